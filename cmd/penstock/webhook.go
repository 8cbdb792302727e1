package main

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/pkg/webhook"
	"github.com/penstock/penstock/pkg/worker"
)

// The commands about receivers need the key of the installation, which no leader has: they work on the database alone.
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
	c.Flags().IntVar(&limit, "limit", limit, "at most so many")
	return paging(a, c, &limit, []column[webhook.Registered]{
		{title: "URL", text: func(r webhook.Registered) string { return before(r.URL, "(all others)") }},
		{title: "STATE", text: func(r webhook.Registered) string {
			if r.Disabled != nil {
				return "disabled"
			}
			return "serving"
		}},
		{title: "SECRET", text: func(r webhook.Registered) string {
			if r.Own {
				return "own"
			}
			return "-"
		}},
		{title: "OLD UNTIL", text: func(r webhook.Registered) string { return before(stamp(r.OldUntil), "-") }},
		{title: "WHY", text: func(r webhook.Registered) string { return short(r.Reason, 60) }},
	}, func(ctx context.Context, _ conn, _ []string) ([]webhook.Registered, error) {
		db, err := a.database(ctx)
		if err != nil {
			return nil, err
		}
		return webhook.List(ctx, db, from, limit)
	}, func(last webhook.Registered) string { return "--after " + last.URL })
}

// keyFlag adds --key, and returns what opens the vault.
func (a *app) keyFlag(c *cobra.Command) func() (webhook.Vault, error) {
	var key string
	c.Flags().StringVar(&key, "key", "", "what seals secrets, as tasknode.webhook.key: env:NAME or file:/path "+
		"(PENSTOCK_TASKNODE_WEBHOOK_KEY)")
	return func() (webhook.Vault, error) {
		v := webhook.Vault{Read: worker.SecretStore{}.Read}
		ref := cmp.Or(key, a.env("PENSTOCK_TASKNODE_WEBHOOK_KEY"))
		if ref == "" {
			return v, usagef("give --key as the task nodes have it: env:NAME or file:/path")
		}
		var err error
		if v.Key, err = worker.ReadSecret(ref); err == nil {
			err = v.Check()
		}
		if err != nil {
			return v, usagef("--key: %w", err)
		}
		return v, nil
	}
}

func webhookRegister(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "register URL", Short: "Give a receiver a secret of its own, or enable it again, and print its secret",
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		Example: "  penstock webhook register https://acme.example/hooks --key file:/etc/penstock/webhook.key " +
			"--reason 'their contract'",
	}
	vault := a.keyFlag(c)
	var internal bool
	c.Flags().BoolVar(&internal, "internal", false,
		"although it is in a private network; task nodes go by tasknode.webhook.allow_hosts and allow_networks")
	return changing(a, c, func(ctx context.Context, _ conn, args []string) (change, error) {
		var policy webhook.AddressPolicy
		if at, err := url.Parse(args[0]); err == nil && internal {
			policy.AllowHosts = []string{at.Hostname()}
		}
		if _, err := policy.CheckURL(args[0]); err != nil {
			return change{}, usageError{err}
		}
		return a.sealing(ctx, "register webhook "+args[0], vault,
			func(ctx context.Context, v webhook.Vault, by invalidation.By) (webhook.Secret, error) {
				return webhook.Register(ctx, a.pool, v, policy, args[0], by)
			})
	})
}

func webhookSecret(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "secret URL", Short: "Print the secret of a receiver, its own or the one derived for its scheme, host " +
			"and port",
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
	}
	vault := a.keyFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		return a.revealing(c, vault, func(ctx context.Context, db postgres.DB, v webhook.Vault) ([]string, error) {
			secrets, err := webhook.SecretsOf(ctx, db, v, args[0])
			var texts []string
			for _, s := range secrets {
				texts = append(texts, s.Reveal())
			}
			return texts, err
		})
	}
	return c
}

func webhookKey(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "key", Short: "Print the public key with which every receiver can verify signatures of version v1a",
		Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
	}
	vault := a.keyFlag(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.revealing(c, vault, func(ctx context.Context, db postgres.DB, v webhook.Vault) ([]string, error) {
			keys, err := webhook.PublicKeys(ctx, db, v)
			var texts []string
			for _, k := range keys {
				texts = append(texts, k.String())
			}
			return texts, err
		})
	}
	return c
}

// revealing prints what read returns, a line each, the newest first.
func (a *app) revealing(c *cobra.Command, vault func() (webhook.Vault, error),
	read func(context.Context, postgres.DB, webhook.Vault) ([]string, error),
) error {
	v, err := vault()
	if err != nil {
		return err
	}
	db, err := a.database(c.Context())
	if err != nil {
		return err
	}
	lines, err := read(c.Context(), db, v)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(c.OutOrStdout(), strings.Join(lines, "\n"))
	return err
}

func webhookRotate(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "rotate [URL]", Short: "Print a new secret of a receiver; without URL renew the root secret, from " +
			"which those of all others and the key come. The old one signs, too, during --overlap",
		Args: cobra.MaximumNArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
	}
	vault := a.keyFlag(c)
	var overlap time.Duration
	c.Flags().DurationVar(&overlap, "overlap", 24*time.Hour, "how long both sign")
	return changing(a, c, func(ctx context.Context, _ conn, args []string) (change, error) {
		if len(args) > 0 {
			return a.sealing(ctx, "rotate secret of webhook "+args[0], vault,
				func(ctx context.Context, v webhook.Vault, by invalidation.By) (webhook.Secret, error) {
					return webhook.Rotate(ctx, a.pool, v, args[0], overlap, by)
				})
		}
		v, err := vault()
		if err == nil {
			_, err = a.database(ctx)
		}
		return change{
			does: "renew the root secret of webhooks",
			do: func(ctx context.Context, by invalidation.By) (string, error) {
				if _, err := webhook.Rotate(ctx, a.pool, v, "", overlap, by); err != nil {
					return "", err
				}
				keys, err := webhook.PublicKeys(ctx, a.pool, v)
				if err != nil {
					return "", err
				}
				return keys[0].String(), nil
			},
		}, err
	})
}

// sealing plans a change that seals a secret and prints it.
func (a *app) sealing(ctx context.Context, does string, vault func() (webhook.Vault, error),
	do func(context.Context, webhook.Vault, invalidation.By) (webhook.Secret, error),
) (change, error) {
	v, err := vault()
	if err == nil {
		_, err = a.database(ctx)
	}
	return change{does: does, do: func(ctx context.Context, by invalidation.By) (string, error) {
		secret, err := do(ctx, v, by)
		if err != nil {
			return "", err
		}
		return secret.Reveal(), nil
	}}, err
}

func webhookDisable(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "disable URL", Short: "Send a receiver nothing more until it is registered again",
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
	}
	return changing(a, c, func(ctx context.Context, _ conn, args []string) (change, error) {
		db, err := a.database(ctx)
		if err != nil {
			return change{}, err
		}
		return simple("disable webhook "+args[0], "", true, func(ctx context.Context, by invalidation.By) error {
			return webhook.DisableEndpoint(ctx, db, args[0], by)
		})
	})
}
