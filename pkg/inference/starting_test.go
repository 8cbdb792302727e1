package inference

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
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

// starter is a server that is asked for its health: it answers 503 until it serves.
type starter struct {
	*httptest.Server
	says   atomic.Pointer[string] // the reason of the 503
	serves atomic.Bool
}

func (b *bed) starter(says string) *starter {
	b.Helper()
	s := &starter{}
	s.says.Store(&says)
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if s.serves.Load() {
			_, _ = io.WriteString(w, `{"status": "ok"}`)
			return
		}
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = io.WriteString(w, `{"detail": "`+*s.says.Load()+`"}`)
	}))
	b.Cleanup(s.Close)
	return s
}

// prober runs until the test ends, beside a registry.
func (b *bed) prober(t tuning, poll time.Duration) *Prober {
	b.Helper()
	registry := NewRegistry(b.pool, worker.Config{}, poll, quiet)
	b.must(registry.Refresh(b.ctx))
	prober := newProber(t, b.pool, registry, quiet)
	ctx, stop := context.WithCancel(b.ctx)
	var running sync.WaitGroup
	running.Go(func() { _ = registry.Run(ctx) })
	running.Go(func() { _ = prober.Run(ctx) })
	b.Cleanup(func() { stop(); running.Wait() })
	return prober
}

// watches returns when so many starts are watched.
func (b *bed) watches(p *Prober, want int) {
	b.Helper()
	for end := time.Now().Add(time.Minute); len(p.starts) != want; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			b.Fatalf("%d starts are watched, want %d", len(p.starts), want)
		}
	}
}

// Between two probes of the ordinary kind an hour passes here: the hint has the instance probed, and the watch finds it
// ready once its server answers.
func TestAnAnnouncedInstanceIsReadyWhenItsServerIs(t *testing.T) {
	b := newBed(t, worker.Model{})
	s := b.starter("not yet")
	prober := b.prober(tuned(func(t *tuning) { t.probeEvery = time.Hour }), time.Hour)
	_, err := b.pool.Exec(b.ctx, `SELECT penstock.announce_instance($1, 'gpu-1', $2, 1)`, b.model.Name, s.URL+"/run")
	b.must(err)
	prober.Wake()
	b.await(1, `SELECT count(*) FROM penstock.instance WHERE checked_at IS NOT NULL AND state = 'unhealthy'`)
	s.serves.Store(true)
	b.await(1, `SELECT count(*) FROM penstock.instance WHERE state = 'ready'`)
}

// A stall of the database lapses the claim on a probe that runs, and the process claims it again. A start would be
// watched once more with each stall.
func TestAProbeThatRunsIsNotBegunAgain(t *testing.T) {
	b := newBed(t, worker.Model{})
	id := b.instance("gpu-1", b.starter("loading").URL, 1)
	registry := NewRegistry(b.pool, worker.Config{}, 0, quiet)
	b.must(registry.Refresh(b.ctx))
	prober := newProber(tuned(func(t *tuning) { t.probeEvery = time.Hour }), b.pool, registry, quiet)
	ctx, stop := context.WithCancel(b.ctx)
	var probes sync.WaitGroup
	probing := make(chan struct{}, probesMax)
	prober.begin(ctx, []int32{id}, &probes, probing)
	b.watches(prober, 1)
	prober.begin(ctx, []int32{id}, &probes, probing)
	if len(probing) != 0 {
		t.Error("an instance is probed whose start is watched")
	}
	stop()
	probes.Wait()
	ctx, stop = context.WithCancel(b.ctx)
	prober.begin(ctx, []int32{id}, &probes, probing)
	b.watches(prober, 1) // one that has ended is begun again
	stop()
	probes.Wait()
}

// Nobody else probes an instance whose start is watched.
func TestOrphanedSlotsOfAWatchedStartAreFreed(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.instance("gpu-1", b.starter("loading").URL, 1)
	b.lease(b.node(time.Hour), 1)
	prober := b.prober(tuned(func(t *tuning) { t.probeEvery, t.probeGrace = 100*time.Millisecond, time.Millisecond }), 10*time.Millisecond)
	b.watches(prober, 1)
	_, err := b.pool.Exec(b.ctx, `UPDATE penstock.slot SET doubt_at = clock_timestamp()`)
	b.must(err)
	b.await(0, `SELECT count(*) FROM penstock.slot`)
}

func TestAnInstanceThatFailsAfterItsStartIsWatchedNoMore(t *testing.T) {
	b := newBed(t, worker.Model{})
	s := b.starter("loading")
	b.instance("gpu-1", s.URL, 1)
	prober := b.prober(tuned(func(t *tuning) { t.probeEvery = 100 * time.Millisecond }), 10*time.Millisecond)
	b.watches(prober, 1)
	failed := "out of memory"
	s.says.Store(&failed)
	b.await(1, `SELECT count(*) FROM penstock.instance WHERE state = 'unhealthy'`)
	b.watches(prober, 0)
}

// One probe that fails does not take an instance that serves away from all clients of its model.
func TestTheSecondProbeThatFailsDecides(t *testing.T) {
	b := newBed(t, worker.Model{})
	var asked, fails atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if asked.Add(1) <= fails.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_, _ = io.WriteString(w, `{}`)
	}))
	b.Cleanup(server.Close)
	id := b.instance("gpu-1", server.URL, 1)
	registry := NewRegistry(b.pool, worker.Config{}, 0, quiet)
	prober := newProber(usualTuning(), b.pool, registry, quiet)
	for _, c := range []struct {
		name          string
		before, after worker.HealthState
		fails, asked  int32
	}{
		{"a moment", worker.StateReady, worker.StateReady, 1, 2},
		{"for longer", worker.StateReady, worker.StateUnhealthy, 2, 2},
		{"as before", worker.StateUnhealthy, worker.StateUnhealthy, 1, 1},
		{"not at all", worker.StateUnhealthy, worker.StateReady, 0, 1},
	} {
		_, err := b.pool.Exec(b.ctx, `UPDATE penstock.instance SET state = $1`, c.before)
		b.must(err)
		b.must(registry.Refresh(b.ctx))
		asked.Store(0)
		fails.Store(c.fails)
		_, err = prober.probe(b.ctx, id)
		b.must(err)
		if n := b.count(`SELECT count(*) FROM penstock.instance WHERE state = $1`, c.after); n != 1 || asked.Load() != c.asked {
			t.Errorf("%s: after %d probes it is not %s", c.name, asked.Load(), c.after)
		}
	}
}

func TestAnInstanceIsProbedOnceMoreOnlyWhereItMayPass(t *testing.T) {
	model := worker.Model{Name: "m"}.WithDefaults()
	const ill, ready = worker.StateUnhealthy, worker.StateReady
	for name, c := range map[string]struct {
		before worker.HealthState
		now    worker.Health
		took   time.Duration
		want   bool
	}{
		"busy for a moment": {ready, worker.Health{State: ill}, time.Second, true},
		"busy":              {worker.StateBusy, worker.Health{State: ill, Unreached: true}, 5 * time.Second, true},
		"no server":         {ready, worker.Health{State: ill, Gone: true}, 0, false},
		"it hangs":          {ready, worker.Health{State: ill, Unreached: true}, model.Timeouts.Probe.Duration(), false},
		"it was ill":        {ill, worker.Health{State: ill}, 0, false},
		"it is loading":     {ready, worker.Health{State: worker.StateStarting}, 0, false},
		"unknown so far":    {"", worker.Health{State: ill}, 0, false},
	} {
		if got := mayPass(&Endpoint{Model: model, State: c.before}, c.now, c.took); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
