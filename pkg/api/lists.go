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
	// listsEach is how many of them one token has at most.
	listsEach = listsMax / 2
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
	taken chan struct{}
	wait  time.Duration

	mu sync.Mutex
	of map[string]*listShare // by holder
}

// listShare is the places that one holder has or waits for.
type listShare struct {
	taken chan struct{}
	users int // with mu of listPlaces; at 0 it is forgotten
}

func newListPlaces() *listPlaces {
	return &listPlaces{taken: make(chan struct{}, listsMax), wait: listWait, of: map[string]*listShare{}}
}

// enter waits for a place, which the caller gives back. An empty holder has no share: callers cannot be told apart.
func (l *listPlaces) enter(ctx context.Context, holder string) (leave func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, l.wait)
	defer cancel()
	if holder == "" {
		return enterPlace(ctx, l.taken, errLists)
	}
	share := l.share(holder)
	leaveShare, err := enterPlace(ctx, share.taken, errOwnLists)
	if err != nil {
		l.forget(holder, share)
		return nil, err
	}
	leaveAll, err := enterPlace(ctx, l.taken, errLists)
	if err != nil {
		leaveShare()
		l.forget(holder, share)
		return nil, err
	}
	return func() {
		leaveAll()
		leaveShare()
		l.forget(holder, share)
	}, nil
}

func enterPlace(ctx context.Context, taken chan struct{}, full error) (leave func(), err error) {
	leave = func() { <-taken }
	select {
	case taken <- struct{}{}: // also where ctx has ended
		return leave, nil
	default:
	}
	select {
	case taken <- struct{}{}:
		return leave, nil
	case <-ctx.Done():
		if errors.Is(ctx.Err(), context.Canceled) {
			return nil, ctx.Err()
		}
		return nil, full
	}
}

func (l *listPlaces) share(holder string) *listShare {
	l.mu.Lock()
	defer l.mu.Unlock()
	share := l.of[holder]
	if share == nil {
		share = &listShare{taken: make(chan struct{}, listsEach)}
		l.of[holder] = share
	}
	share.users++
	return share
}

func (l *listPlaces) forget(holder string, share *listShare) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if share.users--; share.users == 0 {
		delete(l.of, holder)
	}
}
