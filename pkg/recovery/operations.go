package recovery

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Operations is the duty that carries out bulk operations on entries and failures, as fast as each one's throttle
// lets it, and ends pauses.
type Operations struct {
	cfg     Config
	db      postgres.DB // whose statements count within the term only
	fence   Fence
	changed atomic.Int64
}

// NewOperations returns the duty for one term.
func NewOperations(db postgres.DB, fence Fence, cfg Config) *Operations {
	return &Operations{cfg: cfg.withDefaults(), db: late{db, fence}, fence: fence}
}

// Run carries out operations until ctx ends.
func (o *Operations) Run(ctx context.Context) error { return loop(ctx, o.cfg, "operations", o.pass) }

// Changed is how many entries and failures were changed in this term.
func (o *Operations) Changed() int64 { return o.changed.Load() }

// pass ends pauses whose time is over, and steps the operations. A step holds the row of its operation, so that no two
// leaders make the same one.
func (o *Operations) pass(ctx context.Context) (time.Duration, error) {
	err := o.fence.InTx(ctx, func(tx pgx.Tx) error {
		_, err := invalidation.EndPauses(ctx, tx)
		return err
	})
	if err != nil {
		return 0, err
	}
	n, err := invalidation.RunOperations(ctx, o.db)
	o.changed.Add(int64(n))
	if err != nil && !general(err) {
		// One operation that goes wrong is no reason for another leader: it would go wrong there as well.
		o.cfg.Log.ErrorContext(ctx, "operation was left for later", "error", err)
		err = nil
	}
	if n > 0 {
		return 0, err
	}
	return time.Second, err
}
