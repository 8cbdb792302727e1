package main

import (
	"cmp"
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func groupCommand(a *app) *cobra.Command {
	return noun("group", "Groups: lock keys with waiting entries", groupList(a), groupCompact(a),
		groupBlocked(a), groupUnblock(a))
}

func groupList(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "list QUEUE", Short: "Lock keys of a queue, in their order", Args: cobra.ExactArgs(1),
		ValidArgsFunction: a.completeQueues(),
	}
	var after string
	var limit int
	c.Flags().StringVar(&after, "after", "", "keys behind this one: the last of the page before")
	limitFlag(c.Flags(), &limit, operator.PageDefault, "at most so many")
	type row = operator.Group
	return paging(a, c, &limit, []column[row]{
		{title: "LOCK KEY", text: func(g row) string { return short(g.LockKey, 60) }},
		{title: "ENTRIES", right: true, text: func(g row) string { return fmt.Sprint(g.Entries) }},
		{title: "OLDEST", right: true, text: func(g row) string { return fmt.Sprint(g.OldestID) }},
		{title: "AGE", right: true, text: func(g row) string { return age(g.OldestSeconds) }},
		{title: "NODE", text: func(g row) string { return cmp.Or(g.Node, "-") }},
		{title: "HELD", right: true, text: func(g row) string { return cmp.Or(ageOrNone(g.HeldSeconds), "-") }},
		{title: "TOKEN", wide: true, right: true, text: func(g row) string { return optional(g.Token) }},
	}, func(ctx context.Context, api conn, args []string) ([]operator.Group, error) {
		return list[operator.Group](ctx, api, "/v1/groups", limit, after, "queue", args[0])
	}, func(last row) string { return behind(last.LockKey, pageHint(limit, operator.PageMax)) })
}

func groupCompact(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "compact QUEUE", Short: "Merge waiting entries of each lock key into one, by the queue's merge rule",
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeQueues(),
	}
	var key string
	c.Flags().StringVar(&key, "lock-key", "", "this key only")
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		if _, err := findQueue(ctx, api, args[0]); err != nil {
			return change{}, err
		}
		return change{
			does: "compact queue " + args[0] + after(", key ", key), risky: true,
			do: func(ctx context.Context, by invalidation.By) (string, error) {
				type compacted struct {
					Replaced int    `json:"replaced"`
					Next     string `json:"next"`
				}
				total, from := 0, ""
				for {
					in := body(by, "lock_key", key, "after", from)
					part, err := posted[compacted](ctx, api, at("/v1/queues/%v/compact", args[0]), in)
					total += part.Replaced
					if err != nil || part.Next == "" {
						return many(total, "entry was", "entries were") + " merged into others", err
					}
					from = part.Next
				}
			},
		}, nil
	})
}
