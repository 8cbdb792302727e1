package main

import (
	"fmt"
	"net/netip"

	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/webhook"
)

func (w Webhook) policy() (webhook.Policy, error) {
	p := webhook.Policy{HTTPSOnly: w.HTTPSOnly, AllowHosts: w.AllowHosts}
	for _, text := range w.AllowNetworks {
		network, err := netip.ParsePrefix(text)
		if err != nil {
			return p, fmt.Errorf("tasknode.webhook.allow_networks: %q is not a network such as 10.1.0.0/16: %w", text, err)
		}
		p.AllowNetworks = append(p.AllowNetworks, network)
	}
	return p, nil
}

// vault has no key where none is named.
func (w Webhook) vault() (webhook.Vault, error) {
	v := webhook.Vault{Read: inference.ReadSecret}
	if w.Key == "" {
		return v, nil
	}
	var err error
	if v.Key, err = inference.ReadSecret(w.Key); err != nil {
		return v, fmt.Errorf("tasknode.webhook.key: %w", err)
	}
	return v, v.Check()
}
