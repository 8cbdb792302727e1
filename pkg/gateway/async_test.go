package gateway

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// A request that cannot become an entry, since its operation has none or the gateway no queue, keeps the refusal for want
// of room: its client may come again.
func TestRequestsThatCannotBecomeEntriesKeepTheirRefusal(t *testing.T) {
	t.Parallel()
	const kind = "multipart/form-data; boundary=b"
	const form = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b--\r\n"
	for name, c := range map[string]struct {
		queue      Pusher
		path, body string
		kind       string
	}{
		"a form":           {&pushes{}, "/v1/audio/transcriptions", form, kind},
		"no such entries":  {&pushes{}, "/v1/audio/speech", `{"model":"m"}`, "application/json"},
		"without a queue":  {nil, chat, `{"model":"m"}`, "application/json"},
		"a form, no queue": {nil, "/v1/images/edits", form, kind},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := startTestbed(t, func(config *Config, m *ModelState) {
				config.Push, m.Policy.OnFull, m.Instances[0].Usable = c.queue, OnFullPush, false
			}, workertest.Says(200, "{}"))
			answer := p.post(c.path, c.body, "Content-Type", c.kind, "Prefer", "respond-async, wait=5")
			refusedWith(t, answer, 503, "no_endpoints", "no_endpoints")
			if answer.Header.Get("Retry-After") == "" {
				t.Error("no Retry-After")
			}
		})
	}
}

// A response in the background would leave its slot idle while it runs: entries are for clients that do not wait.
func TestResponsesInTheBackgroundAreRefused(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, nil, workertest.Says(200, `{"status":"queued"}`))
	for _, c := range []struct {
		path, fields string
		refused      bool
	}{
		{"/v1/responses", `"background":true`, true},
		{"/v1/responses", `"background":"yes"`, true},
		{"/v1/responses", `"background":true,"background":false`, true},
		{"/v1/responses", `"b\u0061ckground":1`, true},
		{"/v1/responses", `"background":false`, false},
		{"/v1/responses", `"background":null`, false},
		{"/v1/images/generations", `"background":"transparent"`, false},
	} {
		for _, prefer := range []string{"", "respond-async, wait=5"} {
			got := p.post(c.path, `{"model":"m",`+c.fields+`}`, "Prefer", prefer)
			want := map[bool]int{true: http.StatusBadRequest, false: http.StatusOK}[c.refused]
			if got.StatusCode != want || c.refused && !strings.Contains(got.body, `"background_unsupported"`) {
				t.Errorf("%s with %s: got %d %s, want %d", c.path, c.fields, got.StatusCode, got.body, want)
			}
		}
	}
}

// A second attempt waits no longer than what the first has left of the time that the request may wait: a wait for an
// instance to start is not part of that time.
func TestASecondAttemptWaitsForWhatIsLeftOfTheWait(t *testing.T) {
	t.Parallel()
	const ttl = 30 * time.Second
	for name, c := range map[string]struct {
		own        time.Duration // longest wait that the request names
		cold       bool
		wait, left time.Duration
	}{
		"at once":          {0, false, 0, ttl},
		"after a wait":     {0, false, 20 * time.Second, 10 * time.Second},
		"its own time":     {9 * time.Second, false, 5 * time.Second, 4 * time.Second},
		"behind the start": {0, true, 50 * time.Second, ttl},
	} {
		now := time.Unix(1_000_000, 0)
		p := NewPool(DefaultPolicy(), &byteBudget{most: 1 << 30})
		p.SetStarts(now, Starts{May: true})
		server, slot := []InstanceState{{ID: 1, Slots: 1, Usable: true}}, []slot.Held{{Instance: 1, Token: 1}}
		if !c.cold {
			p.SetInstances(now, server)
		}
		first := &Request{Flow: "f", TTL: c.own}
		if c.wait == 0 {
			p.Grant(now, slot)
		}
		if _, refused := p.Arrive(now, first); refused != nil {
			t.Fatal(refused)
		}
		now = now.Add(c.wait)
		if c.cold {
			p.SetInstances(now, server)
		}
		p.Grant(now, slot)
		now = now.Add(time.Second) // at the worker
		p.Lose(now, slot)
		p.End(now, first, CallEnd{Busy: true})
		if inFlight, refused := p.Arrive(now, first.elsewhere()); inFlight || refused != nil {
			t.Fatalf("%s: the second attempt does not wait: %v", name, refused)
		}
		now = now.Add(c.left - time.Millisecond)
		if p.Tick(now); p.waiting != 1 {
			t.Errorf("%s: the second attempt waits less than %s", name, c.left)
		}
		now = now.Add(time.Millisecond)
		if p.Tick(now); p.waiting != 0 {
			t.Errorf("%s: the second attempt waits longer than %s", name, c.left)
		}
	}
}

// A second attempt that gets no slot goes the way of a first one: it becomes an entry where policy and client agree, and
// is refused otherwise.
func TestASecondAttemptWithoutASlotBecomesAnEntry(t *testing.T) {
	t.Parallel()
	for policy, queue := range map[string]*pushes{OnFullPush: {}, OnFullRefuse: {}} {
		p := startTestbed(t, func(c *Config, m *ModelState) { c.Push, m.Policy.OnFull = queue, policy },
			func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Retry-After", "30")
				w.WriteHeader(http.StatusTooManyRequests)
			})
		answer := p.post(chat, `{"model":"m"}`, "Prefer", "respond-async, wait=5", "X-Penstock-Queue-Ttl-Ms", "50")
		if policy == OnFullRefuse {
			refusedWith(t, answer, 429, "queue_timeout", "queue_timeout")
		} else if answer.StatusCode != 202 || len(queue.list) != 1 {
			t.Errorf("got %d and %d entries, want 202 and one: %s", answer.StatusCode, len(queue.list), answer.body)
		}
	}
}

// An entry that a call becomes sends the worker what the call would: of a prediction of Cog the payload is the input,
// which the task node wraps again. A call that no payload gives is refused, and not run otherwise.
func TestACallThatBecomesAnEntryRunsAsItWould(t *testing.T) {
	t.Parallel()
	const cog, dispatcher = worker.ProtocolCog, worker.ProtocolGeneric
	for name, c := range map[string]struct {
		model   ModelState
		body    string
		payload string // empty: the call is refused
	}{
		"prediction":              {ModelState{Protocol: cog}, `{"input":{"prompt":"x"}}`, `{"prompt":"x"}`},
		"asynchronous prediction": {ModelState{Protocol: cog, Async: true}, ` {"input": {"n":1}} `, `{"n":1}`},
		"no input":                {ModelState{Protocol: cog}, `{}`, `{}`},
		"no body":                 {ModelState{Protocol: cog}, ``, `{}`},
		"more than input":         {ModelState{Protocol: cog}, `{"input":{},"context":{"a":"b"}}`, ``},
		"input without its name":  {ModelState{Protocol: cog}, `{"prompt":"x"}`, ``},
		"whole payload":           {ModelState{Protocol: cog, Template: wholePayload}, `{"input":{},"context":{}}`, `{"input":{},"context":{}}`},
		"template":                {ModelState{Protocol: dispatcher, Template: `{"input":"$payload"}`}, `{"input":{}}`, ``},
		"asynchronous template":   {ModelState{Protocol: dispatcher, Template: `{"input":"$payload"}`, Async: true}, `{"n":1}`, `{"n":1}`},
		"no template":             {ModelState{Protocol: dispatcher}, `{"input":{}}`, `{"input":{}}`},
	} {
		queue := &pushes{}
		p := startTestbed(t, func(config *Config, m *ModelState) {
			config.Push, m.Protocol, m.Template, m.Async = queue, c.model.Protocol, c.model.Template, c.model.Async
			m.Policy.OnFull, m.Instances[0].Usable = OnFullPush, false
		}, workertest.Says(200, "{}"))
		for _, prefer := range []string{"respond-async", "respond-async, wait=5"} { // the second one as it finds no room
			queue.list = nil
			answer := p.post("/models/m/call", c.body, "Prefer", prefer)
			switch {
			case c.payload != "" && (answer.StatusCode != 202 || len(queue.list) != 1 || string(queue.list[0].Body) != c.payload):
				t.Errorf("%s, %s: got %d %s and %+v", name, prefer, answer.StatusCode, answer.body, queue.list)
			case c.payload == "" && prefer == "respond-async":
				refusedWith(t, answer, 400, "async_unsupported", "async_unsupported")
			case c.payload == "":
				refusedWith(t, answer, 503, "no_endpoints", "no_endpoints")
			}
			if c.payload == "" && len(queue.list) > 0 {
				t.Errorf("%s, %s: pushed %+v", name, prefer, queue.list)
			}
		}
	}
}

// A client that waits for its entry and does not read the answer holds the answer, and its place in the limits of its
// token, for the time of a stall alone.
func TestAnAnswerThatIsNotReadIsCut(t *testing.T) {
	t.Parallel()
	queue := &pushes{ended: true, outcome: DurableOutcome{Outcome: "done", Result: bytes.Repeat([]byte("7"), 64<<20)}}
	p := startTestbed(t, func(c *Config, m *ModelState) {
		c.Push, m.Async = queue, true
		m.Policy.ClientStall = worker.Seconds(200 * time.Millisecond)
	}, workertest.Says(200, "{}"))
	request := p.request(t.Context(), http.MethodPost, chat, `{"model":"m"}`,
		"Prefer", "respond-async, wait=5", "X-Request-Id", "stalled")
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close() // it is not read
	workertest.WaitFor(t, func() bool { _, over := p.gateway.Explain("stalled"); return over })
	if text, err := io.ReadAll(answer.Body); err == nil {
		t.Errorf("all %d bytes came", len(text))
	}
}
