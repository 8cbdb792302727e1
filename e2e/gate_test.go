package e2e_test

import (
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/penstock/penstock/pkg/worker"
)

// gate is a worker whose calls end when the test lets them: how much a node holds at a moment does not depend on how
// long the machine took to get there.
type gate struct {
	*httptest.Server
	mu      sync.Mutex
	calls   int // that were made
	running int
	open    int           // how many calls may end, in the order in which they were made
	opened  chan struct{} // closed when more may
}

func startGate(t *testing.T, slots int) *gate {
	t.Helper()
	g := &gate{opened: make(chan struct{})}
	g.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.Method != http.MethodPost {
			g.mu.Lock()
			defer g.mu.Unlock()
			fmt.Fprintf(w, `{"status": "ok", "active_jobs": %d, "max_jobs": %d}`, g.running, slots)
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		if g.wait(r) {
			_, _ = io.WriteString(w, `{"status": "success", "result": 1}`)
		}
	}))
	t.Cleanup(func() { g.CloseClientConnections(); g.Close() })
	return g
}

// wait returns when a call may end, and true, or when its caller has gone.
func (g *gate) wait(r *http.Request) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.calls++
	g.running++
	defer func() { g.running-- }()
	for number := g.calls; number > g.open; {
		opened := g.opened
		g.mu.Unlock()
		select {
		case <-opened:
		case <-r.Context().Done():
		}
		g.mu.Lock()
		if r.Context().Err() != nil {
			return false
		}
	}
	return true
}

// letEnd lets the first so many calls end. Those behind them wait.
func (g *gate) letEnd(calls int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = calls
	close(g.opened)
	g.opened = make(chan struct{})
}

// letAllEnd lets every call end, later ones at once.
func (g *gate) letAllEnd() { g.letEnd(math.MaxInt) }

// shut lets no call end that is made from now on.
func (g *gate) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = g.calls
}

// newGatedPlant is a plant with a gate for a worker.
func newGatedPlant(t *testing.T, slots int) (*plant, *gate) {
	t.Helper()
	p, g := notedPlant(t), startGate(t, slots)
	p.queue = p.register(worker.Model{Name: "gated"}, slots, g.URL+"/run")
	return p, g
}
