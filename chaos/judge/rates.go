package judge

import (
	"slices"
	"time"
)

// Rate is that of a token bucket: so many starts at once, and so many a second.
type Rate struct {
	Burst, PerSecond float64
}

// lateRecord is how much later than it was charged a start is recorded at most, where nothing disturbs the database.
const lateRecord = 100 * time.Millisecond

// ratesHold looks at the starts of queues under a rate: in no time are there more than fill the bucket and flow into it
// meanwhile. Those count that ended under their grant and whose worker answered: what a start took out of the bucket
// goes back where the entry did not run. A claim reads the bucket a moment before its grants are recorded, both by the
// server's clock: that moment and one unit more are allowed. A claim that waited in between, for a table that was
// locked, or for a server that was slow, recorded its grants later: no time is judged that begins within a moment of a
// disturbance.
func ratesHold(x *index, r *report) {
	if x.ClockJumped {
		return
	}
	ended := map[int64]bool{}
	for i := range x.Endings {
		ended[x.Endings[i].Token] = true
	}
	starts, known := map[string][]time.Time{}, map[int64]bool{}
	for _, calls := range x.calls {
		for _, c := range calls {
			g := x.grants[c.Token]
			if g == nil || x.forked(g.At) || c.Answer != "ok" && c.Answer != "error" || !ended[c.Token] ||
				known[c.Token] {
				continue
			}
			if _, rated := x.Rates[g.Queue]; rated {
				known[c.Token] = true
				starts[g.Queue] = append(starts[g.Queue], g.At)
			}
		}
	}
	calm := calmOutside(slices.Concat(x.Disturbances, x.Refusals))
	for queue, times := range starts {
		rate := x.Rates[queue]
		slices.SortFunc(times, time.Time.Compare)
		for i, from := range times {
			if calm.between(from.Add(-lateRecord), from) < lateRecord {
				continue
			}
			r.checked++
			for j := i + 1; j < len(times); j++ {
				over := (times[j].Sub(from) + lateRecord).Seconds()
				if n := float64(j - i + 1); n > rate.Burst+rate.PerSecond*over+1 {
					r.bad("%v entries of %s started within %v, at a rate of %v a second and %v at once", n, queue,
						times[j].Sub(from), rate.PerSecond, rate.Burst)
					break
				}
			}
		}
	}
}
