package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/operator"
)

func auditCommand(a *app) *cobra.Command {
	return noun("audit", "Changes with their actors and reasons", auditList(a))
}

func auditList(a *app) *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "Changes with their actors and reasons, newest first", Args: cobra.NoArgs}
	var f operator.AuditFilter
	var since time.Duration
	flags := c.Flags()
	flags.StringVar(&f.Actor, "by", "", "by this actor")
	flags.StringVar(&f.Verb, "verb", "", "this verb, such as pause_queue")
	flags.StringVar(&f.Object, "object", "", "to this object: a queue, 'entry 17', 'node 4711'")
	flags.DurationVar(&since, "since", 0, "not longer ago than this")
	flags.Int64Var(&f.Before, "before", 0, "ids below this one: the last of the page before")
	limitFlag(flags, &f.Limit, operator.PageDefault, "at most so many")
	return paging(a, c, &f.Limit, []column[operator.Audit]{
		{title: "ID", right: true, text: func(r operator.Audit) string { return fmt.Sprint(r.ID) }},
		{title: "AT", text: func(r operator.Audit) string { return stamp(&r.At) }},
		{title: "ACTOR", text: func(r operator.Audit) string { return r.Actor }},
		{title: "VERB", text: func(r operator.Audit) string { return r.Verb }},
		{title: "OBJECT", text: func(r operator.Audit) string { return r.Object }},
		{title: "REASON", text: func(r operator.Audit) string { return short(r.Reason, 60) }},
		{title: "DETAIL", wide: true, text: func(r operator.Audit) string { return string(r.Detail) }},
	}, func(ctx context.Context, api conn, _ []string) ([]operator.Audit, error) {
		return list[operator.Audit](ctx, api, "/v1/audit", f.Limit, f.Before,
			"actor", f.Actor, "verb", f.Verb, "object", f.Object, "since", a.ago(since))
	}, func(last operator.Audit) string { return fmt.Sprintf("--before %d", last.ID) })
}
