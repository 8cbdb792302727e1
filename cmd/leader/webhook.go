package main

import (
	"context"
	"errors"
	"fmt"
	"time"

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
type receivers struct {
	db     postgres.DB
	vault  webhook.Vault
	policy webhook.AddressPolicy
}

func (w Webhook) open(db postgres.DB, policy webhook.AddressPolicy) (receivers, error) {
	r := receivers{db: db, policy: policy, vault: webhook.Vault{Read: worker.SecretStore{}.Read}}
	if w.Key == "" {
		return r, nil
	}
	key, err := worker.ReadSecret(w.Key)
	if err == nil {
		r.vault = webhook.NewVault(key, r.vault.Read)
		err = r.vault.Check()
	}
	if err != nil {
		return r, fmt.Errorf("leader.webhook.key: %w", err)
	}
	return r, nil
}

// sealing returns an error where secrets cannot be sealed.
func (r receivers) sealing() error {
	if r.vault.Key == "" {
		return fmt.Errorf("this leader has no key for secrets of receivers: set leader.webhook.key, or use penstock "+
			"webhook with --key: %w", invalidation.ErrState)
	}
	return nil
}

// Register implements api.Webhooks.
func (r receivers) Register(ctx context.Context, url string, by invalidation.By) (string, error) {
	if err := r.sealing(); err != nil {
		return "", err
	}
	secret, err := webhook.Register(ctx, r.db, r.vault, r.policy, url, by)
	if errors.Is(err, webhook.ErrForbiddenAddress) {
		err = fmt.Errorf("url: %w: %w", err, invalidation.ErrInvalid)
	}
	return revealed(secret, err)
}

// Rotate implements api.Webhooks.
func (r receivers) Rotate(ctx context.Context, url string, overlap time.Duration, by invalidation.By) (string, error) {
	if err := r.sealing(); err != nil {
		return "", err
	}
	return revealed(webhook.Rotate(ctx, r.db, r.vault, url, overlap, by))
}

func revealed(secret webhook.Secret, err error) (string, error) {
	if err != nil {
		return "", err
	}
	return secret.Reveal(), nil
}

// Disable implements api.Webhooks.
func (r receivers) Disable(ctx context.Context, url string, by invalidation.By) error {
	return webhook.DisableEndpoint(ctx, r.db, url, by)
}

// List implements api.Webhooks.
func (r receivers) List(ctx context.Context, after string, limit int) ([]api.Receiver, error) {
	found, err := webhook.List(ctx, r.db, after, limit)
	rows := make([]api.Receiver, len(found))
	for i, row := range found {
		rows[i] = api.Receiver(row)
	}
	return rows, err
}

// Keys implements api.Webhooks.
func (r receivers) Keys(ctx context.Context) ([]string, error) {
	if err := r.sealing(); err != nil {
		return nil, err
	}
	keys, err := webhook.PublicKeys(ctx, r.db, r.vault)
	texts := make([]string, len(keys))
	for i, k := range keys {
		texts[i] = k.String()
	}
	return texts, err
}
