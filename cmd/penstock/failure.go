package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func failureCommand(a *app) *cobra.Command {
	return noun("failure", "Failures: entries that ended in error; retry or discard them",
		failureList(a), failureCauses(a), failureShow(a),
		failureVerb(a, operator.RetryFailure, operator.RetryFailures, &cobra.Command{
			Use: "retry [ID...]", Short: "Retry failed entries, by id or by filter: they go back into their queue",
			Example: "  penstock failure retry 17 --reason 'fixed'\n  penstock failure retry --queue mails " +
				"--class timeout --reason 'provider is back' --dry-run",
		}),
		failureVerb(a, operator.DiscardFailure, operator.DiscardFailures, &cobra.Command{
			Use:   "discard [ID...]",
			Short: "Discard failures, by id or by filter; only the audit keeps a record",
		}))
}

const failedSince = "failed not longer ago than this"

func failureList(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "list QUEUE", Short: "Failures of a queue, largest ids first", Args: cobra.ExactArgs(1),
		ValidArgsFunction: a.completeQueues(),
	}
	var f operator.FailureFilter
	var since time.Duration
	flags := c.Flags()
	flags.StringVar(&f.Class, "class", "", "of this class of error")
	flags.StringVar(&f.Fingerprint, "fingerprint", "", "of this fingerprint, see failure causes")
	flags.StringVar(&f.Flow, "flow", "", "of this flow")
	flags.StringVar(&f.LockKey, "lock-key", "", "of this lock key")
	flags.StringVar(&f.Name, "name", "", "of this name")
	flags.DurationVar(&since, "since", 0, failedSince)
	flags.Int64Var(&f.Before, "before", 0, "ids below this one: the last of the page before")
	limitFlag(flags, &f.Limit, operator.PageDefault, "at most so many")
	return paging(a, c, &f.Limit, []column[operator.Failure]{
		{title: "ID", right: true, text: func(f operator.Failure) string { return fmt.Sprint(f.ID) }},
		{title: "FAILED", right: true, text: func(f operator.Failure) string { return a.since(f.FailedAt) }},
		{title: "CLASS", text: func(f operator.Failure) string { return f.Class }},
		{title: "ATTEMPT", right: true, text: func(f operator.Failure) string { return number(f.Attempt) }},
		{title: "CRASHES", right: true, wide: true, text: func(f operator.Failure) string { return number(f.Crashes) }},
		{title: "NAME", wide: true, text: func(f operator.Failure) string { return f.Name }},
		{title: "LOCK KEY", wide: true, text: func(f operator.Failure) string { return f.LockKey }},
		{title: "FLOW", wide: true, text: func(f operator.Failure) string { return f.Flow }},
		{title: "ERROR", text: func(f operator.Failure) string { return short(f.Error, 80) }},
	}, func(ctx context.Context, api conn, args []string) ([]operator.Failure, error) {
		f.Queue = args[0]
		return list[operator.Failure](ctx, api, "/v1/failures", f.Limit, f.Before, "queue", f.Queue, "class", f.Class,
			"fingerprint", f.Fingerprint, "flow", f.Flow, "lock_key", f.LockKey, "name", f.Name,
			"since", a.ago(since))
	}, func(last operator.Failure) string { return fmt.Sprintf("--before %d", last.ID) })
}

func failureCauses(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "causes QUEUE", Short: "Causes of the 10,000 failures with the largest ids: fingerprints by frequency",
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeQueues(),
	}
	var limit int
	var since time.Duration
	c.Flags().DurationVar(&since, "since", 0, failedSince)
	limitFlag(c.Flags(), &limit, operator.PageDefault, "at most so many")
	return paging(a, c, &limit, []column[operator.Cause]{
		{title: "FAILURES", right: true, text: func(c operator.Cause) string { return fmt.Sprint(c.Failures) }},
		{title: "CLASS", text: func(c operator.Cause) string { return c.Class }},
		{title: "NEWEST", right: true, text: func(c operator.Cause) string { return a.since(c.Newest) }},
		{title: "EXAMPLE", right: true, text: func(c operator.Cause) string { return fmt.Sprint(c.ExampleID) }},
		{title: "FINGERPRINT", text: func(c operator.Cause) string {
			if a.format == "wide" {
				return c.Fingerprint
			}
			return short(c.Fingerprint, 100)
		}},
	}, func(ctx context.Context, api conn, args []string) ([]operator.Cause, error) {
		limit = min(limit, causesMax)
		path := at("/v1/queues/%v/causes", args[0])
		if since > 0 {
			path += "?since=" + a.ago(since)
		}
		return unpaged[operator.Cause](ctx, api, path, limit)
	}, func(operator.Cause) string { return pageHint(limit, causesMax) })
}

func failureDetail(ctx context.Context, api conn, id int64) (operator.FailureDetail, error) {
	return get[operator.FailureDetail](ctx, api, at("/v1/failures/%v", id))
}

// failureThere returns the error of reading a failure.
func failureThere(api conn) func(context.Context, int64) error {
	return func(ctx context.Context, id int64) error {
		_, err := failureDetail(ctx, api, id)
		return err
	}
}

func failureShow(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "show ID", Short: "One failure with payload and history", Args: cobra.ExactArgs(1),
	}
	return showing(a, c, ofEntry(failureDetail), func(w io.Writer, f operator.FailureDetail) {
		a.facts(w, "entry", fmt.Sprint(f.ID), "queue", f.Queue, "failed", stamp(&f.FailedAt),
			"accepted", stamp(&f.CreatedAt), "class", f.Class, "error", f.Error, "fingerprint", f.Fingerprint,
			"attempts spent", fmt.Sprint(f.Attempt), "crashes", fmt.Sprint(f.Crashes), "name", f.Name,
			"lock key", f.LockKey, "flow", f.Flow, "trace", f.Trace)
		a.indented(w, "history", f.History)
		a.indented(w, "payload", f.Payload)
	})
}

// failureVerb is retry or discard: by ids, or by a filter.
func failureVerb(a *app, v operator.Verb, onMany operator.OperationVerb, c *cobra.Command) *cobra.Command {
	bulk := a.bulkFlags(c, true)
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		planned, err := a.oneOrMany(ctx, api, args, bulk, onMany, v.String(), failureThere(api),
			func(ctx context.Context, id int64, by invalidation.By) (string, error) {
				return api.carryOut(ctx, v, id, by, operator.Moment{})
			})
		planned.risky = planned.risky || v == operator.DiscardFailure
		return planned, err
	})
}
