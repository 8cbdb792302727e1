package sim

import (
	"flag"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
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
	const lanes = 4
	t.Run("seeds", func(t *testing.T) {
		for lane := range uint64(lanes) {
			t.Run(fmt.Sprint(lane), func(t *testing.T) {
				t.Parallel()
				for s := first + lane; s <= last && !t.Failed(); s += lanes {
					steps.Add(int64(simulate(t, s)))
				}
			})
		}
	})
	t.Logf("%d seeds, %d steps", last-first+1, steps.Load())
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
func simulate(t *testing.T, s uint64) (steps int) {
	synctest.Test(t, func(t *testing.T) {
		violations, trace := Simulate(s)
		steps = len(trace)
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
	return steps
}
