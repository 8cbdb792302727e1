package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/pkg/worker"
)

func modelCommand(a *app) *cobra.Command {
	return noun("model", "Models: the protocol and settings of their workers", modelList(a), modelRegister(a),
		modelOverride(a),
		modelRemove(a))
}

func modelList(a *app) *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "Models by name", Args: cobra.NoArgs}
	type row = operator.Model
	return listing(a, c, []column[row]{
		{title: "MODEL", text: func(m row) string { return m.Name }},
		{title: "PROTOCOL", text: func(m row) string { return m.Protocol }},
		{title: "QUEUE", text: func(m row) string { return m.Queue }},
		{title: "USABLE", right: true, text: func(m row) string { return fmt.Sprintf("%d/%d", m.Usable, m.Instances) }},
		{title: "SLOTS HELD", right: true, text: func(m row) string { return fmt.Sprintf("%d/%d", m.Held, m.Slots) }},
		{title: "OVERRIDE", text: func(m row) string { return cmp.Or(short(string(m.Override), 60), "-") }},
		{title: "CONFIG", wide: true, text: func(m row) string { return string(m.Config) }},
	}, allOf[operator.Model]("/v1/models"))
}

func modelRegister(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "register MODEL CONFIG", Short: "Make a model known, or replace its config (JSON, @FILE or -); an " +
			"override stays",
		Args:    cobra.ExactArgs(2),
		Example: `  penstock model register llama '{"protocol": "openai"}' --reason 'first model'`,
	}
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		config, err := a.object("config", args[1])
		if err != nil {
			return change{}, err
		}
		known, err := findModel(ctx, api, args[0])
		if err != nil {
			return change{}, err
		}
		if _, err := worker.ReadModel(args[0], config, nil); err != nil {
			return change{}, usagef("%w", err)
		}
		if _, err := worker.ReadModel(args[0], config, known.Override); err != nil {
			return change{}, usagef("the override of the model, which stays, does not go with this config: %w", err)
		}
		return change{
			does: "register model " + args[0],
			do: func(ctx context.Context, by invalidation.By) (string, error) {
				var made struct {
					Queue string `json:"queue"`
				}
				err := api.put(ctx, at("/v1/models/%v", args[0]), body(by, "config", json.RawMessage(config)), &made)
				return "its queue is " + made.Queue, err
			},
		}, nil
	})
}

func modelOverride(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "override MODEL FIELDS", Short: "Lay fields over a model's config for all nodes at once; --clear takes " +
			"them away",
		Args: cobra.RangeArgs(1, 2), ValidArgsFunction: a.completeModels(),
	}
	var remove bool
	c.Flags().BoolVar(&remove, "clear", false, "take the override away")
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		var fields []byte
		var err error
		switch {
		case remove == (len(args) == 2):
			return change{}, usagef("give fields (JSON, @FILE or -), or --clear")
		case !remove:
			if fields, err = a.override(ctx, api, args[0], args[1]); err != nil {
				return change{}, err
			}
		}
		return simple("override model "+args[0], "", false, func(ctx context.Context, by invalidation.By) error {
			path := at("/v1/models/%v/override", args[0])
			if remove {
				return api.overwrite(ctx, "DELETE", path+query("reason", by.Reason), nil)
			}
			return api.overwrite(ctx, "PUT", path, body(by, "override", json.RawMessage(fields)))
		})
	})
}

// override reads fields that are laid over a model's config, and checks what comes out.
func (a *app) override(ctx context.Context, api conn, name, arg string) ([]byte, error) {
	fields, err := a.object("override", arg)
	if err != nil {
		return nil, err
	}
	known, err := findModel(ctx, api, name)
	if err != nil {
		return nil, err
	}
	if _, err := worker.ReadModel(name, known.Config, fields); known.Name != "" && err != nil {
		return nil, usagef("%w", err)
	}
	return fields, nil // of a model that is not there the schema says so
}

// findModel returns a model, the zero value if it is not known.
func findModel(ctx context.Context, api conn, name string) (operator.Model, error) {
	models, err := everything[operator.Model](ctx, api, "/v1/models")
	for _, m := range models {
		if m.Name == name {
			return m, err
		}
	}
	return operator.Model{}, err
}

func modelRemove(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "remove MODEL", Short: "Remove a model that has no instances; its queue stays",
		ValidArgsFunction: a.completeModels(),
	}
	return doing(a, c, operator.RemoveModel, true,
		func(ctx context.Context, api conn, arg string) (any, string, error) {
			is := func(m operator.Model) bool { return m.Name == arg }
			return arg, "", among(ctx, api, "/v1/models", "model "+arg, is)
		})
}

func instanceCommand(a *app) *cobra.Command {
	return noun("instance", "Instances: endpoints of models and their slots",
		instanceList(a), instanceRegister(a), instanceDrain(a), instanceRemove(a))
}

func (a *app) instanceColumns() []column[operator.Instance] {
	type row = operator.Instance
	return []column[row]{
		{title: "MODEL", text: func(i row) string { return i.Model }},
		{title: "SERVER", text: func(i row) string { return i.Server }},
		{title: "STATE", text: func(i row) string {
			if i.Draining {
				return "draining"
			}
			return i.State
		}},
		{title: "SLOTS HELD", right: true, text: func(i row) string { return fmt.Sprintf("%d/%d", i.Held, i.Slots) }},
		{title: "ACTIVE", right: true, text: func(i row) string { return cmp.Or(optional(i.Active), "-") }},
		{title: "QUEUED", right: true, wide: true, text: func(i row) string { return optional(i.Queued) }},
		{title: "DOUBTFUL", right: true, wide: true, text: func(i row) string { return number(i.Doubtful) }},
		{title: "CHECKED", right: true, text: func(i row) string {
			if i.CheckedAt == nil {
				return "-"
			}
			return a.since(*i.CheckedAt)
		}},
		{title: "ENDPOINT", text: func(i row) string { return i.Endpoint }},
		{title: "REASON", text: func(i row) string { return short(i.Reason, 60) }},
		{title: "QUARANTINED", wide: true, text: func(i row) string { return stamp(i.QuarantinedUntil) }},
		{title: "LABELS", wide: true, text: func(i row) string { return string(i.Labels) }},
	}
}

func instanceList(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "list [MODEL]", Short: "Instances of a model, or of all", Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeModels(),
	}
	return listing(a, c, a.instanceColumns(),
		func(ctx context.Context, api conn, args []string) ([]operator.Instance, error) {
			// one at most
			return everything[operator.Instance](ctx, api, "/v1/instances", "model", strings.Join(args, ""))
		})
}

func instanceRegister(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "register MODEL SERVER ENDPOINT",
		Short: "Register an instance or change it; a drain and a quarantine of it end", Args: cobra.ExactArgs(3),
		ValidArgsFunction: a.completeModels(),

		Long: `Register an instance or change it; a drain and a quarantine of it end. Slots and labels that are not
named stay as they are. An instance that announced itself stays for good from then on, instead of until its
announcement ends.`,
		Example: "  penstock instance register llama gpu-1 http://10.0.0.7:8000 --slots 8 --reason 'new card'",
	}
	var slots int32
	var labels string
	c.Flags().Int32Var(&slots, "slots", 0, "how many calls at once; of a new instance 1")
	c.Flags().StringVar(&labels, "labels", "", "JSON object")
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		registered, err := everything[operator.Instance](ctx, api, "/v1/instances", "model", args[0])
		if err != nil {
			return change{}, err
		}
		i := operator.Instance{Model: args[0], Server: args[1], Slots: 1}
		if n := slices.IndexFunc(registered, func(r operator.Instance) bool { return r.Server == args[1] }); n >= 0 {
			i = registered[n]
		}
		i.Endpoint = args[2]
		if c.Flags().Changed("slots") {
			i.Slots = slots
		}
		if labels != "" {
			text, err := a.object("--labels", labels)
			if err != nil {
				return change{}, err
			}
			i.Labels = text
		}
		does, detail := fmt.Sprintf("register instance %s of model %s", i.Server, i.Model),
			fmt.Sprintf("%s with %d slots", i.Endpoint, i.Slots)
		return simple(does, detail, false, func(ctx context.Context, by invalidation.By) error {
			return api.put(ctx, at("/v1/instances/%v/%v", i.Model, i.Server),
				body(by, "endpoint", i.Endpoint, "slots", i.Slots, "labels", i.Labels), nil)
		})
	})
}

func instanceDrain(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "drain MODEL SERVER",
		Short: "Drain an instance: it gets no new calls until it is registered again", Args: cobra.ExactArgs(2),
		ValidArgsFunction: a.completeModels(),
	}
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		does := fmt.Sprintf("drain instance %s of model %s", args[1], args[0])
		return checked(instanceThere(api, args[0], args[1]), does, "", false,
			func(ctx context.Context, by invalidation.By) error {
				return api.post(ctx, at("/v1/instances/%v/%v/drain", args[0], args[1]), body(by))
			})
	})
}

func instanceRemove(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "remove MODEL SERVER",
		Short: "Remove an instance; refused while its slots are held, unless forced", Args: cobra.ExactArgs(2),
		Long: "Remove an instance. It is refused while slots of it are held, unless forced. One of a deployment\n" +
			"drains until its backend has removed it.",
		ValidArgsFunction: a.completeModels(),
	}
	var force bool
	c.Flags().BoolVar(&force, "force", false, "even if slots are held: calls that still run there are counted nowhere")
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		does := fmt.Sprintf("remove instance %s of model %s", args[1], args[0])
		return checked(instanceThere(api, args[0], args[1]), does, "", true,
			func(ctx context.Context, by invalidation.By) error {
				return api.remove(ctx, at("/v1/instances/%v/%v", args[0], args[1]), by, "force", force)
			})
	})
}

// instanceThere checks that there is an instance.
func instanceThere(api conn, model, server string) func(context.Context) error {
	return func(ctx context.Context) error {
		is := func(i operator.Instance) bool { return i.Server == server }
		return among(ctx, api, "/v1/instances", "instance "+server+" of model "+model, is, "model", model)
	}
}
