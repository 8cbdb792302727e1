package main

import (
	"fmt"
	"net/netip"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/penstock/penstock/pkg/webhook"
)

// registry holds all that /metrics shows.
func (n *node) registry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	s := n.task.Stats()
	for _, c := range []struct {
		name, help string
		read       func() float64
	}{
		{"claims_total", "claims, empty ones too", func() float64 { return float64(s.Claims.Load()) }},
		{"claimed_total", "locks claimed", func() float64 { return float64(s.Claimed.Load()) }},
		{"claim_seconds_total", "time in claims", func() float64 { return float64(s.ClaimTime.Load()) / 1e9 }},
		{"runs_total", "runs of handlers", func() float64 { return float64(s.Runs.Load()) }},
		{"run_errors_total", "runs that returned an error", func() float64 { return float64(s.RunErrors.Load()) }},
		{"run_seconds_total", "time in handlers", func() float64 { return float64(s.RunTime.Load()) / 1e9 }},
		{"settles_total", "transactions that recorded endings", func() float64 { return float64(s.Settles.Load()) }},
		{"settled_total", "endings recorded", func() float64 { return float64(s.Settled.Load()) }},
		{"settle_refused_total", "endings refused because the lock was lost", func() float64 { return float64(s.Refused.Load()) }},
		{"leases_lost_total", "times the node's lease ran out", func() float64 { return float64(s.LeasesLost()) }},
	} {
		r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "penstock_node_" + c.name, Help: c.help}, c.read))
	}
	if n.governor != nil {
		r.MustRegister(refusals{n})
	}
	return r
}

// refusals shows what the governor refused, by queue and reason.
type refusals struct{ n *node }

var refusalsDesc = prometheus.NewDesc("penstock_node_governor_refusals_total", "claims that the governor cut short", []string{"queue", "reason"}, nil)

func (r refusals) Describe(out chan<- *prometheus.Desc) { out <- refusalsDesc }

func (r refusals) Collect(out chan<- prometheus.Metric) {
	for _, c := range r.n.governor.Refusals() {
		out <- prometheus.MustNewConstMetric(refusalsDesc, prometheus.CounterValue, float64(c.Count), c.Queue, string(c.Code))
	}
}

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
