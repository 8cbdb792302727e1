package main

import (
	"fmt"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/webhook"
	"github.com/penstock/penstock/pkg/worker"
)

// Webhook is the section for receivers of callbacks.
type Webhook struct {
	Key string `koanf:"key" help:"what seals the secrets of receivers, as tasknode.webhook.key: env:NAME or file:/path; without it they cannot be registered here"`
}

// open returns the keeper of receivers for the API. Without a key it disables them, and no more.
func (w Webhook) open(db postgres.DB, policy webhook.AddressPolicy) (webhook.Keeper, error) {
	vault := webhook.Vault{Read: worker.SecretStore{}.Read}
	k := webhook.Keeper{DB: db, Policy: policy, Open: func() (webhook.Vault, error) {
		if vault.Key == "" {
			return vault, fmt.Errorf("this leader has no key for secrets of receivers: set leader.webhook.key, or "+
				"use penstock webhook with --database-url and --key: %w", invalidation.ErrState)
		}
		return vault, nil
	}}
	if w.Key == "" {
		return k, nil
	}
	key, err := worker.ReadSecret(w.Key)
	if err == nil {
		vault = webhook.NewVault(key, vault.Read)
		err = vault.Check()
	}
	if err != nil {
		return k, fmt.Errorf("leader.webhook.key: %w", err)
	}
	return k, nil
}
