package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/operator"
)

func lockCommand(a *app) *cobra.Command {
	return noun("lock", "Lock records: which node computes which key", lockList(a), lockVerify(a))
}

func lockColumns() []column[operator.Lock] {
	return []column[operator.Lock]{
		{title: "QUEUE", text: func(l operator.Lock) string { return l.Queue }},
		{title: "LOCK KEY", text: func(l operator.Lock) string { return short(l.LockKey, 40) }},
		{title: "FLOW", text: func(l operator.Lock) string { return before(short(l.Flow, 24), "-") }},
		{title: "ENTRIES", right: true, text: func(l operator.Lock) string { return fmt.Sprint(l.Entries) }},
		{title: "NODE", text: func(l operator.Lock) string { return before(l.Node, fmt.Sprint(l.NodeID)) }},
		{title: "AGE", right: true, text: func(l operator.Lock) string { return age(l.AgeSeconds) }},
		{title: "TOKEN", right: true, text: func(l operator.Lock) string { return fmt.Sprint(l.Token) }},
		{title: "NODE ID", wide: true, right: true, text: func(l operator.Lock) string { return fmt.Sprint(l.NodeID) }},
		{
			title: "PRIORITY", wide: true, right: true,
			text: func(l operator.Lock) string { return fmt.Sprint(l.Priority) },
		},
		{title: "CLAIMED", wide: true, text: func(l operator.Lock) string { return stamp(&l.ClaimedAt) }},
	}
}

func lockList(a *app) *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "Locks, oldest first", Args: cobra.NoArgs}
	var f operator.LockFilter
	var node string
	a.queueFlag(c, &f.Queue, "of this queue")
	c.Flags().StringVar(&node, "node", "", "of this node, by name or id")
	c.Flags().IntVar(&f.Limit, "limit", operator.PageDefault, "at most so many")
	must(c.RegisterFlagCompletionFunc("node", a.completeNodes))
	return listing(a, c, lockColumns(), func(ctx context.Context, api conn, _ []string) ([]operator.Lock, error) {
		if node != "" {
			n, err := operator.FindNode(ctx, api, node)
			if err != nil {
				return nil, err
			}
			f.NodeID = n.ID
		}
		return list[operator.Lock](ctx, api, "/v1/locks", f.Limit, f.After, "queue", f.Queue, "node", int64(f.NodeID))
	})
}

func lockVerify(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "verify", Short: "Compare locks with their nodes and entries; exit code 20 if something is wrong",
		Long: "Compare locks with their nodes and entries. The elected leader frees the locks of a dead node within " +
			"the lease and two\n" +
			"seconds; what stays here for longer shows that no leader leads, or that recovery has suspended itself.",
		Args: cobra.NoArgs,
	}
	var limit int
	c.Flags().IntVar(&limit, "limit", 200, "at most so many")
	return reading(a, c, func(ctx context.Context, api conn, _ []string) error {
		found, err := unpaged[operator.Suspect](ctx, api, "/v1/locks/suspects", limit)
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
			{title: "NODE", text: func(s operator.Suspect) string { return before(s.Node, fmt.Sprint(s.NodeID)) }},
			{title: "AGE", right: true, text: func(s operator.Suspect) string { return age(s.AgeSeconds) }},
			{title: "TOKEN", right: true, text: func(s operator.Suspect) string { return fmt.Sprint(s.Token) }},
			{title: "PROBLEM", text: func(s operator.Suspect) string { return s.Problem }},
		}, found)
		if err == nil && len(found) > 0 {
			err = verdict{exitCritical}
		}
		return err
	})
}
