package main

import (
	"encoding/json"
	"net/http"
	"testing"
)

// A gateway says in its heartbeats and in its status where it can be reached, also where the system chose the port.
func TestAGatewayReportsThePortsThatItListensOn(t *testing.T) {
	t.Parallel()
	s := newSite(t, 2)
	cfg := defaults()
	cfg.Database.URL, cfg.Gateway.Open, cfg.Gateway.Name = s.dsn, true, "gateway"
	cfg.Gateway.Listen, cfg.Gateway.Debug = "127.0.0.1:0", "127.0.0.1:0"
	x := &server{cfg: cfg, log: s.log(), observer: newObserver()}
	s.background(x.serveShared)
	addresses := map[string]string{}
	for field, page := range map[string]string{"listen": "/livez", "debug": "/metrics"} {
		var address string
		s.eventually("the heartbeat has its addresses", func() bool {
			err := s.pool.QueryRow(t.Context(), `
SELECT load->>$1 FROM penstock.node WHERE name = 'gateway' AND load ? $1`, field).Scan(&address)
			return err == nil
		})
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+page, nil)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatalf("%s: %s", field, err)
		}
		_ = answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			t.Errorf("%s %s answers %d", field, address, answer.StatusCode)
		}
		addresses[field] = address
	}
	for _, page := range []string{"/livez", "/readyz"} { // probes may ask either
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addresses["debug"]+page, nil)
		if err != nil {
			t.Fatal(err)
		}
		if status, _, text := send(t, request); status != http.StatusOK {
			t.Errorf("%s of the debug listener answers %d %s", page, status, text)
		}
	}
	var status statusAnswer
	readJSON(t, "http://"+addresses["debug"]+"/status", &status)
	if status.Listen != addresses["listen"] {
		t.Errorf("the status names %s, and clients reach the gateway at %s", status.Listen, addresses["listen"])
	}
}

// readJSON reads what an address of the test answers.
func readJSON(t *testing.T, address string, into any) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address, nil)
	if err != nil {
		t.Fatal(err)
	}
	status, _, text := send(t, request)
	if err := json.Unmarshal(text, into); err != nil || status != http.StatusOK {
		t.Fatalf("%s answers %d %s: %v", address, status, text, err)
	}
}
