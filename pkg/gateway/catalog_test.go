package gateway

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// A model is not called without one of its headers: they may be credentials, or name a tenant. The answer names the
// header, and neither its value nor the variable or file of its secret.
func TestModelWhoseHeadersCannotBeReadIsNotCalled(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ header, value string }{
		"control character": {"X-Tenant", "a\nb"},
		"no variable":       {"Authorization", "Bearer ${env:PENSTOCK_SECRET_OF_NO_ONE}"},
		"no file":           {"X-Key", "file:/nonexistent/key"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var log bytes.Buffer
			seen := make(chan http.Header, 4)
			p := startTestbed(t, func(config *Config, m *ModelState) {
				config.Log = slog.New(slog.NewTextHandler(&log, nil))
				m.Headers = map[string]string{"X-Plain": "1", c.header: c.value}
			}, func(w http.ResponseWriter, r *http.Request) {
				seen <- r.Header.Clone()
				workertest.Says(200, "{}")(w, r)
			})
			for _, model := range []string{"m", "lora-1", "m"} {
				answer := p.post(chat, `{"model":"`+model+`"}`)
				refusedWith(t, answer, 503, "no_endpoints", "no_endpoints")
				var body envelope
				want := "no_endpoints: the header " + c.header + " that the model is called with cannot be read"
				if err := json.Unmarshal([]byte(answer.body), &body); err != nil || body.Error.Message != want {
					t.Errorf("the message is %q, want %q", body.Error.Message, want)
				}
				if answer.Header.Get("Retry-After") == "" {
					t.Error("the answer has no Retry-After")
				}
			}
			if len(seen) > 0 {
				t.Errorf("the worker was called with %v", <-seen)
			}
			if n := strings.Count(log.String(), "\n"); n != 1 || !strings.Contains(log.String(), c.header) {
				t.Errorf("the log has %d lines: %s", n, log.String())
			}
			model := p.model
			model.Headers = map[string]string{c.header: "readable"}
			p.gateway.SetModels([]ModelState{model})
			if answer := p.post(chat, `{"model":"m"}`); answer.StatusCode != 200 {
				t.Fatalf("got %d %s", answer.StatusCode, answer.body)
			}
			if got := <-seen; got.Get(c.header) != "readable" {
				t.Errorf("the worker got %v", got)
			}
		})
	}
}

// Calls go to the address of the instance with its own query, and to models of the Open Inference Protocol by names
// that are escaped once.
func TestTheAddressOfACall(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		model         ModelState
		base, request string
		want          string
	}{
		{ModelState{Protocol: worker.ProtocolOIP, Remote: "org/model a"}, "/base", "", "/base/v2/models/org%2Fmodel%20a/infer"},
		{ModelState{Protocol: worker.ProtocolOIP, Remote: "m", Version: "1/2"}, "/a%2Fb/", "", "/a%2Fb/v2/models/m/versions/1%2F2/infer"},
		{ModelState{Protocol: worker.ProtocolOIP, Remote: "m", Operation: "generate"}, "", "", "/v2/models/m/generate"},
		{ModelState{Protocol: worker.ProtocolOIP, Remote: "m", Operation: "generate", Stream: true}, "", "", "/v2/models/m/generate_stream"},
		{ModelState{Protocol: worker.ProtocolGeneric}, "/run?key=k", "", "/run?key=k"},
		{ModelState{Protocol: worker.ProtocolGeneric}, "/run?key=k", "?x=1", "/run?key=k&x=1"},
		{ModelState{Protocol: worker.ProtocolGeneric}, "/run?key=k", "?key=other&x=1&ke=2", "/run?key=k&x=1&ke=2"},
		{ModelState{Protocol: worker.ProtocolGeneric}, "/run?a%20b=k&c", "?x=1&a+b=2&%63=3&C&c=4", "/run?a%20b=k&c&x=1"},
		{ModelState{Protocol: worker.ProtocolGeneric}, "/run?key=k", "?x=1;key=2&y=1;2", "/run?key=k&y=1;2"},
		{ModelState{Protocol: worker.ProtocolCog}, "", "?x=1", "/predictions?x=1"},
	} {
		seen := make(chan string, 1)
		p := startTestbed(t, func(_ *Config, m *ModelState) {
			c.model.Name, c.model.Policy, c.model.RunMax = m.Name, m.Policy, m.RunMax
			c.model.Instances = m.Instances
			c.model.Instances[0].Address += c.base
			*m = c.model
		}, func(w http.ResponseWriter, r *http.Request) {
			seen <- r.RequestURI
			workertest.Says(200, "{}")(w, r)
		})
		if a := p.post("/models/m/call"+c.request, `{}`); a.StatusCode != 200 {
			t.Fatalf("got %d %s", a.StatusCode, a.body)
		}
		if got := <-seen; got != c.want {
			t.Errorf("called %s, want %s", got, c.want)
		}
	}
}

// The pool of a model that was removed stays, for sums over all models: not so its memory of 100,000 prefixes.
func TestThePoolOfAModelThatWasRemovedRemembersNoPrefixes(t *testing.T) {
	t.Parallel()
	g := New(Config{Open: true})
	model := ModelState{
		Name: "a", Protocol: worker.ProtocolOpenAI, Policy: DefaultPolicy(),
		Instances: []InstanceState{{ID: 7, Server: "s", Address: "http://127.0.0.1:9", Slots: 1, Usable: true}},
	}
	remembered := func() (n int) {
		g.models.pools["a"].do(func(_ time.Time, p *Pool) { n = len(p.fleet.affinity.entries) })
		return n
	}
	g.SetModels([]ModelState{model})
	g.models.pools["a"].do(func(_ time.Time, p *Pool) { p.fleet.affinity.note(&Request{Session: 1, Prefix: []uint64{2, 3}}, 7) })
	if g.SetModels([]ModelState{model}); remembered() != 3 {
		t.Errorf("%d of 3 places are remembered of a model that stays", remembered())
	}
	g.SetModels(nil)
	if n := remembered(); n != 0 {
		t.Errorf("%d places are remembered of a model that is gone", n)
	}
}

// Sums over all pools must not fall, nor have one twice, while a model is removed or registered again.
func TestAPoolIsInOneOfTheTwoLists(t *testing.T) {
	t.Parallel()
	g := New(Config{Open: true})
	all := []ModelState{
		{Name: "a", Protocol: worker.ProtocolOpenAI, Policy: DefaultPolicy()},
		{Name: "b", Protocol: worker.ProtocolOpenAI, Policy: DefaultPolicy()},
	}
	g.SetModels(slices.Clone(all))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 1000 {
			g.SetModels(slices.Clone(all[:1+i%2]))
		}
	}()
	for ended := false; !ended; {
		select {
		case <-done:
			ended = true
		default:
		}
		if registered, former := g.AllStates(); len(registered)+len(former) != len(all) {
			t.Fatalf("%d pools are registered and %d were, want %d together", len(registered), len(former), len(all))
		}
	}
}
