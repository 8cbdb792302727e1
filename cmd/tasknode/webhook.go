package main

import (
	"fmt"
	"runtime"

	"github.com/penstock/penstock/pkg/webhook"
	"github.com/penstock/penstock/pkg/worker"
)

// config is what the section comes to on a node of so many processing threads, 0 for the default number.
func (w Webhook) config(secrets worker.SecretStore) (c webhook.Config, err error) {
	if c.Policy, err = w.policy(); err != nil {
		return c, err
	}
	if c.Vault, err = w.vault(secrets); err != nil {
		return c, err
	}
	c.Issuer = w.Issuer
	return c, nil
}

func (w Webhook) policy() (webhook.AddressPolicy, error) {
	p, err := webhook.NewPolicy(webhook.AddressConfig{
		HTTPSOnly: w.HTTPSOnly, AllowHTTP: w.AllowHTTP, Ports: w.Ports, AllowHosts: w.AllowHosts,
		AllowNetworks: w.AllowNetworks,
	})
	if err != nil {
		return p, fmt.Errorf("tasknode.webhook.%w", err)
	}
	return p, nil
}

// vault has no key where none is named. References in the database reach the store of secrets alone.
func (w Webhook) vault(secrets worker.SecretStore) (webhook.Vault, error) {
	if w.Key == "" {
		return webhook.Vault{Read: secrets.Read}, nil
	}
	key, err := worker.ReadSecret(w.Key)
	if err != nil {
		return webhook.Vault{}, fmt.Errorf("tasknode.webhook.key: %w", err)
	}
	v := webhook.NewVault(key, secrets.Read)
	return v, v.Check()
}

// threads is how many processing threads deliver at once on a node that has so many in all, 0 for the default number.
func (w Webhook) threads(all int) int {
	if w.Threads > 0 {
		return w.Threads
	}
	if all == 0 {
		all = 16 * runtime.GOMAXPROCS(0)
	}
	return max(2, all/4)
}
