package api

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

const (
	// listsMax is how many readings whose cost grows with what a queue or a history holds use the database at once:
	// lists, causes and dry runs. A filter that matches nothing reads a queue to its end. All requests share the
	// connections of a process, and most of them are for pushes, lookups of tokens and probes.
	listsMax = 4
	// listsEach is how many of them one token has at most. It has a second one where a place is left that a token
	// without one would get: else the lists of two tokens, which may last longer than listWait, would refuse those
	// of all others.
	listsEach = 2
	listWait  = 2 * time.Second // for a place among them
)

// costlyLists are the routes that wait for a place. The other lists read few rows, and are what an operator looks at
// while something is wrong.
var costlyLists = []string{
	"list-audit", "list-batches", "list-blocked-keys", "list-causes", "list-dlq", "list-entries", "list-failures",
	"list-groups", "list-lanes", "list-locks", "list-operations", "list-request-batches", "list-samples",
	"list-scale-decisions", "list-scale-minutes", "list-slots", "list-usage", "list-usage-hours",
}

// costly says whether what the route reads grows with what a queue or a history holds.
func (r route) costly() bool { return slices.Contains(costlyLists, r.id) }

// These are not those of a context: they say nothing about the database.
var (
	errLists    = errors.New("as many lists as may be are being read; try again, with a filter that an index has")
	errOwnLists = errors.New("as many lists of the token as may be at once are being read; ask for them one by one")
)

// listPlaces bounds how many lists are read at once, and how many of them by one holder.
type listPlaces struct {
	wait time.Duration

	mu      sync.Mutex
	taken   int
	of      map[string]int // places by holder, of those that have some
	waiters []*listWaiter  // in the order in which they came
}

// listWaiter waits for a place.
type listWaiter struct {
	holder string
	placed chan struct{} // closed with mu of listPlaces when it has one
}

func newListPlaces() *listPlaces { return &listPlaces{wait: listWait, of: map[string]int{}} }

// enter waits for a place, which the caller gives back. An empty holder has no share: callers cannot be told apart.
func (l *listPlaces) enter(ctx context.Context, holder string) (leave func(), err error) {
	w := &listWaiter{holder: holder, placed: make(chan struct{})}
	l.mu.Lock()
	l.waiters = append(l.waiters, w)
	l.place()
	l.mu.Unlock()
	timer := time.NewTimer(l.wait)
	defer timer.Stop()
	select {
	case <-w.placed:
	case <-ctx.Done():
	case <-timer.C:
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := slices.Index(l.waiters, w); i >= 0 {
		l.waiters = slices.Delete(l.waiters, i, i+1)
		if errors.Is(ctx.Err(), context.Canceled) {
			return nil, ctx.Err()
		}
		return nil, l.full(holder)
	}
	return sync.OnceFunc(func() { l.leave(holder) }), nil // also where ctx has ended
}

// full is the error of a holder for which there is no place. Called with mu held.
func (l *listPlaces) full(holder string) error {
	if n := l.of[holder]; n == listsEach || n > 0 && l.taken < listsMax {
		return errOwnLists
	}
	return errLists
}

func (l *listPlaces) leave(holder string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.taken--
	if l.of[holder]--; l.of[holder] <= 0 {
		delete(l.of, holder)
	}
	l.place()
}

// place gives places to waiters while there are some: to the first of a holder that has none, before the first of one
// that may have another. Called with mu held.
func (l *listPlaces) place() {
	for l.taken < listsMax {
		i := slices.IndexFunc(l.waiters, func(w *listWaiter) bool { return l.of[w.holder] == 0 })
		if i < 0 && l.taken+1 < listsMax {
			i = slices.IndexFunc(l.waiters, func(w *listWaiter) bool { return l.of[w.holder] < listsEach })
		}
		if i < 0 {
			return
		}
		w := l.waiters[i]
		l.waiters = slices.Delete(l.waiters, i, i+1)
		l.taken++
		if w.holder != "" {
			l.of[w.holder]++
		}
		close(w.placed)
	}
}
