// Package node assembles a task node for measurements, as cmd/tasknode does it: its connections, its fair
// order of lanes, its ear for hints. Left out is the governor of CPU and memory, which would hold the node
// back where server, node and load share a machine.
package node

import (
	"context"
	"log/slog"
	"runtime/debug"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/fairness"
	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// Node is a task node and its duties.
type Node struct {
	*tasknode.Node
	claims, beats *pgxpool.Pool
	inference     *inference.Service // nil unless Config.Inference
	duties        []func(context.Context) error
}

// Config says how to reach the database; Task is passed on, silent and with a ranker.
type Config struct {
	DSN       string
	Pooled    bool // through a pooler in transaction mode, which carries no hints
	NoHints   bool
	Inference bool // also serve inference queues
	Task      tasknode.Config
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
	n := &Node{claims: claims, beats: beats, duties: []func(context.Context) error{ranker.Run}}
	if c.Inference {
		n.inference = inference.NewService(inference.ServiceConfig{
			Log: quiet, Freed: func() { n.TryAgain() },
		}, claims, func() invalidation.NodeID { return n.ID() })
		c.Task.Gates, c.Task.Affinity = []tasknode.Gate{n.inference.Pool}, n.inference.Pool
		for _, duty := range n.inference.Duties() {
			n.duties = append(n.duties, duty)
		}
	}
	n.Node = tasknode.New(c.Task, claims, beats)
	if c.Inference {
		n.HandleKind(invalidation.KindInference, n.inference.Dispatcher)
	}
	if !c.NoHints && !c.Pooled {
		listener := invalidation.NewListener(invalidation.ListenConfig{
			Conn: beats.Config().ConnConfig.Copy(),
			Wake: n.Wake, Log: quiet,
		})
		n.duties = append(n.duties, listener.Run)
	}
	return n, nil
}

// Run runs the node until ctx ends, and returns when every ending is recorded. Its duties end after it.
func (n *Node) Run(ctx context.Context) error {
	if n.inference != nil {
		if err := n.inference.Registry.Refresh(ctx); err != nil {
			return err
		}
	}
	duties, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	group, duties := errgroup.WithContext(duties)
	for _, duty := range n.duties {
		group.Go(func() error { return duty(duties) })
	}
	group.Go(func() error {
		defer end()
		return n.Node.Run(ctx)
	})
	return group.Wait()
}

// Close ends the node's connections.
func (n *Node) Close() {
	n.claims.Close()
	n.beats.Close()
}
