package recovery

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Statistics is the duty that counts the depth of queues with a capacity. Pushes are admitted
// against the last count plus the changes in two counters since; each new count corrects losses of
// the counters.
type Statistics struct {
	cfg       Config
	db        postgres.DB
	fence     Fence
	notBefore map[int32]time.Time // when a queue may be counted again
	counts    atomic.Int64
}

// NewStatistics returns the duty for one term. It reads through db and writes through fence.
func NewStatistics(db postgres.DB, fence Fence, cfg Config) *Statistics {
	return &Statistics{cfg: cfg.withDefaults(), db: db, fence: fence, notBefore: map[int32]time.Time{}}
}

// Run counts until ctx ends.
func (s *Statistics) Run(ctx context.Context) error { return loop(ctx, s.cfg, "statistics", s.pass) }

// Counts returns how often a queue was counted in this term.
func (s *Statistics) Counts() int64 { return s.counts.Load() }

// countShare is the share of the time that counting a queue may take: a count of 50 ms runs every
// second.
const countShare = 0.05

func (s *Statistics) pass(ctx context.Context) (time.Duration, error) {
	queues, err := invalidation.List(ctx, s.db)
	if err != nil {
		return 0, err
	}
	for _, q := range queues {
		if !q.Config.CountsDepth() || time.Now().Before(s.notBefore[q.ID]) {
			continue
		}
		start := time.Now()
		if err := s.cfg.tolerate(ctx, s.countQueue(ctx, q), "cannot count the depth of queue", "queue",
			q.Name); err != nil {
			return 0, err
		}
		took := time.Since(start)
		s.notBefore[q.ID] = start.Add(max(s.cfg.CountPause, time.Duration(float64(took)/countShare)))
	}
	return s.cfg.CountPause, nil
}

const countSQL = `SELECT penstock.count_depth($1)`

func (s *Statistics) countQueue(ctx context.Context, q *invalidation.Queue) error {
	var n int64
	err := inTerm(ctx, s.db, s.fence, nil, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, countSQL, q.ID).Scan(&n)
	})
	if err != nil {
		return fmt.Errorf("count queue %q: %w", q.Name, err)
	}
	s.counts.Add(1)
	return nil
}
