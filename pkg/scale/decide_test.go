package scale

import (
	"slices"
	"strings"
	"testing"
	"time"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func ago(d time.Duration) time.Time { return noon.Add(-d) }

func starts(ages ...time.Duration) []time.Time {
	var all []time.Time
	for _, age := range ages {
		all = append(all, ago(age))
	}
	return all
}

func secs(s float64) Seconds { return Seconds(s * float64(time.Second)) }

// four is a policy with four slots an instance.
func four(change ...func(*Policy)) Policy {
	p := Policy{Slots: 4, Max: 20}
	for _, c := range change {
		c(&p)
	}
	return p
}

// quiet is a model with n ready instances that had a request just now and has none any more.
func quiet(n int) (Obs, State) {
	return Obs{Ready: n, Service: 2, ColdStart: 60, ColdStartP95: 90, LastRequest: ago(time.Second)},
		State{At: ago(time.Second), Counted: ago(time.Second), Desired: n, WasReady: ago(time.Second)}
}

type row struct {
	name    string
	policy  Policy
	change  func(o *Obs, s *State) // of a quiet model with two instances
	desired int
	note    NoteCode // that must be there; empty for none
	absent  NoteCode // that must not be there
}

func (r row) check(t *testing.T) {
	t.Helper()
	o, s := quiet(2)
	if r.change != nil {
		r.change(&o, &s)
	}
	d, next := Decide(noon, r.policy, o, s)
	if d.Desired != r.desired {
		t.Errorf("desired %d, want %d: %s", d.Desired, r.desired, d.Explain())
	}
	if next.Desired != d.Desired {
		t.Errorf("the state keeps %d instead of %d", next.Desired, d.Desired)
	}
	has := func(code NoteCode) bool {
		return slices.ContainsFunc(d.Notes, func(n Note) bool { return n.Code == code })
	}
	if r.note != "" && !has(r.note) {
		t.Errorf("no reason %s: %s", r.note, d.Explain())
	}
	if r.absent != "" && has(r.absent) {
		t.Errorf("reason %s: %s", r.absent, d.Explain())
	}
}

func run(t *testing.T, rows []row) {
	t.Helper()
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) { r.check(t) })
	}
}

func TestSwitchesAndModesComeFirst(t *testing.T) {
	busy := func(o *Obs, s *State) { o.Waiting, o.Running, s.Rate = 100, 8, 10 }
	five, thirty := 5, 30
	run(t, []row{
		{"off everywhere", four(), func(o *Obs, s *State) { busy(o, s); o.Switches.Off = true }, 2, NoteOff, NoteBase},
		{"off is before an override", four(), func(o *Obs, _ *State) {
			o.Switches = Switches{Off: true, Override: &five, OverrideUntil: noon.Add(time.Hour)}
		}, 2, NoteOff, NoteOverride},
		{"disabled", four(func(p *Policy) { p.Mode = Disabled }), busy, 2, NoteDisabled, NoteBase},
		{"manual", four(func(p *Policy) { p.Mode = Manual }), busy, 2, NoteManual, NoteBase},
		{"up-only goes up", four(func(p *Policy) { p.Mode = UpOnly }), busy, 6, NoteSurge, NoteUpOnly},
		{"up-only stays", four(func(p *Policy) { p.Mode = UpOnly }), nil, 2, NoteUpOnly, ""},
		{"advise decides", four(func(p *Policy) { p.Mode = Advise }), busy, 6, NoteAdvise, ""},
		{"override", four(), func(o *Obs, _ *State) {
			o.Switches = Switches{Override: &five, OverrideUntil: noon.Add(time.Hour)}
		}, 5, NoteOverride, NoteBase},
		{"override that has expired", four(), func(o *Obs, _ *State) {
			o.Switches = Switches{Override: &five, OverrideUntil: noon}
		}, 1, NoteIdle, NoteOverride},
		{"override above the maximum", four(), func(o *Obs, _ *State) {
			o.Switches = Switches{Override: &thirty, OverrideUntil: noon.Add(time.Hour)}
		}, 30, NoteOverride, NoteMax},
		{"override under the cap", four(), func(o *Obs, _ *State) {
			o.Switches = Switches{Override: &thirty, OverrideUntil: noon.Add(time.Hour), MaxAll: 7}
		}, 7, NoteCap, NoteMax},
		{"manual with a stuck start", four(func(p *Policy) { p.Mode = Manual }), func(o *Obs, s *State) {
			busy(o, s)
			o.Ready, o.Starting = 1, starts(time.Hour)
		}, 2, NoteManual, NoteBase},
		{"override in manual mode", four(func(p *Policy) { p.Mode = Manual }), func(o *Obs, _ *State) {
			o.Switches = Switches{Override: &five, OverrideUntil: noon.Add(time.Hour)}
		}, 5, NoteOverride, NoteManual},
	})
}

func TestUnknownInputIsNotZero(t *testing.T) {
	old := func(gateway, instances time.Duration) func(o *Obs, s *State) {
		return func(o *Obs, s *State) {
			o.Ages = Ages{Seconds(gateway), Seconds(instances)}
			s.Desired, o.Ready = 3, 3
		}
	}
	waiting := func(o *Obs, s *State) { old(40*time.Second, 0)(o, s); o.Waiting, o.Running = 4000, 12 }
	run(t, []row{
		{"fresh", four(), old(0, 0), 1, NoteIdle, NoteStale},
		{"nine seconds", four(), old(9*time.Second, 0), 1, NoteIdle, NoteStale},
		{"eleven seconds: the hold decides", four(), old(11*time.Second, 0), 1, NoteStale, NoteFrozen},
		{"gateway 31 s", four(), old(31*time.Second, 0), 3, NoteFrozen, ""},
		{"instances 31 s", four(), old(0, 31*time.Second), 3, NoteFrozen, ""},
		{"all are old", four(), old(time.Minute, time.Minute), 3, NoteFrozen, NoteBase},
		{"the way up is open", four(), waiting, 7, NoteSurge, NoteFrozen},
		{"no way to zero while stale", four(), func(o *Obs, s *State) {
			o.Ages.Gateway, o.Ready, s.Desired = secs(15), 1, 1
			o.LastRequest = ago(5 * time.Hour)
		}, 1, NoteStale, NoteZero},
		{"the base of the last fresh tick", four(), func(o *Obs, s *State) {
			o.Ages.Gateway, s.Base, s.Desired, o.Ready = secs(15), 3, 3, 3
		}, 3, NoteStale, NoteFrozen},
	})
}

// A reason names what it was measured by: the source that is old, with its age, and the queue of the base.
func TestReasonsNameTheirMeasure(t *testing.T) {
	for _, c := range []struct {
		name, want string
		change     func(o *Obs, s *State)
	}{
		{
			"gateways", "the report of the gateways is 15 s old: nothing is counted",
			func(o *Obs, _ *State) { o.Ages = Ages{Gateway: secs(15), Instances: secs(12)} },
		},
		{
			"backends", "the report of the backends about instances is 31 s old: not down to",
			func(o *Obs, s *State) {
				o.Ages, o.Ready, s.Desired = Ages{Gateway: secs(15), Instances: secs(31)}, 3, 3
			},
		},
		{
			"queue", "the load needs 3: with so many all along, requests would wait ",
			func(o *Obs, s *State) { o.Gateway, s.Online, s.Shadow = true, level(20, 1), level(20, 60) },
		},
		{
			"online", "the load needs 4: with so many all along, requests would wait 0.3 s at the gateways, with one fewer 1.3 s",
			func(o *Obs, s *State) { o.Gateway, s.Online = true, level(20, 30) },
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			o, s := quiet(2)
			c.change(&o, &s)
			if d, _ := Decide(noon, four(), o, s); !strings.Contains(d.Explain(), c.want) {
				t.Errorf("%q does not say %q", d.Explain(), c.want)
			}
		})
	}
}

func level(n int, work float64) []float64 { return slices.Repeat([]float64{work}, n) }

func TestBaseIsTheLeastLevelWithShortWaits(t *testing.T) {
	filled := func(n int, work float64) []float64 {
		w := make([]float64, n)
		for i := range w {
			w[i] = work
		}
		return w
	}
	shadow := func(work float64) func(*Obs, *State) {
		return func(_ *Obs, s *State) { s.Shadow = filled(20, work) }
	}
	single := Policy{Slots: 1, Max: 20}
	run(t, []row{
		{"no work", four(), shadow(0), 1, NoteIdle, NoteBase},
		{"what one instance holds in its slots", four(), shadow(6), 1, NoteBase, NoteRateUp},
		{"one instance works 7.5 s off", four(), shadow(21), 1, NoteBase, NoteRateUp},
		{"two are needed", four(), shadow(30), 2, NoteBase, NoteRateUp},
		{"three are needed", four(), shadow(60), 3, NoteBase, NoteRateUp},
		{"the rate limits", four(), shadow(400), 6, NoteRateUp, ""},
		{"max is the last level", four(func(p *Policy) { p.Max = 4 }), shadow(400), 4, NoteBase, NoteMax},
		{"a long SLO needs less", four(func(p *Policy) { p.SLO = secs(3600) }), shadow(400), 1, NoteBase, ""},
		{"a short SLO needs more", four(func(p *Policy) { p.SLO = secs(5) }), shadow(30), 4, NoteBase, ""},
		{"one slot: half the SLO", single, shadow(17), 1, NoteBase, NoteRateUp},
		{"one slot: two are needed", single, shadow(19), 2, NoteBase, ""},
		{"one slot: three are needed", single, shadow(38), 3, NoteBase, ""},
		{"gateway: online requests alone", four(), func(o *Obs, s *State) {
			o.Gateway, s.Online = true, filled(20, 30)
		}, 4, NoteBaseOnline, NoteBase},
		{"gateway: the larger of both", four(), func(o *Obs, s *State) {
			o.Gateway, s.Online, s.Shadow = true, filled(20, 1), filled(20, 60)
		}, 3, NoteBase, ""},
		{"no gateway: online is not looked at", four(), func(_ *Obs, s *State) { s.Online = filled(20, 300) }, 1, "", NoteBase},
		{"arrivals count", four(), func(o *Obs, _ *State) { o.Arrived = 31 }, 3, NoteBase, ""},
		{"refused requests count", four(), func(o *Obs, _ *State) { o.Arrived, o.Refused = 11, 20 }, 3, NoteBase, ""},
		{"refused ones at most twice the served", four(), func(o *Obs, _ *State) { o.Arrived, o.Refused = 11, 9999 }, 3, NoteBase, ""},
		{"a refused request alone wakes", four(), func(o *Obs, s *State) {
			*s, o.Ready, o.Refused = State{At: ago(time.Second), Counted: ago(time.Second)}, 0, 50
		}, 1, NoteWake, ""},
		{"service unknown", four(), func(o *Obs, _ *State) { o.Service, o.Arrived = 0, 31 }, 2, NoteBase, ""},
	})
}

func TestTolerableLateness(t *testing.T) {
	history := func(share float64) func(*Obs, *State) {
		return func(o *Obs, s *State) {
			o.Ready, s.Desired = 5, 5
			s.Held = []Level{{At: ago(time.Minute), N: 5}}
			s.Late, s.Seen, s.Since, s.SeenAt = make([]float64, 20), 1000, ago(time.Hour), ago(time.Minute)
			for i := range 3 {
				s.Late[i] = share * s.Seen
			}
		}
	}
	run(t, []row{
		{"few were late with three", four(), history(0.09), 4, NoteHold, ""},
		{"fewer than is tolerated", four(), history(0.07), 2, NoteRateDown, ""},
		{"none is tolerated with one slot", Policy{Slots: 1, Max: 20}, history(0.01), 5, NoteHold, NoteTolerated},
		{"a short history trims nothing", four(), func(o *Obs, s *State) {
			history(0.01)(o, s)
			s.Since = ago(time.Minute)
		}, 5, NoteHold, ""},
		{"a peak is trimmed", four(), func(o *Obs, s *State) {
			history(0.01)(o, s)
			s.Held, s.Late[0] = nil, 30
			s.Shadow = make([]float64, 20)
			for i := range s.Shadow {
				s.Shadow[i] = 60
			}
		}, 2, NoteTolerated, ""},
	})
}

func TestSurgeForTheBacklogThatIsThere(t *testing.T) {
	run(t, []row{
		{"nothing waits", four(), func(o *Obs, s *State) { o.Running, s.Rate = 8, 3 }, 2, NoteFull, NoteSurge},
		{"spare capacity suffices", four(), func(o *Obs, s *State) { o.Waiting, o.Running, s.Rate = 30, 8, 1 }, 2, "", NoteSurge},
		{"the rate alone is too much", four(), func(o *Obs, s *State) { o.Waiting, o.Running, s.Rate = 30, 8, 6 }, 5, NoteSurge, ""},
		{"a large backlog", four(), func(o *Obs, s *State) { o.Waiting, o.Running, s.Rate = 900, 8, 4 }, 6, NoteRateUp, ""},
		{"no more than can be used", four(), func(o *Obs, _ *State) { o.Waiting, o.Service, o.Ready = 3, 1000, 0 }, 1, "", NoteRateUp},
		{"starts that ready ones make needless are given up", four(), func(o *Obs, s *State) {
			o.Waiting, o.Running, s.Rate, s.Desired = 100, 8, 4, 6
			o.Starting = starts(50*time.Second, 50*time.Second, 50*time.Second, 50*time.Second)
		}, 3, NoteEnough, NoteRateUp},
		{"starts that the backlog needs are kept", four(), func(o *Obs, s *State) {
			o.Waiting, o.Running, s.Rate, s.Desired = 500, 8, 4, 6
			o.Starting = starts(50*time.Second, 50*time.Second, 50*time.Second, 50*time.Second)
		}, 5, "", NoteRateDown},
		{"a late entry starts nothing", four(), func(o *Obs, s *State) { o.Waiting, o.Late, o.Ready, s.Desired = 1, 1, 0, 0 }, 0, NoteLate, NoteSurge},
		{"late entries start nothing beside an instance", four(), func(o *Obs, s *State) { o.Waiting, o.Late, o.Ready, s.Desired = 100, 100, 1, 1 }, 1, NoteLate, NoteNextLate},
		{"many late entries start one for those behind them", four(), func(o *Obs, s *State) { o.Waiting, o.Late, o.Ready, s.Desired = 100, 100, 0, 0 }, 1, NoteNextLate, NoteSurge},
		{"and so do those that come and go late", four(), func(o *Obs, s *State) {
			o.Waiting, o.Late, o.Ready, s.Desired, s.Recent = 1, 1, 0, 0, 20
		}, 1, NoteNextLate, NoteSurge},
		{"late entries leave the others", four(), func(o *Obs, s *State) {
			o.Waiting, o.Late, o.Ready, s.Desired = 100, 99, 0, 0
		}, 1, NoteLate, ""},
		{"a surge is not held", four(), func(o *Obs, s *State) {
			o.Ready, s.Desired = 10, 10
			s.Changes = []Step{{At: ago(50 * time.Second), By: 8}}
		}, 5, NoteRateDown, NoteHold},
		{"a surge of a moment ago is kept", four(), func(o *Obs, s *State) {
			o.Ready, s.Desired, s.Wanted = 10, 10, []Level{{At: ago(29 * time.Second), N: 8}}
		}, 8, NoteWanted, NoteHold},
		{"and given up after half a cold start", four(), func(o *Obs, s *State) {
			o.Ready, s.Desired, s.Wanted = 10, 10, []Level{{At: ago(30 * time.Second), N: 8}}
		}, 5, NoteRateDown, NoteWanted},
		{"what is kept asks for no start", four(), func(o *Obs, s *State) {
			o.Ready, s.Desired, s.Wanted = 2, 2, []Level{{At: ago(time.Second), N: 8}}
		}, 2, NoteWanted, NoteRateUp},
		{"one of twenty more", four(func(p *Policy) { p.Max = 40 }), func(o *Obs, s *State) {
			o.Ready, s.Desired, o.Running, o.Waiting, s.Rate = 20, 20, 80, 10, 41
		}, 21, NoteSurge, ""},
		{"more than a cold start without use of what is ready", four(), func(o *Obs, s *State) {
			o.Waiting, s.Unused = 900, ago(time.Minute)
		}, 1, NoteUnused, NoteRateUp},
		{"less than that", four(), func(o *Obs, s *State) { o.Waiting, s.Unused = 900, ago(59*time.Second) }, 6, NoteSurge, NoteUnused},
		{"before and after a time without a leader", four(), func(o *Obs, s *State) {
			o.Waiting, s.Unused, s.Counted = 900, ago(time.Hour), ago(time.Hour)
		}, 6, NoteSurge, NoteUnused},
		{"requests at a gateway use what is ready", four(), func(o *Obs, s *State) {
			o.Waiting, o.Urgent, s.Unused = 900, 9, ago(time.Minute)
		}, 6, NoteSurge, NoteUnused},
		{"half more than run are tried", four(), func(o *Obs, s *State) {
			o.Waiting, o.Running, s.Unusable = 900, 2, true
		}, 3, NoteUnused, ""},
		{"all slots are used again", four(), func(o *Obs, s *State) { o.Waiting, o.Running, s.Unusable = 900, 8, true }, 6, NoteSurge, NoteUnused},
		{"pending asks for one", four(), func(o *Obs, s *State) { o.Ready, s.Desired, o.Running = 0, 0, 1 }, 1, NotePending, ""},
	})
}

// No task node runs from the evening on. The backlog starts instances until they are seen to be of no use, and one stays. When
// nodes are back all are started that the backlog needs.
func TestABacklogThatNoNodeWorksOffKeepsNoFleet(t *testing.T) {
	const night, cold = 10 * 60 * 60, 90 * time.Second
	p, s := Policy{Slots: 4, Max: 20}, State{At: noon, Counted: noon, LastUse: noon, WasReady: noon}
	var began []time.Time
	hours, threads, ready := 0.0, 0, 0
	for second := range night + 15*60 {
		now := noon.Add(time.Duration(second+1) * time.Second)
		ready = 0
		var starting []time.Time
		for _, b := range began {
			if now.Sub(b) >= cold {
				ready++
			} else {
				starting = append(starting, b)
			}
		}
		if second == night {
			threads = 1000
		}
		o := Obs{
			Waiting: 10_000, Running: min(threads, 4*ready), Service: 10, Ready: ready, Starting: starting,
			ColdStart: cold.Seconds(), ColdStartP95: cold.Seconds(), LastRequest: now,
		}
		if second == 0 {
			o.Arrived = 10_000
		}
		var d Decision
		d, s = Decide(now, p, o, s)
		for len(began) < d.Desired {
			began = append(began, now)
		}
		began = began[:d.Desired]
		if second < night {
			hours += float64(d.Desired) / 3600
		}
	}
	if hours > 20 {
		t.Errorf("%.0f instance-hours in a night in which nothing ran", hours)
	}
	if ready != 20 {
		t.Errorf("%d are ready a quarter of an hour after nodes are back", ready)
	}
}

func TestHold(t *testing.T) {
	held := func(n int, age time.Duration) func(*Obs, *State) {
		return func(o *Obs, s *State) {
			o.Ready, s.Desired, s.Held = n, n, []Level{{At: ago(age), N: n}}
		}
	}
	idle := func(d time.Duration, recent float64) func(*Obs, *State) {
		return func(o *Obs, s *State) {
			o.Ready, s.Desired, o.LastRequest, s.LastUse, s.Recent = 1, 1, ago(d), ago(d), recent
		}
	}
	run(t, []row{
		{"level 3 after a minute", four(), held(3, time.Minute), 3, NoteHold, ""},
		{"level 3 after 599 s", four(), held(3, 599*time.Second), 3, NoteHold, ""},
		{"level 3 after 600 s", four(), held(3, 600*time.Second), 1, NoteIdle, NoteHold},
		{"one slot after 299 s", Policy{Max: 20}, held(3, 299*time.Second), 3, NoteHold, ""},
		{"one slot after 300 s", Policy{Max: 20}, held(3, 300*time.Second), 1, NoteIdle, NoteHold},
		{"a hold of its own", four(func(p *Policy) { p.Hold = secs(60) }), held(3, 61*time.Second), 1, NoteIdle, NoteHold},
		{"a lower level comes after a higher one", four(), func(o *Obs, s *State) {
			o.Ready, s.Desired = 5, 5
			s.Held = []Level{{At: ago(time.Hour), N: 5}, {At: ago(time.Minute), N: 3}}
		}, 3, NoteHold, ""},
		{"almost full", four(), func(o *Obs, s *State) { o.Ready, s.Desired, o.Running = 3, 3, 7 }, 3, NoteFull, ""},
		{"not quite", four(), func(o *Obs, s *State) { o.Ready, s.Desired, o.Running = 3, 3, 6 }, 2, "", NoteHold},
		{"idle for a minute", four(), idle(time.Minute, 1), 1, NoteIdle, NoteZero},
		{"idle for 299 s", four(), idle(299*time.Second, 0), 1, NoteIdle, NoteZero},
		{"idle for 300 s, rare requests", four(), idle(300*time.Second, 0.5), 0, NoteZero, NoteIdle},
		{"idle for 300 s, frequent requests", four(), idle(300*time.Second, 20), 1, NoteIdle, NoteZero},
		{"idle for two hours", four(), idle(2*time.Hour, 1e6), 0, NoteZero, NoteIdle},
		{"dear cold starts", four(func(p *Policy) { p.ColdPrice = 100 }), idle(300*time.Second, 0.5), 1, NoteIdle, NoteZero},
		{"idle bounds of its own", four(func(p *Policy) { p.IdleMin = secs(10) }), idle(11*time.Second, 0), 0, NoteZero, ""},
	})
}

func TestRates(t *testing.T) {
	want := func(have, waiting int, changes ...Step) func(*Obs, *State) {
		return func(o *Obs, s *State) {
			o.Ready, s.Desired, o.Waiting, o.Running, s.Rate = have, have, waiting, 4*have, 100
			s.Changes = changes
		}
	}
	down := func(have int, changes ...Step) func(*Obs, *State) {
		return func(o *Obs, s *State) { o.Ready, s.Desired, s.Changes = have, have, changes }
	}
	hundred := four(func(p *Policy) { p.Max = 100 })
	run(t, []row{
		{"four from one", hundred, want(1, 900), 5, NoteRateUp, ""},
		{"four from three", hundred, want(3, 900), 7, NoteRateUp, ""},
		{"twice from ten", hundred, want(10, 900), 20, NoteRateUp, ""},
		{"used up in the period", hundred, want(20, 900, Step{ago(5 * time.Second), 10}), 20, NoteRateUp, ""},
		{"partly used up", hundred, want(15, 900, Step{ago(5 * time.Second), 5}), 20, NoteRateUp, ""},
		{"free again after the period", hundred, want(20, 900, Step{ago(15 * time.Second), 10}), 40, NoteRateUp, ""},
		{"half down", hundred, down(8), 4, NoteRateDown, ""},
		{"ten down at most", hundred, down(60), 50, NoteRateDown, ""},
		{"one of one", hundred, func(o *Obs, s *State) {
			down(1)(o, s)
			o.LastRequest = ago(3 * time.Hour)
		}, 0, NoteZero, NoteRateDown},
		{"half down, used up", hundred, down(4, Step{ago(30 * time.Second), -4}), 4, NoteRateDown, ""},
		{"free again after a minute", hundred, down(4, Step{ago(time.Minute), -4}), 2, NoteRateDown, ""},
		{"slow start", hundred, func(o *Obs, s *State) {
			*s = State{At: ago(time.Second), Desired: 4}
			o.Ready, o.Waiting, o.Starting = 0, 900, starts(9*time.Second, 9*time.Second, 9*time.Second, 9*time.Second)
		}, 5, NoteSlowStart, ""},
		{"no slow start for a known template", hundred, func(o *Obs, s *State) {
			o.Ready, o.Waiting, s.Desired = 0, 2000, 4
			s.WasReady = ago(23 * time.Hour)
			o.Starting = starts(9*time.Second, 9*time.Second, 9*time.Second, 9*time.Second)
		}, 8, NoteRateUp, NoteSlowStart},
		{"slow start again after a day", hundred, func(o *Obs, s *State) {
			o.Ready, o.Waiting, s.Desired, s.WasReady = 0, 900, 4, ago(25*time.Hour)
			o.Starting = starts(9*time.Second, 9*time.Second, 9*time.Second, 9*time.Second)
		}, 5, NoteSlowStart, ""},
	})
}

func TestZeroAndBack(t *testing.T) {
	no := false
	last := func(change func(*Obs, *State)) func(*Obs, *State) {
		return func(o *Obs, s *State) {
			o.Ready, s.Desired, o.LastRequest = 1, 1, ago(3*time.Hour)
			if change != nil {
				change(o, s)
			}
		}
	}
	run(t, []row{
		{"to zero", four(), last(nil), 0, NoteZero, ""},
		{"not while something waits", four(), last(func(o *Obs, _ *State) { o.Waiting = 1 }), 1, "", NoteZero},
		{"not while something runs", four(), last(func(o *Obs, _ *State) { o.Running = 1 }), 1, "", NoteZero},
		{"not while something is due", four(), last(func(o *Obs, _ *State) { o.Due = 1 }), 1, NoteDue, NoteZero},
		{"due work starts one from zero", four(), last(func(o *Obs, s *State) { o.Due, o.Ready, s.Desired = 1, 0, 0 }), 1, NoteDue, ""},
		{"not with an unknown last request", four(), last(func(o *Obs, _ *State) { o.LastRequest = time.Time{} }), 1, NoteLastRequest, NoteZero},
		{"not where it is off", four(func(p *Policy) { p.ScaleToZero = &no }), last(nil), 1, NoteZeroOff, NoteZero},
		{"not while it is switched off", four(), last(func(o *Obs, _ *State) { o.Switches.ZeroOff = true }), 1, NoteZeroOff, NoteZero},
		{"a minimum", four(func(p *Policy) { p.Min = 1 }), last(nil), 1, NoteMin, ""},
		{"from zero at once", four(), last(func(o *Obs, s *State) { o.Waiting, o.Ready, s.Desired = 1, 0, 0 }), 1, NoteWake, NoteSlowStart},
		{"a thousand at once: one wave", four(), last(func(o *Obs, s *State) {
			o.Waiting, o.Arrived, o.Ready, s.Desired = 1000, 1000, 0, 0
		}), 4, NoteRateUp, ""},
		{"zero stays zero", four(), last(func(o *Obs, s *State) { o.Ready, s.Desired = 0, 0 }), 0, "", NoteZero},
		{"never below what runs", four(), func(o *Obs, s *State) { o.Ready, s.Desired, o.Running = 3, 3, 12 }, 3, "", NoteRateDown},
	})
}

func TestBounds(t *testing.T) {
	heavy := func(o *Obs, s *State) { o.Waiting, o.Running, s.Rate = 900, 8, 100 }
	unhealthy := func(n int) func(*Obs, *State) {
		return func(o *Obs, s *State) { o.Unhealthy, s.Unhealthy = n, []Level{{At: ago(time.Second), N: -n}} }
	}
	run(t, []row{
		{"min", four(func(p *Policy) { p.Min = 4 }), nil, 4, NoteMin, ""},
		{"max", four(func(p *Policy) { p.Max = 5 }), heavy, 5, NoteMax, ""},
		{"max below what is there", four(func(p *Policy) { p.Max = 1 }), heavy, 1, NoteMax, ""},
		{"a maximum that was lowered", four(func(p *Policy) { p.Max = 10 }), func(o *Obs, s *State) {
			o.Ready, o.Running, s.Desired = 40, 150, 40
		}, 30, NoteMax, ""},
		{"no growth above the maximum", four(func(p *Policy) { p.Max = 10 }), func(o *Obs, s *State) {
			heavy(o, s)
			o.Ready, s.Desired, s.Begun = 11, 11, Level{At: ago(time.Minute), N: 20}
		}, 11, NoteMax, ""},
		{"what ran before is held above the maximum", four(func(p *Policy) { p.Max = 10 }), func(o *Obs, s *State) {
			*s, o.Ready, o.Running = State{}, 20, 60
		}, 20, NoteBegun, ""},
		{"what ran before is held in a lull", four(func(p *Policy) { p.Max = 40 }), func(o *Obs, s *State) {
			*s, o.Ready, o.Running = State{}, 20, 10
		}, 20, NoteBegun, NoteRateDown},
		{"what runs after advice is held", four(func(p *Policy) { p.Max = 40 }), func(o *Obs, s *State) {
			o.Ready, s.Advised, s.Begun = 20, true, Level{At: ago(time.Hour), N: 20}
		}, 20, NoteBegun, ""},
		{"also where no lower number is permitted", four(func(p *Policy) { p.Max, p.Mode = 10, UpOnly }), func(o *Obs, s *State) {
			o.Ready, s.Advised = 20, true
		}, 20, NoteBegun, ""},
		{"for the time of a hold", four(func(p *Policy) { p.Max = 10 }), func(o *Obs, s *State) {
			o.Ready, o.Running, s.Desired, s.Begun = 20, 60, 20, Level{At: ago(600 * time.Second), N: 20}
		}, 10, NoteMax, NoteBegun},
		{"floor of a schedule", four(), func(o *Obs, _ *State) { o.Floor = 7 }, 7, NoteFloor, ""},
		{"floor below the need", four(), func(o *Obs, s *State) { heavy(o, s); o.Floor = 3 }, 6, "", NoteFloor},
		{"floor above max", four(func(p *Policy) { p.Max = 5 }), func(o *Obs, _ *State) { o.Floor = 7 }, 5, NoteMax, ""},
		{"emergency cap of the policy", four(func(p *Policy) { p.EmergencyMax = 3 }), heavy, 3, NoteCap, ""},
		{"emergency cap of all", four(), func(o *Obs, s *State) { heavy(o, s); o.Switches.MaxAll = 3 }, 3, NoteCap, ""},
		{"cap above min", four(func(p *Policy) { p.Min, p.EmergencyMax = 4, 3 }), nil, 3, NoteCap, ""},
		{"one more for an unhealthy one", four(), unhealthy(1), 2, NoteUnhealthy, ""},
		{"at most half as many for all", four(), unhealthy(20), 2, NoteUnhealthy, ""},
		{"within the rate", four(), func(o *Obs, s *State) { heavy(o, s); unhealthy(1)(o, s) }, 6, NoteUnhealthy, ""},
		{"not for one that just became so", four(), func(o *Obs, s *State) {
			o.Unhealthy, s.Unhealthy = 1, []Level{{At: ago(10 * time.Second)}}
		}, 1, "", NoteUnhealthy},
	})
}

// A request waits, and the only instance is unhealthy. Another one is started, and the number stays as it is.
func TestAnotherInstanceIsStartedForOneThatHangs(t *testing.T) {
	now, s := noon, State{At: ago(time.Second), Counted: ago(time.Second), Desired: 1, WasReady: noon}
	turns, last := 0, 1
	for range 1800 {
		now = now.Add(time.Second)
		o := Obs{
			Unhealthy: 1, Waiting: 1, Urgent: 1, Gateway: true, Service: 2, ColdStart: 60, LastRequest: now, Ready: max(0, s.Desired-1),
		}
		var d Decision
		if d, s = Decide(now, Policy{Slots: 4, Max: 20}, o, s); d.Desired != last {
			last, turns = d.Desired, turns+1
		}
	}
	if last != 2 || turns != 1 {
		t.Errorf("%d instances after %d changes", last, turns)
	}
}

// What was unhealthy before and after a gap in the observations, or at the first of them, may have been healthy meanwhile:
// others are started when it has been so for the whole time again.
func TestUnhealthinessIsObservedAnewAfterAGap(t *testing.T) {
	before := ago(0).Add(-10 * time.Minute)
	for name, window := range map[string][]Level{
		"first": nil, "gap": {{At: before.Add(-time.Second), N: -1}, {At: before, N: -2}},
	} {
		t.Run(name, func(t *testing.T) {
			s := State{At: before, Counted: before, Desired: 4, Base: 2, LastUse: noon, WasReady: noon, Unhealthy: window}
			covered := -1
			for second := range 40 {
				now := noon.Add(time.Duration(second) * time.Second)
				var d Decision
				d, s = Decide(now, Policy{Slots: 4, Min: 2, Max: 20}, Obs{
					Unhealthy: 2, Ready: 2, Running: 7, Service: 2, ColdStart: 60, LastRequest: now, Gateway: true,
				}, s)
				has := slices.ContainsFunc(d.Notes, func(n Note) bool { return n.Code == NoteUnhealthy })
				if has && covered < 0 {
					covered = second
				}
			}
			if covered != 30 {
				t.Errorf("others are started after %d s, want 30", covered)
			}
		})
	}
}

func TestStuckStarts(t *testing.T) {
	stuck := func(ages ...time.Duration) func(*Obs, *State) {
		return func(o *Obs, s *State) {
			o.Waiting, o.Running, s.Rate, o.Starting = 400, 8, 4, starts(ages...)
			s.Desired = 2 + len(ages)
		}
	}
	with := func(change func(*Obs, *State)) func(*Obs, *State) {
		return func(o *Obs, s *State) { stuck(11*time.Minute)(o, s); change(o, s) }
	}
	history := func(h StuckHistory) map[string]StuckHistory { return map[string]StuckHistory{"": h} }
	blocked := func(until time.Duration) func(*Obs, *State) {
		return func(_ *Obs, s *State) {
			s.Stuck = history(StuckHistory{Blocked: true, BlockedUntil: ago(until), Ready: 2})
		}
	}
	run(t, []row{
		{"a slow start is not stuck", four(), stuck(9 * time.Minute), 5, "", NoteStuck},
		{"after ten minutes it is", four(), stuck(11 * time.Minute), 6, NoteReplace, NoteBlocked},
		{"three times the p95", four(), with(func(o *Obs, _ *State) { o.ColdStartP95 = 300 }), 5, "", NoteStuck},
		{"a bound of its own", four(func(p *Policy) { p.StuckMin = secs(1000) }), stuck(11 * time.Minute), 5, "", NoteStuck},
		{"replaced once in that time", four(), with(func(_ *Obs, s *State) {
			s.Stuck = history(StuckHistory{Replaced: 1, ReplacedAt: ago(time.Minute)})
		}), 6, NoteStuck, NoteReplace},
		{"blocked after three", four(), with(func(_ *Obs, s *State) {
			s.Stuck = history(StuckHistory{Replaced: 3, ReplacedAt: ago(11 * time.Minute)})
		}), 2, NoteBlocked, NoteReplace},
		{"blocked still", four(), with(blocked(-time.Minute)), 2, NoteBlocked, ""},
		{"blocked, and time for a try", four(), with(blocked(0)), 3, NoteBlocked, ""},
		{"the try is ready", four(), with(func(o *Obs, s *State) {
			blocked(time.Minute)(o, s)
			o.Starting, o.Ready = nil, 3
		}), 5, "", NoteBlocked},
		{"blocked may fall", four(), blocked(-time.Minute), 1, NoteBlocked, ""},
		{"blocked keeps unhealthy instances", four(), with(func(o *Obs, s *State) {
			blocked(-time.Minute)(o, s)
			o.Unhealthy = 2
		}), 4, NoteBlocked, ""},
		{"one pending start freezes nothing", four(), stuck(11*time.Minute, time.Minute), 5, NoteStuck, ""},
	})
}

// A number that is set by hand is one of instances that serve: a start that is stuck is replaced under it, too.
func TestAStuckStartIsReplacedUnderAnOverride(t *testing.T) {
	three := 3
	for name, change := range map[string]func(*Policy, *Obs){
		"override": func(_ *Policy, o *Obs) { o.Switches = Switches{Override: &three, OverrideUntil: noon.Add(time.Hour)} },
		"manual":   func(p *Policy, _ *Obs) { p.Mode = Manual },
	} {
		p := four()
		o, s := quiet(2)
		s.Desired, o.Starting = 3, starts(time.Hour)
		change(&p, &o)
		d, next := Decide(noon, p, o, s)
		if d.Replace != 1 || d.Desired != 3 || next.Stuck[""].Replaced != 1 {
			t.Errorf("%s: %d are replaced, %d desired: %s", name, d.Replace, d.Desired, d.Explain())
		}
	}
	p, off := four(), Switches{Off: true}
	o, s := quiet(2)
	s.Desired, o.Starting, o.Switches = 3, starts(time.Hour), off
	if d, _ := Decide(noon, p, o, s); d.Replace != 0 {
		t.Errorf("%d are replaced while scaling is off", d.Replace)
	}
}

// Starts of the only deployment of a model never become ready. After three replacements there is one try at a time, as
// there is for one deployment of several.
func TestStartsThatAreStuckAreFollowedByOneTryAtATime(t *testing.T) {
	now, s := noon, State{At: noon, Counted: noon, WasReady: noon}
	var under []time.Time
	blocked, tries, most := false, 0, 0
	for range 4 * 3600 {
		now = now.Add(time.Second)
		o := Obs{Waiting: 50, Service: 10, ColdStart: 60, LastRequest: now, Starting: slices.Clone(under)}
		var d Decision
		if d, s = Decide(now, Policy{Slots: 2}, o, s); d.Replace > 0 {
			under = nil
		}
		has := slices.ContainsFunc(d.Notes, func(n Note) bool { return n.Code == NoteBlocked })
		blocked = blocked || has
		under = under[:min(len(under), d.Desired)]
		for len(under) < d.Desired {
			under = append(under, now)
			if blocked {
				tries++
			}
		}
		if blocked {
			most = max(most, len(under))
		}
	}
	// The first rounds take 4 x 10 min. Then 10 min without starts and 10 min of a try follow each other.
	if !blocked || most != 1 || tries < 9 || tries > 11 {
		t.Errorf("blocked %v, at most %d starts at once, %d tries", blocked, most, tries)
	}
}

// Under a number that is set by hand starts that are stuck are replaced after three replacements as well: once for each
// blocked_for_seconds and the time after which the next one is stuck. The number stays.
func TestStartsOfANumberSetByHandAreReplacedForAsLongAsTheyAreStuck(t *testing.T) {
	one := 1
	for name, change := range map[string]func(*Policy, *Obs){
		"manual": func(p *Policy, _ *Obs) { p.Mode = Manual },
		"override": func(_ *Policy, o *Obs) {
			o.Switches = Switches{Override: &one, OverrideUntil: noon.Add(24 * time.Hour)}
		},
		"of several": func(_ *Policy, o *Obs) {
			o.Deployments = []DeploymentStarts{{Name: "own", Ready: o.Ready}, {Name: "spot", Starting: o.Starting, ByHand: true}}
		},
	} {
		now, began := noon, noon
		s := State{At: noon, Counted: noon, Desired: 1}
		var replaced []time.Duration
		for range 3 * 3600 {
			now = now.Add(time.Second)
			o, p := Obs{Starting: []time.Time{began}, LastRequest: now, ColdStart: 60}, Policy{Slots: 2, Min: 1}
			change(&p, &o)
			var d Decision
			if d, s = Decide(now, p, o, s); d.Replace > 0 {
				replaced, began = append(replaced, now.Sub(noon).Truncate(time.Minute)), now
			}
			if d.Desired != 1 && name != "of several" {
				t.Fatalf("%s: %d are desired: %s", name, d.Desired, d.Explain())
			}
		}
		minutes := func(ns ...int) (ds []time.Duration) {
			for _, n := range ns {
				ds = append(ds, time.Duration(n)*time.Minute)
			}
			return ds
		}
		if want := minutes(10, 20, 30, 50, 70, 90, 110, 130, 150, 170); !slices.Equal(replaced, want) {
			t.Errorf("%s: replaced after %v, want %v", name, replaced, want)
		}
	}
}

func TestAlgorithmsOfOthers(t *testing.T) {
	of := func(a Method, change ...func(*Policy)) Policy {
		return four(append(change, func(p *Policy) { p.Algorithm = a })...)
	}
	waiting := func(n int) func(*Obs, *State) { return func(o *Obs, _ *State) { o.Waiting = n } }
	used := func(perMinute float64) func(*Obs, *State) {
		return func(o *Obs, s *State) { o.Busy, o.Ready, s.Desired = perMinute, 10, 10 }
	}
	bounds := func(p *Policy) { p.Utilization = UtilizationPolicy{Variant: "bounds", OutOfCap: true} }
	band := func(p *Policy) { p.Utilization.Variant = "band" }
	forecast := func(p *Policy) { p.Utilization.Forecast = true }
	lastWeek := func(perMinute float64) func(*Obs, *State) {
		return func(o *Obs, s *State) {
			used(60*4*5)(o, s)
			o.Forecast = perMinute
		}
	}
	run(t, []row{
		{"replicate up", of(ReplicateV2), waiting(20), 5, NoteRatio, ""},
		{"replicate within hysteresis", of(ReplicateV2), waiting(8), 2, NoteTolerance, ""},
		{"replicate: at most five more", of(ReplicateV2), waiting(80), 7, NoteRateUp, ""},
		{"replicate: running does not count", of(ReplicateV2), func(o *Obs, _ *State) { o.Waiting, o.Running = 8, 8 }, 2, NoteTolerance, ""},
		{"replicate: running counts", of(ReplicateV2, func(p *Policy) { p.Replicate.Computing = true }), func(o *Obs, _ *State) {
			o.Waiting, o.Running = 8, 8
		}, 4, NoteRatio, ""},
		{"replicate: headroom", of(ReplicateV2, func(p *Policy) { p.Replicate.Headroom = 12 }), waiting(8), 5, NoteRatio, ""},
		{"replicate waits 30 s to go out", of(ReplicateV2), func(o *Obs, s *State) {
			o.Waiting, s.Window = 20, []Level{{ago(10 * time.Second), 2}}
		}, 2, "", NoteRateUp},
		{"replicate waits 2 min to go in", of(ReplicateV2), func(_ *Obs, s *State) { s.Window = []Level{{ago(time.Minute), 2}} }, 2, "", NoteZero},
		{"replicate keeps the last one", of(ReplicateV2), func(o *Obs, s *State) { o.Ready, s.Desired = 1, 1 }, 1, NoteIdle, ""},
		{"replicate to zero", of(ReplicateV2), func(o *Obs, s *State) {
			o.Ready, s.Desired, o.LastRequest = 1, 1, ago(6*time.Minute)
		}, 0, NoteZero, ""},
		{"replicate: not below what runs", of(ReplicateV2), func(o *Obs, s *State) {
			o.Ready, s.Desired, o.Running = 4, 4, 9
		}, 3, NoteRunning, ""},
		{"hpa up", of(HPA), waiting(20), 5, "", NoteTolerance},
		{"hpa within tolerance", of(HPA), func(o *Obs, s *State) {
			o.Waiting, s.Desired = 42, 10
		}, 10, NoteTolerance, ""},
		{"hpa: the larger of four and all", of(HPA), waiting(80), 6, NoteRateUp, ""},
		{"hpa: every 15 s", of(HPA), func(o *Obs, s *State) { o.Waiting, s.Synced = 80, ago(10*time.Second) }, 2, NoteNextCycle, ""},
		{"hpa: window of 300 s", of(HPA), func(_ *Obs, s *State) { s.Window = []Level{{ago(299 * time.Second), 2}} }, 2, NoteWindow, ""},
		{"hpa down after it", of(HPA), func(_ *Obs, s *State) { s.Window = []Level{{ago(300 * time.Second), 2}} }, 1, "", NoteWindow},
		{"hpa: one from zero", of(HPA), func(o *Obs, s *State) { o.Waiting, o.Ready, s.Desired = 80, 0, 0 }, 1, "", ""},
		{"count: requests a minute", of(Utilization), func(o *Obs, _ *State) { o.PerMin = 10 }, 8, NoteLoad, ""},
		{"count: ten down a cycle", of(Utilization), func(o *Obs, s *State) { o.Ready, s.Desired = 15, 15 }, 5, NoteRateDown, ""},
		{"count: every five minutes", of(Utilization), func(o *Obs, s *State) { o.PerMin, s.Synced = 10, ago(time.Minute) }, 2, NoteNextCycle, ""},
		{"band: within", of(Utilization, band), used(60 * 4 * 8), 10, NoteDeadBand, ""},
		{"band: above", of(Utilization, band), used(60 * 4 * 10), 12, NoteLoad, ""},
		{"band: below", of(Utilization, band), used(60 * 4 * 5), 6, NoteLoad, ""},
		{"bounds: within", of(Utilization, bounds), used(60 * 4 * 5), 10, NoteDeadBand, ""},
		{"bounds: above", of(Utilization, bounds), used(60 * 4 * 9), 12, NoteLoad, ""},
		{"bounds: below", of(Utilization, bounds), used(60 * 4 * 1.5), 5, NoteLoad, ""},
		{"bounds: refused requests count", of(Utilization, bounds), func(o *Obs, s *State) {
			used(60*4*5)(o, s)
			o.Arrived, o.Refused = 10, 10
		}, 13, NoteOutOfCap, ""},
		{"bounds: at most twice", of(Utilization, bounds), func(o *Obs, s *State) {
			used(60*4*5)(o, s)
			o.Arrived, o.Refused = 10, 500
		}, 13, NoteOutOfCap, ""},
		{"band: more last week", of(Utilization, band), lastWeek(60 * 4 * 10), 12, NoteLoad, ""},
		{"bounds: more last week", of(Utilization, bounds, forecast), lastWeek(60 * 4 * 9), 12, NoteLoad, NoteDeadBand},
		{"bounds: less last week", of(Utilization, bounds, forecast), lastWeek(60), 10, NoteDeadBand, ""},
		{"bounds: last week is not asked for", of(Utilization, bounds), lastWeek(60 * 4 * 9), 10, NoteDeadBand, NoteLoad},
		{"hpa: zero_off keeps the last one", of(HPA), func(o *Obs, s *State) {
			o.Ready, s.Desired, s.LastUse, o.LastRequest, o.Switches.ZeroOff = 1, 1, ago(time.Hour), ago(time.Hour), true
		}, 1, NoteZeroOff, NoteZero},
		{"count: from zero at once for work", of(Utilization), func(o *Obs, s *State) {
			o.Waiting, o.Ready, s.Desired, s.Synced = 450, 0, 0, ago(time.Minute)
		}, 1, NoteWake, ""},
		{"bounds: from zero for work", of(Utilization, bounds), func(o *Obs, s *State) { o.Waiting, o.Ready, s.Desired = 450, 0, 0 }, 1, NotePending, ""},
		{"count: not to zero while work waits", of(Utilization), func(o *Obs, s *State) { o.Waiting, o.Ready, s.Desired = 450, 1, 1 }, 1, NotePending, NoteZero},
		{"count: to zero without work", of(Utilization), func(o *Obs, s *State) { o.Ready, s.Desired = 1, 1 }, 0, NoteZero, ""},
		{"count: scale_to_zero", of(Utilization, func(p *Policy) { p.ScaleToZero = new(bool) }), func(o *Obs, s *State) {
			o.Ready, s.Desired = 1, 1
		}, 1, NoteZeroOff, NoteZero},
		{"count: zero_off", of(Utilization), func(o *Obs, s *State) { o.Ready, s.Desired, o.Switches.ZeroOff = 1, 1, true }, 1, NoteZeroOff, NoteZero},
		{"bounds: unhealthy ones go one by one", of(Utilization, bounds), func(o *Obs, s *State) {
			used(60*4*4)(o, s)
			o.Unhealthy = 2
		}, 9, NoteUnhealthy, ""},
	})
}

// bursts plays an hour and a half of 12 requests a second for a minute of each eight, with a hold of ten minutes.
// Instances are ready at once. It returns the number of instances of each second.
func bursts(change func(second int, o *Obs)) []int {
	now, s, ready := noon, State{}, 0
	var trace []int
	for second := range 5400 {
		now = now.Add(time.Second)
		rate := 0.2
		if second%480 < 60 {
			rate = 12
		}
		running := min(int(rate*2+0.5), ready*4)
		o := Obs{
			Arrived: rate, Running: running, Waiting: max(0, int(rate*2)-running), Ready: ready, Service: 2,
			ColdStart: 60, ColdStartP95: 60, LastRequest: now,
		}
		change(second, &o)
		var d Decision
		d, s = Decide(now, Policy{Slots: 4, Max: 60}, o, s)
		ready = d.Desired
		trace = append(trace, ready)
	}
	return trace
}

// The number at the end of a switch is that of the traffic meanwhile, and not of an empty window.
func TestWindowsGoOnWhileScalingIsSwitchedOff(t *testing.T) {
	const begin, end = 1900, 3500
	five := 5
	want := slices.Min(bursts(func(int, *Obs) {})[end : end+300])
	for name, change := range map[string]func(*Obs){
		"off":      func(o *Obs) { o.Switches.Off = true },
		"override": func(o *Obs) { o.Switches.Override, o.Switches.OverrideUntil = &five, noon.Add(end*time.Second) },
	} {
		t.Run(name, func(t *testing.T) {
			trace := bursts(func(second int, o *Obs) {
				if second >= begin && second < end {
					change(o)
				}
			})
			if got := slices.Min(trace[end : end+300]); got < want {
				t.Errorf("%d instances within 5 min of its end, %d without it", got, want)
			}
		})
	}
}

// Ten minutes without a leader are observed at once: their requests came in ten minutes and not in one.
func TestRequestsOfAGapAreNoBurst(t *testing.T) {
	const begin, end = 1800, 2400
	now, s, ready, missed := noon, State{}, 0, 0.0
	before, most := 0, 0
	for second := range 3600 {
		now = now.Add(time.Second)
		missed += 12
		if second >= begin && second < end {
			continue
		}
		running := min(24, ready*4)
		o := Obs{
			Arrived: missed, Running: running, Waiting: 24 - running, Ready: ready, Service: 2, ColdStart: 60,
			ColdStartP95: 60, LastRequest: now,
		}
		var d Decision
		d, s = Decide(now, Policy{Slots: 4, Max: 60}, o, s)
		ready, missed = d.Desired, 0
		if second < begin {
			before = ready
		}
		most = max(most, ready)
	}
	if most > before+1 {
		t.Errorf("%d instances after a gap in a steady load, %d before it", most, before)
	}
}
