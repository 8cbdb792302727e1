package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func groupBlocked(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "blocked", Short: "Blocked lock keys, with the failure and its time", Args: cobra.NoArgs,
		Long: "Lock keys that are blocked: one of their entries failed for good in a queue with\n" +
			"on_failure=block_key. Their other entries wait until penstock group unblock.",
	}
	var queue, from string
	var limit int
	a.queueFlag(c, &queue, "of this queue")
	c.Flags().StringVar(&from, "after", "", "with --queue: keys behind this one, the last of the page before")
	limitFlag(c.Flags(), &limit, operator.PageDefault, "at most so many")
	return paging(a, c, &limit, []column[operator.BlockedKey]{
		{title: "QUEUE", text: func(k operator.BlockedKey) string { return k.Queue }},
		{title: "LOCK KEY", text: func(k operator.BlockedKey) string { return short(k.LockKey, 40) }},
		{title: "BLOCKED", right: true, text: func(k operator.BlockedKey) string { return a.since(k.BlockedAt) }},
		{title: "WAITING", right: true, text: func(k operator.BlockedKey) string {
			if k.Waiting >= 1000 {
				return "1000+"
			}
			return fmt.Sprint(k.Waiting)
		}},
		{title: "FAILURE", right: true, text: func(k operator.BlockedKey) string { return fmt.Sprint(k.EntryID) }},
		{title: "CLASS", text: func(k operator.BlockedKey) string { return k.Class }},
		{title: "ERROR", text: func(k operator.BlockedKey) string { return short(k.Error, 80) }},
	}, func(ctx context.Context, api conn, _ []string) ([]operator.BlockedKey, error) {
		if from != "" && queue == "" {
			return nil, usagef("--after goes with --queue")
		}
		var last operator.BlockedKeyName
		if from != "" {
			last = operator.BlockedKeyName{Queue: queue, LockKey: from}
		}
		return list[operator.BlockedKey](ctx, api, "/v1/blocked-keys", limit, last, "queue", queue)
	}, func(last operator.BlockedKey) string {
		if queue == "" {
			return pageHint(limit, operator.PageMax) + ", or --queue"
		}
		return behind(last.LockKey, pageHint(limit, operator.PageMax))
	})
}

func groupUnblock(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "unblock QUEUE", Short: "Let the entries of blocked lock keys run again", Args: cobra.ExactArgs(1),
		ValidArgsFunction: a.completeQueues(),
		Long: "Let the entries of a blocked lock key run again, in their order. With --retry the failed entry\n" +
			"goes back first, at the position that it had; without it the key goes on with the entry behind it.",
		Example: "  penstock group unblock orders --lock-key 4711 --retry --reason 'address mended'\n" +
			"  penstock group unblock orders --all --reason 'failures were looked at'",
	}
	var key string
	var all, retry bool
	c.Flags().StringVar(&key, "lock-key", "", "this key")
	c.Flags().BoolVar(&all, "all", false, "all blocked keys of the queue")
	c.Flags().BoolVar(&retry, "retry", false, "put the failed entry back first")
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		if all == (key != "") {
			return change{}, usagef("give either --lock-key or --all")
		}
		if _, err := findQueue(ctx, api, args[0]); err != nil {
			return change{}, err
		}
		does := fmt.Sprintf("unblock key %q of queue %s", key, args[0])
		if all {
			does = "unblock all keys of queue " + args[0]
		}
		return change{
			does: does, risky: all,
			do: func(ctx context.Context, by invalidation.By) (string, error) {
				return unblock(ctx, api, args[0], body(by, "lock_key", key, "all", all, "retry", retry))
			},
		}, nil
	})
}

// unblock repeats the request while keys are left and some of them were not busy.
func unblock(ctx context.Context, api conn, queue string, request any) (string, error) {
	type unblocked struct {
		Unblocked int  `json:"unblocked"`
		More      bool `json:"more"`
	}
	for total := 0; ; {
		part, err := posted[unblocked](ctx, api, at("/v1/queues/%v/blocked-keys/unblock", queue), request)
		total += part.Unblocked
		if err != nil || !part.More || part.Unblocked == 0 {
			said := many(total, "key was", "keys were") + " unblocked"
			if part.More {
				said += "; others are held by other transactions, try again"
			}
			return said, err
		}
	}
}
