package api

import (
	"context"

	"github.com/penstock/penstock/pkg/operator"
)

func (a *API) nodeRoutes() {
	const one = "/v1/nodes/{id}"
	add(a, route{
		method: "GET", path: "/v1/nodes", id: "list-nodes", summary: "Nodes by name, those of one name by id",
		scope: read,
	}, a.listNodes)
	add(a, route{
		method: "GET", path: one, id: "show-node", summary: "One node",
		scope: read, of: ofNode,
	}, func(ctx context.Context, in *InID) (*answer[operator.Node], error) {
		return answered(a.operator.Node(ctx, in.ID))
	})
	verb[idVerb](a, operator.DrainNode, route{
		path: one + "/drain", id: "drain-node",
		summary: "Drain a node: it claims nothing more, finishes its runs, hands back the rest and exits",
		scope:   operate, of: ofNode,
	})
}

type nodeFilter struct {
	Paging
	Node string `query:"node" doc:"Those of this name, or the one with this id."`
}

// listNodes lists for a caller limited to applications the nodes of those, and for one limited to queues none.
func (a *API) listNodes(ctx context.Context, in *nodeFilter) (*answer[list[operator.Node]], error) {
	c := callerOf(ctx)
	return pagedAllowed(c, in.Paging, func(after operator.NodeKey, limit int) ([]operator.Node, error) {
		return a.operator.Nodes(ctx, operator.NodeFilter{Node: in.Node, After: after, Limit: limit})
	}, func(n operator.Node) operator.NodeKey { return operator.NodeKey{Name: n.Name, ID: n.ID} },
		func(n operator.Node) bool { return c.allows("", n.Application) })
}
