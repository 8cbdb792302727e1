package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// noisyFor is how long each part of the comparison lasts and how many entries make the noise: little, or what
// PENSTOCK_NOISY says (`make noisy` sets 1 m) and 200,000.
func noisyFor(t *testing.T) (long time.Duration, entries int) {
	t.Helper()
	text := os.Getenv("PENSTOCK_NOISY")
	if text == "" {
		return 4 * time.Second, 40_000
	}
	long, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("read PENSTOCK_NOISY: %v", err)
	}
	return long, 200_000
}

// quiet is a tenant that pushes one entry now and then, and notes how long each waits until it runs, and how many entries
// of the other tenant begin meanwhile.
type quiet struct {
	*fleet
	queue  *invalidation.Queue
	noise  atomic.Int64 // entries of the other tenant that have begun
	mu     sync.Mutex
	pushed map[string]chan start

	overtaken counts // for each entry pushed since it was last emptied
}

// start is when an entry began, and how many of the other tenant had by then.
type start struct {
	at    time.Time
	noise int64
}

func newQuiet(f *fleet) *quiet {
	return &quiet{fleet: f, queue: f.queue(invalidation.Config{ResultRetention: -1}), pushed: map[string]chan start{}}
}

// wait pushes an entry every 200 ms for that long.
func (x *quiet) wait(long time.Duration) *waits {
	const every = 200 * time.Millisecond
	return x.waitFor(int((long+every-1)/every), every)
}

// waitFor pushes n entries, one after the other has run and at least `every` apart.
func (x *quiet) waitFor(n int, every time.Duration) *waits {
	w := &waits{}
	for range n {
		name := fmt.Sprint(len(x.pushed))
		started := make(chan start, 1)
		x.mu.Lock()
		x.pushed[name] = started
		x.mu.Unlock()
		before := time.Now()
		x.push(x.queue, invalidation.Push{Flow: "quiet", Name: name, Payload: json.RawMessage(`{}`)})
		accepted := x.noise.Load()
		select {
		case began := <-started:
			w.add(began.at.Sub(before))
			x.overtaken = append(x.overtaken, max(0, began.noise-accepted))
		case <-time.After(5 * time.Minute):
			x.Fatal("the quiet tenant's entry does not run")
		}
		time.Sleep(max(0, every-time.Since(before)))
	}
	return w
}

// ran notes that an entry has begun; those of the other tenant have no name.
func (x *quiet) ran(name string) {
	if name == "" {
		x.noise.Add(1)
		return
	}
	now := start{time.Now(), x.noise.Load()}
	x.mu.Lock()
	x.pushed[name] <- now
	x.mu.Unlock()
}

// One tenant has 40,000 entries over 5,000 keys in line, another one pushes one now and then. Of the noisy tenant's entries
// no more begin before it than the threads have in hand, twice in the median and sixteen times at most: the backlog is two
// orders of magnitude more. With PENSTOCK_NOISY it waits at most twice as long as in an empty system, at the 95th percentile.
func TestTimedNoisyNeighbourLeavesTheQuietOneItsWait(t *testing.T) {
	const nodes, threads = 2, 16
	f := newFleet(t)
	long, entries := noisyFor(t)
	x := newQuiet(f)
	f.start(nodes, threads, func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
		x.ran(r.Entry.Name)
		time.Sleep(10 * time.Millisecond)
		return nil, nil
	})
	x.wait(time.Second) // nodes come up
	timed := os.Getenv("PENSTOCK_NOISY") != ""
	alone := &waits{}
	if timed {
		alone = x.wait(long)
	}
	noisy := make([]invalidation.Push, entries)
	for i := range noisy {
		noisy[i] = invalidation.Push{Flow: "noisy", LockKey: fmt.Sprint("key-", i%5000), Payload: json.RawMessage(`{}`)}
	}
	f.push(x.queue, noisy...)
	x.noise.Store(0)
	x.overtaken = nil
	began := time.Now()
	beside := x.wait(long)
	ran, rate := x.noise.Load(), float64(x.noise.Load())/time.Since(began).Seconds()
	t.Logf("alone: %v", alone)
	t.Logf("beside %d entries over 5000 keys: %v; the noisy tenant ran %d, %.0f/s", entries, beside, ran, rate)
	if int(ran) == len(noisy) {
		t.Error("the noisy tenant was done before the end: the comparison says nothing")
	}
	x.overtaken.hold(t, 0.5, 2*nodes*threads)
	x.overtaken.hold(t, 1, 16*nodes*threads)
	if timed && beside.at(0.95) > 2*alone.at(0.95) {
		t.Errorf("the quiet tenant's p95 wait is %.1f ms beside the noisy one and %.1f ms alone: more than twice", ms(beside.at(0.95)), ms(alone.at(0.95)))
	}
}

// Slots are what is scarce, and the noisy tenant's lock keys are long: a group that has run an entry gives its slot to a
// tenant that has used less. Each slot begins at most two of the noisy tenant's entries while the quiet one waits, at the
// 95th percentile, and sixteen at most. `make quiet` compares the wait with that in an empty system.
func TestTimedQuietTenantWaitsForNoGroupWhereSlotsAreScarce(t *testing.T) {
	const (
		run   = 100 * time.Millisecond
		nodes = 2
		slots = 4 // of each node
		waits = 60
		every = 50 * time.Millisecond
	)
	for name, keys := range map[string]int{"solo": 0, "groups": 50} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFleet(t)
			x := newQuiet(f)
			f.startWithSlots(nodes, 16, slots, func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
				x.ran(r.Entry.Name)
				time.Sleep(run)
				return nil, nil
			})
			x.waitFor(5, every) // nodes come up
			noisy := make([]invalidation.Push, 4000)
			for i := range noisy {
				noisy[i] = invalidation.Push{Flow: "noisy", Payload: json.RawMessage(`{}`)}
				if keys > 0 {
					noisy[i].LockKey = fmt.Sprint("key-", i%keys)
				}
			}
			f.push(x.queue, noisy...)
			// Two seconds of work: the quiet tenant comes back after longer than fairness overlooks, to claimed groups.
			for limit := time.Now().Add(5 * time.Minute); x.noise.Load() < 2*nodes*slots*int64(time.Second/run); {
				if time.Now().After(limit) {
					t.Fatalf("the noisy tenant ran %d entries in five minutes", x.noise.Load())
				}
				time.Sleep(10 * time.Millisecond)
			}
			x.overtaken = nil
			beside := x.waitFor(waits, every)
			t.Logf("beside %d entries over %d keys: %v", len(noisy), keys, beside)
			if int(x.noise.Load()) == len(noisy) {
				t.Error("the noisy tenant was done before the end: the comparison says nothing")
			}
			x.overtaken.hold(t, 0.95, 2*nodes*slots)
			x.overtaken.hold(t, 1, 16*nodes*slots)
		})
	}
}

// counts are of the other tenant's entries that began while one of the quiet tenant waited.
type counts []int64

// hold fails the test if the q-quantile is above most.
func (c counts) hold(t *testing.T, q float64, most int64) {
	t.Helper()
	sorted := slices.Sorted(slices.Values(c))
	got := sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
	t.Logf("entries of the noisy tenant that began while the quiet one waited, the %g-quantile: %d, at most %d", q, got, most)
	if got > most {
		t.Errorf("%d entries of the noisy tenant began while the quiet one waited, at the %g-quantile, want at most %d: %v", got, q, most, c)
	}
}
