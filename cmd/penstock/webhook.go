package main

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/pkg/webhook"
	"github.com/penstock/penstock/pkg/worker"
)

// Secrets of receivers are sealed with the key of the installation: the leader's with --server, else that of --key.
func webhookCommand(a *app) *cobra.Command {
	return noun("webhook", "Webhooks: receivers of callbacks and their secrets",
		webhookList(a), webhookRegister(a), webhookSecret(a), webhookKey(a), webhookRotate(a), webhookDisable(a))
}

func webhookList(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "list", Short: "Receivers that were registered or disabled, without their secrets",
		Args: cobra.NoArgs,
	}
	var from string
	limit := operator.PageDefault
	c.Flags().StringVar(&from, "after", "", "addresses behind this one: the last of the page before")
	limitFlag(c.Flags(), &limit, limit, "at most so many")
	return paging(a, c, &limit, []column[operator.Receiver]{
		{title: "URL", text: func(r operator.Receiver) string { return cmp.Or(r.URL, "(all others)") }},
		{title: "STATE", text: func(r operator.Receiver) string {
			if r.DisabledAt != nil {
				return "disabled"
			}
			return "serving"
		}},
		{title: "SECRET", text: func(r operator.Receiver) string {
			if r.OwnSecret {
				return "own"
			}
			return "-"
		}},
		{title: "OLD UNTIL", text: func(r operator.Receiver) string { return cmp.Or(stamp(r.OldSecretUntil), "-") }},
		{title: "WHY", text: func(r operator.Receiver) string { return short(r.DisabledReason, 60) }},
	}, func(ctx context.Context, c conn, _ []string) ([]operator.Receiver, error) {
		return list[operator.Receiver](ctx, c, "/v1/webhooks", limit, from)
	}, func(last operator.Receiver) string { return behind(last.URL, pageHint(limit, operator.PageMax)) })
}

// keyFlag adds --key, and returns what gives the handler in this process its vault. With --server the leader has the
// key.
func (a *app) keyFlag(c *cobra.Command) func() error {
	var key string
	c.Flags().StringVar(&key, "key", "", "what seals secrets, as tasknode.webhook.key: env:NAME or file:/path "+
		"(PENSTOCK_TASKNODE_WEBHOOK_KEY); with --server the leader's own (leader.webhook.key)")
	return func() error {
		if a.server != "" {
			if key != "" {
				return usagef("--key goes with --database-url: with --server the key is the leader's own " +
					"(leader.webhook.key)")
			}
			return nil
		}
		ref := cmp.Or(key, a.env("PENSTOCK_TASKNODE_WEBHOOK_KEY"))
		if ref == "" {
			return usagef("give --key as the task nodes have it: env:NAME or file:/path")
		}
		var err error
		a.keeper.Vault, err = webhook.OpenVault("--key", ref, worker.ReadSecret, worker.SecretStore{}.Read)
		if err != nil {
			return usageError{err}
		}
		return nil
	}
}

func webhookRegister(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "register URL", Short: "Give a receiver a secret of its own, or enable it again, and print its secret",
		Args: cobra.ExactArgs(1),
		Example: "  penstock webhook register https://acme.example/hooks --key file:/etc/penstock/webhook.key " +
			"--reason 'their contract'",
	}
	open := a.keyFlag(c)
	var internal bool
	c.Flags().BoolVar(&internal, "internal", false,
		"although it is in a private network; task nodes go by tasknode.webhook.allow_hosts and allow_networks. "+
			"With --server the leader's settings of the same names decide")
	return changing(a, c, func(_ context.Context, server conn, args []string) (change, error) {
		if err := a.checkReceiver(args[0], internal); err != nil {
			return change{}, err
		}
		return a.sealing(server, "register webhook "+args[0], "/v1/webhooks", open, "url", args[0])
	})
}

// checkReceiver checks an address before anything is changed. With --server the leader does.
func (a *app) checkReceiver(address string, internal bool) error {
	if a.server != "" {
		if internal {
			return usagef("--internal goes with --database-url: with --server the leader goes by allow_hosts and " +
				"allow_networks")
		}
		return nil
	}
	if at, err := url.Parse(address); err == nil && internal {
		a.keeper.Policy.AllowHosts = []string{at.Hostname()}
	}
	if err := a.keeper.Policy.Check(address); err != nil {
		return usageError{err}
	}
	return nil
}

func webhookSecret(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "secret URL", Short: "Print the secret of a receiver, its own or the one derived for its scheme, host " +
			"and port",
		Args: cobra.ExactArgs(1),
	}
	open := a.keyFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		found, err := revealed[struct{ Secrets []string }](c, a, open, "/v1/webhooks/secrets"+query("url", args[0]))
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(c.OutOrStdout(), strings.Join(found.Secrets, "\n"))
		return err
	}
	return c
}

func webhookKey(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "key", Short: "Print the public key with which every receiver can verify signatures of version v1a",
		Args: cobra.NoArgs,
	}
	open := a.keyFlag(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		found, err := revealed[struct{ Keys []string }](c, a, open, "/v1/webhooks/keys")
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(c.OutOrStdout(), strings.Join(found.Keys, "\n"))
		return err
	}
	return c
}

// revealed reads what opens secrets.
func revealed[T any](c *cobra.Command, a *app, open func() error, path string) (found T, err error) {
	server, err := a.connect(c.Context())
	if err == nil {
		err = open()
	}
	if err != nil {
		return found, err
	}
	return get[T](c.Context(), server, path)
}

func webhookRotate(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "rotate [URL]", Short: "Print a new secret of a receiver; without URL renew the root secret, from " +
			"which those of all others and the key come. The old one signs, too, during --overlap",
		Args: cobra.MaximumNArgs(1),
	}
	open := a.keyFlag(c)
	var overlap time.Duration
	c.Flags().DurationVar(&overlap, "overlap", 24*time.Hour, "how long both sign")
	return changing(a, c, func(_ context.Context, server conn, args []string) (change, error) {
		if len(args) == 0 {
			c, err := a.sealing(server, "renew the root secret of webhooks", "/v1/webhooks/rotate", open,
				"overlap_seconds", overlap.Seconds())
			c.risky = true // all receivers without a secret of their own need new ones
			return c, err
		}
		if args[0] == "" {
			return change{}, usagef("the URL is empty: leave it out to renew the root secret")
		}
		return a.sealing(server, "rotate secret of webhook "+args[0], "/v1/webhooks/rotate", open, "url", args[0],
			"overlap_seconds", overlap.Seconds())
	})
}

// sealing plans a change that seals a secret and prints it, or the public key that comes from it.
func (a *app) sealing(server conn, does, path string, open func() error, fields ...any) (change, error) {
	return change{does: does, do: func(ctx context.Context, by invalidation.By) (string, error) {
		made, err := posted[secretMade](ctx, server, path, body(by, fields...))
		return cmp.Or(made.Secret, made.Key), err
	}}, open()
}

func webhookDisable(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "disable URL", Short: "Disable a receiver until it is registered again",
		Args: cobra.ExactArgs(1),
	}
	return changing(a, c, func(_ context.Context, server conn, args []string) (change, error) {
		return simple("disable webhook "+args[0], "", true, func(ctx context.Context, by invalidation.By) error {
			return server.post(ctx, "/v1/webhooks/disable", body(by, "url", args[0]))
		})
	})
}
