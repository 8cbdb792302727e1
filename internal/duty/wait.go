package duty

import (
	"context"
	"time"
)

// AnswerMax bounds the wait for what a duty reads. A connection may freeze without an error while the one that keeps
// the term works: without the bound no leader would do the duty until TCP gives up, which takes a quarter of an hour.
const AnswerMax = 5 * time.Second

// Wait bounds the wait for answers of one kind, readings or transactions, that a duty needs. On a frozen connection the
// whole wait is lost. On a database that is slow the bound doubles with each answer that does not come in time, and
// follows those that come.
type Wait struct {
	First time.Duration // for the first answer, and the least for any
	now   time.Duration // for the next answer, if it is more
}

const (
	waitMin = 500 * time.Millisecond
	waitMax = 10 * time.Second
)

// ForLease sets First by the lease of the nodes: recovery suspends itself after half a lease without an answer. With a
// sixth of it, a wait that was in vain, the pause after it and the next answer take less than half a lease.
func (w *Wait) ForLease(lease time.Duration) {
	first := min(max(waitMin, lease/6), AnswerMax)
	if w.now == w.First { // no answer was late: the bound is that of the lease before
		w.now = first
	}
	w.First, w.now = first, max(w.now, first)
}

// Context is a context for a transaction or a reading of so many rows; end must be called with the result.
func (w *Wait) Context(ctx context.Context, rows int) (bounded context.Context, end func(error)) {
	start, wait := time.Now(), max(w.First, w.now)
	bounded, cancel := context.WithTimeout(ctx, wait+time.Duration(rows)*2*time.Millisecond)
	return bounded, func(err error) {
		switch {
		case err == nil:
			w.now = min(max(w.First, 2*time.Since(start)), waitMax)
		case bounded.Err() != nil && ctx.Err() == nil:
			w.now = min(2*wait, waitMax)
		}
		cancel()
	}
}
