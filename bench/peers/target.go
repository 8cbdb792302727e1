package peers

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
)

// The contenders that have targets.
const (
	ours         = "penstock"
	oursOnWorker = "penstock-inference"
	fastest      = "graphile"      // of the peers, in pick-ups
	fastestCalls = "graphile-call" // the same with a call to the worker
)

// target is a bound on a ratio or a value of one comparison. One whose scenarios or contenders were not run is left
// out.
type target struct {
	name  string
	least bool // wanted is the least allowed, else the most
	want  float64
	got   func(f finder) (float64, bool)
}

// finder returns the median of a value over the rounds of a contender in a scenario.
type finder func(scenario, contender string, value func(Run) float64) (float64, bool)

var targets = []target{
	{"bulk push / River's fastest", true, 1.2, rates("bulk", "river")},
	{"single push / River", true, 3, rates("single", "river")},
	{"single push apart / River", true, 3, rates("single-apart", "river")},
	{"solo drain / graphile-worker", true, 1.3, rates("solo", "graphile")},
	{"solo drain / River", true, 2, rates("solo", "river")},
	{"groups / graphile-worker", true, 3, rates("groups", "graphile")},
	{"sustained / graphile-worker", true, 1.5, rates("sustained", "graphile")},
	{"pick-up by default, p50 ms", false, 1, pickedUp(ours, p50)},
	{"pick-up by default, p99 ms", false, 2, pickedUp(ours, p99)},
	{"pick-up by default, p50 / graphile-worker", false, 1, beside(ours, fastest, p50)},
	{"pick-up by default, p99 / graphile-worker", false, 1, beside(ours, fastest, p99)},
	{"pick-up of an inference queue, p50 / graphile-worker", false, 1, beside(oursOnWorker, fastest, p50)},
	{"pick-up of an inference queue, p99 / graphile-worker", false, 1, beside(oursOnWorker, fastest, p99)},
	{"the same / graphile-worker with the same call, p50", false, 1, beside(oursOnWorker, fastestCalls, p50)},
	{"the same / graphile-worker with the same call, p99", false, 1, beside(oursOnWorker, fastestCalls, p99)},
	{"from the call of the push, p50 / graphile-worker", false, 1, beside(ours, fastest, fromPushP50)},
	{"from the call of the push, p99 / graphile-worker", false, 1, beside(ours, fastest, fromPushP99)},
	{"the same of an inference queue, p50 / graphile-worker", false, 1, beside(oursOnWorker, fastest, fromPushP50)},
	{"the same of an inference queue, p99 / graphile-worker", false, 1, beside(oursOnWorker, fastest, fromPushP99)},
	{"drain under a held snapshot / without", true, 0.9, func(f finder) (float64, bool) {
		held, ok := f("held", ours, Run.Rate)
		free, also := f("solo", ours, Run.Rate)
		return held / free, ok && also
	}},
	{"WAL of a solo entry's life, B", false, 900, func(f finder) (float64, bool) {
		each := func(r Run) float64 { return float64(r.WALBytes) / float64(r.Entries) }
		push, ok := f("bulk", ours, each)
		work, also := f("solo", ours, each)
		return push + work, ok && also
	}},
}

func rates(scenario, peer string) func(finder) (float64, bool) {
	return func(f finder) (float64, bool) {
		mine, ok := f(scenario, ours, Run.Rate)
		theirs, also := f(scenario, peer, Run.Rate)
		return mine / theirs, ok && also
	}
}

// Latencies of pick-ups (us): from the return of the push, and from its call.
func p50(r Run) int         { return r.Latency.P50 }
func p99(r Run) int         { return r.Latency.P99 }
func fromPushP50(r Run) int { return r.FromPush.P50 }
func fromPushP99(r Run) int { return r.FromPush.P99 }

// pickedUp is a latency of a contender's pick-ups (ms).
func pickedUp(contender string, at func(Run) int) func(finder) (float64, bool) {
	return func(f finder) (float64, bool) {
		return f("pickup", contender, func(r Run) float64 { return float64(at(r)) / 1000 })
	}
}

// beside is a latency of a contender's pick-ups, as a multiple of a peer's.
func beside(contender, peer string, at func(Run) int) func(finder) (float64, bool) {
	return func(f finder) (float64, bool) {
		mine, ok := pickedUp(contender, at)(f)
		theirs, also := pickedUp(peer, at)(f)
		return mine / theirs, ok && also
	}
}

// WriteTargets says of each target that these runs can judge whether it was reached.
func WriteTargets(w io.Writer, runs []Run) error {
	find := func(scenario, contender string, value func(Run) float64) (float64, bool) {
		var values []float64
		for _, r := range of(runs, scenario, contender) {
			if !r.Unsupported {
				values = append(values, value(r))
			}
		}
		if len(values) == 0 {
			return 0, false
		}
		slices.Sort(values)
		return middle(values), true
	}
	fmt.Fprintln(w, "\ntargets, of medians")
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, t := range targets {
		got, ok := t.got(find)
		if !ok {
			continue
		}
		bound, verdict := "at most", "missed"
		if t.least {
			bound = "at least"
		}
		if (t.least && got >= t.want) || (!t.least && got <= t.want) {
			verdict = "reached"
		}
		fmt.Fprintf(tw, "%s\t%s %g\t%.2f\t%s\n", t.name, bound, t.want, got, verdict)
	}
	return tw.Flush()
}
