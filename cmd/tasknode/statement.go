package main

import (
	"context"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/config"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/batch"
	"github.com/penstock/penstock/pkg/changelog"
	"github.com/penstock/penstock/pkg/invalidation"
)

// statements runs the entries of queues that declare in SQL what to run. It is a gate as well: what it runs takes a
// connection each for as long as it likes, and must not keep threads waiting that others could use.
type statements struct {
	pool *pgxpool.Pool

	mu     sync.Mutex
	queues map[string]bool
	free   int
}

// statementConns is how many statements run at once. A node without such queues opens none of these connections.
const statementConns = 4

func newStatements(cfg config.Database) (*statements, error) {
	// Pooled: without the settings of our sessions, which leave the planner no choice. That is not for other people's SQL.
	pool, err := postgres.Open(context.Background(), postgres.Config{DSN: cfg.URL, Pooled: true, MaxConns: statementConns})
	return &statements{pool: pool, queues: map[string]bool{}, free: statementConns}, err
}

// handler is what runs the entries of q.
func (s *statements) handler(q *invalidation.Queue) invalidation.Handler {
	s.mu.Lock()
	s.queues[q.Name] = true
	s.mu.Unlock()
	switch q.Config.Kind {
	case invalidation.KindBatch:
		return batch.StatementHandler(s.pool)
	case invalidation.KindChangeLog:
		return changelog.StatementHandler(s.pool)
	default:
		return invalidation.StatementHandler(s.pool, q)
	}
}

// Take implements tasknode.Gate.
func (s *statements) Take(queue string, _, want int) (int, func(n int)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.queues[queue] {
		return want, func(int) {}
	}
	n := min(want, s.free)
	s.free -= n
	return n, func(k int) {
		s.mu.Lock()
		s.free += k
		s.mu.Unlock()
	}
}
