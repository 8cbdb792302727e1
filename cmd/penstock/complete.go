package main

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/operator"
)

func (a *app) completeQueues() cobra.CompletionFunc {
	return complete(a, "/v1/queues", func(q operator.Queue) string { return q.Name })
}

func (a *app) completeNodes() cobra.CompletionFunc {
	return complete(a, "/v1/nodes", func(n operator.Node) string { return n.Name })
}

func (a *app) completeModels() cobra.CompletionFunc {
	return complete(a, "/v1/models", func(m operator.Model) string { return m.Name })
}

func (a *app) completeCron() cobra.CompletionFunc {
	return complete(a, "/v1/cron", func(j operator.CronJob) string { return j.Name })
}

func (a *app) completeDeployments() cobra.CompletionFunc {
	return complete(a, "/v1/scale/deployments", func(d operator.Deployment) string { return d.Name })
}

func (a *app) completeTokens() cobra.CompletionFunc {
	return complete(a, "/v1/tokens", func(t operator.APIToken) string {
		if !t.Live {
			return ""
		}
		return t.Name
	})
}

// complete offers for the first argument the names of rows of a route that begin with what was typed: of the first page
// of the largest size. Global flags were not checked yet, since nothing runs.
func complete[T any](a *app, path string, name func(T) string) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		if a.check() != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		ctx, cancel := context.WithTimeout(c.Context(), a.completionMax)
		defer cancel()
		api, err := a.connect(ctx)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		found, err := list[T](ctx, api, path, pageMax, "")
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		var names []cobra.Completion
		for _, row := range found {
			if name := name(row); name != "" && strings.HasPrefix(name, typed) {
				names = append(names, name)
			}
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

// anywhere offers what complete offers for the first argument for each, or for a flag.
func anywhere(first cobra.CompletionFunc) cobra.CompletionFunc {
	return func(c *cobra.Command, _ []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return first(c, nil, typed)
	}
}

// completeNoFiles makes the commands below c offer no files where they say nothing else: arguments are names.
func completeNoFiles(c *cobra.Command) {
	for _, verb := range c.Commands() {
		completeNoFiles(verb)
	}
	if !c.HasSubCommands() && c.ValidArgsFunction == nil {
		c.ValidArgsFunction = cobra.NoFileCompletions
	}
}
