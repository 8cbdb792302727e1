package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

const deploymentPath = "/v1/scale/deployments/%v"

// desiredOf is the number of instances of a deployment: its share of the decision, or the decision where nothing of
// ours divides it.
func desiredOf(d operator.Deployment) string {
	switch {
	case d.Orders != nil:
		return strconv.Itoa(d.Orders.Desired)
	case d.State != nil && d.Decides:
		return strconv.Itoa(d.State.Desired)
	}
	return "-"
}

// existing is how many instances of a deployment there are: those that its backend reported, or more of them that are
// registered.
func existing(d operator.Deployment) int {
	if d.Orders == nil || d.Orders.Existing == nil {
		return d.Instances
	}
	return max(d.Instances, *d.Orders.Existing)
}

// orderError is the last error of a backend, nothing where there is none.
func orderError(o *operator.ScaleOrders) string {
	if o == nil || o.Error == nil {
		return ""
	}
	return *o.Error
}

func scaleStatus(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "status", Short: "Deployments with their instances, errors of their backends, and reasons",
		Args: cobra.NoArgs,
	}
	type row = operator.Deployment
	type state = operator.ScaleState
	of := func(value func(state) string) func(row) string { // of the model: once
		return func(d row) string {
			if d.State == nil || !d.Decides {
				return "-"
			}
			return value(*d.State)
		}
	}
	ordered := func(d row) string {
		if d.Orders == nil {
			return "-"
		}
		return strconv.Itoa(d.Orders.Ordered)
	}
	return listing(a, c, []column[row]{
		{title: "DEPLOYMENT", text: func(d row) string { return d.Name }},
		{title: "MODEL", text: func(d row) string { return d.Model }},
		{title: "MODE", text: func(d row) string { return d.Mode }},
		{title: "BACKEND", wide: true, text: func(d row) string { return d.Backend }},
		{title: "REQUESTS", right: true, text: of(func(s state) string { return fmt.Sprint(s.Metric) })},
		{title: "DESIRED", right: true, text: desiredOf},
		{title: "READY", right: true, text: func(d row) string { return strconv.Itoa(d.Ready) }},
		{title: "DRAINING", right: true, wide: true, text: func(d row) string { return strconv.Itoa(d.Draining) }},
		{title: "ORDERED", right: true, wide: true, text: ordered},
		{title: "EXIST", right: true, text: func(d row) string { return strconv.Itoa(existing(d)) }},
		{title: "BASE", right: true, wide: true, text: of(func(s state) string { return strconv.Itoa(s.Base) })},
		{title: "OVERRIDE", right: true, text: func(d row) string { return cmp.Or(optional(d.Override), "-") }},
		{title: "DECIDED", right: true, text: of(func(s state) string { return a.since(s.DecidedAt) })},
		{title: "ERROR", text: func(d row) string { return cmp.Or(short(orderError(d.Orders), 60), "-") }},
		{title: "WHY", text: func(d row) string {
			if d.State == nil {
				return "not decided yet"
			}
			return short(d.State.Why, 80)
		}},
	}, allOf[operator.Deployment]("/v1/scale/deployments"))
}

func scaleExplain(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "explain DEPLOYMENT", Short: "Why the model of a deployment has its number of instances, step by step",
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeDeployments(),
	}
	read := func(ctx context.Context, api conn, args []string) (operator.DeploymentDetail, error) {
		return get[operator.DeploymentDetail](ctx, api, at(deploymentPath, args[0]))
	}
	return showing(a, c, read, func(w io.Writer, d operator.DeploymentDetail) {
		a.facts(w, "deployment", d.Name, "model", d.Model, "backend", d.Backend, "mode", d.Mode,
			"override", optional(d.Override)+after(" until ", stamp(d.OverrideUntil))+after(" by ", d.OverrideBy))
		fmt.Fprintln(w)
		a.facts(w, append([]string{
			"instances", fmt.Sprintf("%s desired, %d exist, %d ready, %d drain", desiredOf(d.Deployment),
				existing(d.Deployment), d.Ready, d.Draining),
		}, orderFacts(d.Orders)...)...)
		if !d.Decides {
			fmt.Fprintln(w, "\nThe model's number is decided by the policy of another deployment, filled first.\n"+
				"Mode, override, min, max and caps of this one bind its share.")
		}
		if s := d.State; s != nil {
			fmt.Fprintln(w, "\nmodel")
			a.facts(w, "decided", stamp(&s.DecidedAt), "requests", fmt.Sprintf("%g run or may start", s.Metric),
				"ready", strconv.Itoa(s.Ready), "base", fmt.Sprintf("%d would have sufficed all along", s.Base),
				"raw", fmt.Sprintf("%d with the backlog", s.Raw),
				"stabilised", fmt.Sprintf("%d after the hold", s.Stabilised),
				"desired", fmt.Sprintf("%d after rates and bounds", s.Desired), "why", s.Why)
		} else {
			fmt.Fprintln(w, "\nThere is no decision yet: the elected leader makes one a second.")
		}
		if l := d.LastChange; l != nil {
			fmt.Fprintln(w)
			a.facts(w, "last change", stamp(&l.At), "why", l.Why)
		}
		a.indented(w, "policy", d.Policy)
	})
}

// orderFacts are the last order to the backend of a deployment, and its answer.
func orderFacts(o *operator.ScaleOrders) []string {
	if o == nil {
		return nil
	}
	order := fmt.Sprintf("%d at %s, not accepted yet", o.Ordered, stamp(o.OrderedAt))
	switch {
	case o.Order == 0:
		order = ""
	case o.Applied == o.Order:
		order = fmt.Sprintf("%d, accepted at %s", o.Ordered, stamp(o.AppliedAt))
	}
	failures := ""
	if o.Failures > 0 {
		failures = fmt.Sprintf("%d in a row", o.Failures) + after(", tried again at ", stamp(o.RetryAt))
	}
	return []string{
		"ordered", order, "reported", optional(o.Existing) + after(" at ", stamp(o.SeenAt)), "failures", failures,
		"error", orderError(o),
	}
}

func scaleHistory(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "history MODEL", Short: "Decisions that changed the number of instances of a model, newest first",
		Args: cobra.ExactArgs(1),
	}
	var limit int
	var earlier string
	limitFlag(c.Flags(), &limit, operator.PageDefault, "at most so many")
	c.Flags().StringVar(&earlier, "before", "", "older than this time: the last of the page before")
	type decision = operator.ScaleDecision
	number := func(of func(decision) int32) func(decision) string {
		return func(d decision) string { return fmt.Sprint(of(d)) }
	}
	return paging(a, c, &limit, []column[operator.ScaleDecision]{
		{title: "AT", text: func(d operator.ScaleDecision) string { return stamp(&d.At) }},
		{title: "DESIRED", right: true, text: number(func(d decision) int32 { return d.Desired })},
		{title: "READY", right: true, text: number(func(d decision) int32 { return d.Ready })},
		{title: "BASE", right: true, wide: true, text: number(func(d decision) int32 { return d.Base })},
		{title: "RAW", right: true, wide: true, text: number(func(d decision) int32 { return d.Raw })},
		{title: "STABILISED", right: true, wide: true, text: number(func(d decision) int32 { return d.Stabilised })},
		{title: "WHY", text: func(d operator.ScaleDecision) string { return short(d.Why, 200) }},
	}, func(ctx context.Context, api conn, args []string) ([]operator.ScaleDecision, error) {
		var behind operator.ScaleDecisionKey
		if earlier != "" {
			moment, err := time.Parse(time.RFC3339Nano, earlier)
			if err != nil {
				return nil, usagef("--before is %q: want a time like 2006-01-02T15:04:05Z", earlier)
			}
			behind = operator.ScaleDecisionKey{At: moment, Model: args[0]}
		}
		return list[operator.ScaleDecision](ctx, api, "/v1/scale/decisions", limit, behind, "model", args[0])
	}, func(last operator.ScaleDecision) string { return "--before " + last.At.UTC().Format(time.RFC3339Nano) })
}

// deploymentSettings are the settings of a deployment.
var deploymentSettings = []string{"backend", "target", "policy", "template", "cost", "fill_order", "mode"}

func scaleSet(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "set DEPLOYMENT", Short: "Create a deployment of a model, or change the given settings",
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeDeployments(),
		Example: "  penstock scale set llama --model llama --set 'policy={\"slots\": 4}' --reason new\n" +
			"  penstock scale set llama-own --set mode=up-only --reason launch",
	}
	var model string
	var set []string
	c.Flags().StringVar(&model, "model", "", "its model; needed for a new deployment")
	settingFlag(c, &set, deploymentSettings)
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		options, err := readSettings(set)
		if err != nil {
			return change{}, err
		}
		if model == "" && len(options) == 0 {
			return change{}, usagef("nothing to set: give --model or --set name=value")
		}
		return setDeployment(ctx, api, args[0], model, options)
	})
}

// setDeployment plans a change of a deployment; without a model it keeps the one that it has.
func setDeployment(ctx context.Context, api conn, name, model string, options map[string]any) (change, error) {
	if model == "" {
		found, err := get[operator.DeploymentDetail](ctx, api, at(deploymentPath, name))
		if err != nil {
			return change{}, err
		}
		model = found.Model
	}
	does := "set deployment " + name
	return simple(does, described(options), false, func(ctx context.Context, by invalidation.By) error {
		return api.put(ctx, at(deploymentPath, name), body(by, "model", model, "settings", options), nil)
	})
}

func scaleOverride(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "override DEPLOYMENT [INSTANCES]", Short: "Set the number of instances until a time, or --clear it",
		Args: cobra.RangeArgs(1, 2), ValidArgsFunction: a.completeDeployments(),
		Example: "  penstock scale override llama-own 8 --until 2h --reason launch",
	}
	var until string
	var remove bool
	c.Flags().StringVar(&until, "until", "", "a time, or a duration from now, at which the override ends")
	c.Flags().BoolVar(&remove, "clear", false, "end the override")
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		const path = "/v1/scale/override"
		if remove {
			if len(args) > 1 || until != "" {
				return change{}, usagef("--clear takes no number and no --until")
			}
			does := "end the override of deployment " + args[0]
			return simple(does, "", false, func(ctx context.Context, by invalidation.By) error {
				return api.remove(ctx, path, by, "deployment", args[0])
			})
		}
		if len(args) < 2 || until == "" {
			return change{}, usagef("give a number of instances and --until, or --clear")
		}
		instances, err := strconv.Atoi(args[1])
		if err != nil || instances < 0 {
			return change{}, usagef("%q is not a number of instances", args[1])
		}
		end, err := moment("until", until)
		if err != nil {
			return change{}, err
		}
		does := fmt.Sprintf("override deployment %s with %d instances", args[0], instances)
		return simple(does, inWords(end), false, func(ctx context.Context, by invalidation.By) error {
			in := body(by, "deployment", args[0], "instances", instances, "until", end)
			return api.put(ctx, path, in, nil)
		})
	})
}

func scaleDisable(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "disable [DEPLOYMENT]", Short: "Stop scaling of a deployment, or with --all everywhere",
		Long: "Set the mode of a deployment to disabled, or stop scaling everywhere with --all. Instances stay\n" +
			"as they are. Scaling goes on after penstock scale set DEPLOYMENT --set mode=full, or\n" +
			"penstock scale disable --all --end.",
		Args: cobra.MaximumNArgs(1), ValidArgsFunction: a.completeDeployments(),
	}
	var all, end bool
	c.Flags().BoolVar(&all, "all", false, "everywhere")
	c.Flags().BoolVar(&end, "end", false, "with --all: go on everywhere")
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		if all == (len(args) == 1) || end && !all {
			return change{}, usagef("give a deployment, or --all; --end goes with --all")
		}
		if !all {
			return setDeployment(ctx, api, args[0], "", map[string]any{"mode": "disabled"})
		}
		does, settings := "stop scaling everywhere", map[string]any{"scale.off": true}
		if end {
			does, settings = "go on with scaling everywhere", map[string]any{"scale.off": nil}
		}
		return simple(does, "", !end, func(ctx context.Context, by invalidation.By) error {
			return api.put(ctx, "/v1/scale/settings", body(by, "settings", settings), nil)
		})
	})
}
