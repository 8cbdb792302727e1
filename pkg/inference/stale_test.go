package inference

import (
	"slices"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"

	"pgregory.net/rapid"
)

const grace = 5 * time.Second

// orphan is a slot that was put in doubt some time ago.
func orphan(token int64, age time.Duration) slot.Orphan { return slot.Orphan{Token: token, Age: age} }

// deadOrphan is a slot of a node that died some time ago.
func deadOrphan(token int64, age time.Duration) slot.Orphan {
	return slot.Orphan{Token: token, Age: age, Dead: true}
}

func stale(orphans []slot.Orphan, active int) []int64 {
	e := &Endpoint{Model: worker.Model{Name: "m", Protocol: worker.ProtocolGeneric}.WithDefaults(), Slots: 4}
	return staleOrphans(orphans, worker.Health{State: worker.StateReady, Active: &active}, e, grace)
}

func TestStaleSlots(t *testing.T) {
	old, young := 30*time.Second, time.Second
	for _, c := range []struct {
		name    string
		orphans []slot.Orphan
		active  int
		want    []int64
	}{
		{"worker restarted", []slot.Orphan{orphan(1, old), orphan(2, old+1)}, 0, []int64{2, 1}},
		{"all accounted for", []slot.Orphan{orphan(1, old), orphan(2, old)}, 2, nil},
		{"more than ours", []slot.Orphan{orphan(1, old)}, 5, nil},
		{"one left over, the oldest", []slot.Orphan{orphan(1, old), orphan(2, 2*old)}, 1, []int64{2}},
		// The race: the probe overtook the request that the new slot was taken for.
		{"taken a moment ago", []slot.Orphan{orphan(1, young)}, 0, nil},
		{"old one counted, new one on its way", []slot.Orphan{orphan(1, old), orphan(2, young)}, 1, nil},
		{"exactly at grace", []slot.Orphan{orphan(1, grace)}, 0, []int64{1}},
		{"nonsense report", []slot.Orphan{orphan(1, young)}, -7, nil},
	} {
		if got := stale(c.orphans, c.active); !slices.Equal(got, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

// As long as requests take less than the grace age to arrive, no more slots are
// freed than are unused: calls in flight never exceed what is held.
func TestNoMoreSlotsAreFreedThanAreUnused(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var orphans []slot.Orphan
		active, dead := 0, 0
		for i := range rapid.Int64Range(0, 20).Draw(t, "slots") {
			age := time.Duration(rapid.Int64Range(0, int64(time.Minute)).Draw(t, "age"))
			arrives := time.Duration(rapid.Int64Range(0, int64(grace)-1).Draw(t, "travel"))
			switch {
			case age < arrives: // on its way
			case rapid.Bool().Draw(t, "running"):
				active++
			default:
				dead++
			}
			orphans = append(orphans, orphan(i, age))
		}
		if freed := stale(orphans, active); len(freed) > dead {
			t.Fatalf("%d slots freed, only %d were not in use", len(freed), dead)
		}
	})
}

func TestSlotsOfADeadNodeComeFreeByWhatTheModelSays(t *testing.T) {
	two, one, none := 2, 1, 0
	stops := worker.Model{Name: "m", Protocol: worker.ProtocolOpenAI}
	goesOn := worker.Model{Name: "m", Protocol: worker.ProtocolGeneric}
	dead := []slot.Orphan{deadOrphan(1, 3*time.Second), deadOrphan(2, 3*time.Second), deadOrphan(3, 100*time.Millisecond)}
	for _, c := range []struct {
		name   string
		model  worker.Model
		health worker.Health
		want   []int64
	}{
		{"a closed connection stops the run", stops, worker.Health{State: worker.StateReady, Active: &two}, []int64{1, 2}},
		{"it goes on", goesOn, worker.Health{State: worker.StateReady, Active: &two}, nil},
		{"the worker is idle", goesOn, worker.Health{State: worker.StateReady, Active: &none}, []int64{1, 2}},
		{"calls wait inside", goesOn, worker.Health{State: worker.StateReady, Active: &none, Queued: &two}, nil},
		{"its server is gone", goesOn, worker.Health{State: worker.StateUnhealthy, Gone: true}, []int64{1, 2}},
		{"it is ill, and answers", goesOn, worker.Health{State: worker.StateUnhealthy}, nil},
		{"it is ill, and tells its calls", goesOn, worker.Health{State: worker.StateUnhealthy, Active: &one}, []int64{1}},
		{"its host cannot be reached", goesOn, worker.Health{State: worker.StateUnhealthy, Unreached: true}, nil},
		{"the worker says nothing", goesOn, worker.Health{State: worker.StateReady}, nil},
	} {
		e := &Endpoint{Model: c.model.WithDefaults(), Slots: 4}
		if got := staleOrphans(dead, c.health, e, 10*time.Second); !slices.Equal(got, c.want) {
			t.Errorf("%s: freed %v, want %v", c.name, got, c.want)
		}
	}
	old := []slot.Orphan{deadOrphan(1, 601*time.Second)}
	e := &Endpoint{Model: goesOn.WithDefaults(), Slots: 4}
	if got := staleOrphans(old, worker.Health{State: worker.StateReady}, e, 0); len(got) != 1 {
		t.Error("a slot is kept for longer than a run can last")
	}
}
