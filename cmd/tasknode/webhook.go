package main

import (
	"fmt"

	"github.com/penstock/penstock/pkg/worker"

	"github.com/penstock/penstock/pkg/webhook"
)

func (w Webhook) policy() (webhook.Policy, error) {
	p, err := webhook.NewPolicy(w.HTTPSOnly, w.AllowHosts, w.AllowNetworks)
	if err != nil {
		return p, fmt.Errorf("tasknode.webhook.allow_networks: %w", err)
	}
	return p, nil
}

// vault has no key where none is named.
func (w Webhook) vault() (webhook.Vault, error) {
	v := webhook.Vault{Read: worker.ReadSecret}
	if w.Key == "" {
		return v, nil
	}
	var err error
	if v.Key, err = worker.ReadSecret(w.Key); err != nil {
		return v, fmt.Errorf("tasknode.webhook.key: %w", err)
	}
	return v, v.Check()
}
