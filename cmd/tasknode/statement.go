package main

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/config"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/batch"
	"github.com/penstock/penstock/pkg/changelog"
	"github.com/penstock/penstock/pkg/invalidation"
)

// statements runs the entries of queues that declare in SQL what to run. Each takes a connection for as long as its
// statement likes, so that they have a budget of threads.
type statements struct {
	pool          *pgxpool.Pool
	interruptions invalidation.Interruptions
	*budget
}

// statementConns is how many statements run at once. A node without such queues opens none of these connections.
const statementConns = 4

func newStatements(cfg config.Database) (*statements, error) {
	// Pooled: without the settings of our sessions, which leave the planner no choice. That is not for other
	// people's SQL.
	pool, err := postgres.Open(context.Background(),
		postgres.Config{DSN: cfg.URL, Pooled: true, MaxConns: statementConns})
	return &statements{pool: pool, budget: newBudget(statementConns)}, err
}

// handler is what runs the entries of q.
func (s *statements) handler(q *invalidation.Queue) invalidation.Handler {
	s.add(q.Name)
	var handler invalidation.Handler
	switch q.Config.Kind {
	case invalidation.KindBatch:
		handler = batch.StatementHandler(s.pool)
	case invalidation.KindChangeLog:
		handler = changelog.StatementHandler(s.pool)
	default:
		handler = invalidation.StatementHandler(s.pool, q)
	}
	return s.interruptions.Wrap(handler)
}

// served takes out of the budget what is not among the queues that the node serves, or declares no statements any
// more: a queue that is made anew under its name may have a handler of its own.
func (s *statements) served(queues []*invalidation.Queue) {
	declared := map[string]bool{}
	for _, q := range queues {
		declared[q.Name] = len(q.Statements) > 0
	}
	s.keep(declared)
}
