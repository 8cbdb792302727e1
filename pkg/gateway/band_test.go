package gateway

import "time"

// band is the design of a band of calls in flight to the letter, as gateways of inference had it before: one fair queue
// over models with a request size of 1, whatever the criticality; a request passes the queue by while the count is below the
// upper bound and nothing waits; else critical ones wait, and all others are refused. Poppers look every ten
// milliseconds for room below the lower bound. Waits that end are found once a second, and lower the count, in which they
// never were. With one model the fair queue is first in, first out. The scheduler behind it chooses the engine with the
// fewest requests.
type band struct {
	*world
	lower, upper float64
	inFlight     int
	queue        []arrival
	popped       time.Duration // when the poppers looked last
	cleaned      time.Duration
}

// Settings of the design, by which the bounds follow from the watermark of an engine.
const (
	bandTotal     = 1000
	bandFlowTotal = 100 // of one model, as all requests of a trace are
	bandDeviation = 0.1
	bandPoppers   = 10
	bandWait      = 10 * time.Millisecond
	bandTTL       = 30 * time.Second
	bandClean     = time.Second
)

// newBand returns the band around a watermark of calls to each engine.
func newBand(w *world, watermark float64) *band {
	mark := watermark * float64(len(w.engines))
	return &band{world: w, lower: mark * (1 - bandDeviation), upper: mark * (1 + bandDeviation)}
}

func (b *band) arrive(now time.Duration, a arrival) {
	switch {
	case float64(b.inFlight) < b.upper && len(b.queue) == 0:
		b.schedule(now, a)
	case a.criticality != Critical || len(b.queue) >= min(bandTotal, bandFlowTotal):
		b.refused++
	default:
		b.queue = append(b.queue, a)
	}
}

func (b *band) schedule(now time.Duration, a arrival) {
	b.inFlight++
	b.send(now, b.least(), a, func() { b.inFlight-- })
}

func (b *band) tick(now time.Duration) {
	if now-b.popped >= bandWait {
		b.popped = now
		for range bandPoppers {
			if len(b.queue) == 0 || float64(b.inFlight) >= b.lower {
				break
			}
			a := b.queue[0]
			b.queue = b.queue[1:]
			if now-a.at > bandTTL { // it is not dispatched
				b.expire()
				continue
			}
			b.schedule(now, a)
		}
	}
	if now-b.cleaned >= bandClean {
		b.cleaned = now
		for len(b.queue) > 0 && now-b.queue[0].at > bandTTL {
			b.queue = b.queue[1:]
			b.expire()
		}
	}
}

func (b *band) expire() {
	b.refused++
	b.inFlight--
}
