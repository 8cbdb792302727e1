package gateway

import "time"

// limiter bounds the calls to one instance below its slots while the instance shows that it cannot take
// as many: additive increase, multiplicative decrease. It starts at the slots.
type limiter struct {
	slots  int
	limit  float64
	grown  time.Time     // last time it was looked at for growth
	used   bool          // the limit was reached since then
	cut    time.Time     // last decrease
	probe  time.Time     // time of the last probe that was taken in
	queued int           // probes in a row that reported waiting inside the worker
	tokens int           // output tokens of streams that were not judged yet
	took   time.Duration // in which they were made
}

const (
	limitFall   = 0.9 // of the limit stays after a sign of overload
	limitRise   = 1.02
	limitEvery  = 10 * time.Second // between increases
	limitPause  = time.Second      // between decreases: the calls of one moment give one sign
	kvFull      = 0.90
	staleAfter  = 5 * time.Second // older readings say nothing
	probesQueue = 2               // probes with waiting requests that make a sign
	paceTokens  = 16              // output tokens that are judged together: of fewer, one pause decides
)

func newLimiter(slots int, now time.Time) limiter {
	return limiter{slots: slots, limit: float64(slots), grown: now}
}

// resize tells how many slots the instance has.
func (l *limiter) resize(slots int) {
	if slots == l.slots {
		return
	}
	if l.limit >= float64(l.slots) {
		l.limit = float64(slots)
	}
	l.slots = slots
	l.limit = min(l.limit, float64(slots))
}

// value is how many calls may be in flight, 1 at least.
func (l *limiter) value() int { return max(1, int(l.limit)) }

// busy notes that the worker refused a call for want of room.
func (l *limiter) busy(now time.Time) { l.fall(now) }

// report takes in what the worker said of itself: waiting requests inside it, and the used part of its
// KV cache, at a time that identifies the probe. Readings that are missing, that are stale at now, or of
// a probe that was taken in before change nothing.
func (l *limiter) report(now, at time.Time, queued *int, kv *float64) {
	if now.Sub(at) > staleAfter || !at.After(l.probe) {
		return
	}
	l.probe = at
	if queued != nil {
		if *queued > 0 {
			l.queued++
		} else {
			l.queued = 0
		}
	}
	if l.queued >= probesQueue || (kv != nil && *kv > kvFull) {
		l.queued = 0
		l.fall(now)
	}
}

// pace takes in for how long a stream made how many output tokens, and the most per token that clients accept. The
// limit falls when paceTokens tokens or more, of one stream or of several, took longer. A call that began before the
// last decrease says nothing of the limit that holds since.
func (l *limiter) pace(now, began time.Time, took time.Duration, tokens int, most time.Duration) {
	if most <= 0 || tokens <= 0 || began.Before(l.cut) {
		return
	}
	l.tokens += tokens
	l.took += took
	if l.tokens < paceTokens {
		return
	}
	if l.took/time.Duration(l.tokens) > most { // a product may overflow
		l.fall(now)
	}
	l.tokens, l.took = 0, 0
}

// fall lowers the limit, unless it fell a moment ago.
func (l *limiter) fall(now time.Time) {
	if !l.cut.IsZero() && now.Sub(l.cut) < limitPause {
		return
	}
	l.cut, l.grown, l.used = now, now, false
	l.limit = max(1, l.limit*limitFall)
}

// grow raises the limit by 2 % for each 10 s in which it was reached. Call it with the calls in flight.
func (l *limiter) grow(now time.Time, inFlight int) {
	if inFlight >= l.value() {
		l.used = true
	}
	if now.Sub(l.grown) < limitEvery {
		return
	}
	if l.used && l.limit < float64(l.slots) {
		l.limit = min(float64(l.slots), max(l.limit*limitRise, l.limit+0.2))
	}
	l.grown, l.used = now, false
}
