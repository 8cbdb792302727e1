package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// noisyFor is how long each half of the comparison lasts: a few seconds, or PENSTOCK_NOISY (`make noisy` sets 1 m).
func noisyFor(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("PENSTOCK_NOISY")
	if text == "" {
		return 5 * time.Second
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("read PENSTOCK_NOISY: %v", err)
	}
	return d
}

// quiet is a tenant that pushes one entry now and then, and notes how long each waits until it runs.
type quiet struct {
	*fleet
	queue  *invalidation.Queue
	mu     sync.Mutex
	pushed map[string]chan time.Time
}

// wait pushes an entry every 200 ms for that long.
func (x *quiet) wait(long time.Duration) *waits {
	w := &waits{}
	for i := 0; time.Duration(i)*200*time.Millisecond < long; i++ {
		name := fmt.Sprint(len(x.pushed))
		started := make(chan time.Time, 1)
		x.mu.Lock()
		x.pushed[name] = started
		x.mu.Unlock()
		before := time.Now()
		x.push(x.queue, invalidation.Push{Flow: "quiet", Name: name, Payload: json.RawMessage(`{}`)})
		select {
		case at := <-started:
			w.add(at.Sub(before))
		case <-time.After(30 * time.Second):
			x.Fatal("the quiet tenant's entry does not run")
		}
		time.Sleep(max(0, 200*time.Millisecond-time.Since(before)))
	}
	return w
}

func (x *quiet) ran(name string) {
	now := time.Now()
	x.mu.Lock()
	x.pushed[name] <- now
	x.mu.Unlock()
}

// One tenant has 200,000 entries over 5,000 keys in line, another one pushes one now and then: it waits at most twice
// as long as in an empty system, at the 95th percentile.
func TestNoisyNeighbourLeavesTheQuietOneItsWait(t *testing.T) {
	f := newFleet(t)
	long := noisyFor(t)
	x := &quiet{fleet: f, queue: f.queue("work", invalidation.Config{ResultRetention: -1}), pushed: map[string]chan time.Time{}}
	var noise atomic.Int64
	f.start(2, 16, func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
		if r.Entry.Name != "" {
			x.ran(r.Entry.Name)
		} else {
			noise.Add(1)
		}
		time.Sleep(10 * time.Millisecond)
		return nil, nil
	})
	x.wait(time.Second) // nodes come up
	alone := x.wait(long)
	noisy := make([]invalidation.Push, 200_000)
	for i := range noisy {
		noisy[i] = invalidation.Push{Flow: "noisy", LockKey: fmt.Sprint("key-", i%5000), Payload: json.RawMessage(`{}`)}
	}
	f.push(x.queue, noisy...)
	noise.Store(0)
	began := time.Now()
	beside := x.wait(long)
	ran, rate := noise.Load(), float64(noise.Load())/time.Since(began).Seconds()
	t.Logf("alone: %v", alone)
	t.Logf("beside 200,000 entries over 5,000 keys: %v; the noisy tenant ran %d, %.0f/s", beside, ran, rate)
	if int(ran) == len(noisy) {
		t.Error("the noisy tenant was done before the end: the comparison says nothing")
	}
	if beside.at(0.95) > 2*alone.at(0.95) {
		t.Errorf("the quiet tenant's p95 wait is %.1f ms beside the noisy one, more than twice %.1f ms", ms(beside.at(0.95)), ms(alone.at(0.95)))
	}
}
