package main

import (
	"bytes"
	"context"
	"runtime/metrics"
	"testing"
	"testing/synctest"
	"time"
)

func TestCollectionsComeWhereTheRuntimeHasNone(t *testing.T) {
	t.Parallel()
	start := time.Now()
	const mib = 1 << 20
	last := heapReading{at: start, cycles: 7, automatic: 4, allocated: 100 * mib, live: 16 * mib, goroutines: 420}
	later := func(d time.Duration, grown uint64, change func(*heapReading)) heapReading {
		now := last
		now.at, now.allocated = start.Add(d), last.allocated+grown
		if change != nil {
			change(&now)
		}
		return now
	}
	for _, c := range []struct {
		name  string
		quiet time.Duration // before the last reading
		now   heapReading
		want  bool
	}{
		{"an eighth of what is in use was allocated", time.Minute, later(2*time.Second, 2*mib, nil), true},
		{"less was", time.Minute, later(2*time.Second, 2*mib-1, nil), false},
		{"little is in use, and less than a MiB was", time.Minute, later(2*time.Second, mib-1, func(h *heapReading) {
			h.live = mib
		}), false},
		{"a quarter of the goroutines has ended", time.Minute, later(2*time.Second, 0, func(h *heapReading) {
			h.goroutines = 315
		}), true},
		{"fewer have", time.Minute, later(2*time.Second, 0, func(h *heapReading) { h.goroutines = 316 }), false},
		{"the last one was a moment ago", time.Minute, later(900*time.Millisecond, 8*mib, nil), false},
		{"the last one of a large heap was a minute ago", time.Minute, later(time.Minute, 1<<30, func(h *heapReading) {
			h.live = 1 << 30
		}), false},
		{"the runtime collects by itself", 4 * time.Second, later(900*time.Millisecond, 8*mib, nil), false},
		{"the runtime has just collected", time.Minute, later(2*time.Second, 8*mib, func(h *heapReading) {
			h.cycles, h.automatic = 8, 5
		}), false},
		{"it has done so five seconds ago", 3 * time.Second, later(2*time.Second, 8*mib, nil), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			k := collector{last: last, most: last.goroutines, automatic: last.automatic, quiet: start.Add(-c.quiet)}
			if got := k.due(c.now); got != c.want {
				t.Errorf("due is %v, want %v", got, c.want)
			}
		})
	}
}

// garbage is what the test has allocated last.
var garbage []byte

func TestGarbageOfAQuietProcessIsCollected(t *testing.T) {
	ordered := func(h heapReading) uint64 { return h.cycles - h.automatic }
	before := ordered(readHeap())
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go new(collector).run(ctx)
		for range 600 {
			if ordered(readHeap()) > before {
				return
			}
			garbage = make([]byte, 128<<10) // in five seconds less than the smallest heap at which the runtime collects
			time.Sleep(time.Second)
		}
		t.Error("no collection beside those of the runtime")
	})
}

// It runs beside no other test: what is read is that of the process.
func TestMemoryOfASmallHeapGoesBackToTheSystem(t *testing.T) {
	const size = 64 << 20
	released := func() uint64 {
		s := []metrics.Sample{{Name: "/memory/classes/heap/released:bytes"}}
		metrics.Read(s)
		return s[0].Value.Uint64()
	}
	garbage = bytes.Repeat([]byte{1}, size)
	before := released()
	garbage = nil
	collect(releaseMax)
	if after := released(); after < before+size/2 {
		t.Errorf("%d MiB are released, want %d MiB more than the %d before", after>>20, size>>21, before>>20)
	}
}
