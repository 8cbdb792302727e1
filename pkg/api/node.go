package api

import (
	"context"
	"fmt"
	"slices"

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
	found, err := a.operator.Nodes(ctx, operator.PageMax)
	found = slices.DeleteFunc(found, func(n operator.Node) bool { return !callerOf(ctx).allows("", n.Application) })
	return pageFrom(found, err, *in, func(n operator.Node) string { return fmt.Sprintf("%s\x00%020d", n.Name, n.ID) })
}
