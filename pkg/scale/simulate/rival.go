package simulate

import (
	"math"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/scale"
)

// Decider is a scaler that runs scale.Decide: the same code as in the duty of the leader.
type Decider struct {
	policy scale.Policy
	state  scale.State
	usage  usage
}

// NewDecider returns a scaler with an empty state.
func NewDecider(p scale.Policy) *Decider { return &Decider{policy: p} }

// Desired implements Scaler.
func (p *Decider) Desired(now time.Time, o scale.Obs) int {
	if p.policy.Algorithm == scale.Utilization {
		p.usage.add(o)
		o.PerMin, o.Busy = p.usage.perMinute(), p.usage.busyPerMinute()
	}
	decision, state := scale.Decide(now, p.policy, o, p.state)
	p.state = state
	return decision.Desired
}

// usage is the load over the last fifteen minutes, by the second.
type usage struct {
	arrived, busy [900]float64
	at, filled    int
}

func (u *usage) add(o scale.Obs) {
	u.arrived[u.at], u.busy[u.at] = o.Arrived, float64(o.Running)
	u.at = (u.at + 1) % len(u.busy)
	u.filled = min(u.filled+1, len(u.busy))
}

func (u *usage) perMinute() float64     { return u.mean(u.arrived[:u.filled]) }
func (u *usage) busyPerMinute() float64 { return u.mean(u.busy[:u.filled]) }

func (u *usage) mean(of []float64) float64 {
	sum := 0.0
	for _, v := range of {
		sum += v
	}
	return 60 * sum / float64(max(1, len(of)))
}

// Static never changes.
type Static int

// Desired implements Scaler.
func (s Static) Desired(time.Time, scale.Obs) int { return int(s) }

// Knative is the Knative pod autoscaler on concurrency with its published defaults: a stable window of
// 60 s, a panic window of 6 s that begins at twice the capacity, 70 % utilisation, at most 1,000 times up
// and half down, a tick of 2 s, and 30 s of grace before zero.
type Knative struct {
	Target float64 // requests an instance; Knative's default is 0.7 of its slots
	Max    int

	samples   []float64 // concurrency by the second, at most 60
	desired   int
	panicEnds time.Time
	zeroSince time.Time
}

const (
	knativeStable = 60
	knativePanic  = 6
	knativeGrace  = 30 * time.Second
)

// Desired implements Scaler.
func (k *Knative) Desired(now time.Time, o scale.Obs) int {
	k.samples = append(k.samples, float64(o.Waiting+o.Running))
	if len(k.samples) > knativeStable {
		k.samples = k.samples[1:]
	}
	if now.Unix()%2 != 0 {
		return k.desired
	}
	stable := k.wanted(k.samples, o.Ready)
	burst := k.wanted(k.samples[max(0, len(k.samples)-knativePanic):], o.Ready)
	if float64(burst) >= 2*float64(max(1, o.Ready)) {
		k.panicEnds = now.Add(knativeStable * time.Second)
	}
	wanted := stable
	if now.Before(k.panicEnds) {
		wanted = max(k.desired, burst) // never down while it panics
	}
	if wanted > 0 {
		k.zeroSince = time.Time{}
	} else if k.zeroSince.IsZero() {
		k.zeroSince = now
	}
	if wanted == 0 && k.desired > 0 && now.Sub(k.zeroSince) < knativeGrace {
		wanted = 1
	}
	k.desired = min(wanted, k.Max)
	return k.desired
}

func (k *Knative) wanted(samples []float64, ready int) int {
	sum := 0.0
	for _, s := range samples {
		sum += s
	}
	least := int(math.Floor(float64(ready) / 2))
	return max(int(math.Ceil(sum/float64(len(samples))/k.Target)), least)
}

// Clairvoyant is a bound, not a scaler that could exist: it knows all requests, and has as many instances
// at each time as keep the queue of the next minutes short, started one cold start ahead.
type Clairvoyant struct {
	levels []int // by the second
}

// reserve is for slots that are filled one by one.
const reserve = 1.1

// NewClairvoyant computes the levels of a load. A share of the SLO is left as margin.
func NewClairvoyant(load Load, margin float64) *Clairvoyant {
	span := int(load.Span()) + 2
	work := make([]float64, span)
	for _, r := range load.Requests {
		work[int(r.At)] += r.Service
	}
	total := make([]float64, span+1)
	for at, seconds := range work {
		total[at+1] = total[at] + seconds
	}
	need := make([]int, span)
	wait := int(max(1, margin*load.SLO))
	for at := range span {
		// What arrives in any window that ends here must be served in the window and the permitted wait.
		for window := 1; window <= 4096 && window <= at+1; window *= 2 {
			slots := reserve * (total[at+1] - total[at+1-window]) / float64(window+wait)
			need[at] = max(need[at], int(math.Ceil(slots/float64(load.Slots))))
		}
	}
	levels := make([]int, span)
	ahead, keep := int(load.Cold)+1, wait+int(load.Cold)
	for at := range span {
		from, to := max(0, at-keep), min(span, at+ahead)
		levels[at] = min(load.Max, slices.Max(need[from:to]))
	}
	return &Clairvoyant{levels: levels}
}

// Desired implements Scaler.
func (c *Clairvoyant) Desired(now time.Time, _ scale.Obs) int {
	at := int(now.Sub(epoch).Seconds())
	return c.levels[min(at, len(c.levels)-1)]
}
