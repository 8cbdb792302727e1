package api

import (
	"context"
	"slices"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func (a *API) queueRoutes() {
	add(a, route{method: "GET", path: "/v1/queues", id: "list-queues", summary: "How the queues stand", scope: read, of: ofNobody}, a.listQueues)
	add(a, route{method: "GET", path: "/v1/queues/{queue}", id: "show-queue", summary: "One queue with its settings, lanes and limits", scope: read, of: ofQueue}, a.showQueue)
}

// inQueue is the input of what is about one queue.
type inQueue struct {
	Queue string `path:"queue" maxLength:"48"`
}

func (a *API) listQueues(ctx context.Context, in *paging) (*answer[list[operator.Queue]], error) {
	var after string
	if err := in.after(&after); err != nil {
		return nil, err
	}
	queues, err := a.operator.Queues(ctx)
	if err != nil {
		return nil, err
	}
	queues = slices.DeleteFunc(queues, func(q operator.Queue) bool { return q.Name <= after || !who(ctx).allows(q.Name, q.Application) })
	return pageOf(queues, *in, func(q operator.Queue) any { return q.Name }), nil
}

func (a *API) showQueue(ctx context.Context, in *inQueue) (*answer[operator.QueueDetail], error) {
	found, err := a.operator.Queue(ctx, in.Queue)
	return &answer[operator.QueueDetail]{found}, err
}

// queue returns a handle, which for a push is no more than a name: one that was found once is good for ever.
func (a *API) queue(ctx context.Context, name string) (*invalidation.Queue, error) {
	if q, found := a.queues.Load(name); found {
		return q.(*invalidation.Queue), nil //nolint:errcheck // nothing else is stored
	}
	q, err := invalidation.Open(ctx, a.db, name)
	if err != nil {
		return nil, err
	}
	q = q.Hinting(a.cfg.Hinter)
	a.queues.Store(name, q)
	return q, nil
}
