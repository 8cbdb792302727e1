package gateway

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/penstock/penstock/pkg/worker/workertest"
)

// unfits are answers of instances that refuse the gateway itself.
var unfits = map[string]http.HandlerFunc{
	"another key": func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Www-Authenticate", "Bearer")
		workertest.Says(401, `{"error":"Unauthorized"}`)(w, r)
	},
	"another key, no body": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) },
	"not allowed":          workertest.Says(403, "Forbidden"),
	"a proxy before it":    workertest.Says(407, ""),
	"a redirect": func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "http://127.0.0.1:9/login", http.StatusTemporaryRedirect)
	},
}

// instanceOf returns what the pool holds against an instance.
func (p *testbed) instanceOf(id int32) (faults int, failing bool) {
	p.t.Helper()
	s := p.gateway.models.route("m").pool
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.pool.fleet.find(id)
	return i.faults, i.failing
}

// An instance that does not take the credentials of the gateway, sends it elsewhere, or does not have what was asked for
// has room again at once. Its calls go to another one, and it gets no more of them than one that fails.
func TestUnfitInstanceIsLeftForOthers(t *testing.T) {
	t.Parallel()
	for name, refuses := range unfits {
		t.Run(name, func(t *testing.T) { t.Parallel(); leftForOthers(t, refuses) })
	}
	for _, status := range []int{404, 405, 421} {
		t.Run(http.StatusText(status), func(t *testing.T) {
			t.Parallel()
			leftForOthers(t, workertest.Says(status, `{"detail":"Not Found"}`))
		})
	}
	t.Run("a port that takes TLS alone", func(t *testing.T) {
		t.Parallel()
		leftForOthers(t, workertest.Says(400, "Client sent an HTTP request to an HTTPS server.\n"))
	})
}

func leftForOthers(t *testing.T, refuses http.HandlerFunc) {
	book := &ledger{}
	p := startTestbed(t, func(c *Config, _ *ModelState) { c.Charge = book }, refuses, workertest.Says(200, "{}"))
	for range retrySavedMax / retryCost { // so many second attempts there may be
		if a := p.post(chat, `{"model":"m"}`); a.StatusCode != 200 {
			t.Errorf("got %d %s", a.StatusCode, a.body)
		}
	}
	if faults, failing := p.instanceOf(1); !failing {
		t.Errorf("the instance gets its share after %d refusals", faults)
	}
	book.mu.Lock()
	defer book.mu.Unlock()
	for _, c := range book.charges {
		if c.Wasted {
			t.Errorf("the client is charged a call that ran nothing: %+v", c)
		}
	}
}

// Where no other instance is sound the client is told that the worker is at fault, and not what the gateway was told:
// it would take its own token for invalid, or follow an address of the worker's network.
func TestRefusalOfTheGatewayIsNoAnswer(t *testing.T) {
	t.Parallel()
	for name, refuses := range unfits {
		for _, workers := range [][]http.HandlerFunc{{refuses}, {refuses, refuses}} {
			p := startTestbed(t, nil, workers...)
			a := p.post(chat, `{"model":"m"}`)
			refusedWith(t, a, http.StatusBadGateway, string(DropUpstream), string(DropUpstream))
			if a.Header.Get("Location") != "" || a.Header.Get("Www-Authenticate") != "" || strings.Contains(a.body, "127.0.0.1") {
				t.Errorf("%s: got %v %s", name, a.Header, a.body)
			}
			if e := p.gateway.ring.last[0]; e.Fault != faultStatus || e.Attempts != len(workers) {
				t.Errorf("%s at %d instances: fault %q after %d attempts", name, len(workers), e.Fault, e.Attempts)
			}
		}
	}
}

// What all instances that are asked do not have is the client's mistake: the answer passes, and nothing is held against
// them, also once second attempts are spent.
func TestAnswerThatNoInstanceHasWhatWasAskedForPasses(t *testing.T) {
	t.Parallel()
	const body = `{"error":{"message":"model \"m\" not found, try pulling it first","type":"api_error","param":null,"code":null}}`
	var calls atomic.Int32
	none := func(w http.ResponseWriter, r *http.Request) {
		calls.Add(1)
		workertest.Says(404, body)(w, r)
	}
	const requests = 40 // of which about 14 may be tried again
	for _, workers := range [][]http.HandlerFunc{{none}, {none, none}} {
		calls.Store(0)
		p := startTestbed(t, nil, workers...)
		for i := range requests {
			if a := p.post(chat, `{"model":"m"}`); a.StatusCode != 404 || a.body != body {
				t.Errorf("got %d %s", a.StatusCode, a.body)
			}
			workertest.WaitFor(t, func() bool { return p.state().InFlight == 0 })
			if n, asked := int(calls.Load()), i+1; asked == 5 && n != asked*len(workers) {
				t.Errorf("%d calls for %d requests to %d instances", n, asked, len(workers))
			}
		}
		if n := int(calls.Load()); len(workers) > 1 && n >= requests*len(workers) {
			t.Errorf("%d calls for %d requests: all were tried again", n, requests)
		}
		for id := range workers {
			if faults, failing := p.instanceOf(int32(id) + 1); failing || faults > 0 { //nolint:gosec // small
				t.Errorf("%d faults are held against instance %d of %d", faults, id+1, len(workers))
			}
		}
	}
}
