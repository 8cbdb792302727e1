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

func slotCommand(a *app) *cobra.Command {
	return noun("slot", "Slots: the calls that an instance takes at once, and their holders",
		slotList(a), slotDead(a), slotFree(a), slotGroup(a))
}

func slotList(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "list [MODEL]", Short: "Slots that nodes hold, oldest lease first", Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeModels(),
	}
	var limit int
	var from int64
	c.Flags().Int64Var(&from, "after", 0, "tokens above this one: the last of the page before")
	limitFlag(c.Flags(), &limit, operator.PageDefault, "at most so many")
	return paging(a, c, &limit, []column[operator.Slot]{
		{title: "MODEL", text: func(s operator.Slot) string { return s.Model }},
		{title: "SERVER", text: func(s operator.Slot) string { return s.Server }},
		{title: "SLOT", right: true, text: func(s operator.Slot) string { return fmt.Sprint(s.Number) }},
		{title: "NODE ID", right: true, text: func(s operator.Slot) string { return fmt.Sprint(s.NodeID) }},
		{title: "HELD", right: true, text: func(s operator.Slot) string { return a.since(s.LeasedAt) }},
		{title: "IN DOUBT", text: func(s operator.Slot) string { return cmp.Or(short(s.Doubt, 60), "-") }},
		{title: "ENTRY", wide: true, right: true, text: func(s operator.Slot) string { return optional(s.EntryID) }},
		{title: "TOKEN", wide: true, right: true, text: func(s operator.Slot) string { return fmt.Sprint(s.Token) }},
	}, func(ctx context.Context, api conn, args []string) ([]operator.Slot, error) {
		return list[operator.Slot](ctx, api, "/v1/slots", limit, from, "model", strings.Join(args, ""))
	}, func(last operator.Slot) string { return fmt.Sprintf("--after %d", last.Token) })
}

func slotDead(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "dead [MODEL]", Short: "Slots that nodes hold whose lease has lapsed", Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeModels(),
		Long: "Slots that nodes hold whose lease has lapsed. A call of such a node may still run on the worker: its\n" +
			"slot is given to another node only when the worker no longer reports the call, or cannot run one any\n" +
			"longer. To free them at once: penstock slot free MODEL.",
	}
	return listing(a, c, []column[operator.DeadSlots]{
		{title: "MODEL", text: func(s operator.DeadSlots) string { return s.Model }},
		{title: "SERVER", text: func(s operator.DeadSlots) string { return s.Server }},
		{title: "NODE ID", right: true, text: func(s operator.DeadSlots) string { return fmt.Sprint(int64(s.NodeID)) }},
		{title: "SLOTS", right: true, text: func(s operator.DeadSlots) string { return fmt.Sprint(s.Slots) }},
		{title: "LAPSED", right: true, text: func(s operator.DeadSlots) string { return a.since(s.Since) }},
	}, func(ctx context.Context, api conn, args []string) ([]operator.DeadSlots, error) {
		return everything[operator.DeadSlots](ctx, api, "/v1/slots/dead", "model", strings.Join(args, ""))
	})
}

func slotFree(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "free MODEL", Short: "Free the slots of dead nodes at once", Args: cobra.ExactArgs(1),
		ValidArgsFunction: a.completeModels(),
		Long: `Free the slots of dead nodes at once. Use it when the worker's host is known to run no call of theirs:
where one still runs, the worker gets one call more than it has slots.`,
		Example: "  penstock slot free llama --server gpu-3 --reason 'the host was replaced'",
	}
	var server string
	c.Flags().StringVar(&server, "server", "", "of this instance only")
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		held, err := everything[operator.DeadSlots](ctx, api, "/v1/slots/dead", "model", args[0])
		if err != nil {
			return change{}, err
		}
		slots := 0
		for _, s := range held {
			if server == "" || s.Server == server {
				slots += s.Slots
			}
		}
		return change{
			does: "free the slots of dead nodes of model " + args[0], detail: fmt.Sprintf("%d are held", slots),
			risky: true,
			do: func(ctx context.Context, by invalidation.By) (string, error) {
				in := body(by, "server", server)
				done, err := posted[struct{ Freed int }](ctx, api, at("/v1/models/%v/slots/free", args[0]), in)
				return fmt.Sprintf("%d freed", done.Freed), err
			},
		}, nil
	})
}

func slotGroup(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "group NAME", Short: "Set the slots that the instances of a device group have together",
		Args: cobra.ExactArgs(1),
		Long: "Set the slots that the instances of a device group have together: those whose label device_group is\n" +
			"NAME, whatever their models. With --slots 0 they have as many as the largest of them.",
		Example: "  penstock slot group card-0 --slots 8 --reason 'two models on one card'",
	}
	var slots int
	c.Flags().IntVar(&slots, "slots", 0, "how many calls at once")
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		return simple(fmt.Sprintf("set the slots of device group %s to %d", args[0], slots), "", false,
			func(ctx context.Context, by invalidation.By) error {
				return api.put(ctx, at("/v1/device-groups/%v", args[0]), body(by, "slots", slots), nil)
			})
	})
}
