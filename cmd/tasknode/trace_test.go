package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/penstock/penstock"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/internal/telemetry"
	"github.com/penstock/penstock/pkg/api"
	"github.com/penstock/penstock/pkg/invalidation"
)

// heard is a server that remembers the traceparent of each request, and answers with a fixed text.
func heard(t *testing.T, answer string) (url string, parents chan string) {
	t.Helper()
	parents = make(chan string, 10)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			parents <- r.Header.Get("Traceparent")
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, answer)
	}))
	t.Cleanup(server.Close)
	return server.URL, parents
}

// spans finds finished spans by name, and waits for those that are to come.
type spans struct {
	*testing.T
	exporter *tracetest.InMemoryExporter
	pool     *pgxpool.Pool
}

func (s spans) find(name string) tracetest.SpanStub {
	s.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		for _, one := range s.exporter.GetSpans() {
			if one.Name == name {
				return one
			}
		}
	}
	s.list()
	s.Fatalf("there is no span %q", name)
	return tracetest.SpanStub{}
}

// told is what a server heard; if it heard nothing, the spans may say why.
func (s spans) told(parents chan string) string {
	s.Helper()
	select {
	case parent := <-parents:
		return parent
	case <-time.After(time.Minute):
		s.list()
		s.Fatal("nobody called")
		return ""
	}
}

// list logs the spans, and the entries that have not ended: they say why something is missing.
func (s spans) list() {
	s.Helper()
	for _, one := range s.exporter.GetSpans() {
		s.Logf("%-16s %v %s", one.Name, one.Status, attribute(one, "messaging.operation.name"))
	}
	rows := postgres.Query(s.Context(), s.pool, `SELECT to_jsonb(e)::text, penstock.explain_entry(e.id)::text FROM penstock.entry e`)
	var entry, why string
	if _, err := pgx.ForEachRow(rows, []any{&entry, &why}, func() error { s.Log(entry, why); return nil }); err != nil {
		s.Log(err)
	}
}

func (s spans) wantBelow(child, parent tracetest.SpanStub) {
	s.Helper()
	if child.Parent.SpanID() != parent.SpanContext.SpanID() || child.SpanContext.TraceID() != parent.SpanContext.TraceID() {
		s.Errorf("%q is not below %q", child.Name, parent.Name)
	}
}

func attribute(s tracetest.SpanStub, key string) string {
	for _, a := range s.Attributes {
		if string(a.Key) == key {
			return a.Value.String()
		}
	}
	return ""
}

// One trace tells the life of an entry: the request, the push, the run, the call of the worker, the finish, the callback.
func TestTraceFromThePushToTheCallback(t *testing.T) {
	pool := pgtest.New(t)
	exporter := tracetest.NewInMemoryExporter()
	provider := sdk.NewTracerProvider(sdk.WithSyncer(exporter))
	found := spans{t, exporter, pool}
	worker, called := heard(t, `{"status": "success", "result": {"ok": true}}`)
	receiver, calledBack := heard(t, `{}`)
	if _, err := pool.Exec(t.Context(), fmt.Sprintf(`SELECT penstock.register_model('m', '{"protocol": "dispatcher"}'),
	        penstock.register_instance('m', 's', '%s', 2)`, worker)); err != nil {
		t.Fatal(err)
	}
	leader := httptest.NewServer(telemetry.Traced(provider.Tracer(invalidation.TracerName), api.New(pool, api.Config{Open: true})))
	defer leader.Close()

	cfg := defaults()
	cfg.TaskNode.Governor, cfg.TaskNode.Hints = false, false
	cfg.TaskNode.Webhook.AllowNetworks = []string{"127.0.0.0/8"}
	// No key of the installation: to stretch it takes a minute under the race detector on a busy machine.
	cfg.TaskNode.Secrets = t.TempDir()
	secret := filepath.Join(cfg.TaskNode.Secrets, "root")
	if err := os.WriteFile(secret, []byte("whsec_"+strings.Repeat("c2VjcmV0", 4)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `INSERT INTO penstock.webhook_endpoint (url, secret) VALUES ('', $1)`, "file:"+secret); err != nil {
		t.Fatal(err)
	}
	n, err := newNode(cfg, &penstock.DB{Pool: pool, Beats: pool}, provider, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var failure error
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		failure = n.run(ctx, listener)
	}()
	defer func() {
		stop()
		<-ended
	}()

	const client = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	body := fmt.Sprintf(`{"payload": {"x": 1}, "callback": {"url": %q}}`, receiver)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, leader.URL+"/v1/queues/m/entries", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Traceparent", client)
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(answer.Body)
	answer.Body.Close()
	var pushed struct {
		ID json.Number `json:"id"`
	}
	if err := json.Unmarshal(text, &pushed); err != nil || answer.StatusCode != http.StatusCreated {
		t.Fatalf("push: %d %s", answer.StatusCode, text)
	}

	served, push, process := found.find("POST"), found.find("push m"), found.find("process m")
	call, settle, claim := found.find("call m"), found.find("settle m"), found.find("claim m")
	delivery := found.find("process webhook")
	found.find("settle webhook") // so that the POST below it has ended
	if got := served.Parent.TraceID().String() + served.Parent.SpanID().String(); got != client[3:35]+client[36:52] {
		t.Errorf("the request is below %s, want the client's span", got)
	}
	found.wantBelow(push, served)
	found.wantBelow(process, push)
	found.wantBelow(call, process)
	found.wantBelow(settle, process)
	found.wantBelow(delivery, push)
	if len(process.Links) != 1 || process.Links[0].SpanContext.SpanID() != claim.SpanContext.SpanID() {
		t.Error("the run is not linked to its claim")
	}
	if len(claim.Links) != 1 || claim.Links[0].SpanContext.SpanID() != push.SpanContext.SpanID() {
		t.Error("the claim is not linked to the push")
	}
	for _, s := range []struct {
		span            tracetest.SpanStub
		operation, kind string
		spanKind        trace.SpanKind
	}{
		{push, "push", "send", trace.SpanKindProducer},
		{claim, "claim", "receive", trace.SpanKindClient},
		{process, "process", "process", trace.SpanKindConsumer},
		{settle, "done", "settle", trace.SpanKindClient},
	} {
		if attribute(s.span, "messaging.system") != "penstock" || attribute(s.span, "messaging.destination.name") != "m" ||
			attribute(s.span, "messaging.operation.name") != s.operation || attribute(s.span, "messaging.operation.type") != s.kind || s.span.SpanKind != s.spanKind {
			t.Errorf("%q is %v with %v", s.span.Name, s.span.SpanKind, s.span.Attributes)
		}
	}
	if attribute(process, "messaging.message.id") != pushed.ID.String() {
		t.Errorf("the run is of entry %s, want %s", attribute(process, "messaging.message.id"), pushed.ID)
	}
	if got := found.told(called); got != parent(call) {
		t.Errorf("the worker was told %s, want the span of its call", got)
	}
	told := found.told(calledBack)
	for _, s := range exporter.GetSpans() {
		if s.Name == "POST" && s.SpanKind == trace.SpanKindClient {
			found.wantBelow(s, delivery)
			if told != parent(s) {
				t.Errorf("the receiver was told %s, want the span of its delivery", told)
			}
			told = ""
		}
	}
	if told != "" {
		t.Error("the delivery has no span")
	}
	stop()
	if <-ended; failure != nil {
		t.Error(failure)
	}
	for _, s := range exporter.GetSpans() {
		t.Logf("%-8s %-16s %s below %s", s.SpanKind, s.Name, s.SpanContext.SpanID(), s.Parent.SpanID())
	}
}

func parent(s tracetest.SpanStub) string {
	return "00-" + s.SpanContext.TraceID().String() + "-" + s.SpanContext.SpanID().String() + "-01"
}
