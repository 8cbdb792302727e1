package sim

import (
	"bytes"
	"flag"
	"fmt"
	"hash/fnv"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

var (
	seeds = flag.Uint64("seeds", 1000, "how many seeds TestSimulation runs")
	from  = flag.Uint64("from", 1, "the first of these seeds")
	seed  = flag.Uint64("seed", 0, "run this seed alone and print its steps")

	processes = flag.Int("processes", 1, "how many processes TestSimulation plays its seeds in; 0: one for each core")
)

// oneAtATime lets one goroutine run at a time. Else two goroutines of a process that go on at the same moment reach its
// mutexes in an order that differs from run to run, and a seed does not replay.
func oneAtATime(t *testing.T) {
	before, gc := runtime.GOMAXPROCS(1), debug.SetGCPercent(garbagePercent)
	t.Cleanup(func() {
		runtime.GOMAXPROCS(before)
		debug.SetGCPercent(gc)
	})
}

// garbagePercent is that of a program that keeps little and leaves much. With the usual one the collector took a sixth
// of the time.
const garbagePercent = 1000

// Every seed is a schedule of its own; one that breaks a promise prints its steps.
func TestSimulation(t *testing.T) {
	first, last := *from, *from+*seeds-1
	if *seed != 0 {
		first, last = *seed, *seed
	} else if *processes != 1 {
		playBeside(t, first, last)
		return
	}
	oneAtATime(t)
	steps, faults := 0, map[string]int{}
	for s := first; s <= last && !t.Failed(); s++ {
		w := simulate(t, s)
		steps += len(w.steps)
		for fault, times := range w.faults {
			faults[fault] += times
		}
	}
	t.Logf("%d seeds, %d steps, faults: %v", last-first+1, steps, faults)
	for _, fault := range []string{
		"connection cut", "answer lost", "answer late", "crash of a node", "crash of a leader", "partition",
		"election beside a leader", "row held",
	} {
		if last-first >= 100 && faults[fault] == 0 {
			t.Errorf("%s never happened", fault)
		}
	}
}

// A process plays so many seeds, and another one goes on.
const part = 500

// playBeside plays seeds in several processes, for a process plays one at a time. It ends with the first that fails.
func playBeside(t *testing.T, first, last uint64) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	parts := make(chan uint64)
	go func() {
		defer close(parts)
		for s := first; s <= last; s += part {
			parts <- s
		}
	}()
	atOnce := *processes
	if atOnce == 0 {
		atOnce = runtime.NumCPU()
	}
	var players sync.WaitGroup
	for range atOnce {
		players.Go(func() {
			for s := range parts {
				if t.Failed() {
					continue
				}
				number := min(part, last-s+1)
				out, err := exec.CommandContext(t.Context(), self, "-test.run", "^TestSimulation$", "-test.v",
					"-from", fmt.Sprint(s), "-seeds", fmt.Sprint(number)).CombinedOutput()
				if err != nil {
					t.Errorf("seeds %d to %d: %v\n%s", s, s+number-1, err, out)
				} else {
					t.Logf("from %d: %s", s, bytes.TrimSpace(summary.Find(out)))
				}
			}
		})
	}
	players.Wait()
}

// summary is what a process logs of its seeds.
var summary = regexp.MustCompile(`\d+ seeds, .*`)

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

// simulate runs a seed in a bubble of its own and judges it.
func simulate(t *testing.T, s uint64) (w *world) {
	synctest.Test(t, func(t *testing.T) {
		w = play(s)
		steps := fmt.Sprintf("%s\n%d steps, digest %s", strings.Join(w.steps, "\n"), len(w.steps), digest(w.steps))
		if violations := w.judge(); len(violations) > 0 {
			t.Errorf("seed %d:\n%s\nsteps:\n%s\n%s", s, strings.Join(violations, "\n"), steps, fmt.Sprintf(again, s))
		} else if *seed != 0 {
			t.Log(steps)
		}
	})
	return w
}

// again tells how to replay a seed that failed.
const again = `again with: go -C chaos test ./sim -run TestSimulation -seed %d -v
The replay is the same run if its digest is the same. Steps, times and faults follow from the seed, the Go version and
the code. Go itself draws the order of a map, of timers of one instant, and of the cases of a select that are ready
together: about one replay of a thousand parts from the run before there, and more under the race detector. Then the
steps above are the evidence; repeat the replay with -count=20.`

// digest is short enough to compare two runs by eye.
func digest(steps []string) string {
	h := fnv.New64a()
	for _, s := range steps {
		fmt.Fprintln(h, s)
	}
	return fmt.Sprintf("%016x", h.Sum64())
}

// stepsOf are the steps of one run of a seed.
func stepsOf(t *testing.T, s uint64) (steps []string) {
	synctest.Test(t, func(*testing.T) { steps = play(s).steps })
	return steps
}

// A run that kept its promises, with one thing changed afterwards: the judge has to see it.
func TestJudgeSeesWhatIsWrong(t *testing.T) {
	oneAtATime(t)
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
		"before it ran again": func(w *world) {
			// Each run that is repeated has one of the next entry before it.
			for i := len(w.runs) - 1; i >= 0; i-- {
				early := *w.runs[i]
				early.entry, early.began = early.entry+1, early.began.Add(-1)
				w.runs = slices.Insert(w.runs, i, &early)
			}
		},
		"without the mark that it may have run": func(w *world) {
			for _, r := range w.runs {
				r.mayHaveRun = false
			}
		},
		"entries are left": func(w *world) { w.drained = false },
	}
	for want, spoil := range cases {
		synctest.Test(t, func(t *testing.T) {
			w := play(3) // it has a case of each
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
