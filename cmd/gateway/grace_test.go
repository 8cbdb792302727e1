package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/worker"
)

// heldCharger charges a call only when it is told to.
type heldCharger struct{ entered, release chan struct{} }

func (h heldCharger) Charge(gateway.Charge) {
	close(h.entered)
	<-h.release
}

func (heldCharger) Refuse(string) {}

// The gateway folds its use and gives back its slots once the requests that were cut at the end of the grace have ended.
func TestRequestsThatAreCutAreWaitedFor(t *testing.T) {
	t.Parallel()
	called := make(chan struct{})
	backend := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		close(called)
		<-r.Context().Done()
	}))
	t.Cleanup(backend.Close)
	charger := heldCharger{make(chan struct{}), make(chan struct{})}
	cfg := defaults()
	cfg.Gateway.Grace = time.Millisecond
	s := &server{cfg: cfg, log: (&site{T: t}).log(), gateway: gateway.New(gateway.Config{Open: true, Charge: charger})}
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
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+listener.Addr().String()+"/v1/chat/completions",
		strings.NewReader(`{"model":"m"}`))
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		if answer, err := http.DefaultClient.Do(request); err == nil {
			answer.Body.Close()
		}
	}()
	<-called
	stop()
	<-charger.entered
	select {
	case err := <-done:
		t.Errorf("the gateway goes on while a request that was cut ends its call: %v", err)
		close(charger.release)
	case <-time.After(200 * time.Millisecond):
		close(charger.release)
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}
