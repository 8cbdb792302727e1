package gateway

import (
	"crypto/sha256"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// TokenState is a token of the API that may call models, with its limits. Snapshots have its keys. Its end is a time of
// this process's clock.
type TokenState struct {
	Hash        [sha256.Size]byte `json:"hash"` // of the secret
	Name        string            `json:"name"`
	Flows       []string          `json:"flows"`         // that it may name; empty: its own name, and names below it
	Models      []string          `json:"models"`        // that it may use; empty: all, or none if Limited is set
	Limited     bool              `json:"limited"`       // to queues or applications: it may use their models alone
	Class       RequestClass      `json:"class"`         // at most
	ClassOfFlow bool              `json:"class_of_flow"` // instead of Class: that of the flow, if one is set for it
	Rate        float64           `json:"rate"`          // requests a second; 0: not limited
	InFlightMax int               `json:"flying"`        // calls in flight; 0: not limited
	WaitingMax  int               `json:"waiting"`       // requests that wait; 0: not limited
	Weight      float64           `json:"weight"`        // of its flows; 0 is taken as 1
	PriorityMax *int16            `json:"priority_max"`  // that its entries may ask for; nil: any
	PushRate    float64           `json:"push_rate"`     // entries a second, at each gateway; 0: not limited
	PushBurst   int               `json:"push_burst"`    // entries at once; 0: those of a second
	ExpiresAt   time.Time         `json:"expires_at,omitzero"`
	Budget      Budget            `json:"budget,omitzero"`
}

// Budget bounds the GPU milliseconds that the calls of a token's flows, and of flows below them, take in a period. The
// zero value is no bound.
type Budget struct {
	MS     int64     `json:"ms"`
	Spent  int64     `json:"spent"`  // as of the last reading
	Period string    `json:"period"` // hour or day
	Ends   time.Time `json:"ends"`   // of the period, by this process's clock
}

// refuse returns the refusal of new work if the budget is spent, with the time until the next period.
func (b Budget) refuse(now time.Time) *Rejection {
	if b.MS == 0 || b.Spent < b.MS || !now.Before(b.Ends) {
		return nil
	}
	return &Rejection{
		Reason: DropRate, RetryAfter: b.Ends.Sub(now),
		Detail: fmt.Sprintf("the calls of the token's flows have taken %d of %d GPU milliseconds of this %s; send the "+
			"request in the next one", b.Spent, b.MS, b.Period),
	}
}

// caller is a token with what its holder is doing just now.
type caller struct {
	TokenState
	use *tokenUse
}

// tokenUse counts what the tokens of one name do; it outlives the versions of the table.
type tokenUse struct {
	mu       sync.Mutex
	requests tokenBucket // of the rate
	pushes   tokenBucket // of the rate of entries
	held     heldBytes
	inFlight int
	waiting  int

	admitted int64     // since the start
	last     time.Time // when one was admitted last

	elsewhere elsewhere // see tokencounts.go
}

// total is how many requests of the token are in flight, and wait, at all gateways; called with mu held. Reports that
// are old say nothing: the database is away.
func (u *tokenUse) total(now time.Time) (inFlight, waiting int) {
	if now.Sub(u.elsewhere.at) > countsKept {
		return u.inFlight, u.waiting
	}
	return u.inFlight + u.elsewhere.inFlight, u.waiting + u.elsewhere.waiting
}

// tokenTable finds tokens by the hash of their secret, without a statement.
type tokenTable struct {
	current atomic.Pointer[callers]
	uses    map[string]*tokenUse // touched by set alone
}

// callers are the tokens of one reading.
type callers struct {
	bySecret map[[sha256.Size]byte]*caller
	byName   map[string][]*caller
}

func (t *tokenTable) set(list []TokenState) {
	if t.uses == nil {
		t.uses = map[string]*tokenUse{}
	}
	fresh := callers{make(map[[sha256.Size]byte]*caller, len(list)), make(map[string][]*caller, len(list))}
	for _, s := range list {
		use := t.uses[s.Name]
		if use == nil {
			use = &tokenUse{}
			t.uses[s.Name] = use
		}
		c := &caller{s, use}
		fresh.bySecret[s.Hash] = c
		fresh.byName[s.Name] = append(fresh.byName[s.Name], c)
	}
	t.current.Store(&fresh)
}

// find returns the token of a secret, nil if there is none that is valid.
func (t *tokenTable) find(secret string, now time.Time) *caller {
	table := t.current.Load()
	if table == nil || len(secret) > 512 {
		return nil
	}
	c := table.bySecret[sha256.Sum256([]byte(secret))]
	if c == nil || !c.valid(now) {
		return nil
	}
	return c
}

// named returns the valid tokens of a name: two while one replaces the other.
func (t *tokenTable) named(name string) (list []*caller) {
	table := t.current.Load()
	if table == nil {
		return nil
	}
	now := time.Now()
	for _, c := range table.byName[name] {
		if c.valid(now) {
			list = append(list, c)
		}
	}
	return list
}

func (c *caller) valid(now time.Time) bool { return c.ExpiresAt.IsZero() || now.Before(c.ExpiresAt) }

func (c *caller) mayUse(model string) bool {
	return (len(c.Models) == 0 && !c.Limited) || slices.Contains(c.Models, model)
}

// rateBurst is for how long a token may save up requests that it did not make.
const rateBurst = time.Second

// stepMost bounds the time of requests: sums of a few of them must not overflow.
const stepMost = math.MaxInt64 / 8

// held is what the requests of the tokens of the caller's name hold; nil without a token, where callers cannot be told
// apart.
func (c *caller) held() *heldBytes {
	if c == nil {
		return nil
	}
	return &c.use.held
}

// step is the time in which the rate of the token lets in so many requests.
func (c *caller) step(requests float64) time.Duration { return timeOf(requests, c.Rate) }

// timeOf is the time in which a rate lets in so many.
func timeOf(n, rate float64) time.Duration {
	return time.Duration(min(n/rate*float64(time.Second), stepMost))
}

// tokenBucket bounds a rate (generic cell rate algorithm).
type tokenBucket struct {
	full time.Time // when all that it holds will be there again; the past: it is
}

// take takes what the rate lets in within step, of a bucket that holds what it lets in within burst. over is the time
// until there is as much; 0: it was taken.
func (b *tokenBucket) take(now time.Time, step, burst time.Duration) (over time.Duration) {
	if over = b.taken(now) + step - burst; over > 0 {
		return over
	}
	b.full = now.Add(b.taken(now) + step)
	return 0
}

// taken is what was taken out and is not there again.
func (b *tokenBucket) taken(now time.Time) time.Duration { return max(0, b.full.Sub(now)) }

// begin takes a request into account. The refusal says when there is room again. leave must follow. Only requests for
// work are refused for a spent budget: see Budget.refuse.
func (c *caller) begin(now time.Time) *Rejection {
	c.use.mu.Lock()
	defer c.use.mu.Unlock()
	inFlight, waiting := c.use.total(now)
	if c.InFlightMax > 0 && inFlight >= c.InFlightMax {
		return &Rejection{
			Reason: DropRate, RetryAfter: time.Second,
			Detail: "the token has as many requests in flight as it may",
		}
	}
	if c.WaitingMax > 0 && waiting >= c.WaitingMax {
		return &Rejection{
			Reason: DropRate, RetryAfter: time.Second,
			Detail: "as many requests of the token wait as may",
		}
	}
	if c.Rate > 0 {
		step := c.step(1)
		if over := c.use.requests.take(now, step, max(rateBurst, step)); over > 0 {
			return &Rejection{
				Reason: DropRate, RetryAfter: over,
				Detail: "the token makes more requests a second than it may",
			}
		}
	}
	c.use.inFlight++
	c.use.waiting++
	c.use.admitted++
	c.use.last = now
	return nil
}

// dispatched notes that a request does not wait any more; leave that it is over.
func (c *caller) dispatched() {
	c.use.mu.Lock()
	c.use.waiting--
	c.use.mu.Unlock()
}

func (c *caller) leave() {
	c.use.mu.Lock()
	c.use.inFlight--
	c.use.mu.Unlock()
}
