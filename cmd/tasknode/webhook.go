package main

import (
	"runtime"

	"github.com/penstock/penstock/pkg/webhook"
	"github.com/penstock/penstock/pkg/worker"
)

// config is what the section comes to. References in the database reach the store of secrets alone.
func (w Webhook) config(secrets worker.SecretStore) (c webhook.Config, err error) {
	if c.Policy, err = webhook.NewPolicy("tasknode.webhook", webhook.AddressConfig(w.Addresses)); err != nil {
		return c, err
	}
	c.Vault, err = webhook.OpenVault("tasknode.webhook.key", w.Key, worker.ReadSecret, secrets.Read)
	c.Issuer = w.Issuer
	return c, err
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
