package main

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func flowCommand(a *app) *cobra.Command {
	return noun("flow", "Flows: use of slots and weights", flowList(a), flowUsage(a), flowWeight(a),
		flowCriticality(a))
}

func flowList(a *app) *cobra.Command {
	var queue string
	c := &cobra.Command{
		Use: "list", Short: "Use of slots by flow, largest first", Args: cobra.NoArgs,
		Long: "Use of slots by flow, largest first. SLOTS are the slots that a flow had over the last " +
			"minutes, the latest\n" +
			"counting most; SHARE is its part of what its application used. Fair queues go by them, divided by WEIGHT.",
	}
	a.queueFlag(c, &queue, "of one queue")
	type row = operator.Usage
	return listing(a, c, []column[row]{
		{title: "QUEUE", text: func(u row) string { return u.Queue }},
		{title: "FLOW", text: func(u row) string { return cmp.Or(short(u.Flow, 60), "-") }},
		{title: "APPLICATION", wide: true, text: func(u row) string { return u.Application }},
		{title: "SLOTS", right: true, text: func(u row) string { return fmt.Sprintf("%.2f", u.Slots) }},
		{title: "SHARE", right: true, text: func(u row) string { return fmt.Sprintf("%.1f %%", 100*u.Share) }},
		{title: "WEIGHT", right: true, text: func(u row) string { return fmt.Sprint(u.Weight) }},
		{title: "LOCKS", right: true, text: func(u row) string { return number(u.Locks) }},
		{title: "ENTRIES", right: true, wide: true, text: func(u row) string { return number(u.Entries) }},
		{title: "COST", right: true, wide: true, text: func(u row) string { return fmt.Sprint(u.Cost) }},
	}, func(ctx context.Context, api conn, _ []string) ([]operator.Usage, error) {
		found, err := everything[operator.Usage](ctx, api, "/v1/usage", "queue", queue)
		slices.SortStableFunc(found, func(x, y operator.Usage) int { return cmp.Compare(y.Slots, x.Slots) })
		return found, err
	})
}

func flowWeight(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "weight FLOW WEIGHT", Short: "Give a flow a larger or smaller share than the 1 that others have; 0 " +
			"takes the weight away",
		Args: cobra.ExactArgs(2),
		Example: "  penstock flow weight acme 4 --reason 'gold plan'\n  penstock flow weight acme 0.5 --queue " +
			"thumbnails --reason 'in bulk at night'",
	}
	var queue string
	a.queueFlag(c, &queue, "in one queue only; it goes before a weight in all queues")
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		weight, err := strconv.ParseFloat(args[1], 64)
		if err != nil || math.IsNaN(weight) || weight < 0 || weight > 1000 {
			return change{}, usagef("weight is %q: want a number from 0.001 to 1000, or 0", args[1])
		}
		does := fmt.Sprintf("give flow %q weight %v", args[0], weight)
		if weight == 0 {
			does = fmt.Sprintf("take the weight of flow %q away", args[0])
		}
		if queue != "" {
			does += " in queue " + queue
		}
		set := func(ctx context.Context, by invalidation.By) error {
			return api.post(ctx, "/v1/flows/weight"+query("queue", queue),
				body(by, "flow", args[0], "weight", weight))
		}
		return checked(queueThere(api, queue), does, "", false, set)
	})
}

func flowUsage(a *app) *cobra.Command {
	var queue, application, model, flow, from, to string
	var limit int
	c := &cobra.Command{
		Use: "usage", Short: "Calls, GPU time and tokens by hour, queue, model and flow", Args: cobra.NoArgs,
		Long: `Calls, GPU time and tokens by hour, queue, model and flow, oldest hour first. GPU is the time in which
slots were busy, times the GPUs of their instances; WASTED is the part of runs whose answer was not kept.
The time of a call is in the hour in which it ended. A queue that was dropped is shown as # and its id, with the
application that it had. Hours are kept for 13 months. All rows of the period are printed, unless a --limit is given.`,
		Example: "  penstock flow usage --flow acme --from 2026-11-01 --to 2026-12-01 -o json",
	}
	a.queueFlag(c, &queue, "of this queue")
	c.Flags().StringVar(&application, "application", "", "of this application")
	c.Flags().StringVar(&model, "model", "", "of this model")
	c.Flags().StringVar(&flow, "flow", "", "of this flow")
	c.Flags().StringVar(&from, "from", "24h", "the first hour: a time, or a duration before now")
	c.Flags().StringVar(&to, "to", "", "the hour behind the last one")
	limitFlag(c.Flags(), &limit, 0, "at most so many; all without it")
	return paging(a, c, &limit, []column[operator.UsageHour]{
		{title: "HOUR", text: func(u operator.UsageHour) string { return u.Hour.UTC().Format("2006-01-02 15:04Z") }},
		{title: "QUEUE", text: func(u operator.UsageHour) string { return u.Queue }},
		{title: "MODEL", text: func(u operator.UsageHour) string { return u.Model }},
		{title: "FLOW", text: func(u operator.UsageHour) string { return cmp.Or(short(u.Flow, 40), "-") }},
		{title: "CALLS", right: true, text: func(u operator.UsageHour) string { return number(u.Calls) }},
		{title: "GPU", right: true, text: func(u operator.UsageHour) string { return busy(u.GPUMS) }},
		{title: "WASTED", right: true, text: func(u operator.UsageHour) string { return busy(u.WastedMS) }},
		{title: "TOKENS IN", right: true, text: func(u operator.UsageHour) string { return number(u.TokensIn) }},
		{title: "CACHED", right: true, text: func(u operator.UsageHour) string { return number(u.TokensCached) }},
		{title: "TOKENS OUT", right: true, text: func(u operator.UsageHour) string { return number(u.TokensOut) }},
		{title: "APPLICATION", wide: true, text: func(u operator.UsageHour) string { return u.Application }},
	}, func(ctx context.Context, api conn, _ []string) ([]operator.UsageHour, error) {
		first, err := a.hour("from", from)
		if err != nil {
			return nil, err
		}
		behind, err := a.hour("to", to)
		if err != nil {
			return nil, err
		}
		return listUpTo[operator.UsageHour](ctx, api, "/v1/usage/hours", cmp.Or(limit, math.MaxInt), "", "queue", queue,
			"application", application, "model", model, "flow", flow, "from", first, "to", behind)
	}, func(operator.UsageHour) string { return "leave out --limit" })
}

// busy writes milliseconds as a duration to a tenth of a second.
func busy(ms int64) string {
	return (time.Duration(ms) * time.Millisecond).Round(100 * time.Millisecond).String()
}
