package tasknode

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/penstock/penstock/pkg/invalidation"
)

func drawChoices(t *rapid.T, now time.Time) []choice {
	one := rapid.Custom(func(t *rapid.T) choice {
		c := choice{
			queue: rapid.Int32Range(1, 2).Draw(t, "queue"), priority: int16(rapid.IntRange(0, 2).Draw(t, "priority")), //nolint:gosec // small
			loaded: rapid.Bool().Draw(t, "loaded"), maxWait: time.Second,
		}
		if c.queue == 2 && rapid.Bool().Draw(t, "asks not") {
			c.maxWait, c.loaded = 0, false
		}
		if passed := rapid.IntRange(-1, 1999).Draw(t, "passed ms"); passed >= 0 {
			c.passed = now.Add(-time.Duration(passed) * time.Millisecond)
		}
		return c
	})
	return rapid.SliceOfN(one, 0, 8).Draw(t, "lanes")
}

// Whatever lanes there are: some are kept if there are any, a lane is passed over only for one of its queue that is no
// less urgent, and nothing that is loaded is taken before a lane of the same urgency that has been passed over for long.
func TestPreferenceIsBoundedAndNeverIdles(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(1000, 0)
		lanes := drawChoices(t, now)
		kept := keep(lanes, now)
		if len(lanes) > 0 && !slices.Contains(kept, true) {
			t.Fatal("no lane is left to claim from")
		}
		for i, l := range lanes {
			for j, o := range lanes {
				if kept[i] && kept[j] && l.queue == o.queue && l.priority <= o.priority && l.loaded && o.overdue(now) {
					t.Fatalf("lane %d may be taken before %d, which has waited for long", i, j)
				}
			}
			better := func(o choice) bool {
				return o.queue == l.queue && o.priority >= l.priority && (o.loaded || o.overdue(now))
			}
			if !kept[i] && (l.maxWait <= 0 || l.overdue(now) || !slices.ContainsFunc(lanes, better)) {
				t.Fatalf("lane %d of %+v is passed over for nothing", i, lanes)
			}
			if !kept[i] && !l.loaded && l.passed.IsZero() {
				t.Fatalf("lane %d is passed over and does not know it", i)
			}
		}
	})
}

// Two flows that never run dry, one worker: each has its turn within maxWait, and the worker swaps once a turn.
func TestLanesThatNeverRunDryTakeTurns(t *testing.T) {
	now := time.Unix(1000, 0)
	lanes := []choice{{queue: 1, maxWait: time.Second}, {queue: 1, maxWait: time.Second}}
	swaps, loaded := 0, -1
	for range 1000 { // each claim takes 10 ms
		kept := keep(lanes, now)
		i := slices.Index(kept, true)
		if i != loaded {
			swaps++
		}
		if loaded >= 0 {
			lanes[loaded].loaded = false
		}
		lanes[i].loaded, lanes[i].passed, loaded = true, time.Time{}, i
		for _, l := range lanes {
			if !l.passed.IsZero() && now.Sub(l.passed) > time.Second+10*time.Millisecond {
				t.Fatalf("a lane was passed over for %s", now.Sub(l.passed))
			}
		}
		now = now.Add(10 * time.Millisecond)
	}
	if swaps < 9 || swaps > 11 {
		t.Errorf("%d swaps in ten seconds, want one a second", swaps)
	}
}

type prefers struct{ flow string }

func (p prefers) Loaded(string) ([]string, time.Duration) { return []string{p.flow}, time.Second }

// A flow that its own limit holds back may have waited for long. The flow that is loaded does not wait for it as well.
func TestAFlowThatIsRefusedDoesNotHoldUpTheOneThatIsLoaded(t *testing.T) {
	b := newLaneTable(&turns{})
	b.serve(map[int32]*servedQueue{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	limited, loaded := invalidation.Lane{Priority: 1, Flow: "limited"}, invalidation.Lane{Priority: 1, Flow: "loaded"}
	b.found(1, []invalidation.LaneHead{{Lane: limited, Position: 1}, {Lane: loaded, Position: 2}})
	now := time.Now()
	b.passOver(prefers{"loaded"}, now) // notes that the other one waits
	now = now.Add(2 * time.Second)
	v := takeOne(b, prefers{"loaded"}, true, now)
	if v.lane.key.lane != limited {
		t.Fatalf("%v goes before the flow that has waited for as long as it may be", v.lane.key.lane)
	}
	b.endRefused(v, refusedByGate, now, lasting(time.Second))
	if v = takeOne(b, prefers{"loaded"}, true, now); v == nil {
		t.Fatal("the loaded flow is not claimed from either")
	}
	b.endUnclaimed(v)
	if v = takeOne(b, prefers{"loaded"}, true, now.Add(2*time.Second)); v == nil || v.lane.key.lane != limited {
		t.Error("the limited flow has lost its turn")
	}
}
