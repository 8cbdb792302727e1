package inference

import (
	"errors"
	"maps"
	"net/http"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// quarantineConfig says when an instance is quarantined, and for how long.
type quarantineConfig struct {
	failures int           // entries that failed fast within judgedFor
	fast     time.Duration // a failure within this is fast
	lasts    time.Duration // doubled each time the probe call fails
	lastsMax time.Duration
}

// Beside quarantineConfig.failures an instance is judged by these.
const (
	judgedFor   = 30 * time.Second // what a call said counts for so long
	hangsEnough = 2                // entries that ran into a limit while nothing succeeded there
	shareEnough = 0.8              // of the instance's entries: those that failed fast, or ran into a limit
)

// breaker quarantines instances of one model that fail fast while others do
// not: one broken GPU answers sooner than the good ones, and would draw the
// whole queue to itself. It is pure: callers serialise, and pass the time.
type breaker struct {
	config    quarantineConfig
	instances map[string]*circuit
}

type circuit struct {
	samples    []sample  // of the time of judgedFor, oldest first
	succeeded  time.Time // last
	openUntil  time.Time // quarantined until; zero: closed
	quarantine time.Duration
	probing    bool   // half open, and the one call that may try is out
	lost       bool   // it was opened because the device context was lost
	reason     string // why it was opened
}

// sample is what a call said about an instance.
type sample struct {
	at          time.Time
	judgement   judgement
	entry, flow string
}

// evidence is the circumstances of a call beside its outcome.
type evidence struct {
	entry, flow string
	ran         time.Duration
	last        bool // no other instance of the model could have taken the call
	probe       bool // the call was admitted as a probe
}

// newBreaker returns a breaker with all instances admitted.
func newBreaker(config quarantineConfig) *breaker {
	return &breaker{config: config, instances: map[string]*circuit{}}
}

// Admit reports whether a call may go to the instance. After a quarantine one
// call is admitted as a probe; it must end in Record or Forgo.
func (b *breaker) Admit(now time.Time, instance string) (admitted, probe bool) {
	c := b.instances[instance]
	switch {
	case c == nil || c.openUntil.IsZero():
		return true, false
	case now.Before(c.openUntil) || c.probing:
		return false, false
	}
	c.probing = true
	return true, true
}

// Forgo gives an admission back that was not used, or whose call says nothing
// about the instance.
func (b *breaker) Forgo(instance string) {
	if c := b.instances[instance]; c != nil {
		c.probing = false
	}
}

// verdict on a recorded call.
type verdict struct {
	Quarantined bool   // the instance has just been quarantined
	Recycle     bool   // its process has lost its device context for good: drain and restart it
	Unspent     bool   // the instance is to blame: the entry spends no attempt
	Suspicious  bool   // the last usable instance would be quarantined: probe it, and Condemn it if it is ill
	Reason      string // why, for a person
}

// Record takes the result of a call. Of a quarantined instance the probe alone is judged: other calls began before the
// quarantine.
func (b *breaker) Record(now time.Time, instance string, o worker.Outcome, e evidence) verdict {
	c := b.circuit(instance)
	s := sample{at: now, judgement: b.judge(c, o, now, e.ran), entry: e.entry, flow: e.flow}
	switch s.judgement {
	case saysNothing:
		if e.probe {
			b.Forgo(instance)
		}
		return verdict{}
	case good:
		if !c.openUntil.IsZero() && e.probe {
			*c = circuit{}
		}
		c.succeeded = now
		c.add(now, s)
		return verdict{}
	}
	proven := !c.succeeded.IsZero() && now.Sub(c.succeeded) <= judgedFor
	c.add(now, s)
	lost := o.Class == worker.ClassContextLost
	if !c.openUntil.IsZero() && e.probe {
		b.open(now, c, "probe call failed: "+o.Reason)
		return verdict{Unspent: true, Recycle: lost && c.lost, Reason: c.reason}
	}
	if !c.openUntil.IsZero() {
		return verdict{Unspent: true, Reason: c.reason}
	}
	if reason := b.grounds(now, instance, o); reason != "" {
		if e.last && c.flows(now) < 2 {
			return verdict{Unspent: lost, Suspicious: true, Reason: reason}
		}
		c.lost = lost
		b.open(now, c, reason)
		return verdict{Quarantined: true, Unspent: true, Reason: c.reason}
	}
	// An instance that has not succeeded lately has yet to show that it can: while there are others, the
	// first entry that it fails does not pay for that. What its worker reports of a run is the entry's.
	unproven := !proven && !e.last && !o.Stated && s.judgement == bad
	return verdict{Unspent: unproven || b.suspect(now, instance)}
}

// Condemn quarantines an instance whose probe confirmed the errors of its calls.
func (b *breaker) Condemn(now time.Time, instance, reason string) {
	b.open(now, b.circuit(instance), reason)
}

// grounds says why an instance should be quarantined after this call; empty for no reason.
func (b *breaker) grounds(now time.Time, instance string, o worker.Outcome) string {
	switch {
	case o.Class == worker.ClassContextLost:
		return "device context lost: " + o.Reason
	case b.clustered(now, instance, bad, b.config.failures):
		return "fast failures: " + o.Reason
	case b.clustered(now, instance, hung, hangsEnough):
		return "calls hang: " + o.Reason
	}
	return ""
}

// Quarantine of an instance: until when, and why; ok is false when admitted.
func (b *breaker) Quarantine(now time.Time, instance string) (until time.Time, reason string, ok bool) {
	c := b.instances[instance]
	if c == nil || c.openUntil.IsZero() || (!now.Before(c.openUntil) && !c.probing) {
		return time.Time{}, "", false
	}
	return c.openUntil, c.reason, true
}

type judgement uint8

const (
	saysNothing judgement = iota
	good
	bad  // it failed fast, or was not there
	hung // it ran into a limit while nothing succeeded on the instance
)

// judge decides what an outcome says about the instance, not about the entry.
func (b *breaker) judge(c *circuit, o worker.Outcome, now time.Time, ran time.Duration) judgement {
	limited := errors.Is(o.Err, worker.ErrRunLimit) || errors.Is(o.Err, worker.ErrNoProgress) ||
		errors.Is(o.Err, worker.ErrSilence)
	switch {
	case o.Unsent:
		return saysNothing // nothing was dialled
	case limited && c.succeeded.Before(now.Add(-ran)):
		return hung
	case limited:
		return saysNothing
	case o.Kind == worker.Done:
		return good
	case o.Kind == worker.NotReady && o.Starting:
		return saysNothing // it is loading
	case o.Kind == worker.NotReady:
		return bad
	case o.Kind == worker.Unknown && lostCall(o.StatusCode) && ran <= b.config.fast:
		return bad // a proxy does not reach its server
	case o.Kind != worker.Failed:
		return saysNothing // Busy, Rejected, Cancelled, Accepted, Unknown
	case o.Class == worker.ClassContextLost:
		return bad
	case o.Class == worker.ClassOOM || o.Class == worker.ClassInput || o.Aborted:
		return saysNothing // the entry was too big, or wrong, or the server is going
	case ran <= b.config.fast:
		return bad
	}
	return good // slow failures come from the work
}

// lostCall lists the statuses of answers to a call that may have run. One that comes fast is no answer to a run.
func lostCall(status int) bool {
	return status >= 500 || status == http.StatusRequestTimeout || status == http.StatusSeeOther
}

// clustered: so many entries fared badly here, and not the same everywhere. Where the others fail as
// well, the fault is in the entries or the model, and taking instances away one by one would only
// hide it. An entry counts once: its own retries are no second witness.
func (b *breaker) clustered(now time.Time, instance string, kind judgement, enough int) bool {
	entries, share := b.instances[instance].counts(now, kind)
	if entries < enough || share < shareEnough {
		return false
	}
	others, any := b.others(now, instance)
	return !any || others < shareEnough/2
}

// suspect: this is not the first fast failure in a row, while calls elsewhere
// succeed. The entry is then given the benefit of the doubt.
func (b *breaker) suspect(now time.Time, instance string) bool {
	samples := b.instances[instance].samples
	if len(samples) < 2 || samples[len(samples)-2].judgement != bad {
		return false
	}
	others, any := b.others(now, instance)
	return any && others < shareEnough/2
}

// others returns the share of calls to other instances that fared badly; any is false without calls.
func (b *breaker) others(now time.Time, instance string) (share float64, any bool) {
	failed, total := 0, 0
	for name, c := range b.instances {
		if name == instance {
			continue
		}
		for _, s := range c.samples {
			if now.Sub(s.at) > judgedFor {
				continue
			}
			total++
			if s.judgement != good {
				failed++
			}
		}
	}
	return float64(failed) / float64(max(total, 1)), total > 0
}

func (b *breaker) circuit(instance string) *circuit {
	c := b.instances[instance]
	if c == nil {
		c = &circuit{}
		b.instances[instance] = c
	}
	return c
}

// keep forgets the instances that are not registered any more.
func (b *breaker) keep(registered map[string]bool) {
	maps.DeleteFunc(b.instances, func(instance string, _ *circuit) bool { return !registered[instance] })
}

func (b *breaker) open(now time.Time, c *circuit, reason string) {
	if c.quarantine == 0 {
		c.quarantine = b.config.lasts
	} else if c.probing || c.openUntil.IsZero() {
		c.quarantine = min(2*c.quarantine, b.config.lastsMax)
	}
	c.openUntil, c.probing, c.reason = now.Add(c.quarantine), false, worker.Clip(reason)
}

// samplesMax bounds memory; more of a busy instance would not change the verdict.
const samplesMax = 256

func (c *circuit) add(now time.Time, s sample) {
	first := 0
	for first < len(c.samples) && now.Sub(c.samples[first].at) > judgedFor {
		first++
	}
	first = max(first, len(c.samples)+1-samplesMax)
	c.samples = append(c.samples[:0:0], c.samples[first:]...)
	c.samples = append(c.samples, s)
}

// counts returns how many entries fared so of late, and what share of all entries that is.
func (c *circuit) counts(now time.Time, kind judgement) (entries int, share float64) {
	all, such := map[string]bool{}, map[string]bool{}
	for _, s := range c.samples {
		if now.Sub(s.at) > judgedFor {
			continue
		}
		all[s.entry] = true
		if s.judgement == kind {
			such[s.entry] = true
		}
	}
	return len(such), float64(len(such)) / float64(max(len(all), 1))
}

// flows counts the flows whose entries fared badly of late.
func (c *circuit) flows(now time.Time) int {
	found := map[string]bool{}
	for _, s := range c.samples {
		if now.Sub(s.at) <= judgedFor && s.judgement != good {
			found[s.flow] = true
		}
	}
	return len(found)
}
