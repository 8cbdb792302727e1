package main

import (
	"bytes"
	"context"
	"flag"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/config"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/telemetry"
	"github.com/penstock/penstock/internal/telemetry/telemetrytest"
)

var update = flag.Bool("update", false, "write this program's table in docs/configuration.md")

const page = "../../docs/configuration.md"

func TestConfigurationPageListsEveryOption(t *testing.T) {
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	cfg := defaults()
	want, err := config.Page(string(text), "leader", &cfg)
	if err != nil {
		t.Fatal(err)
	}
	if want == string(text) {
		return
	}
	if !*update {
		t.Fatalf("%s is not what the program knows; run: go test ./cmd/leader -run ConfigurationPage -update", page)
	}
	if err := os.WriteFile(page, []byte(want), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestDefaultsAreValid(t *testing.T) {
	if err := defaults().validate(); err != nil {
		t.Error(err)
	}
}

func TestBadValueIsNamed(t *testing.T) {
	cfg := defaults()
	cfg.Leader.Election.Lease = 10 * time.Millisecond
	cfg.Leader.Recovery.SuspendShare = 30
	cfg.Leader.Open, cfg.Leader.Listen, cfg.Leader.TLS.ClientCA = true, "0.0.0.0:8420", "ca.pem"
	err := cfg.validate()
	for _, want := range []string{"leader.election.lease is 10ms", "leader.recovery.suspend_share is 30", "leader.open is true", "leader.tls.client_ca is ca.pem"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not say %q", err, want)
		}
	}
}

func TestOnlyLoopbackAddressesAreForThisMachineAlone(t *testing.T) {
	for address, want := range map[string]bool{
		"127.0.0.1:1": true, "127.8.8.8:1": true, "[::1]:1": true, "localhost:1": true,
		":1": false, "0.0.0.0:1": false, "[::]:1": false, "10.0.0.1:1": false, "localhost.example:1": false, "nonsense": false,
	} {
		if got := loopback(address); got != want {
			t.Errorf("%s: %v, want %v", address, got, want)
		}
	}
}

// Metrics are described nowhere beforehand, so that a clash of names or labels shows only when they are read.
func TestMetricsCanBeRead(t *testing.T) {
	cfg := defaults()
	cfg.Database.URL = pgtest.DSN(t)
	p, err := open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	if _, err := p.api.Exec(t.Context(), `SELECT penstock.create_queue('work'), penstock.register_model('m', '{"protocol": "dispatcher"}'),
	        penstock.register_instance('m', 's', 'http://127.0.0.1:1', 1)`); err != nil {
		t.Fatal(err)
	}
	if _, err := p.api.Exec(t.Context(), `UPDATE penstock.instance SET state = 'unhealthy'`); err != nil { // a degradation
		t.Fatal(err)
	}
	log, err := cfg.Log.Logger(&bytes.Buffer{})
	if err != nil {
		t.Fatal(err)
	}
	l := newLeader(cfg, p, log)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- l.elector.Run(ctx, l.lead) }()
	for !l.elector.Status().Leading || l.duties.Load() == nil {
		select {
		case err := <-ended:
			t.Fatalf("elector ended: %v", err)
		case <-time.After(10 * time.Millisecond):
		}
	}
	l.requests.observe("GET /", 200, time.Second)
	for l.duties.Load().samples.Latest().At.IsZero() {
		select {
		case err := <-ended:
			t.Fatalf("elector ended: %v", err)
		case <-time.After(10 * time.Millisecond):
		}
	}
	found := telemetrytest.Check(t, telemetry.Leader, l.registry())
	if n := len(found["penstock_queue_entries"].GetMetric()); n != 15 {
		t.Errorf("penstock_queue_entries has %d series, want five states of three queues", n)
	}
	if degraded := found["penstock_degraded"].GetMetric(); len(degraded) != 1 || degraded[0].GetLabel()[1].GetValue() != "model m" {
		t.Errorf("penstock_degraded is %v, want the model whose only instance is unhealthy", degraded)
	}
	stop()
	if err := <-ended; err != nil {
		t.Errorf("elector ended: %v", err)
	}
	families, err := l.registry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "penstock_queue_head_age_seconds" || f.GetName() == "penstock_locks_stuck" {
			t.Errorf("a former leader still shows %s", f.GetName())
		}
	}
}
