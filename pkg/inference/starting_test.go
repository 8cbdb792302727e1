package inference

import (
	"context"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

func TestAStartIsWatchedInStepsThatGrowWithIt(t *testing.T) {
	for watched, want := range map[time.Duration]time.Duration{
		0: watchStepMin, time.Second: watchStepMin, 10 * time.Second: 200 * time.Millisecond, time.Hour: watchStepMax,
	} {
		if got := watchStep(watched); got != want {
			t.Errorf("after %v: %v, want %v", watched, got, want)
		}
	}
}

func TestAnInstanceThatNeverServedIsStarting(t *testing.T) {
	for name, c := range map[string]struct {
		before Endpoint
		now    worker.HealthState
		want   bool
	}{
		"it says so":                       {Endpoint{State: worker.StateReady}, worker.StateStarting, true},
		"nothing listens yet":              {Endpoint{State: worker.StateStarting}, worker.StateUnhealthy, true},
		"nothing listens yet, known as so": {Endpoint{State: worker.StateUnhealthy, Starts: true}, worker.StateUnhealthy, true},
		"it served before":                 {Endpoint{State: worker.StateReady}, worker.StateUnhealthy, false},
		"it serves":                        {Endpoint{State: worker.StateStarting, Starts: true}, worker.StateReady, false},
	} {
		if got := isStarting(found{worker.Health{State: c.now}, &c.before}); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// Between two probes of the ordinary kind an hour passes here: the hint has the instance probed, and the watch finds it
// ready once its server listens.
func TestAnAnnouncedInstanceIsReadyWhenItsServerListens(t *testing.T) {
	b := newBed(t, worker.Model{})
	listener, err := new(net.ListenConfig).Listen(b.ctx, "tcp", "127.0.0.1:0")
	b.must(err)
	address := listener.Addr().String()
	listener.Close()
	registry := NewRegistry(b.pool, worker.Config{}, time.Hour, quiet)
	b.must(registry.Refresh(b.ctx))
	prober := NewProber(ProberConfig{Interval: time.Hour}, b.pool, registry, quiet)
	ctx, stop := context.WithCancel(b.ctx)
	var running sync.WaitGroup
	running.Go(func() { _ = prober.Run(ctx) })
	t.Cleanup(func() { stop(); running.Wait() })

	_, err = b.pool.Exec(b.ctx, `SELECT penstock.announce_instance($1, 'gpu-1', $2, 1)`, b.model.Name, "http://"+address+"/run")
	b.must(err)
	prober.Wake()
	b.await(1, `SELECT count(*) FROM penstock.instance WHERE checked_at IS NOT NULL AND state = 'unhealthy'`)
	server := &http.Server{Addr: address, ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"status": "ok"}`))
	})}
	running.Go(func() { _ = server.ListenAndServe() })
	t.Cleanup(func() { server.Close() })
	b.await(1, `SELECT count(*) FROM penstock.instance WHERE state = 'ready'`)
}
