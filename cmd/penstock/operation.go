package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/operator"
)

func operationCommand(a *app) *cobra.Command {
	return noun("operation", "Bulk operations on many entries or failures", operationList(a), operationFollow(a),
		operationCancel(a))
}

func operationList(a *app) *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "Operations, newest first", Args: cobra.NoArgs}
	var queue string
	var running bool
	var limit int
	a.queueFlag(c, &queue, "of this queue")
	c.Flags().BoolVar(&running, "running", false, "only those that run")
	c.Flags().IntVar(&limit, "limit", operator.PageDefault, "at most so many")
	return listing(a, c, []column[operator.Operation]{
		{title: "ID", right: true, text: func(o operator.Operation) string { return fmt.Sprint(o.ID) }},
		{title: "QUEUE", text: func(o operator.Operation) string { return o.Queue }},
		{title: "VERB", text: func(o operator.Operation) string { return o.Verb }},
		{title: "STATUS", text: func(o operator.Operation) string { return o.Status }},
		{title: "CHANGED", right: true, text: func(o operator.Operation) string { return fmt.Sprint(o.Changed) }},
		{title: "MATCHED", right: true, text: func(o operator.Operation) string { return fmt.Sprint(o.Matched) }},
		{
			title: "PER SECOND", wide: true, right: true,
			text: func(o operator.Operation) string { return fmt.Sprint(o.PerSecond) },
		},
		{title: "FILTER", wide: true, text: func(o operator.Operation) string {
			text, _ := json.Marshal(o.Filter) // it came from JSON
			return string(text)
		}},
		{title: "AGE", right: true, text: func(o operator.Operation) string { return a.since(o.CreatedAt) }},
		{title: "BY", text: func(o operator.Operation) string { return short(o.Actor+after(": ", o.Reason), 60) }},
	}, func(ctx context.Context, api conn, _ []string) ([]operator.Operation, error) {
		return list[operator.Operation](ctx, api, "/v1/operations", limit, 0, "queue", queue, "running", running)
	})
}

// numbered reads the id of something else than an entry.
func numbered(what string, args []string) (int64, error) {
	ids, err := entryIDs(args)
	if err != nil {
		return 0, usagef("%q is not the id of a %s", args[0], what)
	}
	return ids[0], nil
}

func operationFollow(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "follow ID", Short: "Carry an operation out to its end, and show how far it is", Args: cobra.ExactArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		id, err := numbered("bulk operation", args)
		if err != nil {
			return err
		}
		api, err := a.connect(c.Context())
		if err != nil {
			return err
		}
		answer, err := a.follow(c.Context(), api, id)
		if err != nil {
			return err
		}
		return printOne(a, done{Did: fmt.Sprintf("follow operation %d", id), Answer: answer},
			func(w io.Writer) { fmt.Fprintln(w, answer) })
	}
	return c
}

func operationCancel(a *app) *cobra.Command {
	c := &cobra.Command{Use: "cancel ID", Short: "End an operation; what it has changed stays changed"}
	return doing(a, c, operator.CancelOperation, false,
		func(ctx context.Context, api conn, arg string) (any, string, error) {
			id, err := numbered("bulk operation", []string{arg})
			if err != nil {
				return nil, "", err
			}
			o, err := get[operator.Operation](ctx, api, at("/v1/operations/%v", id))
			return id, fmt.Sprintf("%s in queue %s, %d changed of %d", o.Verb, o.Queue, o.Changed, o.Matched), err
		})
}
