package api

import (
	"context"
	"fmt"

	"github.com/penstock/penstock/pkg/operator"
)

func (a *API) nodeRoutes() {
	const one = "/v1/nodes/{id}"
	add(a, route{
		method: "GET", path: "/v1/nodes", id: "list-nodes", summary: "Nodes by name",
		scope: read,
	}, a.listNodes)
	add(a, route{
		method: "GET", path: one, id: "show-node", summary: "One node",
		scope: read, of: ofNode,
	}, func(ctx context.Context, in *InID) (*answer[operator.Node], error) {
		return answered(operator.FindNode(ctx, a.operator, fmt.Sprint(in.ID)))
	})
	verb[idVerb](a, operator.DrainNode, route{
		path: one + "/drain", id: "drain-node",
		summary: "Drain a node: it claims nothing more, finishes its runs, hands back the rest and exits",
		scope:   operate, of: ofNode,
	})
}

// listNodes lists for a caller limited to applications the nodes of those, and for one limited to queues none.
func (a *API) listNodes(ctx context.Context, in *Paging) (*answer[list[operator.Node]], error) {
	c := callerOf(ctx)
	return pagedAllowed(c, *in, func(after operator.NodeKey, limit int) ([]operator.Node, error) {
		return a.operator.Nodes(ctx, after, limit)
	}, func(n operator.Node) operator.NodeKey { return operator.NodeKey{Name: n.Name, ID: n.ID} },
		func(n operator.Node) bool { return c.allows("", n.Application) })
}
