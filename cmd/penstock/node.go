package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func nodeCommand(a *app) *cobra.Command {
	return noun("node", "Task nodes and gateways: list, drain", nodeList(a), nodeDrain(a))
}

func (a *app) nodeColumns() []column[operator.Node] {
	type row = operator.Node
	return []column[row]{
		{title: "NODE", text: func(n row) string { return n.Name }},
		{title: "KIND", text: func(n row) string { return n.Kind }},
		{title: "STATE", text: func(n row) string { return n.State }},
		{title: "APPLICATION", text: func(n row) string { return n.Application }},
		{title: "THREADS", right: true, text: func(n row) string { return fmt.Sprint(n.Threads) }},
		{title: "LOCKS", right: true, text: func(n row) string { return number(n.Locks) }},
		{title: "SILENT", right: true, text: func(n row) string { return age(n.SilentSeconds) }},
		{title: "UP", right: true, text: func(n row) string { return a.since(n.StartedAt) }},
		{title: "QUEUES", text: func(n row) string { return short(strings.Join(n.Queues, ","), 60) }},
		{title: "ID", wide: true, right: true, text: func(n row) string { return fmt.Sprint(n.ID) }},
		{title: "LEASE", wide: true, right: true, text: func(n row) string { return age(n.LeaseSeconds) }},
		{title: "DRAIN BY", wide: true, text: func(n row) string { return n.DrainBy + after(": ", n.DrainReason) }},
		{title: "LOAD", wide: true, text: func(n row) string { return string(n.Load) }},
	}
}

func nodeList(a *app) *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "Task nodes and gateways, by name", Args: cobra.NoArgs}
	var limit int
	limitFlag(c.Flags(), &limit, 500, "at most so many")
	return paging(a, c, &limit, a.nodeColumns(),
		func(ctx context.Context, api conn, _ []string) ([]operator.Node, error) {
			return api.Nodes(ctx, operator.NodeFilter{Limit: limit})
		}, nil)
}

// Nodes lists nodes by name. It has the name that operator.FindNode asks for.
func (c conn) Nodes(ctx context.Context, f operator.NodeFilter) ([]operator.Node, error) {
	return list[operator.Node](ctx, c, "/v1/nodes", f.Limit, f.After, "node", f.Node)
}

// drainPoll is the interval at which a drain is polled by a client that waits for it.
const drainPoll = 500 * time.Millisecond

func nodeDrain(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "drain NODE",
		Short: "Drain a node, by name or id: it claims nothing more, finishes its runs, hands back the rest and exits",
		Args:  cobra.ExactArgs(1), ValidArgsFunction: a.completeNodes(),
	}
	var wait bool
	c.Flags().BoolVar(&wait, "wait", false, "until the node is gone or dead")
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		n, err := operator.FindNode(ctx, api, args[0])
		if err != nil {
			return change{}, err
		}
		return change{
			does: "drain node " + n.Name, detail: n.State + ", it holds " + many(n.Locks, "lock", "locks"), risky: true,
			do: func(ctx context.Context, by invalidation.By) (string, error) {
				_, err := api.carryOut(ctx, operator.DrainNode, int64(n.ID), by, operator.Moment{})
				if err != nil || !wait {
					return "asked; it hears of it at its heartbeat", err
				}
				return a.awaitGone(ctx, api, n.ID)
			},
		}, nil
	})
}

func (a *app) awaitGone(ctx context.Context, api conn, id operator.NodeID) (string, error) {
	for {
		n, err := get[operator.Node](ctx, api, at("/v1/nodes/%s", id))
		switch {
		case errors.Is(err, invalidation.ErrNotFound):
			return "gone, with nothing left behind", nil
		case err != nil:
			return "", err
		case n.State == "dead":
			return "dead: its lease lapsed; the leader frees what it held", nil
		}
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-time.After(drainPoll):
		}
	}
}
