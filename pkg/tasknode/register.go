package tasknode

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// enter reads the queues and registers the node. It waits for a database that is away; where ctx ends first,
// the node was not registered, or its registration is taken back.
func (n *Node) enter(ctx context.Context) (entered bool, err error) {
	err = postgres.Wait(ctx, n.beats, n.cfg.Log, func() error {
		start := time.Now()
		if err := n.readQueues(ctx); err != nil {
			return err
		}
		if err := n.register(ctx); err != nil {
			return err
		}
		n.registerAgain = false
		n.lease.renew(start)
		return nil
	})
	if err == nil && ctx.Err() == nil {
		return true, nil
	}
	n.deregister(ctx)
	return false, err
}

func (n *Node) register(ctx context.Context) error {
	err := invalidation.Register(ctx, n.beats, invalidation.Node{
		ID: n.ID(), Name: n.cfg.Name, Application: n.cfg.Application, Lease: n.cfg.Lease, Threads: n.Threads(),
		Queues: n.lanes.served(),
	})
	if err != nil {
		return fmt.Errorf("register node %q: %w", n.cfg.Name, err)
	}
	return nil
}

// readQueues reads which queues there are, and serves those of its application for which it has a handler.
func (n *Node) readQueues(ctx context.Context) error {
	queues, err := invalidation.ListOf(ctx, n.db, n.cfg.Application)
	if err != nil {
		return err
	}
	served := map[int32]*servedQueue{}
	for _, q := range queues {
		if before := n.lanes.queue(q.ID); before != nil {
			q.LearnFrom(before)
		}
		h := n.handlers[q.Name]
		if h == nil && n.declared != nil && len(q.Statements) > 0 {
			h = n.declared(q)
		}
		if h == nil {
			h = n.kinds[q.Config.Kind]
		}
		// The queue of callbacks is of no application's: every node delivers.
		if h != nil && (q.Config.Application == n.cfg.Application || q.Config.Kind == invalidation.KindWebhook) {
			served[q.ID] = &servedQueue{id: q.ID, name: q.Name, queue: q, handler: h}
		}
	}
	if n.cfg.Queues != nil {
		list := make([]*invalidation.Queue, 0, len(served))
		for _, s := range served {
			list = append(list, s.queue)
		}
		n.cfg.Queues(list)
	}
	n.registerAgain = n.lanes.serve(served) || n.registerAgain
	n.holdings.forget(served)
	n.poll.want()
	if n.lease.renewed().IsZero() { // the start, which registers the node itself
		return n.warnUnserved(ctx)
	}
	if !n.registerAgain {
		return nil
	}
	if err := n.register(ctx); err != nil {
		return err
	}
	n.registerAgain = false
	return nil
}

// warnUnserved names the handlers of queues that the node does not serve: its list has only those that it may.
func (n *Node) warnUnserved(ctx context.Context) error {
	const applicationsSQL = `SELECT name, application, kind = 'webhook' FROM penstock.queue WHERE name = ANY ($1)`
	handled := slices.Sorted(maps.Keys(n.handlers))
	missing := slices.Clone(handled)
	var name, application string
	var callbacks bool
	_, err := pgx.ForEachRow(postgres.Query(ctx, n.db, applicationsSQL, handled),
		[]any{&name, &application, &callbacks}, func() error {
			missing = slices.DeleteFunc(missing, func(m string) bool { return m == name })
			if application != n.cfg.Application && !callbacks {
				n.cfg.Log.Warn("a handler is not called: its queue is of another application than the node",
					"queue", name, "of", application, "application", n.cfg.Application)
			}
			return nil
		})
	if err != nil {
		return fmt.Errorf("read the applications of queues: %w", err)
	}
	for _, name := range missing {
		n.cfg.Log.Warn("a handler waits for its queue, which does not exist", "queue", name)
	}
	return nil
}

// deregister removes the node's row, which the database allows only once no lock names it.
func (n *Node) deregister(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), n.cfg.Beat)
	defer cancel()
	if _, err := invalidation.RemoveNode(ctx, n.beats, n.ID()); err != nil {
		n.cfg.Log.Warn("remove node", "node", n.cfg.Name, "error", err)
	}
}
