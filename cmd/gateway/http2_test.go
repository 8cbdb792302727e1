package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/httpserver"
	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/worker"
)

// Clients may speak HTTP/2 without TLS. Each event of a stream goes to them at once there too.
func TestClientsMaySpeakHTTP2(t *testing.T) {
	t.Parallel()
	const first, last = "data: {\"choices\":[1]}\n\n", "data: [DONE]\n\n"
	read := make(chan struct{})
	goOn := sync.OnceFunc(func() { close(read) })
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, first)
		_ = http.NewResponseController(w).Flush()
		<-read
		_, _ = io.WriteString(w, last)
	}))
	t.Cleanup(backend.Close)
	t.Cleanup(goOn)
	s := &server{cfg: defaults(), log: (&site{T: t}).log(), gateway: gateway.New(gateway.Config{Open: true})}
	s.gateway.SetModels([]gateway.ModelState{{
		Name: "m", Protocol: worker.ProtocolOpenAI, Policy: gateway.DefaultPolicy(), RunMax: time.Minute,
		Instances: []gateway.InstanceState{{ID: 1, Address: backend.URL, Slots: 1, Usable: true}},
	}})
	s.gateway.Fixed()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.serveClients(ctx, t.Context(), listener) }()
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	client := &http.Client{Transport: &http.Transport{Protocols: &protocols}}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+listener.Addr().String()+"/v1/chat/completions",
		strings.NewReader(`{"model":"m","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	answer, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if answer.ProtoMajor != 2 || answer.StatusCode != http.StatusOK {
		t.Errorf("got %s over %s", answer.Status, answer.Proto)
	}
	event := make([]byte, len(first))
	if _, err := io.ReadFull(answer.Body, event); err != nil || string(event) != first {
		t.Errorf("got %q: %v", event, err)
	}
	goOn()
	if rest, err := io.ReadAll(answer.Body); err != nil || string(rest) != last {
		t.Errorf("got %q behind the first event: %v", rest, err)
	}
	client.CloseIdleConnections()
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// One address holds no more requests than connections: HTTP/2 carries many over one.
func TestOneAddressDoesNotHoldTheGateway(t *testing.T) {
	t.Parallel()
	called, release := make(chan struct{}, 2), make(chan struct{})
	gpu := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		called <- struct{}{}
		<-release
		_, _ = io.WriteString(w, "{}")
	}))
	t.Cleanup(gpu.Close)
	cfg := defaults()
	if cfg.Gateway.PerAddress != cfg.Gateway.Conns/2 {
		t.Errorf("one address has %d of %d connections, want half", cfg.Gateway.PerAddress, cfg.Gateway.Conns)
	}
	cfg.Gateway.Listen, cfg.Gateway.PerAddress, cfg.Gateway.Grace = "127.0.0.1:0", 1, time.Millisecond
	s := &server{cfg: cfg, log: (&site{T: t}).log(), gateway: gateway.New(gateway.Config{Open: true})}
	s.gateway.SetModels([]gateway.ModelState{{
		Name: "m", Protocol: worker.ProtocolOpenAI, Policy: gateway.DefaultPolicy(), RunMax: time.Minute,
		Instances: []gateway.InstanceState{{ID: 1, Address: gpu.URL, Slots: 2, Usable: true}},
	}})
	s.gateway.Fixed()
	listener, err := httpserver.Listen(t.Context(), cfg.Gateway.listener())
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	served, sent := make(chan struct{}), make(chan int, 1)
	go func() {
		defer close(served)
		_ = s.serveClients(ctx, t.Context(), listener)
	}()
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	client := &http.Client{Transport: &http.Transport{Protocols: &protocols}}
	send := func() int {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost,
			"http://"+listener.Addr().String()+"/v1/chat/completions", strings.NewReader(`{"model":"m"}`))
		if err != nil {
			t.Error(err)
			return 0
		}
		answer, err := client.Do(request)
		if err != nil {
			return 0
		}
		answer.Body.Close()
		return answer.StatusCode
	}
	go func() { sent <- send() }()
	defer func() { // it logs until it has ended
		close(release)
		<-sent
		stop()
		<-served
	}()
	<-called
	if status := send(); status != http.StatusTooManyRequests {
		t.Errorf("a second request got %d, want 429", status)
	}
}
