package api

import (
	"context"

	"github.com/penstock/penstock/pkg/operator"
)

func (a *API) lockRoutes() {
	add(a, route{
		method: "GET", path: "/v1/locks", id: "list-locks", summary: "Who computes what, oldest first",
		scope: read, of: ofQueue,
	}, a.listLocks)
	add(a, route{
		method: "GET", path: "/v1/locks/suspects", id: "verify-locks",
		summary: "Locks that look stuck or wrong; none is the good answer",
		scope:   read, of: ofPlatform,
	}, func(ctx context.Context, in *struct{}) (*answer[list[operator.Suspect]], error) {
		found, err := a.operator.VerifyLocks(ctx, 1000)
		return pageOf(found, Paging{Limit: 1000}, nil), err
	})
}

type lockFilter struct {
	Paging
	OfOneQueue
	Node int64 `query:"node" doc:"The id of a node."`
}

func (a *API) listLocks(ctx context.Context, in *lockFilter) (*answer[list[operator.Lock]], error) {
	return paged(in.Paging, func(after int64, limit int) ([]operator.Lock, error) {
		return a.operator.Locks(ctx, operator.LockFilter{
			Queue: in.Queue, NodeID: operator.NodeID(in.Node),
			After: after, Limit: limit,
		})
	}, func(l operator.Lock) int64 { return l.Token })
}
