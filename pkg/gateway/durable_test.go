package gateway

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"net/http"
	"testing"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

func TestPayloadNamesItsOperation(t *testing.T) {
	t.Parallel()
	for _, body := range []string{`{}`, ` { } `, `{"a":1}`, "{\"a\":1 \n}\n", `{"operation":"chat","a":1}`} {
		var got map[string]any
		if err := json.Unmarshal(DurablePayload(json.RawMessage(body), "embeddings"), &got); err != nil || got["operation"] != "embeddings" {
			t.Errorf("%s became %v: %v", body, got, err)
		}
	}
	for path, want := range map[string]string{"/v1/embeddings": "embeddings", "/v1/audio/speech": "", "/chat/completions": ""} {
		if got, ok := Operation(path); got != want || ok != (want != "") {
			t.Errorf("%s: got %q %v", path, got, ok)
		}
	}
}

// A deadline holds for the entry that a request becomes, by the clock of the database. Its run is part of the trace of
// the request.
func TestDeadlineAndTraceOfARequestAreThoseOfItsEntry(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	queue := NewQueuePusher(QueuePusherConfig{
		Hinter: invalidation.NewHinter(x.pool, 0), Wait: func(context.Context, int32, int64) {},
	}, x.pool)
	p := startTestbed(t, func(c *Config, m *ModelState) { c.Push, m.Queue = queue, "m" }, workertest.Says(200, "{}"))
	for deadline, want := range map[string]bool{"60000": true, "": false} {
		const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
		headers := []string{"Prefer", "respond-async", "Traceparent", parent}
		if deadline != "" {
			headers = append(headers, "X-Penstock-Deadline-Ms", deadline)
		}
		a := p.post(chat, `{"model":"m","messages":[]}`, headers...)
		var left *float64
		var trace *string
		err := x.pool.QueryRow(t.Context(), `
SELECT extract(epoch FROM finish_by - clock_timestamp())::float8, trace FROM penstock.entry_m ORDER BY id DESC LIMIT 1`).Scan(&left, &trace)
		if trace == nil || *trace != parent {
			t.Errorf("the entry has trace %v", trace)
		}
		if a.StatusCode != http.StatusAccepted || err != nil {
			t.Fatalf("got %d %s: %v", a.StatusCode, a.body, err)
		}
		if (left != nil) != want || left != nil && (*left <= 0 || *left > 60) {
			t.Errorf("deadline %q: the entry has %v seconds", deadline, left)
		}
	}
}

// A client that lost the answer sends its request again under its key: beyond the rate too it is told its entry.
func TestARequestThatBecameAnEntryIsAnsweredBeyondTheRate(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	queue := NewQueuePusher(QueuePusherConfig{
		Hinter: invalidation.NewHinter(x.pool, 0), Wait: func(context.Context, int32, int64) {},
	}, x.pool)
	p := startTestbed(t, func(c *Config, m *ModelState) { c.Push, c.Open, m.Queue = queue, false, "m" }, workertest.Says(200, "{}"))
	p.gateway.SetTokens([]TokenState{{Hash: sha256.Sum256([]byte("key")), Name: "acme", PushRate: 0.001}})
	send := func(key string) reply {
		return p.post(chat, `{"model":"m"}`, "Authorization", "Bearer key", "Prefer", "respond-async", "Idempotency-Key", key)
	}
	first, again := send("a"), send("a")
	if first.StatusCode != http.StatusAccepted || again.StatusCode != http.StatusAccepted || again.body != first.body {
		t.Errorf("got %d %s, and again %d %s", first.StatusCode, first.body, again.StatusCode, again.body)
	}
	refusedWith(t, send("b"), http.StatusTooManyRequests, "rate_limit_exceeded", "rate_limit_exceeded")
}
