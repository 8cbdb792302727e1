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
	return noun("operation", "Bulk operations on many entries or failures", operationList(a), operationShow(a),
		operationFollow(a), operationCancel(a))
}

func operationList(a *app) *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "Operations, newest first", Args: cobra.NoArgs}
	var queue string
	var running bool
	var limit int
	a.queueFlag(c, &queue, "of this queue")
	c.Flags().BoolVar(&running, "running", false, "only those that run")
	var earlier int64
	c.Flags().Int64Var(&earlier, "before", 0, "ids below this one: the last of the page before")
	limitFlag(c.Flags(), &limit, operator.PageDefault, "at most so many")
	type row = operator.Operation
	return paging(a, c, &limit, []column[row]{
		{title: "ID", right: true, text: func(o row) string { return fmt.Sprint(o.ID) }},
		{title: "QUEUE", text: func(o row) string { return o.Queue }},
		{title: "VERB", text: func(o row) string { return o.Verb }},
		{title: "STATUS", text: func(o row) string { return o.Status }},
		{title: "CHANGED", right: true, text: func(o row) string { return fmt.Sprint(o.Changed) }},
		{title: "MATCHED", right: true, text: matched},
		{title: "PER SECOND", wide: true, right: true, text: func(o row) string { return fmt.Sprint(o.PerSecond) }},
		{title: "FILTER", wide: true, text: func(o row) string {
			text, _ := json.Marshal(o.Filter) // it came from JSON
			return string(text)
		}},
		{title: "AGE", right: true, text: func(o row) string { return a.since(o.CreatedAt) }},
		{title: "BY", text: func(o row) string { return short(o.Actor+after(": ", o.Reason), 60) }},
		{title: "PROBLEM", text: func(o row) string { return short(a.problemOf(o), 100) }},
	}, func(ctx context.Context, api conn, _ []string) ([]operator.Operation, error) {
		return list[operator.Operation](ctx, api, "/v1/operations", limit, earlier, "queue", queue, "running", running)
	}, func(last row) string { return fmt.Sprintf("--before %d", last.ID) })
}

// matched is how many match an operation, with a mark where more may match.
func matched(o operator.Operation) string {
	if o.AtLeast() {
		return fmt.Sprintf("%d+", o.Matched)
	}
	return fmt.Sprint(o.Matched)
}

// problemOf is the error of the steps that fail, as long as none has succeeded since.
func (a *app) problemOf(o operator.Operation) string {
	if o.FailedSteps == 0 || o.FailedAt == nil {
		return ""
	}
	return fmt.Sprintf("failed %d times, the last %s ago: %s", o.FailedSteps, a.since(*o.FailedAt), o.Error)
}

func findOperation(ctx context.Context, api conn, args []string) (operator.Operation, error) {
	id, err := numbered("bulk operation", args)
	if err != nil {
		return operator.Operation{}, err
	}
	return get[operator.Operation](ctx, api, at("/v1/operations/%v", id))
}

func operationShow(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "show ID", Short: "One operation: progress, and the last error of its steps", Args: cobra.ExactArgs(1),
	}
	return showing(a, c, findOperation, func(w io.Writer, o operator.Operation) {
		filter, _ := json.Marshal(o.Filter) // it came from JSON
		a.facts(w, "operation", fmt.Sprint(o.ID), "verb", o.Verb, "queue", o.Queue, "filter", string(filter),
			"status", o.Status, "changed", fmt.Sprint(o.Changed), "matched", matched(o),
			"per second", fmt.Sprint(o.PerSecond), "failed steps", number(int64(o.FailedSteps)),
			"last error", o.Error, "failed", stamp(o.FailedAt), "asked for by", o.Actor+after(": ", o.Reason),
			"begun", stamp(&o.CreatedAt), "ended", stamp(o.EndedAt))
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
		Use: "follow ID", Short: "Carry out an operation to its end, and print its progress", Args: cobra.ExactArgs(1),
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
		if _, err := get[operator.Operation](c.Context(), api, at("/v1/operations/%v", id)); err != nil {
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
	c := &cobra.Command{Use: "cancel ID", Short: "End an operation; the changes that it made remain"}
	return doing(a, c, operator.CancelOperation, false,
		func(ctx context.Context, api conn, arg string) (any, string, error) {
			o, err := findOperation(ctx, api, []string{arg})
			of := fmt.Sprintf(" of %d", o.Matched)
			if o.AtLeast() {
				of = " so far"
			}
			return o.ID, fmt.Sprintf("%s in queue %s, %d changed%s", o.Verb, o.Queue, o.Changed, of), err
		})
}
