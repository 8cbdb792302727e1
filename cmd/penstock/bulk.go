package main

import (
	"context"
	"fmt"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// bulk is what is said on the command line about an operation on many.
type bulk struct {
	queue  string
	filter operator.Filter
	rate   int
	detach bool
}

// bulkFlags adds the filters of an operation on many; failures have two more.
func (a *app) bulkFlags(c *cobra.Command, ofFailures bool) *bulk {
	f := &bulk{}
	a.queueFlag(c, &f.queue, "instead of ids: those of this queue that match all filters")
	flags := c.Flags()
	flags.BoolVar(&f.filter.All, "all", false, "all of the queue")
	flags.StringVar(&f.filter.Name, "name", "", "of this name")
	flags.StringVar(&f.filter.LockKey, "lock-key", "", "of this lock key")
	flags.StringVar(&f.filter.Flow, "flow", "", "of this flow")
	flags.DurationVar(&f.filter.OlderThan, "older-than", 0, "accepted (or failed) longer ago than this")
	if ofFailures {
		flags.StringVar(&f.filter.Class, "class", "", "of this class of error")
		flags.StringVar(&f.filter.Pattern, "fingerprint", "", "of this fingerprint, see failure causes")
	}
	flags.IntVar(&f.rate, "per-second", 0, "change at most so many a second: 1000")
	flags.BoolVar(&f.detach, "detach", false, "leave the operation to the elected leader instead of carrying it out here")
	return f
}

func (f *bulk) empty() bool {
	x := f.filter
	return !x.All && x.Name == "" && x.LockKey == "" && x.Flow == "" && x.OlderThan == 0 && x.Class == "" && x.Pattern == ""
}

// oneOrMany plans a verb on entries: one by one by their ids, or as an operation on what a filter matches, which it
// counts first.
func (a *app) oneOrMany(ctx context.Context, b backend, args []string, f *bulk, verb operator.OperationVerb, does string,
	one func(context.Context, int64, invalidation.By) (string, error),
) (change, error) {
	switch {
	case len(args) > 0 && (f.queue != "" || !f.empty()):
		return change{}, usagef("give ids, or --queue with filters, not both")
	case len(args) > 0:
		return a.each(args, does, one)
	case f.queue == "" || f.empty():
		return change{}, usagef("give ids, or --queue with --all or filters")
	}
	o := operator.OperationRequest{Queue: f.queue, Verb: verb, Filter: f.filter, PerSecond: f.rate}
	n, err := b.CountMatching(ctx, o)
	if err != nil {
		return change{}, err
	}
	return change{
		does: fmt.Sprintf("%s: %d in queue %s", does, n, f.queue), risky: true,
		do: func(ctx context.Context, by invalidation.By) (string, error) {
			if n == 0 {
				return "nothing matches", nil
			}
			o.By = by
			id, err := b.StartOperation(ctx, o)
			if err != nil {
				return "", err
			}
			if f.detach {
				return fmt.Sprintf("operation %d, left to the leader; penstock operation list shows it", id), nil
			}
			return a.follow(ctx, b, id)
		},
	}, nil
}

// each plans a verb on single entries. The first error ends it, and says what was done before.
func (a *app) each(args []string, does string, one func(context.Context, int64, invalidation.By) (string, error)) (change, error) {
	ids, err := entryIDs(args)
	if err != nil {
		return change{}, err
	}
	c := change{does: fmt.Sprintf("%s %d", does, ids[0])}
	if len(ids) > 1 {
		c.does = fmt.Sprintf("%s: %d of them", does, len(ids))
	}
	c.do = func(ctx context.Context, by invalidation.By) (string, error) {
		var answer string
		for i, id := range ids {
			if answer, err = one(ctx, id, by); err != nil {
				if i > 0 {
					err = fmt.Errorf("%w (%d of %d were done before)", err, i, len(ids))
				}
				return "", err
			}
		}
		return answer, nil
	}
	return c, nil
}

// follow carries an operation out and shows how far it has come. A leader may carry it out at the same time; the
// operation survives this program.
func (a *app) follow(ctx context.Context, b backend, id int64) (string, error) {
	o, err := b.Operation(ctx, id)
	if err != nil {
		return "", err
	}
	bar := a.progress(o.Matched, o.Verb)
	defer bar.end()
	for {
		bar.set(o.Changed)
		if o.Status != "running" {
			bar.end()
			return fmt.Sprintf("%s, %d changed of %d that matched (operation %d)", o.Status, o.Changed, o.Matched, id), nil
		}
		wait, err := b.Step(ctx, id)
		if err != nil {
			return "", fmt.Errorf("%w; the operation goes on when a leader leads, penstock operation cancel %d ends it", err, id)
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("operation %d goes on when a leader leads, penstock operation cancel %d ends it: %w", id, id, ctx.Err())
		case <-time.After(min(max(wait, time.Millisecond), time.Second)):
		}
		if o, err = b.Operation(ctx, id); err != nil {
			return "", err
		}
	}
}

// bar shows progress on a terminal, and nothing elsewhere.
type bar struct{ bar *progressbar.ProgressBar }

// progress begins a bar on the error stream; total is -1 if nobody knows.
func (a *app) progress(total int64, what string) *bar {
	if !terminal(a.err) {
		return &bar{}
	}
	return &bar{progressbar.NewOptions64(total, progressbar.OptionSetWriter(a.err), progressbar.OptionSetDescription(what),
		progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish(), progressbar.OptionSetWidth(40),
		progressbar.OptionShowCount(), progressbar.OptionSetPredictTime(true))}
}

func (b *bar) set(n int64) {
	if b.bar != nil {
		_ = b.bar.Set64(n) // a bar that cannot be drawn is no reason to stop
	}
}

func (b *bar) end() {
	if b.bar != nil {
		_ = b.bar.Finish()
		b.bar = nil
	}
}
