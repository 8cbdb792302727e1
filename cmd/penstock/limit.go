package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func limitCommand(a *app) *cobra.Command {
	return noun("limit", "Limits on locks at once and on locks a second", limitList(a), limitSet(a), limitUse(a))
}

func limitList(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "list", Short: "Limits with their use and their queues",
		Args: cobra.NoArgs,
	}
	type row = operator.Limit
	return listing(a, c, []column[row]{
		{title: "LIMIT", text: func(l row) string { return l.Name }},
		{title: "IN USE", right: true, text: func(l row) string { return number(l.InUse) }},
		{title: "MAX", right: true, text: func(l row) string { return cmp.Or(optional(l.MaxUnits), "-") }},
		{title: "PER SECOND", right: true, text: func(l row) string { return cmp.Or(optional(l.Rate), "-") }},
		{title: "BURST", right: true, text: func(l row) string { return cmp.Or(optional(l.Burst), "-") }},
		{title: "LEFT", right: true, wide: true, text: func(l row) string { return optional(l.Left) }},
		{title: "OF", text: func(l row) string {
			switch {
			case l.PerFlow:
				return "each flow"
			case l.PerKey:
				return "each lock key"
			}
			return "all flows"
		}},
		{title: "QUEUES", text: func(l row) string { return cmp.Or(short(strings.Join(l.Queues, ","), 60), "-") }},
	}, allOf[operator.Limit]("/v1/limits"))
}

func limitSet(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "set LIMIT", Short: "Create a limit, or change the given settings", Args: cobra.ExactArgs(1),
		Example: "  penstock limit set gpus --max-units 8 --reason 'two cards more'\n  penstock limit set " +
			"provider --rate 50 --burst 100 --per-flow --reason 'their quota'",
	}
	var units int
	var rate, burst float64
	var perFlow, perKey bool
	flags := c.Flags()
	flags.IntVar(&units, "max-units", 0, "units in use at once")
	flags.Float64Var(&rate, "rate", 0, "units a second")
	flags.Float64Var(&burst, "burst", 0, "units that may be saved up")
	flags.BoolVar(&perFlow, "per-flow", false, "each flow has the limit for itself")
	flags.BoolVar(&perKey, "per-key", false, "each lock key has the rate for itself")
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		options := map[string]any{}
		for flag, value := range map[string]any{
			"max-units": units, "rate": rate, "burst": burst, "per-flow": perFlow,
			"per-key": perKey,
		} {
			if flags.Changed(flag) {
				options[strings.ReplaceAll(flag, "-", "_")] = value
			}
		}
		if len(options) == 0 {
			return change{}, usagef("nothing to set: give --max-units, --rate, --burst, --per-flow or --per-key")
		}
		return simple("set limit "+args[0], described(options), false,
			func(ctx context.Context, by invalidation.By) error {
				return api.put(ctx, at("/v1/limits/%v", args[0]), body(by, "settings", options), nil)
			})
	})
}

func limitUse(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "use QUEUE LIMIT", Short: "Put a queue under a limit, or take it out with --units 0",
		Args: cobra.ExactArgs(2), ValidArgsFunction: a.completeQueues(),
	}
	var units int
	c.Flags().IntVar(&units, "units", 1, "units that each lock of the queue uses; 0: take the queue out")
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		if units < 0 {
			return change{}, usagef("--units is %d: want 0 or more", units)
		}
		does, detail := fmt.Sprintf("put queue %s under limit %s", args[0], args[1]),
			fmt.Sprintf("%d units a lock", units)
		if units == 0 {
			does, detail = fmt.Sprintf("take queue %s out of limit %s", args[0], args[1]), ""
		}
		check := func(ctx context.Context) error {
			if _, err := findQueue(ctx, api, args[0]); err != nil {
				return err
			}
			is := func(l operator.Limit) bool { return l.Name == args[1] }
			return among(ctx, api, "/v1/limits", "limit "+args[1], is)
		}
		return checked(check, does, detail, false, func(ctx context.Context, by invalidation.By) error {
			return api.put(ctx, at("/v1/queues/%v/limits/%v", args[0], args[1]), body(by, "units", units), nil)
		})
	})
}
