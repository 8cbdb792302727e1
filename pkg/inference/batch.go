package inference

import (
	"slices"
	"time"
)

// BatchLimits say how entries of a model are put together into one call. A
// limit of 0 does not apply; Items of 0 or 1 means no batches.
type BatchLimits struct {
	Items  int     `json:"items,omitempty"`
	Tokens int64   `json:"tokens,omitempty"`
	Bytes  int64   `json:"bytes,omitempty"`
	Wait   Seconds `json:"wait,omitempty"` // longest wait of the oldest member; 50 ms

	// Fields of the payload, by dotted path: members whose ShapeField differs do
	// not share a call; TokensField says how many tokens a member has, which is
	// otherwise estimated (rows, for tensors).
	ShapeField  string `json:"shape_field,omitempty"`
	TokensField string `json:"tokens_field,omitempty"`
}

func (l BatchLimits) withDefaults() BatchLimits {
	if l.Items > 1 {
		setDefault(&l.Wait, Seconds(50*time.Millisecond))
	}
	return l
}

func (l BatchLimits) validate() error {
	switch {
	case l.Items < 0:
		return fieldError("batch.items", "must not be negative")
	case l.Tokens < 0:
		return fieldError("batch.tokens", "must not be negative")
	case l.Bytes < 0:
		return fieldError("batch.bytes", "must not be negative")
	case l.Wait < 0:
		return fieldError("batch.wait", "must not be negative")
	}
	return nil
}

// Member is an entry waiting to be put into a batch.
type Member struct {
	Entry  string
	Shape  string // only members of one shape may share a call
	Tokens int64
	Bytes  int64
	At     time.Time // when it began to wait here
}

// Former puts members together. It is pure: callers serialise, and pass the
// time. Members of a shape keep their order.
type Former struct {
	limits BatchLimits
	shapes map[string]*forming
}

type forming struct {
	members       []Member
	tokens, bytes int64
}

// NewFormer returns an empty former.
func NewFormer(limits BatchLimits) *Former {
	return &Former{limits: limits.withDefaults(), shapes: map[string]*forming{}}
}

// Add lets a member wait. If it does not fit in with those already waiting, or
// fills their batch, a batch is complete and returned; it may or may not
// contain the new member. A member that exceeds a limit alone travels alone.
func (f *Former) Add(m Member) (batch []Member, complete bool) {
	s := f.shapes[m.Shape]
	if s != nil && !f.fits(s, m) {
		batch = f.remove(m.Shape)
		s = nil
	}
	if s == nil {
		s = &forming{}
		f.shapes[m.Shape] = s
	}
	s.members = append(s.members, m)
	s.tokens, s.bytes = s.tokens+m.Tokens, s.bytes+m.Bytes
	if batch == nil && f.full(s) {
		batch = f.remove(m.Shape)
	}
	return batch, batch != nil
}

// Take returns a batch that is due: its oldest member has waited long enough,
// it is full, or a slot idles, in which case waiting gains nothing. Among
// several the one whose oldest member is oldest comes first.
func (f *Former) Take(now time.Time, slotIdle bool) (batch []Member, due bool) {
	var oldest string
	var since time.Time
	for shape, s := range f.shapes {
		if !slotIdle && !f.full(s) && now.Sub(s.oldest()) < f.limits.Wait.Duration() {
			continue
		}
		if !due || s.oldest().Before(since) || (s.oldest().Equal(since) && shape < oldest) {
			oldest, since, due = shape, s.oldest(), true
		}
	}
	if !due {
		return nil, false
	}
	return f.remove(oldest), true
}

// Next says when Take will return a batch if nothing else happens.
func (f *Former) Next() (at time.Time, waiting bool) {
	for _, s := range f.shapes {
		due := s.oldest().Add(f.limits.Wait.Duration())
		if !waiting || due.Before(at) {
			at, waiting = due, true
		}
	}
	return at, waiting
}

// Withdraw removes a member that was cancelled or expired.
func (f *Former) Withdraw(entry string) bool {
	for shape, s := range f.shapes {
		i := slices.IndexFunc(s.members, func(m Member) bool { return m.Entry == entry })
		if i < 0 {
			continue
		}
		s.tokens, s.bytes = s.tokens-s.members[i].Tokens, s.bytes-s.members[i].Bytes
		s.members = slices.Delete(s.members, i, i+1)
		if len(s.members) == 0 {
			delete(f.shapes, shape)
		}
		return true
	}
	return false
}

// Len counts the waiting members.
func (f *Former) Len() int {
	n := 0
	for _, s := range f.shapes {
		n += len(s.members)
	}
	return n
}

func (f *Former) remove(shape string) []Member {
	members := f.shapes[shape].members
	delete(f.shapes, shape)
	return members
}

func (f *Former) fits(s *forming, m Member) bool {
	return len(s.members)+1 <= max(f.limits.Items, 1) &&
		within(s.tokens+m.Tokens, f.limits.Tokens) && within(s.bytes+m.Bytes, f.limits.Bytes)
}

func (f *Former) full(s *forming) bool {
	return len(s.members) >= max(f.limits.Items, 1) ||
		(f.limits.Tokens > 0 && s.tokens >= f.limits.Tokens) || (f.limits.Bytes > 0 && s.bytes >= f.limits.Bytes)
}

func within(amount, limit int64) bool { return limit == 0 || amount <= limit }

// oldest is the time of the member that has waited longest: members may arrive
// out of the order in which they began to wait.
func (s *forming) oldest() time.Time {
	oldest := s.members[0].At
	for _, m := range s.members[1:] {
		if m.At.Before(oldest) {
			oldest = m.At
		}
	}
	return oldest
}
