package main

import (
	"context"
	"fmt"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/api"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/webhook"
	"github.com/penstock/penstock/pkg/worker"
)

// Webhook is the section for receivers of callbacks.
type Webhook struct {
	Key string `koanf:"key" help:"what seals the secrets of receivers, as tasknode.webhook.key: env:NAME or file:/path; without it they cannot be registered here"`
}

// receivers keeps the receivers of callbacks for the API. Without a key it lists and disables them.
type receivers struct{ webhook.Keeper }

func (w Webhook) open(db postgres.DB, policy webhook.AddressPolicy) (receivers, error) {
	vault := webhook.Vault{Read: worker.SecretStore{}.Read}
	r := receivers{webhook.Keeper{DB: db, Policy: policy, Open: func() (webhook.Vault, error) {
		if vault.Key == "" {
			return vault, fmt.Errorf("this leader has no key for secrets of receivers: set leader.webhook.key, or "+
				"use penstock webhook with --database-url and --key: %w", invalidation.ErrState)
		}
		return vault, nil
	}}}
	if w.Key == "" {
		return r, nil
	}
	key, err := worker.ReadSecret(w.Key)
	if err == nil {
		vault = webhook.NewVault(key, vault.Read)
		err = vault.Check()
	}
	if err != nil {
		return r, fmt.Errorf("leader.webhook.key: %w", err)
	}
	return r, nil
}

// List implements api.Webhooks.
func (r receivers) List(ctx context.Context, after string, limit int) ([]api.Receiver, error) {
	found, err := webhook.List(ctx, r.DB, after, limit)
	rows := make([]api.Receiver, len(found))
	for i, row := range found {
		rows[i] = api.Receiver(row)
	}
	return rows, err
}
