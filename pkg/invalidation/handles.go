package invalidation

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/postgres"
)

// Handles are those by which the requests of a program push, one for each queue, so that not each request reads the
// settings of its queue.
type Handles struct {
	db     postgres.DB
	hinter *Hinter  // nil: their pushes do not hint
	byName sync.Map // to openHandle
}

// NewHandles returns none yet. Pushes by its handles hint as the hinter does; nil: they do not.
func NewHandles(db postgres.DB, hinter *Hinter) *Handles { return &Handles{db: db, hinter: hinter} }

// openHandle is a handle that callers share.
type openHandle struct {
	*Queue
	opened time.Time
}

const (
	// openFor is how long a handle is used. A push itself finds out whether its queue is still the same; but the lanes
	// that its hints name come from the settings that the handle has read, and its id may be that of a queue that was
	// dropped and made again.
	openFor = 2 * time.Second
	// reopenFor is how long a push waits for the settings to be read again before it goes on with the handle before.
	reopenFor = time.Second
	// unusedFor is how long a handle is kept that nobody asks for: its queue may be gone.
	unusedFor = time.Minute
)

// Get returns the handle of a queue, or ErrQueueNotFound. One caller opens it anew when its time is over; others go on
// with the old one, and so does that caller where the queue cannot be read.
func (h *Handles) Get(ctx context.Context, name string) (*Queue, error) {
	stored, found := h.byName.Load(name)
	if !found {
		q, err := Open(ctx, h.db, name)
		if err != nil {
			return nil, err
		}
		if h.hinter != nil {
			q = q.Hinting(h.hinter)
		}
		h.forgetUnused()
		h.byName.Store(name, openHandle{q, time.Now()})
		return q, nil
	}
	known := stored.(openHandle) //nolint:errcheck // nothing else is stored
	renewed := openHandle{known.Queue, time.Now()}
	if time.Since(known.opened) < openFor || !h.byName.CompareAndSwap(name, known, renewed) {
		return known.Queue, nil
	}
	ctx, cancel := context.WithTimeout(ctx, reopenFor)
	defer cancel()
	q, err := known.Reopen(ctx)
	if errors.Is(err, ErrQueueNotFound) {
		h.byName.CompareAndDelete(name, renewed)
		return nil, err
	}
	if err != nil {
		return known.Queue, nil //nolint:nilerr // the push itself finds out whether the database answers
	}
	h.byName.Store(name, openHandle{q, time.Now()})
	return q, nil
}

// forgetUnused drops the handles that were not asked for of late. Each has the texts of all statements of its queue,
// and no Get would find out that the queue of one is gone.
func (h *Handles) forgetUnused() {
	h.byName.Range(func(name, stored any) bool {
		known := stored.(openHandle) //nolint:errcheck // nothing else is stored
		if time.Since(known.opened) >= unusedFor {
			h.byName.CompareAndDelete(name, known)
		}
		return true
	})
}

// Forget has the next Get read the queue.
func (h *Handles) Forget(name string) { h.byName.Delete(name) }
