package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/client"
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
	flags.BoolVar(&f.detach, "detach", false,
		"leave the operation to the elected leader instead of carrying it out here")
	return f
}

func (f *bulk) empty() bool {
	x := f.filter
	return !x.All && x.Name == "" && x.LockKey == "" && x.Flow == "" && x.OlderThan == 0 && x.Class == "" &&
		x.Pattern == ""
}

// oneOrMany plans a verb on entries: one by one by their ids, or as an operation on what a filter matches, which it
// counts first.
func (a *app) oneOrMany(ctx context.Context, api conn, args []string, f *bulk, verb operator.OperationVerb, does string,
	read func(context.Context, int64) error, one func(context.Context, int64, invalidation.By) (string, error),
) (change, error) {
	switch {
	case len(args) > 0 && (f.queue != "" || !f.empty()):
		return change{}, usagef("give ids, or --queue with filters, not both")
	case len(args) > 0:
		return a.each(args, does, read, one)
	case f.queue == "" || f.empty():
		return change{}, usagef("give ids, or --queue with --all or filters")
	}
	o := operator.OperationRequest{Queue: f.queue, Verb: verb, Filter: f.filter, PerSecond: f.rate}
	found, err := countMatching(ctx, api, o)
	if err != nil {
		return change{}, err
	}
	return change{
		does: fmt.Sprintf("%s: %s", does, found.in(f.queue)), risky: true,
		do: func(ctx context.Context, by invalidation.By) (string, error) {
			if found.Matching == 0 && !found.Partial {
				return "nothing matches", nil
			}
			o.By = by
			id, err := startOperation(ctx, api, o)
			if err != nil {
				return "", err
			}
			if f.detach {
				return fmt.Sprintf("operation %d, left to the leader; penstock operation list shows it", id), nil
			}
			return a.follow(ctx, api, id)
		},
	}, nil
}

// each plans a verb on single entries, each of which read finds. The first error ends it, and says what was done
// before.
func (a *app) each(args []string, does string, read func(context.Context, int64) error,
	one func(context.Context, int64, invalidation.By) (string, error),
) (change, error) {
	ids, err := entryIDs(args)
	if err != nil {
		return change{}, err
	}
	c := change{does: fmt.Sprintf("%s %d", does, ids[0])}
	if len(ids) > 1 {
		c.does = fmt.Sprintf("%s: %d of them", does, len(ids))
	}
	c.check = func(ctx context.Context) error {
		for _, id := range ids {
			if err := read(ctx, id); err != nil {
				return err
			}
		}
		return nil
	}
	c.do = func(ctx context.Context, by invalidation.By) (string, error) {
		answers := make([]string, len(ids))
		for i, id := range ids {
			if answers[i], err = one(ctx, id, by); err != nil {
				if i > 0 {
					err = partialError{fmt.Errorf("%w (%d of %d were done before)", err, i, len(ids))}
				}
				return "", err
			}
		}
		return counted(answers), nil
	}
	return c, nil
}

// counted is an answer, or how many there were of each: 2 cancelled, 1 requested.
func counted(answers []string) string {
	if len(answers) == 1 || answers[0] == "" {
		return answers[0]
	}
	n := map[string]int{}
	for _, answer := range answers {
		n[answer]++
	}
	var parts []string
	for _, answer := range slices.Sorted(maps.Keys(n)) {
		parts = append(parts, fmt.Sprintf("%d %s", n[answer], answer))
	}
	return strings.Join(parts, ", ")
}

// follow carries an operation out, which there is, and shows how far it has come. A leader may carry it out at the same
// time; the operation survives this program.
func (a *app) follow(ctx context.Context, api conn, id int64) (string, error) {
	fmt.Fprintf(a.err, "operation %d\n", id)
	var changed int64
	answer, err := a.carryOn(ctx, api, id, &changed)
	switch {
	case err == nil:
		return answer, nil
	case ctx.Err() != nil: // err is that of the request that was interrupted
		err = fmt.Errorf("%d changed so far", changed)
	default:
		err = fmt.Errorf("%w; %d changed so far", err, changed)
	}
	return "", partialError{fmt.Errorf("%w; operation %d goes on when a leader leads, "+
		"penstock operation cancel %d ends it", err, id, id)}
}

// carryOn sets changed to how many the operation has changed.
func (a *app) carryOn(ctx context.Context, api conn, id int64, changed *int64) (string, error) {
	o, err := get[operator.Operation](ctx, api, at("/v1/operations/%v", id))
	if err != nil {
		return "", err
	}
	total := o.Matched
	if o.AtLeast() {
		total = -1
	}
	bar := a.progress(total, o.Verb)
	defer func() { bar.end() }()
	for {
		if total >= 0 && o.AtLeast() {
			total = -1
			bar.end()
			bar = a.progress(total, o.Verb)
		}
		*changed = o.Changed
		bar.set(o.Changed)
		if o.Status != "running" {
			bar.end()
			return fmt.Sprintf("%s, %d changed of %s that matched (operation %d)", o.Status, o.Changed, matched(o),
				id), nil
		}
		wait, err := step(ctx, api, id)
		if err != nil {
			return "", err
		}
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-time.After(min(max(wait, time.Millisecond), time.Second)):
		}
		if o, err = get[operator.Operation](ctx, api, at("/v1/operations/%v", id)); err != nil {
			return "", err
		}
	}
}

// countMatching asks how many an operation would change. The API wants a reason with all that may change something;
// it writes nothing of a count.
func countMatching(ctx context.Context, api conn, o operator.OperationRequest) (startedOperation, error) {
	o.Reason = "to count what matches"
	return sendOperation(ctx, api, o, true)
}

func startOperation(ctx context.Context, api conn, o operator.OperationRequest) (int64, error) {
	answer, err := sendOperation(ctx, api, o, false)
	return answer.ID, err
}

// startedOperation is the API's answer: the id of an operation, or after a dry run how many it would change.
type startedOperation struct {
	ID       int64 `json:"operation_id"`
	Matching int64 `json:"matching"`
	Partial  bool  `json:"partial"` // there may be more
}

// in is how many a dry run counted in a queue.
func (s startedOperation) in(queue string) string {
	switch {
	case s.Partial && s.Matching == 0:
		return fmt.Sprintf("none of the first 100,000 in queue %s, and perhaps later ones", queue)
	case s.Partial:
		return fmt.Sprintf("at least %d in queue %s", s.Matching, queue)
	}
	return fmt.Sprintf("%d in queue %s", s.Matching, queue)
}

func sendOperation(ctx context.Context, api conn, o operator.OperationRequest, dry bool) (startedOperation, error) {
	filter := map[string]any{}
	if o.Filter.OlderThan > 0 {
		filter["older_than_seconds"] = o.Filter.OlderThan.Seconds()
	}
	o.Filter.OlderThan = 0
	text, err := json.Marshal(o.Filter)
	if err == nil {
		err = json.Unmarshal(text, &filter)
	}
	if err != nil {
		return startedOperation{}, err
	}
	in := body(o.By, "verb", o.Verb, "filter", filter, "dry_run", dry)
	if o.PerSecond != 0 {
		in["per_second"] = o.PerSecond
	}
	path := at("/v1/queues/%v/operations", o.Queue)
	if dry {
		var counted startedOperation
		err := api.ask(ctx, client.RawRequest{Method: "POST", Path: path, In: in}, &counted)
		return counted, err
	}
	return posted[startedOperation](ctx, api, path, in)
}

// step carries out the next part of an operation, and returns how long its pace asks to wait after it.
func step(ctx context.Context, api conn, id int64) (time.Duration, error) {
	type stepped struct {
		WaitMS int64 `json:"wait_ms"`
	}
	answer, err := posted[stepped](ctx, api, at("/v1/operations/%v/step", id), nil)
	return time.Duration(answer.WaitMS) * time.Millisecond, err
}

// bar shows progress on a terminal, and nothing elsewhere.
type bar struct{ bar *progressbar.ProgressBar }

// progress begins a bar on the error stream; total is -1 if unknown.
func (a *app) progress(total int64, what string) *bar {
	if !terminal(a.err) {
		return &bar{}
	}
	return &bar{progressbar.NewOptions64(total, progressbar.OptionSetWriter(a.err),
		progressbar.OptionSetDescription(what),
		progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish(),
		progressbar.OptionSetWidth(40),
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
