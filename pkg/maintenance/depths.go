package maintenance

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Depths is the duty that counts the depth of queues with a capacity. Pushes are admitted
// against the last count plus the changes in two counters since; each new count corrects losses of
// the counters.
type Depths struct {
	cfg       Config
	db        postgres.DB
	fence     Fence
	notBefore map[int32]time.Time // when a queue may be counted again
	counts    atomic.Int64
}

// NewDepths returns the duty for one term. It reads through db and writes through fence.
func NewDepths(db postgres.DB, fence Fence, cfg Config) *Depths {
	return &Depths{cfg: cfg.withDefaults(), db: db, fence: fence, notBefore: map[int32]time.Time{}}
}

// Run counts until ctx ends.
func (d *Depths) Run(ctx context.Context) error { return d.cfg.loop("depths").Run(ctx, d.pass) }

// Counts returns how often a queue was counted in this term.
func (d *Depths) Counts() int64 { return d.counts.Load() }

// countShare is the share of the time that counting a queue may take: a count of 50 ms runs every
// second.
const countShare = 0.05

func (d *Depths) pass(ctx context.Context) (time.Duration, error) {
	queues, err := invalidation.ListSettings(ctx, d.db)
	if err != nil {
		return 0, err
	}
	for _, q := range queues {
		if !q.Config.CountsDepth() || time.Now().Before(d.notBefore[q.ID]) {
			continue
		}
		start := time.Now()
		if err := d.cfg.tolerate(ctx, d.countQueue(ctx, q), "count the depth of a queue", "queue",
			q.Name); err != nil {
			return 0, err
		}
		took := time.Since(start)
		d.notBefore[q.ID] = start.Add(max(d.cfg.CountPause, time.Duration(float64(took)/countShare)))
	}
	return d.cfg.CountPause, nil
}

const countSQL = `SELECT penstock.count_depth($1)`

func (d *Depths) countQueue(ctx context.Context, q *invalidation.Queue) error {
	var n int64
	err := inTerm(ctx, d.db, d.fence, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, countSQL, q.ID).Scan(&n)
	})
	if err != nil {
		return fmt.Errorf("count queue %q: %w", q.Name, err)
	}
	d.counts.Add(1)
	return nil
}
