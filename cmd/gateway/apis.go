package main

import (
	"context"

	"github.com/penstock/penstock/pkg/gateway/openaibatch"
	"github.com/penstock/penstock/pkg/gateway/prediction"
	"github.com/penstock/penstock/pkg/webhook"
	"github.com/penstock/penstock/pkg/worker"
)

// mount adds what clients of OpenAI and Replicate expect beside live requests. It needs the database.
func (s *server) mount() error {
	g := s.cfg.Gateway
	s.batches = openaibatch.New(openaibatch.Config{
		Log: s.errors.Log("batches", s.log), Hint: s.hinter.Hint,
	}, s.gateway, s.pool)
	s.batches.Mount()
	policy, err := g.policy()
	if err != nil {
		return err
	}
	vault, err := webhook.OpenVault("gateway.webhook_key", g.WebhookKey, worker.ReadSecret,
		worker.SecretStore{Dir: g.Secrets}.Read)
	if err != nil {
		return err
	}
	c := prediction.Config{
		Base: g.PublicURL, BodyMax: g.BodyBytes, Hint: s.hinter.Hint, Log: s.errors.Log("predictions", s.log),
		CheckWebhook: policy.Check,
	}
	if g.WebhookKey != "" {
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
