package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
)

const templatePath = "/v1/scale/templates/%v"

// templateSettings are the settings of a template of deployments.
var templateSettings = []string{"backend", "target", "policy", "template", "cost", "fill_order", "idle_seconds"}

func scaleTemplate(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "template MODEL",
		Short: "Set the template from which the first request of a model creates a deployment, or --clear it",
		Long: "Set what the first request of a model makes a deployment from, while the model has none. What is\n" +
			"not given takes its default. A deployment that was made from it follows: where its template changed,\n" +
			"its instances are replaced one by one. It goes when it has no instance and its last request is older\n" +
			"than idle_seconds.",
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeModels(),
		Example: "  penstock scale template llama --set backend=local \\\n" +
			"    --set 'target={\"command\": \"llama\"}' --reason new",
	}
	var set []string
	var remove bool
	settingFlag(c, &set, templateSettings)
	c.Flags().BoolVar(&remove, "clear", false, "make no more deployments of the model on demand")
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		options, err := readSettings(set)
		if err != nil {
			return change{}, err
		}
		if remove == (len(options) > 0) {
			return change{}, usagef("give --set name=value, or --clear")
		}
		if remove {
			does := "remove the template of model " + args[0]
			return simple(does, "", false, func(ctx context.Context, by invalidation.By) error {
				return api.remove(ctx, at(templatePath, args[0]), by)
			})
		}
		does := "set the template of model " + args[0]
		return simple(does, described(options), false, func(ctx context.Context, by invalidation.By) error {
			return api.put(ctx, at(templatePath, args[0]), body(by, "settings", options), nil)
		})
	})
}
