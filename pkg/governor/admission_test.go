package governor

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

const gibi = 1 << 30

func defaults() Config { return Config{}.withDefaults() }

// node is a quiet node of 4 cores and 10 GiB with 16 idle threads.
func node(now time.Time) Readings {
	return Readings{
		Measurement: Measurement{At: now, Cores: 4, CPUUsed: 0.05, MemoryLimitBytes: 10 * gibi, MemoryUsedBytes: gibi},
		FreeThreads: 16,
	}
}

func codes(v Admission) []RefusalCode {
	var list []RefusalCode
	for _, r := range v.Reasons {
		list = append(list, r.Code)
	}
	return list
}

func TestVerdictCountsEntriesThatFit(t *testing.T) {
	now := time.Unix(1000, 0)
	tests := []struct {
		name  string
		need  Need
		edit  func(*Readings)
		allow int
		codes []RefusalCode
	}{
		{"declares nothing", Need{}, nil, 16, nil},
		{"no idle thread", Need{}, func(r *Readings) { r.FreeThreads = 0 }, 0, []RefusalCode{Threads}},
		{"four threads each", Need{Threads: 4}, nil, 4, nil},
		{"more threads than idle", Need{Threads: 20}, nil, 0, []RefusalCode{Threads}},
		// Packed to the low mark: 8 GiB, of which 1 is used.
		{"memory for three", Need{MemoryBytes: 2 * gibi}, nil, 3, []RefusalCode{MemoryNeed}},
		{"memory taken since the reading", Need{MemoryBytes: 2 * gibi}, func(r *Readings) { r.Running.MemoryBytes = 4 * gibi }, 1, []RefusalCode{MemoryNeed}},
		{"memory released since the reading", Need{MemoryBytes: 2 * gibi}, func(r *Readings) {
			r.MemoryUsedBytes, r.Sampled.MemoryBytes = 7*gibi, 6*gibi
		}, 3, []RefusalCode{MemoryNeed}},
		{"declared memory not yet used", Need{MemoryBytes: 2 * gibi}, func(r *Readings) {
			r.Sampled.MemoryBytes, r.Running.MemoryBytes = 7*gibi, 7*gibi
		}, 0, []RefusalCode{MemoryNeed}},
		{"larger than the node", Need{MemoryBytes: 9 * gibi}, nil, 0, []RefusalCode{MemorySize}},
		{"memory above its mark", Need{}, func(r *Readings) { r.MemoryUsedBytes = 9*gibi + 1<<29 }, 0, []RefusalCode{MemoryHigh}},
		{"one core each", Need{CPU: 1}, nil, 4, []RefusalCode{CPUNeed}},
		{"one core each, two taken", Need{CPU: 1}, func(r *Readings) { r.Running.CPU = 2 }, 2, []RefusalCode{CPUNeed}},
		{"others use half the CPU", Need{CPU: 1}, func(r *Readings) { r.CPUUsed = 0.5 }, 2, []RefusalCode{CPUNeed}},
		{"busy with its own work", Need{CPU: 1}, func(r *Readings) { r.CPUUsed, r.Sampled.CPU = 1, 4 }, 4, []RefusalCode{CPUNeed}},
		{"others use all CPU", Need{CPU: 1}, func(r *Readings) { r.CPUUsed = 1 }, 0, []RefusalCode{CPUHigh, CPUNeed}},
		{"all CPU used, none declared", Need{}, func(r *Readings) { r.CPUUsed = 1 }, 16, nil},
		{"more cores than the node", Need{CPU: 5}, nil, 0, []RefusalCode{CPUSize}},
		{"tenths add up", Need{CPU: 0.1}, func(r *Readings) { r.CPUUsed, r.Cores, r.FreeThreads = 0, 1, 50 }, 10, []RefusalCode{CPUNeed}},
		{"nothing known", Need{CPU: 9, MemoryBytes: 99 * gibi}, func(r *Readings) { r.Cores, r.MemoryLimitBytes = 0, 0 }, 16, nil},
		{"old readings", Need{}, func(r *Readings) { r.At = now.Add(-time.Minute) }, 0, []RefusalCode{Stale}},
		{"no readings", Need{}, func(r *Readings) { r.Measurement = Measurement{} }, 0, []RefusalCode{Stale}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			r := node(now)
			if test.edit != nil {
				test.edit(&r)
			}
			v, _ := Decide(defaults(), Gates{}, r, test.need, now)
			if v.Allow != test.allow || !slices.Equal(codes(v), test.codes) {
				t.Errorf("allow %d because %v, want %d because %v", v.Allow, v.Reasons, test.allow, test.codes)
			}
		})
	}
}

func TestRefuseUndeclaredAppliesTheCPUGateToAll(t *testing.T) {
	now := time.Unix(1000, 0)
	c := Config{RefuseUndeclared: true}.withDefaults()
	r := node(now)
	r.CPUUsed = 0.95
	if v, _ := Decide(c, Gates{}, r, Need{}, now); v.Allow != 0 {
		t.Errorf("allow %d at 95%% CPU, want 0", v.Allow)
	}
}

// A level that swings between the marks neither closes an open gate nor opens a closed one.
func TestGateOpensOnlyAfterCalm(t *testing.T) {
	start := time.Unix(1000, 0)
	c, s := defaults(), Gates{}
	at := func(seconds float64, level float64) bool {
		now := start.Add(time.Duration(seconds * float64(time.Second)))
		r := node(now)
		r.MemoryUsedBytes = int64(level * float64(r.MemoryLimitBytes))
		var v Admission
		v, s = Decide(c, s, r, Need{}, now)
		return v.Allow > 0
	}
	story := []struct {
		seconds, level float64
		open           bool
	}{
		{0, 0.85, true},     // between the marks: still open
		{1, 0.91, false},    // above high: closes
		{2, 0.85, false},    // between the marks: still closed
		{3, 0.79, false},    // below low: calm begins
		{5, 0.79, false},    // not long enough
		{5.5, 0.81, false},  // calm is broken
		{6, 0.70, false},    // begins anew
		{8.9, 0.70, false},  //
		{9, 0.70, true},     // 3 s of calm: opens
		{9.5, 0.89, true},   // between the marks: stays open
		{10, 0.901, false},  // closes again
		{13.5, 0.50, false}, // calm begins only now
		{16.5, 0.50, true},
	}
	for _, step := range story {
		if open := at(step.seconds, step.level); open != step.open {
			t.Fatalf("at %.1f s, level %.3f: open %v, want %v", step.seconds, step.level, open, step.open)
		}
	}
}

// Whatever the levels do, a gate opens at most once per calm time.
func TestGateNeverFlaps(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := defaults()
		levels := rapid.SliceOfN(rapid.Float64Range(0, 1), 2, 200).Draw(t, "levels")
		now, g := time.Unix(1000, 0), Hysteresis{}
		var opened time.Time
		for _, level := range levels {
			now = now.Add(500 * time.Millisecond)
			before := g
			g = g.step(level, c.MemoryLow, c.MemoryHigh, c.Calm, now)
			if !before.Closed && level > c.MemoryHigh && !g.Closed {
				t.Fatalf("level %.2f left the gate open", level)
			}
			if before.Closed && !g.Closed {
				if level >= c.MemoryLow {
					t.Fatalf("opened at level %.2f", level)
				}
				if now.Sub(before.Since) < c.Calm || now.Sub(opened) < c.Calm {
					t.Fatalf("opened %v after closing", now.Sub(before.Since))
				}
				opened = now
			}
		}
	})
}

func drawReadings(t *rapid.T, now time.Time) Readings {
	limit := rapid.Int64Range(0, 64*gibi).Draw(t, "memory limit")
	return Readings{
		Measurement: Measurement{
			At: now, Cores: rapid.Float64Range(0, 64).Draw(t, "cores"), CPUUsed: rapid.Float64Range(0, 1).Draw(t, "cpu used"),
			MemoryLimitBytes: limit, MemoryUsedBytes: rapid.Int64Range(0, 70*gibi).Draw(t, "memory used"),
		},
		Sampled:     drawNeed(t, "sampled"),
		Running:     drawNeed(t, "running"),
		FreeThreads: rapid.IntRange(0, 200).Draw(t, "free threads"),
	}
}

func drawNeed(t *rapid.T, label string) Need {
	return Need{
		CPU:         rapid.Float64Range(0, 16).Draw(t, label+" cpu"),
		MemoryBytes: rapid.Int64Range(0, 16*gibi).Draw(t, label+" memory"),
		Threads:     rapid.IntRange(0, 8).Draw(t, label+" threads"),
	}
}

// What a verdict allows fits: threads, declared cores, declared memory. A refusal has a
// reason, and every reason can be read.
func TestVerdictNeverPromisesMoreThanThereIs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(1000, 0)
		c, r, n := defaults(), drawReadings(t, now), drawNeed(t, "need")
		v, _ := Decide(c, Gates{}, r, n, now)
		taken := float64(v.Allow)
		if v.Allow < 0 || v.Allow*max(n.Threads, 1) > r.FreeThreads {
			t.Fatalf("allow %d entries of %d threads with %d idle", v.Allow, n.Threads, r.FreeThreads)
		}
		if v.Allow == 0 && len(v.Reasons) == 0 {
			t.Fatal("refused without a reason")
		}
		for _, reason := range v.Reasons {
			if reason.String() == "" || reason.String() == string(reason.Code) {
				t.Fatalf("reason %q has no sentence", reason.Code)
			}
		}
		if v.Allow == 0 {
			return
		}
		if r.Cores > 0 && n.CPU > 0 && r.Running.CPU+taken*n.CPU > r.Cores+1e-6 {
			t.Fatalf("allow %d x %.3f cores on top of %.3f of %.3f", v.Allow, n.CPU, r.Running.CPU, r.Cores)
		}
		room := c.MemoryLow * float64(r.MemoryLimitBytes)
		if r.MemoryLimitBytes > 0 && n.MemoryBytes > 0 && float64(r.Running.MemoryBytes)+taken*float64(n.MemoryBytes) > room+1 {
			t.Fatalf("allow %d x %d bytes on top of %d of %.0f", v.Allow, n.MemoryBytes, r.Running.MemoryBytes, room)
		}
	})
}

// More use, more running work or a larger need never allows more entries.
func TestVerdictIsMonotone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(1000, 0)
		c, r, n := defaults(), drawReadings(t, now), drawNeed(t, "need")
		v, _ := Decide(c, Gates{}, r, n, now)
		worse, larger := r, n
		switch rapid.IntRange(0, 4).Draw(t, "what gets worse") {
		case 0:
			worse.MemoryUsedBytes += rapid.Int64Range(0, gibi).Draw(t, "more")
		case 1:
			worse.CPUUsed = min(1, worse.CPUUsed+rapid.Float64Range(0, 0.5).Draw(t, "more"))
		case 2:
			worse.Running.MemoryBytes += rapid.Int64Range(0, gibi).Draw(t, "more")
		case 3:
			worse.Running.CPU += rapid.Float64Range(0, 4).Draw(t, "more")
		case 4:
			if larger.MemoryBytes > 0 {
				larger.MemoryBytes += rapid.Int64Range(0, gibi).Draw(t, "more")
			}
		}
		if w, _ := Decide(c, Gates{}, worse, larger, now); w.Allow > v.Allow {
			t.Fatalf("allow rose from %d to %d\n%+v %+v\n%+v %+v", v.Allow, w.Allow, r, n, worse, larger)
		}
	})
}

func TestConfigNamesBadMarks(t *testing.T) {
	if err := (Config{}).Validate(); err != nil {
		t.Errorf("zero config: %v", err)
	}
	for _, c := range []Config{{MemoryHigh: 0.5, MemoryLow: 0.6}, {CPUHigh: 2}, {CPULow: -1}, {Calm: -1}} {
		if c.Validate() == nil {
			t.Errorf("%+v is accepted", c)
		}
	}
}
