package main

import (
	"context"
	"fmt"

	"github.com/penstock/penstock/pkg/gateway/openaibatch"
	"github.com/penstock/penstock/pkg/gateway/prediction"
	"github.com/penstock/penstock/pkg/webhook"
	"github.com/penstock/penstock/pkg/worker"
)

// mount adds what clients of OpenAI and Replicate expect beside live requests. It needs the database.
func (s *server) mount() error {
	g := s.cfg.Gateway
	s.batches = openaibatch.New(openaibatch.Config{Log: s.log, Hint: s.hinter.Hint}, s.gateway, s.pool)
	s.batches.Mount()
	policy, err := g.Callback.policy()
	if err != nil {
		return err
	}
	c := prediction.Config{
		Base: g.PublicURL, BodyMax: g.BodyBytes, Hint: s.hinter.Hint, Log: s.log,
		CheckWebhook: func(address string) error {
			_, err := policy.CheckURL(address)
			return err
		},
	}
	if g.WebhookKey != "" {
		key, err := worker.ReadSecret(g.WebhookKey)
		if err != nil {
			return fmt.Errorf("gateway.webhook_key: %w", err)
		}
		vault := webhook.NewVault(key, worker.SecretStore{Dir: g.Secrets}.Read)
		c.Secret = func(ctx context.Context, owner string) (string, error) {
			secrets, err := webhook.ClientSecrets(ctx, s.pool, vault, owner)
			if err != nil {
				return "", err
			}
			return secrets[0].Reveal(), nil
		}
	}
	s.predicts = prediction.New(c, s.gateway, s.pool)
	s.predicts.Mount()
	return nil
}
