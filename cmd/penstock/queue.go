package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func queueCommand(a *app) *cobra.Command {
	return noun("queue", "Queues: state, settings, pause and disable",
		queueList(a), queueShow(a), queueHistory(a), queueCreate(a), queueAlter(a), queueDrop(a),
		queueVerb(a, operator.PauseQueue, &cobra.Command{
			Use: "pause QUEUE", Short: "Pause claims from a queue; runs go on",
			Example: "  penstock queue pause mails --until 30m --reason 'provider is down'",
		}),
		queueVerb(a, operator.ResumeQueue, &cobra.Command{Use: "resume QUEUE", Short: "End a pause"}),
		queueVerb(a, operator.DisableQueue, &cobra.Command{
			Use:   "disable QUEUE",
			Short: "Take a queue out of service; it still accepts entries",
		}),
		queueVerb(a, operator.EnableQueue, &cobra.Command{Use: "enable QUEUE", Short: "Put a queue back into service"}),
	)
}

// standing is a queue's state in one word.
func standing(q operator.Queue) string {
	switch {
	case q.OutOfService:
		return "disabled"
	case q.Paused:
		return "paused"
	case q.Unmeasured:
		return "not measured yet"
	case q.Serving == 0:
		return "no node"
	case q.Blocked != nil:
		return strings.ReplaceAll(*q.Blocked, "_", " ")
	}
	return "serving"
}

// estimate marks a number that is one.
func estimate(n int64, estimated bool) string {
	if estimated && n > 0 {
		return fmt.Sprintf("~%d", n)
	}
	return fmt.Sprint(n)
}

// asOf is the time of the counts of a queue.
func asOf(q operator.Queue) string {
	if q.Unmeasured {
		return "-"
	}
	return cmp.Or(stamp(q.SampledAt), "now")
}

func queueColumns() []column[operator.Queue] {
	type row = operator.Queue
	depth := func(title string, of func(row) int64, wide bool) column[row] {
		return column[row]{title: title, right: true, wide: wide, text: func(q row) string {
			if of(q) == 0 {
				return "-"
			}
			return estimate(of(q), q.Estimated)
		}}
	}
	return []column[row]{
		{title: "QUEUE", text: func(q row) string { return q.Name }},
		{title: "KIND", text: func(q row) string { return q.Kind }},
		{title: "STATE", text: standing},
		{title: "APPLICATION", wide: true, text: func(q row) string { return q.Application }},
		depth("INITIAL", func(q row) int64 { return q.Initial }, false),
		depth("PENDING", func(q row) int64 { return q.Pending }, false),
		depth("COMPUTING", func(q row) int64 { return q.Computing }, false),
		depth("AWAITING", func(q row) int64 { return q.AwaitingCompute }, true),
		depth("DISABLED", func(q row) int64 { return q.Disabled }, true),
		depth("FAILED", func(q row) int64 { return q.Failed }, false),
		{title: "HEAD AGE", right: true, text: func(q row) string { return cmp.Or(ageOrNone(q.HeadAgeSeconds), "-") }},
		{title: "NODES", right: true, text: func(q row) string { return number(q.Serving) }},
		{title: "CAPACITY", right: true, wide: true, text: func(q row) string { return optional(q.Capacity) }},
		{title: "MAX", right: true, wide: true, text: func(q row) string { return optional(q.MaxConcurrent) }},
		{title: "AS OF", wide: true, text: asOf},
		{title: "PAUSED BY", wide: true, text: func(q row) string { return q.PausedBy + after(": ", q.PausedReason) }},
	}
}

func queueList(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "list [QUEUE...]", Short: "State of each queue",
		Long: "State of each queue. ~ marks estimates, beyond 10,000 entries of a kind. HEAD AGE is the waiting\n" +
			"time of the entry that a node would claim first; entries of locked keys and paused queues do not count.",
		ValidArgsFunction: anywhere(a.completeQueues()),
	}
	return listing(a, c, queueColumns(), func(ctx context.Context, api conn, args []string) ([]operator.Queue, error) {
		queues, err := listQueues(ctx, api, args...)
		for _, name := range args {
			if err == nil && !slices.ContainsFunc(queues, func(q operator.Queue) bool { return q.Name == name }) {
				err = fmt.Errorf("list queue %q: %w", name, invalidation.ErrQueueNotFound)
			}
		}
		return queues, err
	})
}

func queueShow(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "show QUEUE", Short: "One queue in detail: state, settings, lanes",
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeQueues(),
	}
	return showing(a, c, func(ctx context.Context, api conn, args []string) (operator.QueueDetail, error) {
		return findQueue(ctx, api, args[0])
	}, a.writeQueue)
}

func queueHistory(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "history QUEUE", Short: "Samples of the state of a queue, oldest first", Args: cobra.ExactArgs(1),
		ValidArgsFunction: a.completeQueues(),
		Long: "Samples of the state of a queue, taken by the elected leader: about every five seconds for the last\n" +
			"hour, and one a minute before that, for 30 days.",
	}
	var over time.Duration
	c.Flags().DurationVar(&over, "over", 5*time.Minute, "how far back")
	rate := func(perSecond *float64) string {
		if perSecond == nil {
			return "-"
		}
		return fmt.Sprintf("%.1f", *perSecond)
	}
	type row = operator.Sample
	count := func(title string, of func(row) int64) column[row] {
		return column[row]{
			title: title, right: true,
			text: func(s row) string { return estimate(of(s), s.Estimated) },
		}
	}
	most := samplesMax
	return paging(a, c, &most, []column[row]{
		{title: "AT", text: func(s row) string { return stamp(&s.At) }},
		count("INITIAL", func(s row) int64 { return s.Initial }),
		count("PENDING", func(s row) int64 { return s.Pending }),
		count("COMPUTING", func(s row) int64 { return s.Computing }),
		count("FAILED", func(s row) int64 { return s.Failed }),
		{title: "IN/S", right: true, text: func(s row) string { return rate(s.InPerSecond) }},
		{title: "OUT/S", right: true, text: func(s row) string { return rate(s.OutPerSecond) }},
		{title: "HEAD AGE", right: true, text: func(s row) string { return cmp.Or(ageOrNone(s.HeadAgeSeconds), "-") }},
		{title: "NODES", right: true, text: func(s row) string { return number(s.Serving) }},
		{title: "BLOCKED", text: func(s row) string {
			if s.Blocked == nil {
				return ""
			}
			return *s.Blocked
		}},
	}, func(ctx context.Context, api conn, args []string) ([]row, error) {
		found, err := samples(ctx, api, args[0], over)
		if err == nil && len(found) == 0 && a.tabular() {
			fmt.Fprintf(a.err, "no samples yet of the last %s: the elected leader takes one every five seconds, and "+
				"for more than an hour back one a minute\n", over)
		}
		return found, err
	}, func(row) string { return fmt.Sprintf("these are the newest %d", samplesMax) })
}

func (a *app) writeQueue(w io.Writer, q operator.QueueDetail) {
	pause := ""
	if q.Paused {
		pause = q.PausedBy + after(": ", q.PausedReason) + after(", until ", stamp(q.PausedUntil))
	}
	n := func(v int64) string { return estimate(v, q.Estimated) }
	a.facts(w, "queue", q.Name, "state", standing(q.Queue), "paused by", pause, "initial", n(q.Initial),
		"pending", n(q.Pending), "computing", n(q.Computing), "awaiting compute", n(q.AwaitingCompute),
		"disabled", n(q.Disabled), "failed", n(q.Failed), "head of line", ageOrNone(q.HeadAgeSeconds),
		"nodes", fmt.Sprint(q.Serving))
	a.indented(w, "settings", q.Settings)
	a.indented(w, "limits", q.Limits)
	if len(q.Lanes) > 0 {
		fmt.Fprintf(w, "\n%s\n%s", a.paint(bold, "lanes"), a.table(columns2text(laneColumns(), q.Lanes, false)))
	}
	if len(q.Off) > 0 {
		fmt.Fprintf(w, "\n%s\n%s", a.paint(bold, "disabled entries"), a.table(columns2text([]column[operator.Off]{
			{title: "SCOPE", text: func(o operator.Off) string { return o.Scope }},
			{title: "VALUE", text: func(o operator.Off) string { return o.Value }},
			{title: "BY", text: func(o operator.Off) string { return o.Actor + after(": ", o.Reason) }},
		}, q.Off, false)))
	}
}

func laneColumns() []column[operator.Lane] {
	type row = operator.Lane
	return []column[row]{
		{title: "QUEUE", text: func(l row) string { return l.Queue }},
		{title: "PRIORITY", right: true, text: func(l row) string {
			if l.Throttled {
				return "throttled"
			}
			return fmt.Sprint(l.Priority)
		}},
		{title: "FLOW", text: func(l row) string { return cmp.Or(l.Flow, "-") }},
		{title: "KEYS", right: true, text: func(l row) string {
			if l.Keys >= 1000 {
				return "1000+"
			}
			return fmt.Sprint(l.Keys)
		}},
		{title: "HEAD AGE", right: true, text: func(l row) string { return cmp.Or(ageOrNone(l.HeadAgeSeconds), "-") }},
	}
}

// settings are the options of create and alter, for completion; the database knows what each takes.
var settings = []string{
	"algorithm", "application", "capacity", "capacity_per_flow", "capacity_per_slot", "crash_limit",
	"entry_priority", "failure_retention", "finish_within", "grouping", "kind",
	"lapse", "max_concurrent", "max_concurrent_per_name", "max_concurrent_per_node", "max_weight",
	"merge", "mergeable", "model", "needs",
	"no_instance_timeout", "on_failure", "on_no_instance",
	"payload_limit", "priority",
	"quantum_count", "quantum_time", "result_retention", "retry", "run_timeout", "shards", "start_within",
}

// listQueues returns queues that are named one by one as they are now, and all of them as the leader sampled them.
func listQueues(ctx context.Context, api conn, names ...string) ([]operator.Queue, error) {
	if len(names) == 0 {
		return everything[operator.Queue](ctx, api, "/v1/queues")
	}
	var found []operator.Queue
	for _, name := range slices.Compact(slices.Sorted(slices.Values(names))) {
		switch q, err := findQueue(ctx, api, name); {
		case err == nil:
			found = append(found, q.Queue)
		case !errors.Is(err, invalidation.ErrQueueNotFound):
			return nil, err
		}
	}
	return found, nil
}

func findQueue(ctx context.Context, api conn, name string) (operator.QueueDetail, error) {
	return get[operator.QueueDetail](ctx, api, at("/v1/queues/%v", name))
}

// queueThere checks that there is a queue, if it has a name.
func queueThere(api conn, name string) func(context.Context) error {
	return func(ctx context.Context) error {
		if name == "" {
			return nil
		}
		_, err := findQueue(ctx, api, name)
		return err
	}
}

// samples asks for whole minutes, the unit of the API.
func samples(ctx context.Context, api conn, queue string, over time.Duration) ([]operator.Sample, error) {
	minutes := int((over + time.Minute - 1) / time.Minute)
	path := at("/v1/queues/%v/samples", queue) + query("minutes", minutes)
	return unpaged[operator.Sample](ctx, api, path, samplesMax)
}

func queueCreate(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "create QUEUE", Short: "Create a queue with its table", Args: cobra.ExactArgs(1),
		Example: "  penstock queue create thumbnails --kind task --set max_concurrent=4 --set " +
			"'result_retention=2 days' --reason 'new feature'",
	}
	var kind string
	var set []string
	c.Flags().StringVar(&kind, "kind", "", "task (default), batch, cron, change_log, inference, webhook")
	settingFlag(c, &set, settings)
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		options, err := readSettings(set)
		if err != nil {
			return change{}, err
		}
		if kind != "" {
			options["kind"] = kind
		}
		return simple("create queue "+args[0], described(options), false,
			func(ctx context.Context, by invalidation.By) error {
				return api.post(ctx, "/v1/queues", body(by, "name", args[0], "settings", options))
			})
	})
}

func queueAlter(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "alter QUEUE", Short: "Change settings of a queue", Args: cobra.ExactArgs(1),
		ValidArgsFunction: a.completeQueues(),
		Example: "  penstock queue alter thumbnails --set capacity=100000 --unset max_concurrent --reason " +
			"'black friday'",
	}
	var set, unset []string
	settingFlag(c, &set, settings)
	c.Flags().StringArrayVar(&unset, "unset", nil, "setting to take away; several times")
	must(c.RegisterFlagCompletionFunc("unset", cobra.FixedCompletions(settings, cobra.ShellCompDirectiveNoFileComp)))
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		options, err := readSettings(set)
		if err != nil {
			return change{}, err
		}
		for _, name := range unset {
			options[name] = nil
		}
		if len(options) == 0 {
			return change{}, usagef("nothing to change: give --set name=value or --unset name")
		}
		if _, err := findQueue(ctx, api, args[0]); err != nil {
			return change{}, err
		}
		return simple("alter queue "+args[0], described(options), false,
			func(ctx context.Context, by invalidation.By) error {
				return api.overwrite(ctx, "PATCH", at("/v1/queues/%v", args[0]), body(by, "settings", options))
			})
	})
}

func queueDrop(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "drop QUEUE", Short: "Remove a queue; with --force also its entries",
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeQueues(),
	}
	var force bool
	c.Flags().BoolVar(&force, "force", false, "even if it has entries: they are lost")
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		q, err := findQueue(ctx, api, args[0])
		if err != nil {
			return change{}, err
		}
		detail := fmt.Sprintf("entries: %s, failures: %d", estimate(q.Initial+q.Pending+q.Disabled, q.Estimated),
			q.Failed)
		return simple("drop queue "+q.Name, detail, true, func(ctx context.Context, by invalidation.By) error {
			return api.remove(ctx, at("/v1/queues/%v", q.Name), by, "force", force)
		})
	})
}

func queueVerb(a *app, v operator.Verb, c *cobra.Command) *cobra.Command {
	c.ValidArgsFunction = a.completeQueues()
	return doing(a, c, v, false, func(ctx context.Context, api conn, arg string) (any, string, error) {
		q, err := findQueue(ctx, api, arg)
		return q.Name, fmt.Sprintf("waiting: %s, computing: %d", estimate(q.AwaitingCompute, q.Estimated),
			q.Computing), err
	})
}
