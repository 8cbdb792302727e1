package gateway

import "time"

// PoolMode is how a pool admits requests.
type PoolMode uint8

// The modes.
const (
	ModePass  PoolMode = iota // slots suffice
	ModeQueue                 // requests wait, and durable calls may be preempted
	ModeCold                  // no usable instance, but one may start
)

var modeNames = [...]string{"pass", "queue", "cold"}

// String returns the name as metrics and status show it.
func (m PoolMode) String() string { return modeNames[m] }

// bounds are the lower and the upper bound of the hysteresis band, in calls. Without a watermark the
// upper bound is the ceiling.
func (p *Pool) bounds() (lower, upper float64) {
	mark := p.policy.Watermark * float64(p.fleet.usable())
	if p.policy.Watermark == 0 {
		mark = float64(p.ceiling()) / (1 + p.policy.Deviation)
	}
	return mark * (1 - p.policy.Deviation), mark * (1 + p.policy.Deviation)
}

// updateMode moves the mode with the calls in flight and the requests that wait: QUEUE above the upper bound, PASS
// below the lower one, and as it was between the two.
func (p *Pool) updateMode(now time.Time) {
	before := p.mode
	lower, upper := p.bounds()
	load := float64(p.inFlight + p.waiting)
	switch {
	case p.fleet.usable() == 0 && p.mayStart():
		p.mode = ModeCold
	case load > upper:
		p.mode = ModeQueue
	case load < lower || p.waiting == 0 && before == ModeCold || load == 0:
		p.mode = ModePass
	case before == ModeCold:
		p.mode = ModeQueue
	}
	if p.mode != before {
		p.modeSince = now
	}
	if before == ModeCold && p.mode != ModeCold {
		p.restartTTLs(now)
	}
}
