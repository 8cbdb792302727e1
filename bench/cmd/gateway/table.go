package main

import (
	"fmt"
	"time"

	"github.com/penstock/penstock/bench/meter"
)

// scenarios are all that this program can measure, in the order in which it does, with the most time that one takes.
var scenarios = []struct {
	name string
	most time.Duration
	run  func(ctx *run) error
}{
	{"whole", 2 * time.Minute, proxied("whole")},
	{"highest", 2 * time.Minute, proxied("highest")},
	{"streams", 2 * time.Minute, proxied("streams")},
	{"prompts", 2 * time.Minute, proxied("prompts")},
	{"overload", time.Minute, overload},
	{"waiting", 2 * time.Minute, waiting},
	{"handover", time.Minute, handOver},
	{"preemption", 90 * time.Second, preemption},
	{"fairness", 90 * time.Second, fairness},
	{"idle", time.Minute, idle},
}

// row is a line of the table: a target, and the figure that was measured.
type row struct {
	scenario, what string
	target         float64
	measured       float64
	unit           string
	least          bool // the target is the least that is wanted; else the most
}

func (r row) reached() bool {
	if r.least {
		return r.measured >= r.target
	}
	return r.measured <= r.target
}

// table collects the rows of a run.
type table []row

func (t *table) most(scenario, what string, target, measured float64, unit string) {
	*t = append(*t, row{scenario, what, target, measured, unit, false})
}

func (t *table) least(scenario, what string, target, measured float64, unit string) {
	*t = append(*t, row{scenario, what, target, measured, unit, true})
}

func (t table) print() {
	fmt.Printf("\n%-11s %-52s %12s %12s\n", "scenario", "figure", "target", "measured")
	for _, r := range t {
		bound, word := "<=", "reached"
		if r.least {
			bound = ">="
		}
		if !r.reached() {
			word = "MISSED"
		}
		fmt.Printf("%-11s %-52s %2s %9.4g %12.4g %-4s %s\n",
			r.scenario, r.what, bound, r.target, r.measured, r.unit, word)
	}
}

// quantile of durations, in milliseconds; 0 without any.
func quantile(list []time.Duration, q float64) float64 {
	return float64(meter.Quantile(list, q)) / float64(time.Millisecond)
}
