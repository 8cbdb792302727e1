package invalidation

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/internal/postgres"
)

// hintChannel is the channel of LISTEN and NOTIFY. A payload is the id of a queue.
const hintChannel = "penstock"

// hintSQL hints at queues $1. NOTIFY takes a lock over all databases at commit, so this never runs in a pusher's
// transaction, and one statement speaks for every push since the last.
const hintSQL = `SELECT pg_notify('` + hintChannel + `', id::text) FROM unnest($1::int[]) u(id)`

// Hinter tells nodes after a push that a queue has work, so that they need not wait for their next poll. A hint is
// only a hint: pushes never wait for it, and where the database does not answer it is dropped without a word.
// Make one with NewHinter, hand it to queues with Queue.Hinting, and let Run run.
type Hinter struct {
	notify func(ctx context.Context, queues []int32) error
	every  time.Duration // at most one hint a queue in this time; the first goes out at once

	mu   sync.Mutex
	due  map[int32]struct{} // bounded by the number of queues
	last map[int32]time.Time
	wake chan struct{}

	// Sent and Dropped count hints.
	Sent, Dropped atomic.Int64
}

// hintTimeout bounds how long a hint is tried. A later one would come too late anyway: nodes poll.
const hintTimeout = time.Second

// NewHinter returns a Hinter that sends on db, at most one hint a queue in `every`, 15 ms if zero.
func NewHinter(db postgres.DB, every time.Duration) *Hinter {
	return newHinter(every, func(ctx context.Context, queues []int32) error {
		_, err := db.Exec(ctx, hintSQL, queues)
		return err
	})
}

func newHinter(every time.Duration, notify func(context.Context, []int32) error) *Hinter {
	if every == 0 {
		every = 15 * time.Millisecond
	}
	return &Hinter{
		notify: notify, every: every, due: map[int32]struct{}{}, last: map[int32]time.Time{}, wake: make(chan struct{}, 1),
	}
}

// Hint says that a push to the queue has committed. It returns at once. A nil Hinter does nothing.
func (h *Hinter) Hint(queue int32) {
	if h == nil {
		return
	}
	h.mu.Lock()
	h.due[queue] = struct{}{}
	h.mu.Unlock()
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// Run sends hints until ctx ends.
func (h *Hinter) Run(ctx context.Context) error {
	for {
		queues, wait := h.ready(time.Now())
		if len(queues) > 0 {
			h.send(ctx, queues)
			continue
		}
		var timer <-chan time.Time
		if wait > 0 {
			timer = time.After(wait)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-h.wake:
		case <-timer:
		}
	}
}

// ready takes the queues whose hint may go out now. If there are none it says when there will be some, 0 for unknown.
func (h *Hinter) ready(now time.Time) (queues []int32, wait time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for q := range h.due {
		left := h.every - now.Sub(h.last[q])
		if left <= 0 {
			queues = append(queues, q)
			h.last[q] = now
			delete(h.due, q)
		} else if wait == 0 || left < wait {
			wait = left
		}
	}
	return queues, wait
}

func (h *Hinter) send(ctx context.Context, queues []int32) {
	ctx, cancel := context.WithTimeout(ctx, hintTimeout)
	defer cancel()
	if err := h.notify(ctx, queues); err != nil {
		h.Dropped.Add(int64(len(queues)))
		return
	}
	h.Sent.Add(int64(len(queues)))
}

// Hinting returns the same queue, whose pushes outside a transaction hint at themselves. Who pushes inside one calls
// Hint after the commit.
func (q *Queue) Hinting(h *Hinter) *Queue {
	other := *q
	other.hinter = h
	return &other
}
