package web

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/scale/simulate"
)

const (
	readingsMax   = 2000             // values kept; those not used for longest go first
	readingsBytes = 64 << 20         // of the pages among them
	readingKept   = 15 * time.Minute // after the last use
)

// readings keeps the last value of each read. Of callers that want the same value at the same time
// one reads it, and the others wait for that one.
type readings struct {
	timeout    time.Duration // of a read
	generation atomic.Int64  // values of an earlier one are due
	down       atomic.Pointer[failedRead]
	mu         sync.Mutex
	kept       map[string]*reading
	bytes      int64 // of all that are kept
}

type reading struct {
	used    time.Time     // guarded by readings.mu, as are bytes and dropped
	bytes   int64         // of a page
	dropped bool          // no longer kept
	turn    chan struct{} // held by the caller that reads; guards the rest

	tried      time.Time
	took       time.Duration // of the last try
	generation int64         // at that time
	at         time.Time     // of value; zero: there is none
	value      any
	err        error // of the last try
}

// failedRead is the last read that the database did not answer. For a moment after it other reads
// fail with the same error, so that a page of several reads waits for one of them alone.
type failedRead struct {
	at  time.Time
	err error
}

const downFor = 800 * time.Millisecond

func newReadings(timeout time.Duration) *readings {
	return &readings{timeout: timeout, kept: map[string]*reading{}}
}

// expire makes every value due for a new read. The values stay, for the time in which the database
// does not answer.
func (s *readings) expire() { s.generation.Add(1) }

// of returns the reading of a key and makes room for a new one.
func (s *readings) of(key string, now time.Time) *reading {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, known := s.kept[key]
	if !known {
		s.prune(now)
		r = &reading{turn: make(chan struct{}, 1)}
		s.kept[key] = r
	}
	r.used = now
	return r
}

// weigh counts the bytes of a value that was read, and makes room where all that are kept have too many.
func (s *readings) weigh(r *reading, value any) {
	page, is := value.(interface{ size() int64 })
	if !is {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.dropped { // while it was read
		return
	}
	s.bytes += page.size() - r.bytes
	r.bytes = page.size()
	if s.bytes > readingsBytes {
		s.prune(time.Now())
	}
}

// prune drops values that were not used for long and, where there are too many or their bytes are, those not used for
// longest, until a tenth of the room is free.
func (s *readings) prune(now time.Time) {
	full := len(s.kept) >= readingsMax || s.bytes > readingsBytes
	keys := make([]string, 0, len(s.kept))
	for key, r := range s.kept {
		if now.Sub(r.used) > readingKept {
			s.drop(key)
		} else {
			keys = append(keys, key)
		}
	}
	if !full {
		return
	}
	slices.SortFunc(keys, func(a, b string) int { return s.kept[a].used.Compare(s.kept[b].used) })
	for _, key := range keys {
		if len(s.kept) <= readingsMax*9/10 && s.bytes <= readingsBytes*9/10 {
			return
		}
		s.drop(key)
	}
}

func (s *readings) drop(key string) {
	r := s.kept[key]
	s.bytes -= r.bytes
	r.dropped = true
	delete(s.kept, key)
}

// stale is a value that is older than it should be, because the database did not answer.
type stale struct {
	at  time.Time
	err error
}

// outages collects the stale values that a page is made of.
type outages struct {
	mu    sync.Mutex
	stale []stale
}

func (o *outages) add(s stale) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stale = append(o.stale, s)
}

// oldest returns the oldest stale value; false: there is none.
func (o *outages) oldest() (stale, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.stale) == 0 {
		return stale{}, false
	}
	return slices.MinFunc(o.stale, func(a, b stale) int { return a.at.Compare(b.at) }), true
}

type outagesKey struct{}

// withOutages returns a context in which cached records the stale values that it returns.
func withOutages(ctx context.Context) (context.Context, *outages) {
	o := &outages{}
	return context.WithValue(ctx, outagesKey{}, o), o
}

// beat is the time between two readings of what is live. Beats begin at multiples of it, for all tabs at
// once.
const beat = 500 * time.Millisecond

// readShare is how many times as long as a read took the next one waits at least, so that a slow
// database spends no more than a fifth of the time on what people watch.
const readShare = 4

// due reports whether a value is to be read again. Times are compared by their beats: a read that began
// late in its beat does not put off the next.
func (r *reading) due(now time.Time, fresh time.Duration) bool {
	age := now.Truncate(beat).Sub(r.tried.Truncate(beat))
	return age < 0 || age >= max(fresh, readShare*r.took)
}

// cached returns the value of a key, read at most once in the time fresh by whichever caller comes
// first. The value is shared and must not be changed. When a read fails because the database does
// not answer or takes too long, the value before is returned and recorded as stale in the context;
// without one the error is returned.
func cached[T any](
	ctx context.Context, d *Dashboard, key string, fresh time.Duration, read func(ctx context.Context) (T,
		error),
) (T, error) {
	return kept(ctx, d, key, fresh, func(ctx context.Context) (T, error) { return bounded(ctx, d.reads, read) })
}

// kept is cached for what is made of other values: it is made although the database does not answer.
func kept[T any](
	ctx context.Context, d *Dashboard, key string, fresh time.Duration, read func(ctx context.Context) (T, error),
) (T, error) {
	var none T
	now := time.Now()
	r := d.reads.of(key, now)
	select {
	case r.turn <- struct{}{}:
		defer func() { <-r.turn }()
	case <-ctx.Done():
		return none, ctx.Err()
	}
	generation := d.reads.generation.Load()
	now = time.Now()
	if r.due(now, fresh) || r.generation != generation {
		value, err := read(ctx)
		r.tried, r.took, r.generation, r.err = now, time.Since(now), generation, err
		if err == nil {
			r.value, r.at = value, time.Now()
			d.reads.weigh(r, value)
		}
		if errors.Is(err, simulate.ErrBusy) { // which says nothing of the value: the next caller tries at once
			r.tried = time.Time{}
		}
	}
	if r.err == nil {
		return r.value.(T), nil //nolint:errcheck,forcetypeassert // a key has values of one type
	}
	if r.at.IsZero() || !unanswered(r.err) {
		return none, r.err
	}
	if o, found := ctx.Value(outagesKey{}).(*outages); found {
		o.add(stale{at: r.at, err: r.err})
	}
	return r.value.(T), nil //nolint:errcheck,forcetypeassert // a key has values of one type
}

// bounded reads a value in the time that a read has. The visitor that reads for all may leave
// meanwhile.
func bounded[T any](ctx context.Context, s *readings, read func(ctx context.Context) (T, error)) (T, error) {
	if down := s.down.Load(); down != nil && time.Since(down.at) < downFor {
		var none T
		return none, down.err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.timeout)
	defer cancel()
	value, err := read(ctx)
	if err != nil && unanswered(err) && !slow(err) {
		s.down.Store(&failedRead{at: time.Now(), err: err})
	}
	return value, err
}

// unanswered reports whether an error says nothing about the object of a read: the database could
// not be reached, or took too long.
func unanswered(err error) bool { return postgres.Unavailable(err) && !known(err) || slow(err) }

// slow reports whether a statement was ended because of its timeout.
func slow(err error) bool { return postgres.Code(err) == postgres.QueryCanceled }

// keyOf makes a key of the name of a read and its parameters.
func keyOf(name string, parameters ...any) string { return fmt.Sprintf("%s %#v", name, parameters) }
