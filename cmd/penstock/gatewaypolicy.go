package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// criticalities are those of online requests, the first served first.
var criticalities = []string{"critical", "default", "sheddable"}

func gatewayPolicies(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "policies", Short: "Shares of the slots of each model, and the settings of its pool",
		Args: cobra.NoArgs,
		Long: "How the slots of each model are divided between online calls and entries, and the settings of its\n" +
			"pool. ONLINE and DURABLE are the slots that are kept for each; both may use the others.",
	}
	count := func(of func(operator.PoolShare) int32) func(operator.PoolShare) string {
		return func(p operator.PoolShare) string { return fmt.Sprint(of(p)) }
	}
	return listing(a, c, []column[operator.PoolShare]{
		{title: "MODEL", text: func(p operator.PoolShare) string { return p.Model }},
		{title: "SLOTS", right: true, text: count(func(p operator.PoolShare) int32 { return p.Slots })},
		{title: "ONLINE", right: true, text: count(func(p operator.PoolShare) int32 { return p.Reserved })},
		{title: "DURABLE", right: true, text: count(func(p operator.PoolShare) int32 { return p.BatchReserved })},
		{title: "SETTINGS", text: func(p operator.PoolShare) string { return cmp.Or(string(p.Policy), "defaults") }},
	}, allOf[operator.PoolShare]("/v1/gateway/pools"))
}

func gatewaySet(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:     "set MODEL [SETTINGS]",
		Short:   "Replace the settings of a model's pool, a JSON object; without it, the defaults",
		Args:    cobra.RangeArgs(1, 2),
		Example: `  penstock gateway set llama '{"total": 500, "queue_ttl": 20}' --reason 'fewer may wait'`,
	}
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		fields, does := []any{}, "set the pool of model "+args[0]+" to the defaults"
		if len(args) == 2 {
			var settings map[string]any
			if err := json.Unmarshal([]byte(args[1]), &settings); err != nil || settings == nil {
				return change{}, usagef("settings are %q: want a JSON object", args[1])
			}
			fields, does = []any{"settings", settings}, "set the pool of model "+args[0]
		}
		return simple(does, "", false, func(ctx context.Context, by invalidation.By) error {
			return api.put(ctx, at("/v1/gateway/pools/%v", args[0]), body(by, fields...), nil)
		})
	})
}

func flowCriticality(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:     "criticality FLOW CRITICALITY",
		Short:   "Set the criticality of a flow's online requests: critical, default or sheddable; none removes it",
		Args:    cobra.ExactArgs(2),
		Example: "  penstock flow criticality acme critical --reason 'a person waits for the answer'",
	}
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		criticality := args[1]
		if criticality != "none" && !slices.Contains(criticalities, criticality) {
			return change{}, usagef("criticality is %q: want critical, default, sheddable or none", criticality)
		}
		fields, does := []any{"flow", args[0]}, fmt.Sprintf("take the criticality of flow %q away", args[0])
		if criticality != "none" {
			fields = append(fields, "criticality", criticality)
			does = fmt.Sprintf("give flow %q the criticality %s", args[0], criticality)
		}
		return simple(does, "", false, func(ctx context.Context, by invalidation.By) error {
			return api.post(ctx, "/v1/gateway/flows", body(by, fields...))
		})
	})
}
