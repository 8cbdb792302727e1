package main

import (
	"cmp"
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func lockCommand(a *app) *cobra.Command {
	return noun("lock", "Lock records: the node that holds each lock key", lockList(a), lockVerify(a), lockUnlock(a))
}

func lockColumns() []column[operator.Lock] {
	return []column[operator.Lock]{
		{title: "QUEUE", text: func(l operator.Lock) string { return l.Queue }},
		{title: "LOCK KEY", text: func(l operator.Lock) string { return short(l.LockKey, 40) }},
		{title: "FLOW", text: func(l operator.Lock) string { return cmp.Or(short(l.Flow, 24), "-") }},
		{title: "ENTRIES", right: true, text: func(l operator.Lock) string { return fmt.Sprint(l.Entries) }},
		{title: "NODE", text: func(l operator.Lock) string { return cmp.Or(l.Node, fmt.Sprint(l.NodeID)) }},
		{title: "AGE", right: true, text: func(l operator.Lock) string { return age(l.AgeSeconds) }},
		{title: "TOKEN", right: true, text: func(l operator.Lock) string { return fmt.Sprint(l.Token) }},
		{title: "NODE ID", wide: true, right: true, text: func(l operator.Lock) string { return fmt.Sprint(l.NodeID) }},
		{
			title: "PRIORITY", wide: true, right: true,
			text: func(l operator.Lock) string { return fmt.Sprint(l.Priority) },
		},
		{title: "WEIGHT", wide: true, right: true, text: func(l operator.Lock) string { return fmt.Sprint(l.Weight) }},
		{title: "CLAIMED", wide: true, text: func(l operator.Lock) string { return stamp(&l.ClaimedAt) }},
	}
}

func lockList(a *app) *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "Locks, oldest first", Args: cobra.NoArgs}
	var f operator.LockFilter
	var node string
	a.queueFlag(c, &f.Queue, "of this queue")
	c.Flags().StringVar(&node, "node", "", "of this node, by name or id")
	c.Flags().Int64Var(&f.After, "after", 0, "tokens above this one: the last of the page before")
	limitFlag(c.Flags(), &f.Limit, operator.PageDefault, "at most so many")
	must(c.RegisterFlagCompletionFunc("node", a.completeNodes()))
	read := func(ctx context.Context, api conn, _ []string) ([]operator.Lock, error) {
		if node != "" {
			n, err := operator.FindNode(ctx, api, node)
			if err != nil {
				return nil, err
			}
			f.NodeID = n.ID
		}
		return list[operator.Lock](ctx, api, "/v1/locks", f.Limit, f.After, "queue", f.Queue, "node", int64(f.NodeID))
	}
	return paging(a, c, &f.Limit, lockColumns(), read,
		func(last operator.Lock) string { return fmt.Sprintf("--after %d", last.Token) })
}

func lockVerify(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "verify", Short: "Compare locks with their nodes and entries; exit code 20 if one breaks a rule",
		Long: "Compare locks with their nodes and entries. The elected leader frees the locks of a dead node within " +
			"the lease and two\n" +
			"seconds; what stays here for longer shows that no leader leads, or that recovery has suspended itself.",
		Args: cobra.NoArgs,
	}
	var limit int
	var after int64
	c.Flags().Int64Var(&after, "after", 0, "tokens above this one: the last of the page before")
	limitFlag(c.Flags(), &limit, 200, "at most so many")
	return reading(a, c, func(ctx context.Context, api conn, _ []string) error {
		found, err := list[operator.Suspect](ctx, api, "/v1/locks/suspects", limit, after)
		if err != nil {
			return err
		}
		if len(found) == 0 && a.tabular() {
			fmt.Fprintln(a.out, "every lock has a node that lives and lists it, and entries")
			return nil
		}
		err = printList(a, []column[operator.Suspect]{
			{title: "QUEUE", text: func(s operator.Suspect) string { return s.Queue }},
			{title: "LOCK KEY", text: func(s operator.Suspect) string { return short(s.LockKey, 40) }},
			{title: "NODE", text: func(s operator.Suspect) string { return cmp.Or(s.Node, fmt.Sprint(s.NodeID)) }},
			{title: "AGE", right: true, text: func(s operator.Suspect) string { return age(s.AgeSeconds) }},
			{title: "TOKEN", right: true, text: func(s operator.Suspect) string { return fmt.Sprint(s.Token) }},
			{title: "PROBLEM", text: func(s operator.Suspect) string { return s.Problem }},
		}, found)
		if len(found) == limit {
			fmt.Fprintf(a.err, "there may be more: --after %d\n", found[len(found)-1].Token)
		}
		if err == nil && len(found) > 0 {
			err = exitStatus{exitCritical}
		}
		return err
	})
}

func lockUnlock(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "unlock QUEUE TOKEN", Args: cobra.ExactArgs(2),
		Short:             "End one lock by hand; its key is ready again",
		ValidArgsFunction: a.completeQueues(),
		Long: `End one lock by hand, so that its key is ready again at its old position. Recovery ends the locks of dead
nodes by itself within seconds: a lock that it leaves alone is listed by a node that lives, and is refused here too
unless --even-listed is given. The run then goes on, its result is refused by the token, and the entry runs a second
time. A node that claims the key again while it runs ends that run first.`,
		Example: "  penstock lock unlock mail 4711 --reason 'its node is cut off'",
	}
	var evenListed bool
	c.Flags().BoolVar(&evenListed, "even-listed", false, "although its node lives and lists the lock")
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		token, err := strconv.ParseInt(args[1], 10, 64)
		if err != nil || token < 1 {
			return change{}, usagef("TOKEN is %q: want the number that penstock lock list has", args[1])
		}
		found, err := list[operator.Lock](ctx, api, "/v1/locks", 1, token-1, "queue", args[0])
		if err != nil {
			return change{}, err
		}
		if len(found) == 0 || found[0].Token != token {
			return change{}, fmt.Errorf("queue %s has no lock with token %d: %w", args[0], token,
				invalidation.ErrNotFound)
		}
		l := found[0]
		node := cmp.Or(l.Node, fmt.Sprint(l.NodeID))
		detail := fmt.Sprintf("%d entries, held by node %s for %s", l.Entries, node, age(l.AgeSeconds))
		return simple(fmt.Sprintf("end the lock of key %q in queue %s", l.LockKey, l.Queue), detail, true,
			func(ctx context.Context, by invalidation.By) error {
				return api.post(ctx, at("/v1/queues/%v/locks/%v/unlock", l.Queue, token),
					body(by, "lock_key", l.LockKey, "even_listed", evenListed))
			})
	})
}
