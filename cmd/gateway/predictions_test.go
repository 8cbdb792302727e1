package main

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
	"github.com/penstock/penstock/pkg/webhook"
	"github.com/penstock/penstock/pkg/worker"
)

type predicted struct {
	ID, Model, Version, Status, Error string
	Input                             map[string]any
	Output                            []string
	CreatedAt                         string `json:"created_at"`
	CompletedAt                       string `json:"completed_at"`
	URLs                              struct{ Get, Cancel, Stream string }
	Metrics                           struct {
		Predict float64 `json:"predict_time"`
	}
}

// predict creates a prediction with headers, and returns the status and what the answer says.
func (f *front) predict(t *testing.T, path, body string, headers ...string) (status int, p predicted) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	return f.do(t, request, &p), p
}

const wanted = `{"version":"m","input":{"prompt":"hello","max_tokens":3}}`

func TestPredictionRunsAsAnEntry(t *testing.T) {
	t.Parallel()
	s := newSite(t, 4)
	f := s.startGateway(nil)
	s.startNode(8)
	status, p := f.predict(t, "/v1/predictions", wanted, "Prefer", "wait=30")
	if status != 201 || p.Status != "succeeded" || len(p.Output) != 1 || p.Output[0] != "x" || p.Model != "m" ||
		p.Input["prompt"] != "hello" || p.CompletedAt == "" || p.URLs.Get != f.url+"/v1/predictions/"+p.ID {
		t.Fatalf("got %d %+v", status, p)
	}
	var again predicted
	if status := f.call(t, "GET", "/v1/predictions/"+p.ID, nil, &again); status != 200 || again.Status != "succeeded" {
		t.Errorf("got %d %+v", status, again)
	}
	for _, path := range []string{"/v1/models/acme/m/predictions", "/v1/deployments/acme/m/predictions"} {
		status, p := f.predict(t, path, `{"input":{"prompt":"x"}}`)
		if status != 201 || p.Status != "starting" && p.Status != "succeeded" || p.URLs.Stream == "" {
			t.Errorf("%s: got %d %+v", path, status, p)
		}
	}
	var page struct{ Results []predicted }
	f.call(t, "GET", "/v1/predictions", nil, &page)
	if len(page.Results) != 3 || page.Results[2].ID != p.ID {
		t.Errorf("got %+v", page)
	}
	status, p = f.predict(t, "/v1/predictions", `{"version":"m","input":{"fail":true}}`, "Prefer", "wait")
	if status != 201 || p.Status != "failed" || p.Error == "" {
		t.Errorf("got %d %+v", status, p)
	}
}

// Clients take every status but starting in the answer to a creation for the end, whatever the entry does.
func TestPredictionThatRunsLongerIsStartingForItsClient(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	f := s.startGateway(nil)
	s.startNode(2)
	status, p := f.predict(t, "/v1/predictions", `{"version":"m","input":{"hold":true}}`, "Prefer", "wait=1")
	if status != 202 || p.Status != "starting" {
		t.Fatalf("got %d %+v", status, p)
	}
	s.eventually("it runs", func() bool { running, _, _ := s.gpu.counts(); return running == 1 })
	f.call(t, "GET", "/v1/predictions/"+p.ID, nil, &p)
	if p.Status != "processing" {
		t.Errorf("got %+v", p)
	}
	if status := f.call(t, "POST", "/v1/predictions/"+p.ID+"/cancel", nil, &p); status != 200 {
		t.Errorf("cancel: %d", status)
	}
	s.eventually("it is canceled", func() bool {
		f.call(t, "GET", "/v1/predictions/"+p.ID, nil, &p)
		return p.Status == "canceled"
	})
}

// A prediction for one of the other names of a model, as that of an adapter, is an entry that asks the server for it.
func TestPredictionOfAnAdapterAsksForIt(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	if _, err := inference.RegisterModel(t.Context(), s.pool, worker.Model{
		Name: "m", Protocol: worker.ProtocolOpenAI, RemoteName: "base", RemoteNames: []string{"lora-1"},
	}, inference.By{Reason: "test"}); err != nil {
		t.Fatal(err)
	}
	f := s.startGateway(nil)
	const input = `"input":{"prompt":"a","model":"other"}`
	for _, c := range []struct{ path, body, want string }{
		{"/v1/predictions", `{"version":"lora-1",` + input + `}`, "lora-1"},
		{"/v1/predictions", `{"version":"acme/lora-1:latest",` + input + `}`, "lora-1"},
		{"/v1/models/acme/lora-1/predictions", `{` + input + `}`, "lora-1"},
		{"/v1/predictions", `{"version":"m",` + input + `}`, "none"},
	} {
		if status, p := f.predict(t, c.path, c.body); status != http.StatusCreated || p.Model != "m" {
			t.Errorf("%s %s: got %d %+v", c.path, c.body, status, p)
		}
		var got string
		if err := s.pool.QueryRow(t.Context(), `SELECT coalesce(payload->>'model', 'none') FROM penstock.entry ORDER BY id DESC LIMIT 1`).Scan(&got); err != nil || got != c.want {
			t.Errorf("%s %s: the entry asks for %s, want %s: %v", c.path, c.body, got, c.want, err)
		}
	}
}

func TestPredictionsThatCannotBe(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	f := s.startGateway(nil)
	for _, c := range []struct {
		body   string
		header []string
		status int
	}{
		{`{"version":"none","input":{}}`, nil, 404},
		{`{"version":"acme/m:5c7d5dc6","input":{}}`, nil, 422},
		{`{"version":"m","input":[]}`, nil, 422},
		{`{"input":{}}`, nil, 422},
		{`{"version":"m","input":{},"webhook":"ftp://x"}`, nil, 422},
		{`{"version":"m","input":{},"webhook_events_filter":["end"]}`, nil, 422},
		{`{"version":"m","input":{}}`, []string{"Prefer", "wait=61"}, 422},
		{`{"version":"m","input":{}}`, []string{"Cancel-After", "soon"}, 422},
		{`{`, nil, 422},
		{`{"version":"m","input":{"a":"\u0000"}}`, nil, 422},
		{`{"version":"m","input":{},"webhook":"https://b\u00fccher.example/"}`, nil, 422},
		{`{"version":"m","input":{},"webhook":"https://user:password@hooks.example/"}`, nil, 422},
		{`{"version":"m","input":{},"webhook":"http://169.254.169.254/latest/meta-data"}`, nil, 422},
		{`{"version":"m","input":{},"webhook":"https://localhost/"}`, nil, 422},
	} {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+"/v1/predictions", strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < len(c.header); i += 2 {
			request.Header.Set(c.header[i], c.header[i+1])
		}
		var problem struct {
			Title, Detail string
			Status        int
		}
		if status := f.do(t, request, &problem); status != c.status || problem.Status != c.status || problem.Detail == "" {
			t.Errorf("%s: got %d %+v, want %d", c.body, status, problem, c.status)
		}
	}
	for _, path := range []string{"/v1/predictions?cursor=%00", "/v1/predictions/%00", "/v1/predictions/%FF"} {
		var problem struct{ Detail string }
		if status := f.call(t, "GET", path, nil, &problem); status != 422 || problem.Detail == "" {
			t.Errorf("%s: got %d %+v", path, status, problem)
		}
	}
	if n := s.count(`SELECT count(*) FROM penstock.entry`); n != 0 {
		t.Errorf("%d entries", n)
	}
}

// A queue that refuses pushes while its model has no instance says so to the clients of each route.
func TestRequestsForAModelWithoutAnInstanceAreRefused(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	f := s.startGateway(nil)
	s.exec(`SELECT penstock.alter_queue($1, '{"on_no_instance": "fail"}')`, s.queue.Name)
	s.exec(`DELETE FROM penstock.instance`)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+"/v1/predictions", strings.NewReader(wanted))
	if err != nil {
		t.Fatal(err)
	}
	status, header, text := send(t, request)
	if status != 503 || !strings.Contains(string(text), "no instance of the model") || header.Get("Retry-After") == "" {
		t.Errorf("a prediction: got %d %s", status, text)
	}
	a := f.prefer(t, "respond-async", quick)
	if a.status != 503 || !strings.Contains(a.text, `"code":"no_instance"`) || a.header.Get("Retry-After") == "" {
		t.Errorf("a request that is to be an entry: got %+v", a)
	}
}

func TestPredictionStreams(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	f := s.startGateway(nil)
	s.startNode(2)
	_, p := f.predict(t, "/v1/predictions", `{"version":"m","stream":true,"input":{"prompt":"x","chunks":3,"ms":300}}`)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.URLs.Stream, nil)
	if err != nil {
		t.Fatal(err)
	}
	var text string
	if status := f.do(t, request, &text); status != 200 || eventsOf(text) != "output:t0 output:t1 output:t2 done:{}" {
		t.Errorf("got %d %q", status, text)
	}
}

// startDeliverer runs a node that delivers webhooks with the key that seals secrets.
func (s *site) startDeliverer(key string) {
	s.Helper()
	pool := s.connect()
	node := tasknode.New(tasknode.Config{
		Name: "deliverer", Application: "default", Threads: 2, Poll: 50 * time.Millisecond, Log: s.log(),
	}, pool, s.connect())
	policy, err := webhook.NewPolicy("tasknode.webhook", webhook.AddressConfig{AllowNetworks: []string{"127.0.0.0/8"}})
	if err != nil {
		s.Fatal(err)
	}
	node.HandleKind(invalidation.KindWebhook, webhook.NewHandler(webhook.Config{
		Vault: webhook.NewVault(key, nil), Policy: policy,
	}, pool, s.log()))
	s.background(node.Run)
}

func TestPredictionCallsBackWithTheSecretOfItsClient(t *testing.T) {
	const key = "0123456789abcdef0123456789abcdef"
	t.Setenv("PENSTOCK_SECRET_WEBHOOK", key)
	s := newSite(t, 4)
	f := s.startGateway(func(c *Config) { c.Gateway.WebhookKey = "env:PENSTOCK_SECRET_WEBHOOK" })
	s.startNode(4)
	s.startDeliverer(key)
	type delivery struct {
		header http.Header
		body   []byte
	}
	got := make(chan delivery, 8)
	receiver := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got <- delivery{r.Header, body}
	}))
	defer receiver.Close()
	var secret struct{ Key string }
	if status := f.call(t, "GET", "/v1/webhooks/default/secret", nil, &secret); status != 200 || !strings.HasPrefix(secret.Key, "whsec_") {
		t.Fatalf("got %d %+v", status, secret)
	}
	parsed, err := webhook.ParseSecret(secret.Key)
	if err != nil {
		t.Fatal(err)
	}
	_, p := f.predict(t, "/v1/predictions", `{"version":"m","input":{"prompt":"x"},"webhook":"`+receiver.URL+`/hook"}`)
	statuses := map[string]int{}
	for range 2 {
		select {
		case d := <-got:
			var told predicted
			if err := json.Unmarshal(d.body, &told); err != nil || told.ID != p.ID {
				t.Errorf("got %s: %v", d.body, err)
			}
			if err := webhook.Verify(d.header, time.Now(), d.body, parsed); err != nil {
				t.Error(err)
			}
			statuses[told.Status]++
		case <-time.After(time.Minute):
			t.Fatalf("deliveries: %v", statuses)
		}
	}
	if statuses["starting"] != 1 || statuses["succeeded"] != 1 {
		t.Errorf("deliveries: %v", statuses)
	}
	_, _ = f.predict(t, "/v1/predictions", `{"version":"m","input":{},"webhook":"`+receiver.URL+`","webhook_events_filter":["completed"]}`)
	if d := <-got; !strings.Contains(string(d.body), `"succeeded"`) {
		t.Errorf("got %s", d.body)
	}
}

// A delivery that the queue of webhooks does not take as it is neither delays nor ends those behind it: it is sent
// without its data.
func TestDeliveryThatIsRefusedDoesNotStopTheOthers(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	f := s.startGateway(nil)
	create := func(input string) predicted {
		status, p := f.predict(t, "/v1/predictions",
			`{"version":"m","input":`+input+`,"webhook":"https://hooks.example/","webhook_events_filter":["completed"]}`)
		if status != 201 {
			t.Fatalf("got %d %+v", status, p)
		}
		return p
	}
	large, odd, usual := create(`{}`), create(`{}`), create(`{"prompt":"kept"}`)
	// 700 kB as text, and more than the queue takes as jsonb.
	s.exec(`UPDATE penstock.prediction SET input = (SELECT jsonb_build_object('a', jsonb_agg(i)) FROM generate_series(1, 110000) i)
	         WHERE id = $1`, large.ID)
	s.exec(`UPDATE penstock.prediction SET webhook = 'https://%E2%84%AA.example/' WHERE id = $1`, odd.ID)
	for _, p := range []predicted{large, odd, usual} {
		if status := f.call(t, "POST", "/v1/predictions/"+p.ID+"/cancel", nil, &p); status != 200 {
			t.Fatalf("cancel: %d", status)
		}
	}
	s.eventually("all three are pushed", func() bool {
		return s.count(`SELECT count(*) FROM penstock.prediction WHERE notified_at IS NULL`) == 0
	})
	const removed = `SELECT count(*) FROM penstock.entry WHERE payload->'data'->>'id' = $1 AND (payload->'data'->>'data_removed')::boolean = $2`
	if s.count(removed, large.ID, true) != 1 || s.count(removed, odd.ID, false) != 1 || s.count(removed, usual.ID, false) != 1 {
		t.Errorf("got %d, %d, %d deliveries", s.count(removed, large.ID, true), s.count(removed, odd.ID, false),
			s.count(removed, usual.ID, false))
	}
}

// Cancel-After counts by the clock of the database, by which the entry expires.
func TestCancelAfterIsADeadlineByTheClockOfTheDatabase(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	f := s.startGateway(nil)
	before := s.count(`SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint`)
	status, p := f.predict(t, "/v1/predictions", wanted, "Cancel-After", "1m 30s")
	after := s.count(`SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint`)
	if status != http.StatusCreated {
		t.Fatalf("got %d", status)
	}
	const left = 90_000
	for _, source := range []string{
		`SELECT (extract(epoch FROM deadline) * 1000)::bigint FROM penstock.prediction WHERE id = $1`,
		`SELECT (extract(epoch FROM e.finish_by) * 1000)::bigint FROM penstock.entry e JOIN penstock.prediction p ON p.entry_id = e.id WHERE p.id = $1`,
	} {
		if at := s.count(source, p.ID); at < before+left || at > after+left {
			t.Errorf("the deadline is %d ms from the request: %s", at-before, source)
		}
	}
}
