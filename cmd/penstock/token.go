package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func tokenCommand(a *app) *cobra.Command {
	return noun("token", "Tokens of the HTTP API and their rights", tokenList(a), tokenCreate(a), tokenRotate(a),
		tokenRevoke(a))
}

func tokenList(a *app) *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "Tokens by name, without their secrets", Args: cobra.NoArgs}
	type row = operator.APIToken
	return listing(a, c, []column[row]{
		{title: "TOKEN", text: func(t row) string { return t.Name }},
		{title: "STATE", text: tokenState},
		{title: "SCOPES", text: func(t row) string { return strings.Join(t.Scopes, ",") }},
		{title: "APPLICATIONS", text: func(t row) string { return cmp.Or(strings.Join(t.Applications, ","), "all") }},
		{title: "QUEUES", text: func(t row) string { return cmp.Or(short(strings.Join(t.Queues, ","), 40), "all") }},
		{title: "FLOWS", wide: true, text: func(t row) string {
			return cmp.Or(short(strings.Join(t.Flows, ","), 40), "all")
		}},
		{title: "PRIORITY MAX", wide: true, right: true, text: func(t row) string {
			if t.PriorityMax == nil {
				return "-"
			}
			return fmt.Sprint(*t.PriorityMax)
		}},
		{title: "RATE", wide: true, right: true, text: func(t row) string {
			if t.Rate == nil {
				return "-"
			}
			return fmt.Sprint(*t.Rate)
		}},
		{title: "USED", text: func(t row) string { return cmp.Or(stamp(t.UsedAt), "never") }},
		{title: "EXPIRES", text: func(t row) string { return cmp.Or(stamp(t.ExpiresAt), "never") }},
		{title: "CREATED BY", wide: true, text: func(t row) string { return t.CreatedBy }},
	}, allOf[operator.APIToken]("/v1/tokens"))
}

func tokenState(t operator.APIToken) string {
	switch {
	case t.RevokedAt != nil:
		return "revoked"
	case !t.Live:
		return "expired"
	}
	return "live"
}

func tokenCreate(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "create NAME", Short: "Create a token and print its secret, which cannot be read again",
		Args:    cobra.ExactArgs(1),
		Example: "  penstock token create ci --scope push,read --queue mails --expires 2160h --reason 'build server'",
	}
	var g operator.Grant
	var expires string
	var highest int16
	var rate float64
	var burst int32
	var gpuMS int64
	var gpuPeriod string
	f := c.Flags()
	f.StringSliceVar(&g.Scopes, "scope", nil,
		"push, read, operate (and read), admin (everything), call (models, at gateways), announce (instances)")
	f.StringSliceVar(&g.Applications, "application", nil, "limit it to these")
	f.StringSliceVar(&g.Queues, "queue", nil, "limit it to these")
	f.StringSliceVar(&g.Flows, "flow", nil, "limit its pushes to these flows; not with scopes operate and admin")
	f.Int16Var(&highest, "priority-max", 9,
		"limit the priority that its pushes may ask for, 0 to 9; not with scopes operate and admin")
	f.Float64Var(&rate, "rate", 0,
		"limit its pushes to so many entries a second at each leader and gateway; not with scopes operate and admin")
	f.Int32Var(&burst, "burst", 0, "with --rate: so many entries at once; by default those of a second")
	f.Int64Var(&gpuMS, "gpu-ms", 0, "refuse its pushes when the calls of its --flow have taken so many milliseconds "+
		"of GPU in a --gpu-period")
	f.StringVar(&gpuPeriod, "gpu-period", "hour", "of --gpu-ms: hour or day")
	f.StringVar(&expires, "expires", "", "a time, a duration from now, or never; by default the server's lifetime "+
		"of tokens, a year unless configured")
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		var err error
		if len(g.Scopes) == 0 {
			return change{}, usagef("a token needs --scope: push, read, operate, admin, call or announce")
		}
		never := expires == "never"
		var ends operator.Moment
		if !never {
			if ends, err = moment("expires", expires); err != nil {
				return change{}, err
			}
		}
		if c.Flags().Changed("priority-max") {
			g.PriorityMax = &highest
		}
		if c.Flags().Changed("rate") {
			g.Rate = &rate
		}
		if c.Flags().Changed("burst") {
			g.Burst = &burst
		}
		if c.Flags().Changed("gpu-ms") {
			g.GPUMS, g.GPUPeriod = &gpuMS, &gpuPeriod
		}
		g.Name = args[0]
		return change{
			does: "create token " + g.Name,
			do: func(ctx context.Context, by invalidation.By) (string, error) {
				in := body(by, "name", g.Name, "scopes", g.Scopes, "applications", g.Applications, "queues", g.Queues,
					"flows", g.Flows, "priority_max", g.PriorityMax, "rate", g.Rate, "burst", g.Burst,
					"gpu_ms", g.GPUMS, "gpu_period", g.GPUPeriod,
					"expires_at", ends, "never_expires", never)
				made, err := posted[secretMade](ctx, api, "/v1/tokens", in)
				return made.Secret, err
			},
		}, nil
	})
}

func tokenRotate(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "rotate NAME", Short: "Print a new secret; the old ones end after --overlap", Args: cobra.ExactArgs(1),
		ValidArgsFunction: a.completeTokens(),
	}
	var overlap time.Duration
	var expires string
	c.Flags().DurationVar(&overlap, "overlap", time.Hour, "how long the old secrets stay good")
	c.Flags().StringVar(&expires, "expires", "",
		"when the new one ends, or in how long; without it, it lasts as long as the one before was to")
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		ends, err := moment("expires", expires)
		if err != nil {
			return change{}, err
		}
		return change{
			does: "rotate token " + args[0], check: tokenThere(api, args[0]),
			do: func(ctx context.Context, by invalidation.By) (string, error) {
				in := body(by, "overlap_seconds", overlap.Seconds(), "expires_at", ends)
				made, err := posted[secretMade](ctx, api, at("/v1/tokens/%v/rotate", args[0]), in)
				return made.Secret, err
			},
		}, nil
	})
}

func tokenRevoke(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "revoke NAME", Short: "End every secret of a token, within seconds",
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeTokens(),
	}
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		revoke := func(ctx context.Context, by invalidation.By) error {
			return api.post(ctx, at("/v1/tokens/%v/revoke", args[0]), body(by))
		}
		return checked(tokenThere(api, args[0]), "revoke token "+args[0], "", true, revoke)
	})
}

// tokenThere checks that there is a token of a name.
func tokenThere(api conn, name string) func(context.Context) error {
	return func(ctx context.Context) error {
		is := func(t operator.APIToken) bool { return t.Name == name }
		return among(ctx, api, "/v1/tokens", "token "+name, is)
	}
}
