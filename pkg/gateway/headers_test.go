package gateway

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// full starts a testbed of one slot, which a call keeps until the test ends.
func full(t *testing.T, change func(*Config, *ModelState)) *testbed {
	t.Helper()
	release := make(chan struct{})
	p := startTestbed(t, func(c *Config, m *ModelState) {
		m.Instances[0].Slots = 1
		m.Policy.QueueTTL = worker.Seconds(time.Hour)
		if change != nil {
			change(c, m)
		}
	}, held(release))
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var group sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		close(release)
		group.Wait()
	})
	p.occupy(ctx, &group, `{"model":"m"}`)
	workertest.WaitFor(t, func() bool { return p.state().InFlight == 1 })
	return p
}

// occupy sends a request whose answer the test does not need.
func (p *testbed) occupy(ctx context.Context, group *sync.WaitGroup, body string, headers ...string) {
	request := p.request(ctx, http.MethodPost, chat, body, headers...)
	group.Go(func() {
		if answer, err := http.DefaultClient.Do(request); err == nil {
			_, _ = io.Copy(io.Discard, answer.Body)
			answer.Body.Close()
		}
	})
}

func TestAClientSaysHowLongItsRequestMayWait(t *testing.T) {
	t.Parallel()
	p := full(t, nil)
	refused := p.post(chat, `{"model":"m"}`, "X-Penstock-Queue-Ttl-Ms", "50")
	refusedWith(t, refused, http.StatusTooManyRequests, "queue_timeout", "queue_timeout")
	if refused.Header.Get("Retry-After") == "" {
		t.Error("the client is not told when to come back")
	}
}

func TestAPolicyRefusesWith503(t *testing.T) {
	t.Parallel()
	p := full(t, func(_ *Config, m *ModelState) {
		m.Policy.RefuseStatus, m.Policy.Total = http.StatusServiceUnavailable, 0
	})
	refusedWith(t, p.post(chat, `{"model":"m"}`), http.StatusServiceUnavailable, "overloaded", "overloaded")
}

// A flow that has as many waiting requests as it may leaves room for others.
func TestAFlowHasItsShareOfTheQueue(t *testing.T) {
	t.Parallel()
	p := full(t, func(_ *Config, m *ModelState) { m.Policy.FlowTotal = 1 })
	ctx, leave := context.WithCancel(t.Context())
	var group sync.WaitGroup
	defer group.Wait()
	defer leave()
	p.occupy(ctx, &group, `{"model":"m"}`, "X-Penstock-Flow", "a")
	workertest.WaitFor(t, func() bool { return p.state().Waiting["default"] == 1 })
	refused := p.post(chat, `{"model":"m"}`, "X-Penstock-Flow", "a")
	refusedWith(t, refused, http.StatusTooManyRequests, "flow_queue_full", "flow_queue_full")
	other := p.post(chat, `{"model":"m"}`, "X-Penstock-Flow", "b", "X-Penstock-Queue-Ttl-Ms", "50")
	refusedWith(t, other, http.StatusTooManyRequests, "queue_timeout", "queue_timeout")
}

// The bodies of requests that wait have a bound of their own.
func TestBodiesThatWaitAreBounded(t *testing.T) {
	t.Parallel()
	p := full(t, func(c *Config, _ *ModelState) { c.WaitingMax = 1000 })
	body := `{"model":"m","x":"` + strings.Repeat("y", 600) + `"}`
	ctx, leave := context.WithCancel(t.Context())
	var group sync.WaitGroup
	defer group.Wait()
	defer leave()
	p.occupy(ctx, &group, body)
	workertest.WaitFor(t, func() bool { return p.state().Waiting["default"] == 1 })
	refusedWith(t, p.post(chat, body), http.StatusTooManyRequests, "overloaded", "overloaded")
}

// A request that makes room for one of a higher criticality is told so by its reason, with the code of a full pool.
func TestAnEvictedRequestIsToldSo(t *testing.T) {
	t.Parallel()
	p := full(t, func(_ *Config, m *ModelState) { m.Policy.Total = 1 })
	evicted := make(chan reply, 1)
	go func() { evicted <- p.post(chat, `{"model":"m"}`, "X-Penstock-Criticality", "sheddable") }()
	workertest.WaitFor(t, func() bool { return p.state().Waiting["sheddable"] == 1 })
	ctx, leave := context.WithCancel(t.Context())
	var group sync.WaitGroup
	defer group.Wait()
	defer leave()
	p.occupy(ctx, &group, `{"model":"m"}`, "X-Penstock-Criticality", "critical")
	refusedWith(t, <-evicted, http.StatusTooManyRequests, "overloaded", "evicted")
	workertest.WaitFor(t, func() bool { return p.state().Waiting["critical"] == 1 })
	refusedWith(t, p.post(chat, `{"model":"m"}`, "X-Penstock-Criticality", "critical"), http.StatusTooManyRequests, "overloaded", "overloaded")
}

func TestAGatewayCanRememberNothing(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, func(c *Config, _ *ModelState) { c.Remember = -1 }, workertest.Says(200, "{}"))
	if a := p.post(chat, `{"model":"m"}`); a.StatusCode != 200 {
		t.Errorf("got %d", a.StatusCode)
	}
	if kept := cap(p.gateway.ring.last); kept != 0 {
		t.Errorf("the gateway keeps %d requests", kept)
	}
}

// A client that left while its request waited is 499 in metrics and in the record of the request.
func TestAClientThatLeftIs499(t *testing.T) {
	t.Parallel()
	p := full(t, nil)
	ctx, leave := context.WithCancel(t.Context())
	var group sync.WaitGroup
	p.occupy(ctx, &group, `{"model":"m"}`, "X-Request-Id", "left")
	workertest.WaitFor(t, func() bool { return p.state().Waiting["default"] == 1 })
	leave()
	group.Wait()
	workertest.WaitFor(t, func() bool { _, known := p.gateway.Explain("left"); return known })
	if e, _ := p.gateway.Explain("left"); e.Status != statusLeft || e.Trace.Dropped != DropCancelled {
		t.Errorf("got %d %s", e.Status, e.Trace.Dropped)
	}
}

// Anthropic's clients send their key in a header of its own.
func TestAKeyMayComeAsAnthropicsClientsSendIt(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, func(c *Config, _ *ModelState) { c.Open = false }, workertest.Says(200, "{}"))
	p.gateway.SetTokens([]TokenState{{Hash: sha256.Sum256([]byte("key")), Name: "a"}})
	if a := p.post("/v1/messages", `{"model":"m"}`, "X-Api-Key", "key"); a.StatusCode != 200 {
		t.Errorf("got %d %s", a.StatusCode, a.body)
	}
}

// Requests of a session, of a prompt_cache_key, and of a long prefix go to one instance each, the same from each of two
// gateways, and those of different ones to different instances.
func TestWhatBelongsTogetherGoesToOneInstance(t *testing.T) {
	t.Parallel()
	server := func(n int) http.HandlerFunc { return workertest.Says(200, fmt.Sprintf(`{"instance":%d}`, n)) }
	prompt := func(key int) string { return strings.Repeat(fmt.Sprintf("%04d", key), prefixBlock) }
	for name, send := range map[string]func(p *testbed, key int) reply{
		"session": func(p *testbed, key int) reply {
			return p.post(chat, `{"model":"m"}`, "X-Penstock-Session", fmt.Sprint(key))
		},
		"prompt_cache_key": func(p *testbed, key int) reply {
			return p.post(chat, fmt.Sprintf(`{"model":"m","prompt_cache_key":"%d"}`, key))
		},
		"prefix of messages": func(p *testbed, key int) reply {
			return p.post(chat, fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":"%s"}]}`, prompt(key)))
		},
		"prefix of a prompt": func(p *testbed, key int) reply {
			return p.post("/v1/completions", fmt.Sprintf(`{"model":"m","prompt":"%s"}`, prompt(key)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			first := startTestbed(t, nil, server(1), server(2))
			second := startTestbed(t, nil, server(1), server(2))
			homes := map[string]bool{}
			for key := range 12 {
				home := send(first, key).body
				homes[home] = true
				for _, p := range []*testbed{first, second, second} {
					if got := send(p, key).body; got != home {
						t.Errorf("request of %d went to %s, and the one before to %s", key, got, home)
					}
				}
			}
			if len(homes) != 2 {
				t.Errorf("all went to %v", homes)
			}
		})
	}
}

// Workers name runs by the idempotency key, also those of entries: a key of a client is its own, the same each time.
func TestIdempotencyKeysOfClientsDoNotMeetAtAWorker(t *testing.T) {
	t.Parallel()
	seen := make(chan string, 1)
	p := startTestbed(t, func(c *Config, _ *ModelState) { c.Open = false }, func(w http.ResponseWriter, r *http.Request) {
		seen <- r.Header.Get("Idempotency-Key")
		workertest.Says(200, "{}")(w, r)
	})
	p.gateway.SetTokens([]TokenState{
		{Hash: sha256.Sum256([]byte("1")), Name: "a"}, {Hash: sha256.Sum256([]byte("2")), Name: "b"},
	})
	send := func(token, flow, key string) string {
		p.post(chat, `{"model":"m"}`, "Authorization", "Bearer "+token, "X-Penstock-Flow", flow, "Idempotency-Key", key)
		return <-seen
	}
	first := send("1", "a", "17-3")
	if first != send("1", "a", "17-3") {
		t.Error("a key that is sent again is another one")
	}
	all := map[string]bool{"17-3": true, first: true}
	for _, other := range []string{send("2", "b", "17-3"), send("1", "a/x", "17-3"), send("1", "a", "17-4")} {
		if all[other] {
			t.Errorf("%q is the key of two clients", other)
		}
		all[other] = true
	}
	p.post(chat, `{"model":"m"}`, "Authorization", "Bearer 1")
	if key := <-seen; key != "" {
		t.Errorf("a request without a key has %q", key)
	}
}

// Servers take JSON under its own type alone: what the gateway has read as JSON goes on as that, whatever the client says.
func TestJSONGoesOnUnderItsType(t *testing.T) {
	t.Parallel()
	seen := make(chan string, 1)
	p := startTestbed(t, nil, func(w http.ResponseWriter, r *http.Request) {
		seen <- r.Header.Get("Content-Type")
		workertest.Says(200, "{}")(w, r)
	})
	for sent, want := range map[string]string{
		"application/x-www-form-urlencoded": "application/json", "": "application/json", "text/plain": "application/json",
		"application/json": "application/json", "application/json; charset=utf-8": "application/json; charset=utf-8",
	} {
		p.post(chat, `{"model":"m"}`, "Content-Type", sent)
		if got := <-seen; got != want {
			t.Errorf("%q goes on as %q, want %q", sent, got, want)
		}
	}
}
