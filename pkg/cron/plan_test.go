package cron

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// history simulates a job under a clock that stops, runs, and jumps either way, with pauses and with runs of any length,
// and records the runs. It is the engine's logic without a database.
type history struct {
	t       *Timetable
	overlap Overlap
	m       memory
	start   time.Time
	now     time.Time
	runs    []simulated
	idle    []idlePass
}

// simulated is a run of a history.
type simulated struct {
	nominal      time.Time // zero: it was requested or retried, beside the schedule
	retried      bool
	began, ended time.Time
}

// idlePass is a pass that fired nothing.
type idlePass struct {
	at   time.Time
	runs int // before it
}

const simulatedJob = "job"

// pass fires at most one run, which takes d.
func (h *history) pass(d time.Duration) bool {
	s := h.t.plan(simulatedJob, h.overlap, h.m, h.now)
	h.m = s.memory
	if s.fire {
		h.run(simulated{nominal: s.nominal}, d)
	} else {
		h.idle = append(h.idle, idlePass{h.now, len(h.runs)})
	}
	return s.fire
}

// request makes a run that an operator requests, of a job that may be paused.
func (h *history) request(d time.Duration) {
	h.m = h.t.beside(simulatedJob, h.overlap, h.m, h.now, h.now).memory
	h.run(simulated{}, d)
}

// retry runs an entry that has failed again, as penstock.resume_cron_run does.
func (h *history) retry(d time.Duration) {
	h.m.catchingUpTo = h.now
	h.run(simulated{retried: true}, d)
}

func (h *history) run(r simulated, d time.Duration) {
	r.began, r.ended = h.now, h.now.Add(d)
	if h.overlap == OverlapCancel {
		if next, ok := h.t.following(simulatedJob, h.m.handled, h.now); ok && next.Before(r.ended) {
			r.ended = next
		}
	}
	h.runs = append(h.runs, r)
	h.now, h.m.ended = r.ended, r.ended
}

// during reports whether a nominal time falls due during a run.
func (h *history) during(nominal time.Time, r simulated) bool {
	due := h.t.FireAt(simulatedJob, nominal)
	return due.After(r.began) && !due.After(r.ended)
}

// overlaps reports whether any nominal time falls due during a run.
func (h *history) overlaps(r simulated) bool {
	last := h.t.lastDue(simulatedJob, h.start, r.ended)
	return !last.IsZero() && h.during(last, r)
}

// waiting returns the last nominal time that has come by an idle pass, after all that were fired, and that fell due during
// no run if the job skips those.
func (h *history) waiting(p idlePass) (time.Time, bool) {
	last := h.start
	for _, r := range h.runs[:p.runs] {
		last = later(last, r.nominal)
	}
	found, ok := h.t.latest(last, p.at)
	for i := p.runs - 1; ok && i >= 0 && h.overlap == OverlapSkip; i-- {
		if h.during(found, h.runs[i]) {
			found = h.t.lastDue(simulatedJob, last, h.runs[i].began)
			ok = !found.IsZero()
		}
	}
	return found, ok
}

// fired are the runs that the schedule made.
func (h *history) fired() []simulated {
	return slices.DeleteFunc(slices.Clone(h.runs), func(r simulated) bool { return r.nominal.IsZero() })
}

func drawHistory(t *rapid.T, catchUp CatchUp, overlap Overlap, back bool) *history {
	specs := []string{"*/7 * * * *", "0 * * * *", "30 2 * * *"}
	if catchUp != CatchUpAll { // more often, and a history would have more nominal times than are ever caught up
		specs = append(specs, "* * * * *", "@every 90s", "*/5 * * * * *")
	}
	timetable, err := Parse(Schedule{
		Spec: rapid.SampledFrom(specs).Draw(t, "spec"), CatchUp: catchUp, CatchUpMax: 1000,
		Zone:   rapid.SampledFrom([]string{"UTC", "Europe/Berlin", "America/New_York"}).Draw(t, "zone"),
		Jitter: rapid.SampledFrom([]time.Duration{0, 10 * time.Minute, time.Hour}).Draw(t, "jitter"),
	})
	if err != nil {
		t.Fatal(err)
	}
	start := time.Date(2026, 3, 28, 20, 0, 0, 0, time.UTC).Add(time.Duration(rapid.IntRange(0, 1_000_000).Draw(t, "start")) * time.Second)
	h := &history{t: timetable, overlap: overlap, start: start, now: start, m: memory{handled: start}}
	lowest := 0
	if back {
		lowest = -3600
	}
	for range rapid.IntRange(1, 30).Draw(t, "steps") {
		h.now = h.now.Add(time.Duration(rapid.IntRange(lowest, 3600).Draw(t, "pause")) * time.Second)
		d := time.Duration(rapid.IntRange(0, 900).Draw(t, "run")) * time.Second
		switch rapid.SampledFrom([]string{"pass", "pass", "pass", "request", "retry"}).Draw(t, "step") {
		case "pass":
			h.pass(d)
		case "request":
			h.request(d)
		case "retry":
			h.retry(d)
		}
	}
	for h.pass(0) {
	}
	return h
}

func drawCatchUp(t *rapid.T) CatchUp {
	return rapid.SampledFrom([]CatchUp{CatchUpNone, CatchUpLast, CatchUpAll}).Draw(t, "catch up")
}

func drawOverlap(t *rapid.T) Overlap {
	return rapid.SampledFrom([]Overlap{OverlapSkip, OverlapQueue, OverlapCancel}).Draw(t, "overlap")
}

func TestNoNominalTimeFiresTwiceWhateverTheClockDoes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := drawHistory(t, drawCatchUp(t), drawOverlap(t), true)
		fired := h.fired()
		for i, r := range fired {
			if i > 0 && !r.nominal.After(fired[i-1].nominal) {
				t.Fatalf("%s fired after %s", r.nominal, fired[i-1].nominal)
			}
			if h.t.FireAt(simulatedJob, r.nominal).After(r.began) {
				t.Fatalf("%s fired at %s, before its time", r.nominal, r.began)
			}
		}
	})
}

func TestCatchUpAllWithoutSkipLosesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := drawHistory(t, CatchUpAll, rapid.SampledFrom([]Overlap{OverlapQueue, OverlapCancel}).Draw(t, "overlap"), false)
		at := h.start
		for _, r := range h.fired() {
			next, ok := h.t.Next(at)
			if !ok || !next.Equal(r.nominal) {
				t.Fatalf("after %s came %s, want %s", at, r.nominal, next)
			}
			at = r.nominal
		}
	})
}

// A pass that fires nothing leaves nothing behind: the last nominal time that has fallen due was fired, the job skips it
// since it fell due during a run, or it is too late for CatchUpNone.
func TestANominalTimeThatHasFallenDueFires(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		catchUp, overlap := drawCatchUp(t), drawOverlap(t)
		h := drawHistory(t, catchUp, overlap, false)
		for _, p := range h.idle {
			nominal, ok := h.waiting(p)
			due := h.t.FireAt(simulatedJob, nominal)
			switch {
			case !ok || due.After(p.at):
			case catchUp == CatchUpNone && p.at.Sub(due) > defaultGrace:
			case catchUp == CatchUpAll && overlap == OverlapSkip && slices.ContainsFunc(h.runs[:p.runs], h.overlaps):
				// What comes while others are caught up on is dropped with the times that fell due during a run.
			default:
				t.Fatalf("%s, due at %s, does not fire at %s", nominal, due, p.at)
			}
		}
	})
}

func TestSkipFiresNothingThatFellDueDuringARun(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := drawHistory(t, drawCatchUp(t), OverlapSkip, false)
		for i, r := range h.runs {
			if r.nominal.IsZero() {
				continue
			}
			for _, before := range slices.Backward(h.runs[:i]) {
				if h.during(r.nominal, before) {
					t.Fatalf("%s fired, which fell due during the run from %s to %s", r.nominal, before.began, before.ended)
				}
				if before.retried {
					break // it counts as missed what had fallen due before it
				}
			}
		}
	})
}

// Those that were missed before a time that waits for its jitter are counted as dropped when it fires, not before.
func TestNominalTimesAreCountedAsDroppedOnce(t *testing.T) {
	timetable := parse(t, Schedule{Spec: "@hourly", Jitter: 30 * time.Minute})
	m, due := memory{handled: noon}, timetable.FireAt(simulatedJob, noon.Add(3*time.Hour))
	if s := timetable.plan(simulatedJob, OverlapSkip, m, due.Add(-time.Second)); s.fire || s.dropped {
		t.Errorf("before its jitter has passed: %+v", s)
	}
	if s := timetable.plan(simulatedJob, OverlapSkip, m, due); !s.fire || !s.dropped {
		t.Errorf("when its jitter has passed: %+v", s)
	}
}

func TestARunIsCancelledWhenTheNextNominalTimeFallsDue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, handled := drawSchedule(t)
		s.Jitter = time.Duration(rapid.Int64Range(0, int64(2*time.Hour)).Draw(t, "jitter"))
		timetable, err := Parse(s)
		if err != nil {
			t.Skip(err)
		}
		now := handled.Add(time.Duration(rapid.Int64Range(-int64(time.Hour), int64(48*time.Hour)).Draw(t, "now")))
		next, more := timetable.Next(handled)
		for more && !timetable.FireAt(simulatedJob, next).After(now) {
			next, more = timetable.Next(next)
		}
		got, ok := timetable.following(simulatedJob, handled, now)
		if want := timetable.FireAt(simulatedJob, next); ok != more || ok && !got.Equal(want) {
			t.Fatalf("%+v: of a run at %s the next falls due at %s (%v), want %s (%v)", s, now, got, ok, want, more)
		}
	})
}
