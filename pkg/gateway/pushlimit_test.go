package gateway

import (
	"crypto/sha256"
	"net/http"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker/workertest"
)

// What a token may push is bounded over all ways, and its tokens of one name share it.
func TestPushesOfATokenHaveARate(t *testing.T) {
	t.Parallel()
	g := New(Config{})
	g.SetTokens([]TokenState{
		{Hash: sha256.Sum256([]byte("old")), Name: "shop", PushRate: 7},
		{Hash: sha256.Sum256([]byte("new")), Name: "shop", PushRate: 7},
		{Hash: sha256.Sum256([]byte("free")), Name: "free"},
		{Hash: sha256.Sum256([]byte("burst")), Name: "burst", PushRate: 0.001, PushBurst: 3},
	})
	mayPush := func(token string, n int) int {
		may, _ := g.MayPush(token, n)
		return may
	}
	if n := mayPush("free", 1000) + mayPush("unknown", 1000); n != 2000 {
		t.Errorf("%d entries of tokens without a rate are let in, want 2000", n)
	}
	now := time.Now()
	first, second := g.tokens.find("old", now), g.tokens.find("new", now)
	if n, refused := first.pushes(now, 5); n != 5 || refused != nil {
		t.Errorf("%d of 5 are let in: %v", n, refused)
	}
	n, refused := second.pushes(now, 5)
	if n != 2 || refused == nil || refused.RetryAfter <= 0 || refused.RetryAfter > time.Second/7+1 {
		t.Fatalf("%d of the other 5 are let in, and refused is %+v; want 2 and another within a seventh of a second", n, refused)
	}
	now = now.Add(refused.RetryAfter)
	if n, _ := first.pushes(now, 5); n != 1 {
		t.Errorf("%d are let in after the wait, want 1", n)
	}
	if n := mayPush("burst", 10); n != 3 {
		t.Errorf("%d entries are let in, want the burst of 3", n)
	}
	g.GiveBackPushes("burst", 2)
	if n := mayPush("burst", 10); n != 2 {
		t.Errorf("%d entries are let in, want the 2 that were given back", n)
	}
}

func TestAsyncRequestsAreWithinTheRateOfTheirToken(t *testing.T) {
	t.Parallel()
	queue := &pushes{}
	p := startTestbed(t, func(c *Config, _ *ModelState) { c.Push, c.Open = queue, false }, workertest.Says(200, "{}"))
	p.gateway.SetTokens([]TokenState{{
		Hash: sha256.Sum256([]byte("key")), Name: "acme", PushRate: 0.001, PriorityMax: new(int16(3)),
	}})
	send := func() reply {
		return p.post(chat, `{"model":"m"}`, "Authorization", "Bearer key", "Prefer", "respond-async")
	}
	if a := send(); a.StatusCode != http.StatusAccepted {
		t.Fatalf("got %d %s", a.StatusCode, a.body)
	}
	refused := send()
	refusedWith(t, refused, http.StatusTooManyRequests, "rate_limit_exceeded", "rate_limit_exceeded")
	if len(queue.list) != 1 || *queue.list[0].PriorityMax != 3 || refused.Header.Get("Retry-After") == "" {
		t.Errorf("pushed %+v; Retry-After is %q", queue.list, refused.Header.Get("Retry-After"))
	}
}

func TestACriticalEntryAsksForNoMoreThanItsTokenMay(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		criticality Criticality
		most        *int16
		unasked     int
		want        *int16
	}{
		{Critical, nil, 1, new(int16(8))},
		{Critical, new(int16(9)), 1, new(int16(8))},
		{Critical, new(int16(3)), 1, new(int16(3))},
		{Critical, new(int16(0)), 1, nil}, // default requests have 1
		{Critical, nil, 9, nil},
		{Default, new(int16(0)), 1, nil},
		{Sheddable, new(int16(0)), 1, new(int16(0))},
	} {
		got := Durable{Criticality: c.criticality, PriorityMax: c.most}.priority(c.unasked)
		if (got == nil) != (c.want == nil) || got != nil && *got != *c.want {
			t.Errorf("%+v: got %v", c, got)
		}
	}
}
