package cron

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// history simulates a job under a clock that stops, runs, and jumps either way, with runs of any
// length, and records the firings. It is the engine's logic without a database.
type history struct {
	t       *Timetable
	overlap Overlap
	m       memory
	now     time.Time
	fired   []time.Time
	starts  []time.Time
	ends    []time.Time
}

// run fires at most one run now, which lasts for d.
func (h *history) run(d time.Duration) {
	s := h.t.plan("job", h.overlap, h.m, h.now)
	h.m = s.memory
	if !s.fire {
		return
	}
	h.fired, h.starts = append(h.fired, s.nominal), append(h.starts, h.now)
	h.now = h.now.Add(d)
	h.ends = append(h.ends, h.now)
	h.m.ended = h.now
}

func drawHistory(t *rapid.T, catchUp CatchUp, overlap Overlap, back bool) *history {
	specs := []string{"*/7 * * * *", "0 * * * *", "30 2 * * *"}
	if catchUp != CatchUpAll { // more often, and a history would have more nominal times than are ever caught up
		specs = append(specs, "* * * * *", "@every 90s", "*/5 * * * * *")
	}
	spec := rapid.SampledFrom(specs).Draw(t, "spec")
	zone := rapid.SampledFrom([]string{"UTC", "Europe/Berlin", "America/New_York"}).Draw(t, "zone")
	timetable, err := Parse(Schedule{Spec: spec, Zone: zone, CatchUp: catchUp, CatchUpMax: 1000})
	if err != nil {
		t.Fatal(err)
	}
	start := time.Date(2026, 3, 28, 20, 0, 0, 0, time.UTC).Add(time.Duration(rapid.IntRange(0, 1_000_000).Draw(t, "start")) * time.Second)
	h := &history{t: timetable, overlap: overlap, now: start, m: memory{handled: start}}
	lowest := 0
	if back {
		lowest = -3600
	}
	for range rapid.IntRange(1, 30).Draw(t, "steps") {
		h.now = h.now.Add(time.Duration(rapid.IntRange(lowest, 3600).Draw(t, "pause")) * time.Second)
		h.run(time.Duration(rapid.IntRange(0, 900).Draw(t, "run")) * time.Second)
	}
	return h
}

func TestNoNominalTimeFiresTwiceWhateverTheClockDoes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		catchUp := rapid.SampledFrom([]CatchUp{CatchUpNone, CatchUpLast, CatchUpAll}).Draw(t, "catch up")
		overlap := rapid.SampledFrom([]Overlap{OverlapSkip, OverlapQueue, OverlapCancel}).Draw(t, "overlap")
		h := drawHistory(t, catchUp, overlap, true)
		for i := 1; i < len(h.fired); i++ {
			if !h.fired[i].After(h.fired[i-1]) {
				t.Fatalf("%s fired after %s", h.fired[i], h.fired[i-1])
			}
		}
		for i, nominal := range h.fired {
			if nominal.After(h.starts[i]) {
				t.Fatalf("%s fired at %s, before its time", nominal, h.starts[i])
			}
		}
	})
}

func TestCatchUpAllWithQueueLosesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := drawHistory(t, CatchUpAll, OverlapQueue, false)
		for caughtUp := false; !caughtUp; {
			n := len(h.fired)
			h.run(0)
			caughtUp = len(h.fired) == n
		}
		if len(h.fired) == 0 {
			return
		}
		at := h.fired[0]
		for _, nominal := range h.fired[1:] {
			next, ok := h.t.Next(at)
			if !ok || !next.Equal(nominal) {
				t.Fatalf("after %s came %s, want %s", at, nominal, next)
			}
			at = nominal
		}
	})
}

func TestSkipFiresNothingThatCameDuringARun(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		catchUp := rapid.SampledFrom([]CatchUp{CatchUpNone, CatchUpLast}).Draw(t, "catch up")
		h := drawHistory(t, catchUp, OverlapSkip, false)
		for i, nominal := range h.fired {
			for j := range h.starts[:i] {
				if nominal.After(h.starts[j]) && !nominal.After(h.ends[j]) {
					t.Fatalf("%s fired, which came during the run from %s to %s", nominal, h.starts[j], h.ends[j])
				}
			}
		}
	})
}
