package judge

import (
	"slices"
	"time"
)

// Rate is that of a token bucket: so many starts at once, and so many a second.
type Rate struct {
	Burst, PerSecond float64
}

// ratesHold looks at the starts of queues under a rate: in no time are there more than fill the bucket and flow into it
// meanwhile. Those count whose worker answered: what a start took out of the bucket goes back where the entry did not
// run, and may go back where a drain or a lost lease ended the run. A grant is recorded a moment after it was charged:
// the tolerance and one unit more allow for that.
func ratesHold(x *index, r *report) {
	if x.ClockJumped {
		return
	}
	starts := map[string][]time.Time{}
	for _, calls := range x.calls {
		for _, c := range calls {
			g := x.grants[c.Token]
			if g == nil || x.forked(g.At) || c.Answer != "ok" && c.Answer != "error" {
				continue
			}
			if _, rated := x.Rates[g.Queue]; rated {
				starts[g.Queue] = append(starts[g.Queue], g.At)
			}
		}
	}
	for queue, times := range starts {
		rate := x.Rates[queue]
		slices.SortFunc(times, time.Time.Compare)
		for i, from := range times {
			r.checked++
			for j := i + 1; j < len(times); j++ {
				over := (times[j].Sub(from) + x.Tolerance).Seconds()
				if n := float64(j - i + 1); n > rate.Burst+rate.PerSecond*over+1 {
					r.bad("%v entries of %s started within %v, at a rate of %v a second and %v at once", n, queue,
						times[j].Sub(from), rate.PerSecond, rate.Burst)
					break
				}
			}
		}
	}
}
