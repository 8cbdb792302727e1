package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func pauseCommand(a *app) *cobra.Command {
	return noun("pause", "Pauses of flows, names, lock keys, models, applications and nodes; those of queues are "+
		"listed too",
		pauseList(a), pauseSet(a), pauseEnd(a))
}

func pauseList(a *app) *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "Pauses in force, oldest first", Args: cobra.NoArgs}
	return listing(a, c, []column[operator.Pause]{
		{title: "SCOPE", text: func(p operator.Pause) string { return p.Scope }},
		{title: "VALUE", text: func(p operator.Pause) string { return cmp.Or(short(p.Value, 60), `""`) }},
		{title: "QUEUE", text: func(p operator.Pause) string { return cmp.Or(p.Queue, "-") }},
		{title: "FOR", right: true, text: func(p operator.Pause) string { return a.since(p.Since) }},
		{title: "UNTIL", text: func(p operator.Pause) string { return cmp.Or(stamp(p.Until), "-") }},
		{title: "BY", text: func(p operator.Pause) string { return short(p.Actor+after(": ", p.Reason), 80) }},
	}, allOf[operator.Pause]("/v1/pauses"))
}

// checkScope refuses what is no scope, and names the commands for queues, which a person would try here.
func checkScope(scope operator.Scope) error {
	switch {
	case slices.Contains(operator.Scopes(), string(scope)):
		return nil
	case scope == "queue":
		return usagef("a queue is paused by penstock queue pause, and its pause ended by penstock queue resume")
	default:
		return usagef("SCOPE is %q: want %s", scope, strings.Join(operator.Scopes(), ", "))
	}
}

// subject makes c take a scope, a value and --queue.
func (a *app) subject(c *cobra.Command) func(args []string) operator.Subject {
	var queue string
	a.queueFlag(c, &queue, "of a name or lock key, or of a flow in one queue only")
	c.Args = cobra.ExactArgs(2)
	c.ValidArgsFunction = cobra.FixedCompletions(operator.Scopes(), cobra.ShellCompDirectiveNoFileComp)
	return func(args []string) operator.Subject {
		return operator.Subject{Scope: operator.Scope(args[0]), Value: args[1], Queue: queue}
	}
}

func pauseSet(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "set SCOPE VALUE", Short: "Stop claims of a flow, name, lock key, model, application or node; what " +
			"runs goes on",
		Long: "Stop claims of a flow, name, lock_key, model, application or node, for ever or --until; what runs " +
			"goes on. To pause\n" +
			"again replaces actor, reason and end, and says which pause that was. A whole queue is paused with\n" +
			"penstock queue pause.",
		Example: "  penstock pause set flow acme --until 1h --reason 'over their quota'\n  penstock pause set name " +
			"newsletter --queue mails --reason 'wrong text'",
	}
	read := a.subject(c)
	var until string
	c.Flags().StringVar(&until, "until", "", "a time, or a duration from now, at which the pause ends by itself")
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		end, err := moment("until", until)
		if err != nil {
			return change{}, err
		}
		s := read(args)
		if err := checkScope(s.Scope); err != nil {
			return change{}, err
		}
		return change{
			does: "pause " + s.String(), detail: inWords(end), check: queueThere(api, s.Queue),
			do: func(ctx context.Context, by invalidation.By) (string, error) {
				in := body(by, "scope", s.Scope, "value", s.Value, "until", end)
				return api.pause(ctx, "/v1/pauses"+query("queue", s.Queue), in)
			},
		}, nil
	})
}

func pauseEnd(a *app) *cobra.Command {
	c := &cobra.Command{Use: "end SCOPE VALUE", Short: "End a pause"}
	read := a.subject(c)
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		s := read(args)
		if err := checkScope(s.Scope); err != nil {
			return change{}, err
		}
		is := func(p operator.Pause) bool {
			return p.Scope == string(s.Scope) && p.Value == s.Value && p.Queue == s.Queue
		}
		check := func(ctx context.Context) error {
			return among(ctx, api, "/v1/pauses", "pause of "+s.String(), is)
		}
		return checked(check, "resume "+s.String(), "", false, func(ctx context.Context, by invalidation.By) error {
			return api.remove(ctx, "/v1/pauses", by, "queue", s.Queue, "scope", s.Scope, "value", s.Value)
		})
	})
}

func applicationCommand(a *app) *cobra.Command {
	return noun("application", "Applications: nodes, locks and quotas", applicationList(a), applicationQuota(a))
}

func applicationList(a *app) *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "Applications by name", Args: cobra.NoArgs}
	type row = operator.Application
	return listing(a, c, []column[row]{
		{title: "APPLICATION", text: func(x row) string { return x.Name }},
		{title: "STATE", text: func(x row) string {
			switch {
			case x.Paused:
				return "paused"
			case x.Nodes == 0:
				return "no node"
			}
			return "serving"
		}},
		{title: "QUEUES", right: true, text: func(x row) string { return fmt.Sprint(x.Queues) }},
		{title: "NODES", right: true, text: func(x row) string { return number(x.Nodes) }},
		{title: "THREADS", right: true, text: func(x row) string { return number(x.Threads) }},
		{title: "LOCKS", right: true, text: func(x row) string { return number(x.Locks) }},
		{title: "QUOTA", right: true, text: func(x row) string { return cmp.Or(optional(x.QuotaUnits), "-") }},
		{title: "PER SECOND", right: true, text: func(x row) string { return cmp.Or(optional(x.QuotaRate), "-") }},
		{title: "OLDEST LOCK", right: true, text: func(x row) string {
			return cmp.Or(ageOrNone(x.OldestSeconds), "-")
		}},
	}, allOf[operator.Application]("/v1/applications"))
}

func applicationQuota(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "quota APPLICATION", Short: "Bound what an application uses over all its queues, those to come as " +
			"well; --clear removes the bound",
		Args: cobra.ExactArgs(1),
	}
	var units int
	var l operator.Quota
	var remove bool
	flags := c.Flags()
	flags.IntVar(&units, "max-units", 0, "locks at once")
	flags.Float64Var(&l.Rate, "rate", 0, "locks a second")
	flags.Float64Var(&l.Burst, "burst", 0, "locks that may be saved up")
	flags.BoolVar(&remove, "clear", false, "remove the bound")
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		quota, does := &l, fmt.Sprintf("set quota of application %s", args[0])
		if flags.Changed("max-units") {
			l.MaxUnits = &units
		}
		if given := l.MaxUnits != nil || l.Rate != 0; given == remove {
			return change{}, usagef("give --max-units or --rate, or --clear")
		}
		if remove {
			quota, does = nil, fmt.Sprintf("remove quota of application %s", args[0])
		}
		return simple(does, "", false, func(ctx context.Context, by invalidation.By) error {
			path := at("/v1/applications/%v/quota", args[0])
			if quota == nil {
				return api.overwrite(ctx, "DELETE", path+query("reason", by.Reason), nil)
			}
			in := body(by, "max_units", quota.MaxUnits, "rate", quota.Rate, "burst", quota.Burst)
			return api.put(ctx, path, in, nil)
		})
	})
}
