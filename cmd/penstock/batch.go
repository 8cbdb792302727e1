package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func batchCommand(a *app) *cobra.Command {
	return noun("batch", "Batches: sets that are processed in parts",
		batchList(a), batchShow(a), batchCreate(a),
		batchVerb(a, operator.PauseBatch, "pause", "Take the parts that do not run out of the queue"),
		batchVerb(a, operator.ResumeBatch, "resume", "End a pause"),
		batchVerb(a, operator.CancelBatch, "cancel", "End a batch; parts that run are asked to end"),
		batchVerb(a, operator.RetryBatch, "retry", "Run the parts again that did not end done"),
	)
}

func batchList(a *app) *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "Batches, newest first", Args: cobra.NoArgs}
	var queue string
	var limit int
	a.queueFlag(c, &queue, "of this queue")
	var earlier int64
	c.Flags().Int64Var(&earlier, "before", 0, "ids below this one: the last of the page before")
	limitFlag(c.Flags(), &limit, 20, "at most so many; the parts of each are counted")
	type row = operator.Batch
	return paging(a, c, &limit, []column[row]{
		{title: "ID", right: true, text: func(b row) string { return fmt.Sprint(b.ID) }},
		{title: "NAME", text: func(b row) string { return short(b.Name, 40) }},
		{title: "QUEUE", text: func(b row) string { return b.Queue }},
		{title: "STATE", text: func(b row) string { return b.State }},
		{title: "DONE", right: true, text: func(b row) string { return fmt.Sprintf("%d/%d", b.Done, b.Parts) }},
		{title: "BAD", right: true, text: func(b row) string { return number(b.Bad) }},
		{title: "QUEUED", right: true, text: func(b row) string { return number(b.Queued) }},
		{title: "WAITING", right: true, wide: true, text: func(b row) string { return number(b.Waiting) }},
		{title: "AGE", right: true, text: func(b row) string { return a.since(b.CreatedAt) }},
		{title: "BY", wide: true, text: func(b row) string { return b.Actor }},
		{title: "PROBLEM", text: func(b row) string { return short(b.Problem, 60) }},
	}, func(ctx context.Context, api conn, _ []string) ([]operator.Batch, error) {
		return list[operator.Batch](ctx, api, "/v1/batches", limit, earlier, "queue", queue)
	}, func(last row) string { return fmt.Sprintf("--before %d", last.ID) })
}

func findBatch(ctx context.Context, api conn, args []string) (operator.Batch, error) {
	id, err := numbered("batch", args)
	if err != nil {
		return operator.Batch{}, err
	}
	return get[operator.Batch](ctx, api, at("/v1/batches/%v", id))
}

func batchShow(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "show ID", Short: "One batch: state, parts, result", Args: cobra.ExactArgs(1),
	}
	return showing(a, c, findBatch, func(w io.Writer, x operator.Batch) {
		a.facts(w, "batch", fmt.Sprint(x.ID), "name", x.Name, "queue", x.Queue, "state", x.State,
			"parts", fmt.Sprint(x.Parts), "done", fmt.Sprint(x.Done), "bad", fmt.Sprint(x.Bad),
			"queued", fmt.Sprint(x.Queued), "waiting", fmt.Sprint(x.Waiting), "problem", x.Problem,
			"paused by", x.PausedBy+after(": ", x.PausedReason)+after(", until ", stamp(x.PausedUntil)),
			"made by", x.Actor, "made", stamp(&x.CreatedAt), "ended", stamp(x.EndedAt))
		a.indented(w, "result", x.Result)
	})
}

func batchCreate(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "create NAME QUEUE", Short: "Create a batch from a list of items, or from the rows of a query",
		Args: cobra.ExactArgs(2),
		Example: "  penstock batch create backfill embeddings --items @ids.json --set part_size=50 --reason 'new " +
			"model'\n" +
			"  penstock batch create backfill embeddings --query 'SELECT id FROM document' --reason 'new model'",
	}
	var items, query string
	var set []string
	c.Flags().StringVar(&items, "items", "", "the set as a JSON array, @FILE or -")
	c.Flags().StringVar(&query, "query", "", "a SELECT whose rows are the set; a task node runs it, with its rights")
	settingFlag(c, &set, []string{"part_size", "window_parts", "detail", "flow", "priority", "completion_queue"})
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		options, err := readSettings(set)
		if err != nil {
			return change{}, err
		}
		switch {
		case (items == "") == (query == ""):
			return change{}, usagef("give --items or --query, one of them")
		case query != "":
			options["query"] = query
		default:
			text, err := a.document("--items", items)
			if err != nil {
				return change{}, err
			}
			options["items"] = json.RawMessage(text)
		}
		return change{
			does: "create batch " + args[0],
			do: func(ctx context.Context, by invalidation.By) (string, error) {
				in := body(by, "name", args[0], "options", options)
				made, err := posted[struct{ ID int64 }](ctx, api, at("/v1/queues/%v/batches", args[1]), in)
				return fmt.Sprintf("batch %d", made.ID), err
			},
		}, nil
	})
}

func batchVerb(a *app, v operator.Verb, use, help string) *cobra.Command {
	c := &cobra.Command{Use: use + " ID", Short: help}
	return doing(a, c, v, v == operator.CancelBatch,
		func(ctx context.Context, api conn, arg string) (any, string, error) {
			x, err := findBatch(ctx, api, []string{arg})
			return x.ID, fmt.Sprintf("%s is %s, %d of %d parts are done", x.Name, x.State, x.Done, x.Parts), err
		})
}
