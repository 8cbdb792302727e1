package scale

import (
	"math"
	"time"
)

// Sources older than these permit no way down beyond the hold, and no way down at all.
const (
	staleAfter = 10 * time.Second
	blindAfter = 30 * time.Second
)

// elapsedMax bounds the time that one observation may cover: a leader that was away for an hour does
// not work an hour off the shadow queues at once. Of the requests of a longer time the share of elapsedMax counts.
const elapsedMax = time.Minute

// decider is one decision in the making.
type decider struct {
	now     time.Time
	p       Policy
	o       Obs
	s       State // the next state; it shares no memory with the one before
	d       Decision
	elapsed float64 // seconds since the last fresh observation
	slots   float64
	alive   int           // instances ready or starting, without stuck ones
	stale   bool          // a source is older than staleAfter: nothing is counted
	frozen  bool          // a source is older than blindAfter: no way down
	byHand  bool          // an operator sets the number
	source  InputSource   // the oldest one
	oldest  time.Duration // its age
	rows    []float64
}

// Decide returns how many instances a model should have. It is pure: the same arguments give the same
// results. Durations are compared on the clock of now; all sources are read in one observation.
func Decide(now time.Time, p Policy, o Obs, s State) (Decision, State) {
	p = p.WithDefaults()
	t := decider{now: now, p: p, o: o.sane(now), s: s.sane(now, time.Duration(p.BlockedFor))}
	t.begin()
	if t.switched() {
		if t.d.Apply {
			t.byHand = true
			t.countStuck()
		}
		t.moveWindows()
		return t.end()
	}
	t.count()
	t.countStuck()
	switch t.p.Algorithm {
	case ReplicateV2:
		t.replicate()
	case HPA:
		t.hpa()
	case Utilization:
		t.utilization()
	default:
		t.penstock()
	}
	t.bound()
	t.block()
	t.allow()
	return t.end()
}

// penstock is our own algorithm: what would have sufficed all along, and what the present backlog needs.
func (t *decider) penstock() {
	t.base()
	t.surge()
	t.d.Raw = max(t.d.Base, t.d.Surge)
	switch {
	case t.d.Raw > 0:
	case t.work() > 0 || t.o.Refused > 0:
		t.d.Raw = 1
		t.note(NotePending, float64(t.work())+t.o.Refused, 0, 0)
	case t.o.Late > 0 && t.alive == 0 && t.worth(max(t.s.Recent, float64(t.o.Late))) >= 1:
		t.d.Raw = 1
		t.note(NoteNextLate, float64(t.o.Late), 0, 0)
	}
	t.hold()
	t.coverUnhealthy()
	t.rates()
	t.keepRunning()
	t.zero()
}

// moveWindows moves the windows on while a switch, an override or a mode sets the number, so that the traffic of that
// time decides at its end. The levels that are found are published; reasons and number stay those of the switch.
func (t *decider) moveWindows() {
	given := t.d
	t.count()
	if t.p.Algorithm == Penstock {
		t.base()
		t.surge()
		t.d.Raw = max(t.d.Base, t.d.Surge)
		t.hold()
	}
	given.Base, given.Surge, given.Raw, given.Stabilised = t.d.Base, t.d.Surge, t.d.Raw, t.d.Stabilised
	t.d = given
}

func (t *decider) begin() {
	t.slots = float64(t.p.Slots)
	t.s.Changes = recentChanges(t.s.Changes, t.now)
	advised := t.p.Mode == Advise
	if t.s.At.IsZero() || t.s.Advised && !advised { // nothing had to follow the number before
		t.s.Desired, t.s.Changes = t.o.Ready+len(t.o.Starting), nil
		t.s.Begun = Level{At: t.now, N: t.s.Desired}
	}
	t.s.Advised = advised
	t.s.At = t.now
	t.alive = t.o.Ready + len(t.liveStarts())
	t.d = Decision{At: t.now, Current: t.s.Desired, Desired: t.s.Desired, Apply: true}
	t.age()
}

// age marks the sources that are too old. An error is never read as zero.
func (t *decider) age() {
	t.source, t.oldest = SourceGateway, time.Duration(t.o.Ages.Gateway)
	if age := time.Duration(t.o.Ages.Instances); age > t.oldest {
		t.source, t.oldest = SourceInstances, age
	}
	t.frozen = t.oldest > blindAfter
	t.stale = t.oldest > staleAfter
}

// count adds the requests that arrived to the rates. A stale observation counts nothing: the requests
// of its time are in the next fresh one.
func (t *decider) count() {
	if t.stale {
		t.noteSource(NoteStale)
		return
	}
	if !t.s.Counted.IsZero() {
		away := t.now.Sub(t.s.Counted)
		t.elapsed = max(0, min(away, elapsedMax).Seconds())
		if away > elapsedMax {
			t.thin(elapsedMax.Seconds() / away.Seconds())
		}
	}
	t.s.Counted = t.now
	arrived := t.arrived()
	if t.elapsed > 0 {
		t.s.Rate += (arrived/t.elapsed - t.s.Rate) * (1 - math.Exp(-t.elapsed/rateSeconds))
	}
	t.s.Recent = t.s.Recent*math.Exp(-t.elapsed/recentSeconds) + arrived
	if arrived > 0 || t.work() > 0 {
		t.s.LastUse = t.now
	}
	if t.o.LastRequest.After(t.s.LastUse) {
		t.s.LastUse = t.o.LastRequest
	}
	if t.o.Ready > 0 {
		t.s.WasReady = t.now
	}
}

// thin leaves a share of the requests that arrived.
func (t *decider) thin(share float64) {
	t.o.Arrived *= share
	t.o.Online *= share
	t.o.Refused *= share
}

const (
	rateSeconds   = 60   // of the rate that a surge expects to go on
	recentSeconds = 1800 // of the hazard of another request
)

// arrived counts refused requests too, at most twice the served: refused clients repeat their requests.
func (t *decider) arrived() float64 {
	refused := min(t.o.Refused, max(2*t.o.Arrived, 1))
	return t.o.Arrived + refused
}

// work is the number of requests that wait or run. Those that will be late start nothing.
func (t *decider) work() int { return t.waiting() + t.o.Running }

// waiting leaves out late entries of queues: a request at a gateway is never one of them.
func (t *decider) waiting() int { return max(t.o.Urgent, t.o.Waiting-t.o.Late) }

// service is the seconds that a request holds a slot, guessed at a second while nothing is known.
func (t *decider) service() float64 {
	if t.o.Service > 0 {
		return t.o.Service
	}
	return 1
}

func (t *decider) coldStart() float64 {
	if t.o.ColdStart > 0 {
		return t.o.ColdStart
	}
	return 60
}

// end records the decision in the state.
func (t *decider) end() (Decision, State) {
	if t.d.Desired != t.s.Desired && len(t.d.Notes) == 0 { // what had asked for more is over
		t.note(NoteEnough, float64(t.d.Desired), float64(t.work()), 0)
	}
	if by := t.d.Desired - t.s.Desired; by != 0 {
		t.s.Changes = append(t.s.Changes, Step{At: t.now, By: by})
	}
	t.s.Desired = t.d.Desired
	return t.d, t.s
}
