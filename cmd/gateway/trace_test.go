package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/penstock/penstock/internal/config"
	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/worker"
)

// The programs share a file: a section that leaders and task nodes have stops no gateway.
func TestAGatewayKnowsTheSectionOfTraces(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "penstock.yaml")
	text := "trace:\n  endpoint: http://collector:4318/v1/traces\n  share: 0.5\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := defaults()
	program := config.Program{Name: "gateway", Args: []string{"--config", file}, Environ: []string{}}
	if err := config.Load(program, &cfg); err != nil {
		t.Fatal(err)
	}
	if cfg.Trace.Share != 0.5 || !strings.Contains(cfg.Trace.Endpoint, "collector") {
		t.Errorf("read %+v", cfg.Trace)
	}
	cfg.Trace.Share = 2
	if err := cfg.validate(); err == nil {
		t.Error("a share of 2 is taken")
	}
}

// A request has a span below that of its client, and the worker is told it.
func TestAWorkerIsToldTheSpanOfItsRequest(t *testing.T) {
	t.Parallel()
	parents := make(chan string, 1)
	gpu := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		parents <- r.Header.Get("Traceparent")
	}))
	t.Cleanup(gpu.Close)
	exporter := tracetest.NewInMemoryExporter()
	s := &server{
		gateway: gateway.New(gateway.Config{Open: true}), tracing: sdk.NewTracerProvider(sdk.WithSyncer(exporter)),
	}
	s.gateway.SetModels([]gateway.ModelState{{
		Name: "m", Remote: "m", Protocol: worker.ProtocolOpenAI, Policy: gateway.DefaultPolicy(), RunMax: time.Minute,
		Instances: []gateway.InstanceState{{ID: 1, Address: gpu.URL, Slots: 1, Usable: true}},
	}})
	s.gateway.Fixed()
	const id = "4bf92f3577b34da6a3ce929d0e0e4736"
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"model":"m"}`))
	r.Header.Set("Traceparent", "00-"+id+"-00f067aa0ba902b7-01")
	w := httptest.NewRecorder()
	s.handler().ServeHTTP(w, r)
	if w.Code != http.StatusOK {
		t.Fatalf("got %d %s", w.Code, w.Body)
	}
	spans := exporter.GetSpans()
	if len(spans) != 1 || spans[0].SpanContext.TraceID().String() != id {
		t.Fatalf("spans %v", spans)
	}
	if told, want := <-parents, "00-"+id+"-"+spans[0].SpanContext.SpanID().String()+"-01"; told != want {
		t.Errorf("the worker was told %q, want %q", told, want)
	}
}
