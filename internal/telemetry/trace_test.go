package telemetry_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/penstock/penstock/internal/telemetry"
)

func TestSpansReachTheCollectorBeforeTheProgramEnds(t *testing.T) {
	received := make(chan string, 10)
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		received <- r.URL.Path + " " + string(body)
	}))
	defer collector.Close()
	provider, stop, err := telemetry.NewTracing(t.Context(), "penstock-test", collector.URL+"/v1/traces", 1)
	if err != nil {
		t.Fatal(err)
	}
	_, span := provider.Tracer("test").Start(t.Context(), "push mails")
	span.End()
	stop()
	select {
	case got := <-received:
		if !strings.HasPrefix(got, "/v1/traces ") || !strings.Contains(got, "push mails") || !strings.Contains(got, "penstock-test") {
			t.Errorf("the collector got %q", got)
		}
	default:
		t.Error("the collector got nothing")
	}
}

func TestWithoutAnAddressThereIsNoTracing(t *testing.T) {
	provider, stop, err := telemetry.NewTracing(t.Context(), "penstock-test", "", 1)
	if provider != nil || err != nil {
		t.Errorf("there is %v (%v)", provider, err)
	}
	stop()
}

// Of traces that begin here the share is kept; what a caller wants recorded is recorded whatever the share.
func TestShareIsOfTracesThatBeginHere(t *testing.T) {
	provider, stop, err := telemetry.NewTracing(t.Context(), "penstock-test", "http://127.0.0.1:1/v1/traces", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	seen := map[bool]trace.SpanContext{}
	handler := telemetry.Traced(provider.Tracer("test"), http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Traceparent") != "" {
			t.Error("the header goes on")
		}
		seen[trace.SpanFromContext(r.Context()).IsRecording()] = trace.SpanContextFromContext(r.Context())
	}))
	for _, parent := range []string{"", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/queues/work/entries", nil)
		r.Header.Set("Traceparent", parent)
		handler.ServeHTTP(httptest.NewRecorder(), r)
	}
	if len(seen) != 2 || seen[true].TraceID().String() != "0af7651916cd43dd8448eb211c80319c" {
		t.Errorf("recorded and not: %v", seen)
	}
}

// The address of a prediction's stream has a key by which anybody may read it: a trace has the path without it.
func TestSpansHaveNoKeysOfStreams(t *testing.T) {
	exporter := tracetest.NewInMemoryExporter()
	tracer := sdk.NewTracerProvider(sdk.WithSyncer(exporter)).Tracer("test")
	handler := telemetry.Traced(tracer, http.NotFoundHandler())
	for path, want := range map[string]string{
		"/v1/predictions/p1/stream/planted-key":      "/v1/predictions/p1/stream/",
		"/v1/predictions/p1/stream/planted-key/more": "/v1/predictions/p1/stream/",
		"/v1/predictions/p1%2Fstream%2Fplanted-key":  "/v1/predictions/p1/stream/",
		"/v1/predictions/p1":                         "/v1/predictions/p1",
	} {
		exporter.Reset()
		handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		spans := exporter.GetSpans()
		if len(spans) != 1 || strings.Contains(fmt.Sprint(spans), "planted") {
			t.Fatalf("%s: %v", path, spans)
		}
		set := attribute.NewSet(spans[0].Attributes...)
		if got, _ := set.Value("url.path"); got.AsString() != want {
			t.Errorf("%s is %s in its span, want %s", path, got.AsString(), want)
		}
	}
}
