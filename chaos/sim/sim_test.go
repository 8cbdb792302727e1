package sim

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

var (
	seeds = flag.Int("seeds", 1000, "how many seeds TestSimulation runs")
	seed  = flag.Uint64("seed", 0, "run this seed alone and print its steps")
)

// Every seed is a schedule of its own; one that breaks a promise prints its steps.
func TestSimulation(t *testing.T) {
	first, last := uint64(1), uint64(*seeds)
	if *seed != 0 {
		first, last = *seed, *seed
	}
	var steps atomic.Int64
	var mu sync.Mutex
	faults := map[string]int{}
	const lanes = 4
	t.Run("seeds", func(t *testing.T) {
		for lane := range uint64(lanes) {
			t.Run(fmt.Sprint(lane), func(t *testing.T) {
				t.Parallel()
				for s := first + lane; s <= last && !t.Failed(); s += lanes {
					n, met := simulate(t, s)
					steps.Add(int64(n))
					mu.Lock()
					for fault, times := range met {
						faults[fault] += times
					}
					mu.Unlock()
				}
			})
		}
	})
	t.Logf("%d seeds, %d steps, faults: %v", last-first+1, steps.Load(), faults)
	for _, fault := range []string{
		"connection cut", "answer lost", "answer late", "crash of a node", "crash of a leader", "partition",
		"election beside a leader",
	} {
		if last-first >= 100 && faults[fault] == 0 {
			t.Errorf("%s never happened", fault)
		}
	}
}

// An election during a transaction that does not commit is not taken back with it.
func TestElectionOutlivesARollback(t *testing.T) {
	s := newStore("solo")
	tx, err := connect(s, unhindered{}).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s.tables.term++
	if err := tx.Rollback(t.Context()); err != nil || s.tables.term != 2 {
		t.Errorf("the term is %d after the rollback (%v), want 2", s.tables.term, err)
	}
}

// simulate runs a seed in a bubble of its own and returns the number of its steps.
func simulate(t *testing.T, s uint64) (steps int, faults map[string]int) {
	synctest.Test(t, func(t *testing.T) {
		w := play(s)
		violations, trace := w.judge(), w.steps
		steps, faults = len(trace), w.faults
		if len(violations) > 0 {
			t.Errorf(
				"seed %d:\n%s\nsteps:\n%s\nagain with: go -C chaos test ./sim -run TestSimulation -seed %d -v",
				s,
				strings.Join(violations, "\n"),
				strings.Join(trace, "\n"),
				s,
			)
		} else if *seed != 0 {
			t.Log(strings.Join(trace, "\n"))
		}
	})
	return steps, faults
}

// A run that kept its promises, with one thing changed afterwards: the judge has to see it.
func TestJudgeSeesWhatIsWrong(t *testing.T) {
	first := func(w *world, what, how string) *event {
		for i := range w.store.tables.events {
			if e := &w.store.tables.events[i]; e.what == what && (how == "" || e.how == how) {
				return e
			}
		}
		t.Fatalf("no event %s %s", what, how)
		return nil
	}
	cases := map[string]func(w *world){
		"did not run under it": func(w *world) {
			e := first(w, "ended", "done")
			w.runs = slices.DeleteFunc(w.runs, func(r *run) bool { return r.entry == e.entry && r.token == e.token })
		},
		"its run ended well: false": func(w *world) {
			e := first(w, "ended", "done")
			for _, r := range w.runs {
				r.well = r.well && r.entry != e.entry
			}
		},
		"ended twice": func(w *world) {
			w.store.tables.note(*first(w, "ended", ""))
		},
		"gone without an outcome": func(w *world) { w.told[1<<40] = true },
		"was granted token": func(w *world) {
			w.store.tables.note(*first(w, "granted", ""))
		},
		"never committed": func(w *world) { w.runs[0].token = 1 << 40 },
		"beside entry": func(w *world) {
			twice := *w.runs[0]
			w.runs = slices.Insert(w.runs, 1, &twice)
		},
		"whose node was silent for": func(w *world) {
			for i, earlier := range w.runs {
				for _, later := range w.runs[i+1:] {
					if later.key == earlier.key && later.token != earlier.token && earlier.ended.Before(later.began) {
						earlier.ended = later.began.Add(time.Millisecond)
					}
				}
			}
		},
		"accepted later": func(w *world) {
			w.runs = slices.Insert(w.runs, 0, &run{entry: 1 << 40, key: "k1", process: w.runs[0].process})
		},
		"entries are left": func(w *world) { w.drained = false },
	}
	for want, spoil := range cases {
		synctest.Test(t, func(t *testing.T) {
			w := play(1)
			if found := w.judge(); len(found) > 0 {
				t.Fatalf("before anything was changed: %q", found)
			}
			spoil(w)
			if found := w.judge(); !strings.Contains(strings.Join(found, "\n"), want) {
				t.Errorf("want %q, found %q", want, found)
			}
		})
	}
}
