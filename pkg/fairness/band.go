package fairness

import (
	"math"
	"time"
)

// band is one priority. Bands are served from the highest down, but each one with work is
// owed a guaranteed share of what this node gives out.
type band struct {
	priority int16
	members  group // its queues

	// credit is service owed: share x all service while the band had work, less what it got.
	credit  float64
	running float64       // estimates of what runs on this node
	peak    float64       // the most that running was, inflated like an account
	share   float64       // guaranteed now, 0 to 1
	oldest  time.Duration // head age over its lanes
	seen    time.Time     // when it last had work
	now     bool          // it has work in this ranking
}

// How the guaranteed share of a band grows with the age of its oldest head.
const (
	ageStep = time.Minute // at which it has doubled
	ageCap  = 4.0         // the largest multiple
)

// wake records that the band has work, with a head of this age.
func (x *band) wake(age time.Duration, now time.Time) {
	if !x.now {
		x.now, x.seen, x.oldest = true, now, 0
	}
	x.oldest = max(x.oldest, age)
}

// shares sets the guaranteed share of every band with work but the highest, which needs none.
// A share grows with the age of the oldest head, up to a cap; together they never exceed one half.
func (b *Book) shares(now time.Time) {
	owed, top := 0, int16(math.MinInt16)
	for _, x := range b.bands {
		if x.now {
			top = max(top, x.priority)
		}
		if now.Sub(x.seen) <= b.config.Grace {
			owed++
		} else {
			x.credit = min(x.credit, 0) // an idle band saves nothing up
		}
	}
	for _, x := range b.bands {
		x.share = 0
		if now.Sub(x.seen) > b.config.Grace || x.priority == top {
			continue
		}
		age := min(1+x.oldest.Seconds()/ageStep.Seconds(), ageCap)
		x.share = min(b.config.MinShare*age, 0.5/float64(max(owed-1, 1)))
	}
}

// due is how far the band has fallen behind its guarantee, 0 if it has not. One that is
// owed nothing yet still takes its first turn.
func (x *band) due() float64 {
	if x.share == 0 || x.credit < 0 {
		return 0
	}
	return x.credit + math.SmallestNonzeroFloat64
}

// owed is how much service a claim may bring of the band that was ranked first: what it has fallen behind, and its
// share of what runs. Without the latter most claims of a band that gets its share would be of one entry. A band below
// others was first since it was due; what it was owed may have been charged since by another claim, or for what runs.
// 0: it is the highest band, which nothing bounds.
func (b *Book) owed(priority int16) float64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	x := b.band(priority)
	if x.share == 0 {
		return 0
	}
	running := 0.0
	for _, other := range b.bands {
		running += other.running
	}
	return max(x.due(), math.SmallestNonzeroFloat64) + x.share*running
}

// most bounds credit, by twice the work that runs at once. A band may have been served alone
// for hours while something else held up those above it: it must not pay for that for hours,
// nor may a band that could not be served save up its share.
const most = 2

// earn books service given to a band: every band with work earns its share of it.
func (b *Book) earn(served *band, cost, running, scale float64) {
	served.running = max(0, served.running+running)
	served.peak = max(served.peak, served.running*scale)
	served.credit -= cost
	all := 0.0
	for _, x := range b.bands {
		all += x.peak
	}
	for _, x := range b.bands {
		x.credit = min(max(x.credit+x.share*cost, -most*x.peak/scale), most*x.share*all/scale)
	}
}

func (b *Book) band(priority int16) *band {
	for _, x := range b.bands {
		if x.priority == priority {
			return x
		}
	}
	x := &band{priority: priority}
	b.bands = append(b.bands, x)
	return x
}
