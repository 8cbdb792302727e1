package main

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/inference"
)

// register registers an instance of the model again, or a new one.
func (s *site) register(server, address string, slots int) {
	s.Helper()
	_, err := inference.RegisterInstance(s.Context(), s.pool, "m", server, address, slots, nil, inference.By{Reason: "test"})
	if err != nil {
		s.Fatal(err)
	}
}

// An instance that is registered again with fewer slots gets no call beyond them once those that run have ended.
func TestInstanceRegisteredAgainWithFewerSlotsGetsFewerCalls(t *testing.T) {
	t.Parallel()
	s := newSite(t, 10)
	f := s.startGateway(nil)
	var held sync.WaitGroup
	for range 8 {
		held.Go(func() {
			if _, _, err := f.ask(t.Context(), `{"model":"m","messages":[],"hold_online":true}`); err != nil {
				t.Error(err)
			}
		})
	}
	s.eventually("8 calls run", func() bool { running, _, _ := s.gpu.counts(); return running == 8 })
	s.register("gpu-1", s.gpu.URL, 4)
	s.eventually("the gateway knows", func() bool {
		states := f.gateway.States()
		return len(states) == 1 && states[0].Instances[0].Slots == 4
	})
	close(s.gpu.online) // calls that hold end at once from now on
	held.Wait()
	s.eventually("no call runs", func() bool { running, _, _ := s.gpu.counts(); return running == 0 })
	s.gpu.mu.Lock()
	s.gpu.slots, s.gpu.most = 4, 0
	s.gpu.mu.Unlock()
	f.burst(t, 40, quick)
	if _, most, _ := s.gpu.counts(); most > 4 {
		t.Errorf("%d calls at once on 4 slots", most)
	}
}

// However many instances change in a second, a gateway reads the registry once a second; none of the requests that run
// meanwhile is lost, and no slot is used twice.
func TestRegistryStormIsReadOnceASecond(t *testing.T) {
	t.Parallel()
	s := newSite(t, 8)
	others := startGPU(t)
	var readings atomic.Int64
	s.changed = func() { readings.Add(1) }
	f := s.startGateway(nil)
	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	var served atomic.Int64
	for range 12 {
		clients.Go(func() {
			for ctx.Err() == nil {
				if status, _, err := f.ask(context.WithoutCancel(ctx), quick); status != http.StatusOK {
					t.Error(status, err)
					return
				}
				served.Add(1)
			}
		})
	}
	s.eventually("requests are served", func() bool { return served.Load() > 10 })
	began, before := time.Now(), readings.Load()
	const changes = 60
	for n := range changes {
		s.register("gpu-1", s.gpu.URL, 4+n%5)
		s.register(fmt.Sprint("gpu-", 2+n%40), others.URL, 1+n%3)
		s.exec(`UPDATE penstock.instance SET draining_at = CASE WHEN id % 2 = $1 THEN now() END WHERE server <> 'gpu-1'`, n%2)
	}
	took, read := time.Since(began), readings.Load()-before
	t.Logf("%.0f changes/s, %d readings in %s", 3*changes/took.Seconds(), read, took)
	if most := int64(took.Seconds()) + 2; read > most {
		t.Errorf("the registry was read %d times in %s, want %d at most", read, took, most)
	}
	stop()
	clients.Wait()
	if _, most, _ := s.gpu.counts(); most > 8 {
		t.Errorf("%d calls at once on 8 slots", most)
	}
}
