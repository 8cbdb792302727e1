package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/internal/oneline"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func entryCommand(a *app) *cobra.Command {
	return noun("entry", "Entries: push, list, show, explain, wait, cancel, disable, enable",
		entryPush(a), entryList(a), entryShow(a), entryExplain(a), entryWait(a),
		entryCancel(a),
		entrySwitch(a, operator.DisableEntry, "disable",
			"Take entries out of line: by id, or all of a name or lock key, those to come as well"),
		entrySwitch(a, operator.EnableEntry, "enable", "Put disabled entries back into line"),
	)
}

func (a *app) entryColumns() []column[operator.EntryStatus] {
	type row = operator.EntryStatus
	return []column[row]{
		{title: "ID", right: true, text: func(e row) string { return fmt.Sprint(e.ID) }},
		{title: "STATE", text: func(e row) string { return e.State }},
		{title: "LOCK KEY", text: func(e row) string { return cmp.Or(short(e.LockKey, 32), "-") }},
		{title: "FLOW", text: func(e row) string { return cmp.Or(short(e.Flow, 24), "-") }},
		{title: "PRIORITY", right: true, text: func(e row) string { return fmt.Sprint(e.Priority) }},
		{title: "NAME", text: func(e row) string { return cmp.Or(short(e.Name, 24), "-") }},
		{title: "ATTEMPT", right: true, text: func(e row) string { return number(e.Attempt) }},
		{title: "CRASHES", right: true, wide: true, text: func(e row) string { return number(e.Crashes) }},
		{title: "AGE", right: true, text: func(e row) string { return a.since(e.CreatedAt) }},
		{title: "WEIGHT", right: true, wide: true, text: func(e row) string { return fmt.Sprint(e.Weight) }},
		{title: "DUE", wide: true, text: func(e row) string { return stamp(e.DueAt) }},
		{title: "START BY", wide: true, text: func(e row) string { return stamp(e.StartBy) }},
		{title: "FINISH BY", wide: true, text: func(e row) string { return stamp(e.FinishBy) }},
		{title: "NODE", wide: true, text: func(e row) string { return optional(e.NodeID) }},
		{title: "TOKEN", wide: true, right: true, text: func(e row) string { return optional(e.Token) }},
	}
}

func entryList(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "list QUEUE", Short: "Entries of a queue, oldest first", Args: cobra.ExactArgs(1),
		ValidArgsFunction: a.completeQueues(),
	}
	var f operator.EntryFilter
	flags := c.Flags()
	flags.StringVar(&f.State, "state", "", "initial, pending, computing or disabled")
	flags.StringVar(&f.Flow, "flow", "", "of this flow")
	flags.StringVar(&f.LockKey, "lock-key", "", "of this lock key")
	flags.StringVar(&f.Name, "name", "", "of this name")
	flags.Int64Var(&f.After, "after", 0, "ids above this one: the last of the page before")
	limitFlag(flags, &f.Limit, operator.PageDefault, "at most so many")
	must(c.RegisterFlagCompletionFunc("state",
		cobra.FixedCompletions(operator.States(), cobra.ShellCompDirectiveNoFileComp)))
	return paging(a, c, &f.Limit, a.entryColumns(),
		func(ctx context.Context, api conn, args []string) ([]operator.EntryStatus, error) {
			f.Queue = args[0]
			return list[operator.EntryStatus](ctx, api, "/v1/entries", f.Limit, f.After,
				"queue", f.Queue, "state", f.State, "flow", f.Flow, "lock_key", f.LockKey, "name", f.Name)
		}, func(last operator.EntryStatus) string { return fmt.Sprintf("--after %d", last.ID) })
}

func entryShow(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "show ID", Short: "One entry in detail, whether it waits, runs or has ended", Args: cobra.ExactArgs(1),
	}
	return showing(a, c, ofEntry(entryDetail), a.writeEntry)
}

func (a *app) writeEntry(w io.Writer, d operator.EntryDetail) {
	facts := []string{"entry", fmt.Sprint(d.ID), "queue", d.Queue, "state", d.State}
	if e := d.Entry; e != nil {
		facts = append(facts,
			"lock key", e.LockKey,
			"flow", e.Flow,
			"priority", fmt.Sprint(e.Priority),
			"weight", fmt.Sprint(e.Weight),
			"name", e.Name,
			"attempts spent", fmt.Sprint(e.Attempt),
			"crashes", fmt.Sprint(e.Crashes),
			"accepted", stamp(&e.CreatedAt),
			"due", stamp(e.DueAt),
			"start by", stamp(e.StartBy),
			"finish by", stamp(e.FinishBy),
			"node", optional(e.NodeID),
			"token", optional(e.Token),
			"claimed", stamp(e.ClaimedAt),
			"trace", d.Trace)
	}
	if e := d.Ended; e != nil {
		facts = append(facts,
			"ended", stamp(&e.At),
			"accepted", stamp(&e.Accepted),
			"attempts spent", fmt.Sprint(e.Attempt),
			"class", e.Class,
			"reason", e.Reason)
		if e.NodeID != 0 {
			facts = append(facts, "node", fmt.Sprint(e.NodeID), "token", fmt.Sprint(e.Token),
				"ran for", age(e.RunSeconds))
		}
	}
	a.facts(w, facts...)
	a.indented(w, "progress", d.Progress)
	a.indented(w, "history", d.History)
	a.indented(w, "payload", d.Payload)
	if d.Ended != nil {
		a.indented(w, "result", d.Ended.Result)
	}
}

func entryExplain(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "explain ID", Short: "Why an entry does not run: each condition of a claim, with its numbers",
		Args: cobra.ExactArgs(1),
	}
	return showing(a, c, ofEntry(explain), func(w io.Writer, e operator.Explanation) {
		fmt.Fprintf(w, "entry %d of queue %s: %s\n", e.ID, e.Queue, a.paint(cellColours[e.State], e.State))
		for _, r := range e.Reasons {
			fmt.Fprintf(w, "  %s: %s\n", r.Code, oneline.Of(r.Text))
		}
		if len(e.Reasons) == 0 {
			fmt.Fprintln(w, "  nothing holds it: it is next in its lane")
		}
	})
}

// ended is an awaited entry that has ended.
type ended struct {
	ID int64 `json:"id"`
	operator.EntryOutcome
}

func entryWait(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "wait ID...", Short: "Wait until entries have ended; exit code 9 if one did not end as done",
		Args: cobra.MinimumNArgs(1),
	}
	var most time.Duration
	c.Flags().DurationVar(&most, "for", 0, "give up after so long; 0: never")
	c.RunE = func(c *cobra.Command, args []string) error {
		ids, err := entryIDs(args)
		if err != nil {
			return err
		}
		api, err := a.connect(c.Context())
		if err != nil {
			return err
		}
		entries := make([]awaited, len(ids))
		for i, id := range ids {
			entries[i].id = id
		}
		return a.await(c.Context(), api, entries, most)
	}
	return c
}

// await prints how entries ended, in the order in which they were asked for. Where one of them cannot be waited for, or
// is late, those before it are printed all the same.
func (a *app) await(ctx context.Context, api conn, entries []awaited, most time.Duration) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if most > 0 {
		timer := time.AfterFunc(most, func() { cancel(errTimeout) })
		defer timer.Stop()
	}
	var found []ended
	var failed error
	for _, entry := range entries {
		e, err := a.awaitEnd(ctx, api, entry)
		if err != nil && errors.Is(context.Cause(ctx), errTimeout) {
			err = fmt.Errorf("wait for entry %d: it has not ended after %s: %w", entry.id, most, errTimeout)
		}
		if failed = err; failed != nil {
			break
		}
		found = append(found, ended{entry.id, e})
	}
	if failed != nil && len(found) == 0 {
		return failed
	}
	if err := a.writeEnds(found); err != nil || failed != nil {
		return errors.Join(failed, err)
	}
	for _, e := range found {
		if e.Outcome != "done" {
			return exitStatus{exitEndedBadly}
		}
	}
	return nil
}

func (a *app) writeEnds(found []ended) error {
	return printList(a, []column[ended]{
		{title: "ID", right: true, text: func(e ended) string { return fmt.Sprint(e.ID) }},
		{title: "OUTCOME", text: func(e ended) string { return e.Outcome }},
		{title: "RAN", right: true, text: func(e ended) string {
			if e.NodeID == 0 {
				return "-"
			}
			return age(e.RunSeconds)
		}},
		{title: "RESULT", text: func(e ended) string {
			return cmp.Or(short(e.Reason, 100),
				short(string(e.Result), 100))
		}},
	}, found)
}

// waitStep is how long one request waits for the end of an entry.
const waitStep = 20 * time.Second

// silentWait is how long a wait lasts before it says why the entry has not ended.
const silentWait = 3 * time.Second

// awaitEnd returns the outcome of an entry as soon as it has ended. Meanwhile it reports on the error stream
// why the entry does not run, whenever that changes: a queue that nothing serves would be waited for in
// silence.
func (a *app) awaitEnd(ctx context.Context, api conn, entry awaited) (operator.EntryOutcome, error) {
	said := ""
	for wait := silentWait; ; wait = waitStep {
		e, err := readEntry(ctx, api, entry, min(wait, a.timeout*2/3))
		if err != nil {
			return operator.EntryOutcome{}, err
		}
		if e.Ended != nil {
			return *e.Ended, nil
		}
		why := ""
		for _, r := range e.Reasons {
			why += after("; ", r.Text)
		}
		if why != said && why != "" {
			fmt.Fprintf(a.err, "entry %d waits: %s\n", entry.id, oneline.Of(strings.TrimPrefix(why, "; ")))
		}
		said = why
		select { // a server that is about to end answers at once
		case <-ctx.Done():
			return operator.EntryOutcome{}, context.Cause(ctx)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func entryCancel(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "cancel [ID...]", Short: "Cancel entries by id or by filter; the node of one that runs is asked to end it",
		Example: "  penstock entry cancel 17 18 --reason 'wrong input'\n  penstock entry cancel --queue " +
			"mails --name newsletter --reason 'sent twice'",
	}
	bulk := a.bulkFlags(c, false)
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		planned, err := a.oneOrMany(ctx, api, args, bulk, operator.CancelEntries, "cancel entry", entryThere(api),
			func(ctx context.Context, id int64, by invalidation.By) (string, error) {
				type cancelled struct{ Verdict operator.Cancelled }
				answer, err := posted[cancelled](ctx, api, at("/v1/entries/%v/cancel", id), body(by))
				if answer.Verdict == operator.CancelRequested {
					return "requested; the node that runs it hears of it at its heartbeat", err
				}
				return string(answer.Verdict), err
			})
		planned.risky = true
		return planned, err
	})
}

// entrySwitch is disable or enable: by ids, or by a name or lock key of a queue.
func entrySwitch(a *app, v operator.Verb, verb, help string) *cobra.Command {
	c := &cobra.Command{Use: verb + " [ID...]", Short: help}
	var queue, name, key string
	a.queueFlag(c, &queue, "queue of --name or --lock-key")
	c.Flags().StringVar(&name, "name", "", "all entries of this name")
	c.Flags().StringVar(&key, "lock-key", "", "all entries of this lock key")
	c.MarkFlagsMutuallyExclusive("name", "lock-key")
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		scope, value := operator.ByName, name
		route := "/v1/queues/%v/entries/disable"
		if v == operator.EnableEntry {
			route = "/v1/queues/%v/entries/enable"
		}
		if key != "" {
			scope, value = operator.ByLockKey, key
		}
		switch {
		case len(args) > 0 && queue+name+key == "":
			return a.each(args, v.String(), entryThere(api),
				func(ctx context.Context, id int64, by invalidation.By) (string, error) {
					return api.carryOut(ctx, v, id, by, operator.Moment{})
				})
		case len(args) > 0 || queue == "" || value == "":
			return change{}, usagef("give ids, or --queue with --name or --lock-key")
		}
		return change{
			does:  fmt.Sprintf("%s entries of queue %s with %s %s", verb, queue, scope, value),
			check: queueThere(api, queue),
			do: func(ctx context.Context, by invalidation.By) (string, error) {
				in := body(by, "scope", scope, "value", value)
				started, err := posted[startedOperation](ctx, api, at(route, queue), in)
				if err != nil {
					return "", err
				}
				return a.follow(ctx, api, started.ID)
			},
		}, nil
	})
}
