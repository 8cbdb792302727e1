// Package node assembles a task node for measurements, as cmd/tasknode does it: its connections, its fair order of lanes,
// its ear for hints. Left out is the governor of CPU and memory, which would hold the node back where server, node and
// load share a machine.
package node

import (
	"context"
	"log/slog"
	"runtime/debug"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/fairness"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// Node is a task node and what runs beside it.
type Node struct {
	*tasknode.Node
	claims, beats *pgxpool.Pool
	duties        []func(context.Context) error
}

// Config says how to reach the database; Task is passed on, silent and with a ranker.
type Config struct {
	DSN     string
	Pooled  bool // through a pooler in transaction mode, which carries no hints
	NoHints bool
	Task    tasknode.Config
}

// New connects. Close must follow.
func New(ctx context.Context, c Config) (*Node, error) {
	claims, err := postgres.Open(ctx, postgres.Config{DSN: c.DSN, Pooled: c.Pooled, MaxConns: 4})
	if err != nil {
		return nil, err
	}
	beats, err := postgres.Open(ctx, postgres.Config{DSN: c.DSN, Pooled: c.Pooled, MaxConns: 1})
	if err != nil {
		claims.Close()
		return nil, err
	}
	debug.SetGCPercent(400) // as cmd/tasknode does
	quiet := slog.New(slog.DiscardHandler)
	ranker := fairness.NewRanker(fairness.RankerConfig{Log: quiet}, claims)
	c.Task.Log, c.Task.Ranker = quiet, ranker
	n := &Node{Node: tasknode.New(c.Task, claims, beats), claims: claims, beats: beats}
	n.duties = []func(context.Context) error{n.Node.Run, ranker.Run}
	if !c.NoHints && !c.Pooled {
		listener := invalidation.NewListener(invalidation.ListenConfig{Conn: beats.Config().ConnConfig.Copy(), Wake: n.Wake, HandedOver: n.HandedOver, Log: quiet})
		n.duties = append(n.duties, listener.Run)
	}
	return n, nil
}

// Run runs the node and what is beside it until ctx ends, and returns when every ending is recorded.
func (n *Node) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, duty := range n.duties {
		group.Go(func() error { return duty(ctx) })
	}
	return group.Wait()
}

// Close ends the node's connections.
func (n *Node) Close() {
	n.claims.Close()
	n.beats.Close()
}
