package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/pkg/scale/backend"
)

// provider is a receiver of orders of backend webhook, with instances of the model w that announce themselves. It answers
// badly, late, or not at all, and complains about each order that would stop a call.
type provider struct {
	*httptest.Server
	t    *testing.T
	pool *pgxpool.Pool

	mu         sync.Mutex
	draw       *rand.Rand
	calm       bool // it does as it is told
	last       int64
	desired    map[int64]int // by order
	instances  map[string]*hosted
	started    int
	stopped    int
	complaints []string
	running    sync.WaitGroup
}

// hosted is an instance of a provider.
type hosted struct {
	*httptest.Server
	name   string
	calls  int
	cancel context.CancelFunc
}

func startProvider(t *testing.T, pool *pgxpool.Pool, seed uint64) *provider {
	t.Helper()
	h := &provider{
		t: t, pool: pool, desired: map[int64]int{}, instances: map[string]*hosted{},
		draw: rand.New(rand.NewPCG(seed, 2)), //nolint:gosec // the same each time
	}
	h.Server = httptest.NewServer(http.HandlerFunc(h.answer))
	t.Cleanup(func() {
		h.Close()
		h.mu.Lock()
		for _, i := range h.instances {
			i.cancel()
		}
		h.mu.Unlock()
		h.running.Wait()
	})
	return h
}

// answer takes an order, or fails before, after or in the middle of it.
func (h *provider) answer(w http.ResponseWriter, r *http.Request) {
	var o backend.WebhookOrder
	if err := json.NewDecoder(r.Body).Decode(&o); err != nil {
		h.mu.Lock()
		h.complain("an order cannot be read: %v", err)
		h.mu.Unlock()
		return
	}
	h.mu.Lock()
	mode := h.draw.IntN(8)
	if h.calm {
		mode = 7
	}
	h.mu.Unlock()
	switch mode {
	case 0:
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	case 1: // it arrives behind later ones, which its number tells
		time.Sleep(2 * time.Second)
	}
	h.apply(o)
	switch mode {
	case 2: // twice
		h.apply(o)
	case 3: // it was carried out, and the sender does not know
		w.WriteHeader(http.StatusInternalServerError)
	case 4:
		panic(http.ErrAbortHandler)
	}
}

// apply does what an order says, unless a later one came before.
func (h *provider) apply(o backend.WebhookOrder) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n, known := h.desired[o.DecisionID]; known && n != o.Desired {
		h.complain("order %d was for %d, and is for %d", o.DecisionID, n, o.Desired)
	}
	h.desired[o.DecisionID] = o.Desired
	if o.DecisionID < h.last {
		return
	}
	h.last = o.DecisionID
	for _, name := range o.Remove {
		i := h.instances[name]
		if i == nil {
			continue
		}
		if i.calls > 0 {
			h.complain("order %d removes %s, where %d calls run", o.DecisionID, name, i.calls)
		}
		h.stopped++
		i.cancel()
		delete(h.instances, name)
	}
	for len(h.instances) < o.Desired {
		h.start()
	}
}

// complain notes what an order should not have been. The caller holds mu.
func (h *provider) complain(format string, args ...any) {
	h.complaints = append(h.complaints, fmt.Sprintf(format, args...))
}

// start starts an instance. The caller holds mu.
func (h *provider) start() {
	h.started++
	ctx, cancel := context.WithCancel(context.WithoutCancel(h.t.Context()))
	i := &hosted{name: fmt.Sprintf("gpu-%d", h.started), cancel: cancel}
	count := func(n int) func() {
		return func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			i.calls += n
		}
	}
	h.instances[i.name] = i
	h.running.Go(func() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(coldStart):
		}
		i.Server = httptest.NewServer(answering(count(1), count(-1), func() bool { return false }))
		defer i.Close()
		h.announce(ctx, i)
	})
}

// announce says again and again that an instance is there, until it is removed.
func (h *provider) announce(ctx context.Context, i *hosted) {
	for ctx.Err() == nil {
		var told string
		err := h.pool.QueryRow(ctx, `SELECT penstock.announce_instance('w', $1, $2, 2, '{}', '5 seconds', 'w', NULL, NULL, 'provider')`,
			i.name, i.URL).Scan(&told)
		h.mu.Lock()
		if err == nil && told == "stop" && i.calls > 0 {
			h.complain("%s is told to stop, where %d calls run", i.name, i.calls)
		}
		h.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// figures returns what the provider has, and what it complains about.
func (h *provider) figures() (instances, started, orders int, complaints []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.instances), h.started, len(h.desired), slices.Clone(h.complaints)
}

// settle has the provider do as it is told from now on.
func (h *provider) settle() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.calm = true
}
