package main

import (
	"bytes"
	"context"
	"flag"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
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

// Each row is a way to start a leader; those that give tokens or profiles to the network end with exit code 2.
func TestStartIsRefusedWhereTokensWouldBeInPlainTextOrNotNeeded(t *testing.T) {
	secured := config.TLS{Cert: "cert.pem", Key: "key.pem"}
	for _, c := range []struct {
		listen         string
		tls            config.TLS
		insecure, open bool
		want           string // in the error; empty: it starts
	}{
		{"127.0.0.1:8420", config.TLS{}, false, false, ""},
		{"127.0.0.1:8420", config.TLS{}, false, true, ""},
		{"[::1]:8420", secured, false, true, ""},
		{"0.0.0.0:8420", config.TLS{}, false, false, "leader.insecure_listen"},
		{":8420", config.TLS{}, false, false, "leader.insecure_listen"},
		{"0.0.0.0:8420", config.TLS{}, true, false, ""},
		{"0.0.0.0:8420", secured, false, false, ""},
		{"0.0.0.0:8420", secured, false, true, "leader.open"},
		{"0.0.0.0:8420", config.TLS{}, true, true, "leader.open"},
	} {
		cfg := defaults()
		cfg.Leader.Listen, cfg.Leader.TLS, cfg.Leader.Insecure, cfg.Leader.Open = c.listen, c.tls, c.insecure, c.open
		err := cfg.validate()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("listen %s, TLS %v, insecure %v, open %v: %v", c.listen, c.tls.Cert != "", c.insecure, c.open, err)
		}
	}
}

// Probes are there for all, profiles for this machine.
func TestDebugAddressServesProfilesToThisMachineAlone(t *testing.T) {
	metrics := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	probes := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	for _, c := range []struct {
		listen, host, path string
		want               int
	}{
		{"127.0.0.1:8422", "127.0.0.1:8422", "/debug/pprof/", 200},
		{"127.0.0.1:8422", "localhost:8422", "/debug/pprof/", 200},
		{"[::1]:8422", "[::1]:8422", "/metrics", 200},
		{"127.0.0.1:8422", "rebound.example:8422", "/debug/pprof/", 421},
		{"127.0.0.1:8422", "127.0.0.1:8422", "/debug/pprof/cmdline", 404},
		{"0.0.0.0:8422", "leader.example:8422", "/metrics", 200},
		{"0.0.0.0:8422", "10.0.0.1:8422", "/debug/pprof/", 404},
		{"0.0.0.0:8422", "10.0.0.1:8422", "/debug/pprof/heap", 404},
		{"0.0.0.0:8422", "10.0.0.1:8422", "/livez", 204},
		{"127.0.0.1:8422", "127.0.0.1:8422", "/readyz", 204},
	} {
		r := httptest.NewRequestWithContext(t.Context(), "GET", c.path, nil)
		r.Host = c.host
		w := httptest.NewRecorder()
		Leader{Debug: c.listen}.debug(metrics, probes).ServeHTTP(w, r)
		if w.Code != c.want {
			t.Errorf("%s at %s, called %s: %d, want %d", c.path, c.listen, c.host, w.Code, c.want)
		}
	}
}

func TestBadCallbackOptionsAreNamed(t *testing.T) {
	for want, c := range map[string]config.Addresses{"leader.callback.allow_networks": {AllowNetworks: []string{"10.1"}}, "leader.callback.ports": {Ports: []string{"https"}}} {
		if _, err := (Leader{Callback: c}).policy(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v does not name %s", c, err, want)
		}
	}
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := (Reports{CallbackKey: "file:" + key}).open(nil, nil); err == nil || !strings.Contains(err.Error(), "callback_key") {
		t.Errorf("a key of one letter: %v", err)
	}
}

// Metrics are described nowhere beforehand, so that a clash of names or labels shows only when they are read.
func TestMetricsCanBeRead(t *testing.T) {
	cfg := defaults()
	cfg.Database.URL = pgtest.DSN(t)
	cfg.Leader.Election.Lease = time.Minute // a busy machine does not end the term
	p, err := open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	if _, err := p.api.Exec(t.Context(), `SELECT penstock.create_queue('work'), penstock.register_model('m', '{"protocol": "dispatcher"}'),
	        penstock.register_instance('m', 's', 'http://127.0.0.1:1', 1), penstock.set_deployment('d', 'm')`); err != nil {
		t.Fatal(err)
	}
	if _, err := p.api.Exec(t.Context(), `UPDATE penstock.instance SET state = 'unhealthy'`); err != nil { // a degradation
		t.Fatal(err)
	}
	log, err := cfg.Log.Logger(&bytes.Buffer{})
	if err != nil {
		t.Fatal(err)
	}
	l, err := newLeader(cfg, p, log)
	if err != nil {
		t.Fatal(err)
	}
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
	for l.duties.Load().samples.Latest().At.IsZero() || l.duties.Load().scaler.Status().Passes == 0 {
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
	pools := map[string]bool{}
	for _, m := range found["penstock_db_connections"].GetMetric() {
		pools[m.GetLabel()[0].GetValue()] = true
	}
	want := map[string]bool{"api": true, "duties": true, "scale": true, "election": true, "dashboard": true}
	if !maps.Equal(pools, want) {
		t.Errorf("penstock_db_connections has the pools %v, want %v", pools, want)
	}
	if n := len(found["penstock_scale_instances"].GetMetric()); n != 11 {
		t.Errorf("penstock_scale_instances has %d series, want eleven of one model", n)
	}
	if degraded := found["penstock_degraded"].GetMetric(); len(degraded) != 1 || degraded[0].GetLabel()[2].GetValue() != "model m" {
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

func TestTheDashboardCoversNoAddressOfTheAPI(t *testing.T) {
	text, err := os.ReadFile("../../docs/openapi.yaml")
	if err != nil {
		t.Fatal(err)
	}
	paths := regexp.MustCompile(`(?m)^  /([^/:]+)[^:\n]*:$`).FindAllStringSubmatch(string(text), -1)
	if len(paths) < 50 {
		t.Fatalf("found %d addresses", len(paths))
	}
	begins := map[string]bool{}
	for _, path := range paths {
		if begins[path[1]] {
			continue
		}
		begins[path[1]] = true
		cfg := defaults()
		cfg.Leader.Dashboard.Path = "/" + path[1] + "/"
		if err := cfg.validate(); err == nil || !strings.Contains(err.Error(), "dashboard.path") {
			t.Errorf("a dashboard at %s: %v", cfg.Leader.Dashboard.Path, err)
		}
	}
}
