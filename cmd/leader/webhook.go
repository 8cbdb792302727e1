package main

import (
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/webhook"
	"github.com/penstock/penstock/pkg/worker"
)

// Webhook is the section for receivers of callbacks.
type Webhook struct {
	Key string `koanf:"key" help:"what seals the secrets of receivers, as tasknode.webhook.key: env:NAME or file:/path; without it they cannot be registered here"`
}

// open returns the keeper of receivers for the API. Without a key it disables them, and no more.
func (w Webhook) open(db postgres.DB, policy webhook.AddressPolicy) (webhook.Keeper, error) {
	vault, err := webhook.OpenVault("leader.webhook.key", w.Key, worker.ReadSecret, worker.SecretStore{}.Read)
	return webhook.Keeper{DB: db, Policy: policy, Vault: vault}, err
}
