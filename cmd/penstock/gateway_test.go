package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// A gateway is asked without a database or an API, within --timeout, and what is no gateway is said to be none.
func TestAGatewayIsAskedAtItsDebugListener(t *testing.T) {
	held := make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"name": "g", "pools": [{"model": "llama", "mode": "pass"}]}`)
	})
	mux.HandleFunc("GET /explain/{request}", func(w http.ResponseWriter, r *http.Request) {
		if r.PathValue("request") != "a/b" {
			http.Error(w, "the request is not among the last that this gateway remembers", http.StatusNotFound)
			return
		}
		fmt.Fprint(w, `{"id": "a/b", "model": "llama", "status": 200}`)
	})
	mux.HandleFunc("GET /hangs/status", func(http.ResponseWriter, *http.Request) { <-held })
	mux.HandleFunc("GET /html/status", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") })
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	t.Cleanup(func() { close(held) })

	for line, want := range map[string]struct {
		code int
		says string
	}{
		"status --gateway GATEWAY":                      {exitDone, "llama"},
		"explain a/b --gateway GATEWAY":                 {exitDone, "a/b  model llama"},
		"explain a/b --gateway GATEWAY -o yaml":         {exitDone, "model: llama"},
		"explain x --gateway GATEWAY":                   {exitNotFound, "not among the last"},
		"status --gateway GATEWAY/none":                 {exitUnavailable, "answered 404 to /status"},
		"status --gateway GATEWAY/html":                 {exitUnavailable, "next: give the address of a gateway's debug listener"},
		"status --gateway http://127.0.0.1:1":           {exitUnavailable, "next: give the address of a gateway's debug listener"},
		"status --gateway GATEWAY/hangs --timeout 50ms": {exitTimeout, "next: check --gateway"},
		"status --gateway nonsense":                     {exitUsage, `--gateway is "nonsense": want http://host:port`},
	} {
		args := append([]string{"gateway"}, strings.Fields(strings.ReplaceAll(line, "GATEWAY", server.URL))...)
		if out, errs, code := command(t, nil, args...); code != want.code || !strings.Contains(out+errs, want.says) {
			t.Errorf("%q: exit %d, %s%s; want %d, %s", line, code, out, errs, want.code, want.says)
		}
	}
}
