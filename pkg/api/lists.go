package api

import (
	"context"
	"errors"
	"time"
)

const (
	// listsMax is how many readings whose cost grows with what a queue holds use the database at once: lists, causes
	// and dry runs. A filter that matches nothing reads a queue to its end. All requests share the connections of a
	// process, and most of them are for pushes, lookups of tokens and probes.
	listsMax = 4
	listWait = 2 * time.Second // for a place among them
)

// errLists is not that of a context: it says nothing about the database.
var errLists = errors.New("as many lists as may be at once are being read; try again, with a filter that an index has")

// listPlaces bounds how many lists are read at once.
type listPlaces struct {
	taken chan struct{}
	wait  time.Duration
}

func newListPlaces() listPlaces {
	return listPlaces{taken: make(chan struct{}, listsMax), wait: listWait}
}

// enter waits for a place, which the caller gives back.
func (l listPlaces) enter(ctx context.Context) (leave func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, l.wait)
	defer cancel()
	select {
	case l.taken <- struct{}{}:
		return func() { <-l.taken }, nil
	case <-ctx.Done():
		if errors.Is(ctx.Err(), context.Canceled) {
			return nil, ctx.Err()
		}
		return nil, errLists
	}
}
