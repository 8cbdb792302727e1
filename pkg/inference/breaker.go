package inference

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// QuarantineConfig says when an instance is quarantined. The zero value works.
type QuarantineConfig struct {
	Failures      int           // fast failures within Window; 5
	Share         float64       // of the instance's calls within Window that failed fast; 0.8
	Fast          time.Duration // a failure within this is fast; 2 s
	Window        time.Duration // 60 s
	Quarantine    time.Duration // 15 s, doubled each time the probe call fails
	QuarantineMax time.Duration // 10 min
}

func (c QuarantineConfig) withDefaults() QuarantineConfig {
	c.Failures = cmp.Or(c.Failures, 5)
	c.Share = cmp.Or(c.Share, 0.8)
	c.Fast = cmp.Or(c.Fast, 2*time.Second)
	c.Window = cmp.Or(c.Window, time.Minute)
	c.Quarantine = cmp.Or(c.Quarantine, 15*time.Second)
	c.QuarantineMax = cmp.Or(c.QuarantineMax, 10*time.Minute)
	return c
}

// breaker quarantines instances of one model that fail fast while others do
// not: one broken GPU answers sooner than the good ones, and would draw the
// whole queue to itself. It is pure: callers serialise, and pass the time.
type breaker struct {
	config    QuarantineConfig
	instances map[string]*circuit
}

type circuit struct {
	samples    []sample  // within the window, oldest first
	openUntil  time.Time // quarantined until; zero: closed
	quarantine time.Duration
	probing    bool   // half open, and the one call that may try is out
	reason     string // why it was opened
}

type sample struct {
	at   time.Time
	fast bool // failed fast; false: it succeeded or took its time
}

// newBreaker returns a breaker with all instances admitted.
func newBreaker(config QuarantineConfig) *breaker {
	return &breaker{config: config.withDefaults(), instances: map[string]*circuit{}}
}

// Admit reports whether a call may go to the instance. After a quarantine one
// call is admitted as a probe; it must end in Record or Forgo.
func (b *breaker) Admit(now time.Time, instance string) bool {
	c := b.instances[instance]
	switch {
	case c == nil || c.openUntil.IsZero():
		return true
	case now.Before(c.openUntil) || c.probing:
		return false
	}
	c.probing = true
	return true
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
	Recycle     bool   // its process has lost its device context: drain and restart it
	Unspent     bool   // the instance is to blame: the entry spends no attempt
	Reason      string // why, for a person
}

// Record takes what a call came to and how long it ran.
func (b *breaker) Record(now time.Time, instance string, o worker.Outcome, ran time.Duration) verdict {
	c := b.circuit(instance)
	switch judgement := b.judge(o, ran); {
	case judgement == saysNothing:
		b.Forgo(instance)
		return verdict{}
	case o.Class == worker.ClassContextLost && (o.Kind == worker.Failed || o.Kind == worker.NotReady):
		b.open(now, c, "device context lost: "+o.Reason)
		return verdict{Quarantined: true, Recycle: true, Unspent: true, Reason: c.reason}
	case judgement == good:
		wasOpen := !c.openUntil.IsZero()
		if wasOpen && c.probing {
			*c = circuit{}
		}
		c.add(now, b.config.Window, sample{at: now})
		return verdict{}
	}
	c.add(now, b.config.Window, sample{at: now, fast: true})
	if !c.openUntil.IsZero() {
		if c.probing {
			b.open(now, c, "probe call failed: "+o.Reason)
		}
		return verdict{Unspent: true, Reason: c.reason}
	}
	if b.clustered(now, instance) {
		b.open(now, c, "fast failures: "+o.Reason)
		return verdict{Quarantined: true, Unspent: true, Reason: c.reason}
	}
	return verdict{Unspent: b.suspect(now, instance)}
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
	bad
)

// judge decides what an outcome says about the instance, not about the entry.
func (b *breaker) judge(o worker.Outcome, ran time.Duration) judgement {
	switch o.Kind {
	case worker.Done:
		return good
	case worker.NotReady:
		return bad
	case worker.Failed:
		if o.Class == worker.ClassContextLost {
			return bad
		}
		if o.Class == worker.ClassOOM || o.Class == worker.ClassInput {
			return saysNothing // the entry was too big, or wrong
		}
		if ran <= b.config.Fast {
			return bad
		}
		return good // slow failures come from the work
	}
	return saysNothing // Busy, Rejected, Cancelled, Accepted, Unknown
}

// clustered: enough fast failures here, and not the same everywhere. Where the
// others fail as fast, the fault is in the entries or the model, and taking
// instances away one by one would only hide it.
func (b *breaker) clustered(now time.Time, instance string) bool {
	fast, total := b.instances[instance].counts(now, b.config.Window)
	if fast < b.config.Failures || float64(fast) < b.config.Share*float64(total) {
		return false
	}
	otherFast, otherTotal := b.others(now, instance)
	return otherTotal == 0 || float64(otherFast)/float64(otherTotal) < b.config.Share/2
}

// suspect: this is not the first fast failure in a row, while calls elsewhere
// succeed. The entry is then given the benefit of the doubt.
func (b *breaker) suspect(now time.Time, instance string) bool {
	samples := b.instances[instance].samples
	if len(samples) < 2 || !samples[len(samples)-2].fast {
		return false
	}
	otherFast, otherTotal := b.others(now, instance)
	return otherTotal > 0 && float64(otherFast)/float64(otherTotal) < b.config.Share/2
}

func (b *breaker) others(now time.Time, instance string) (fast, total int) {
	for _, name := range slices.Collect(maps.Keys(b.instances)) {
		if name == instance {
			continue
		}
		f, t := b.instances[name].counts(now, b.config.Window)
		fast, total = fast+f, total+t
	}
	return fast, total
}

func (b *breaker) circuit(instance string) *circuit {
	c := b.instances[instance]
	if c == nil {
		c = &circuit{}
		b.instances[instance] = c
	}
	return c
}

func (b *breaker) open(now time.Time, c *circuit, reason string) {
	if c.quarantine == 0 {
		c.quarantine = b.config.Quarantine
	} else if c.probing || c.openUntil.IsZero() {
		c.quarantine = min(2*c.quarantine, b.config.QuarantineMax)
	}
	c.openUntil, c.probing, c.reason = now.Add(c.quarantine), false, worker.Clip(reason)
}

// samplesMost bounds memory; a busy instance fills a window with fewer anyway
// than would change the verdict.
const samplesMost = 256

func (c *circuit) add(now time.Time, window time.Duration, s sample) {
	first := 0
	for first < len(c.samples) && now.Sub(c.samples[first].at) > window {
		first++
	}
	first = max(first, len(c.samples)+1-samplesMost)
	c.samples = append(c.samples[:0:0], c.samples[first:]...)
	c.samples = append(c.samples, s)
}

func (c *circuit) counts(now time.Time, window time.Duration) (fast, total int) {
	for _, s := range c.samples {
		if now.Sub(s.at) > window {
			continue
		}
		total++
		if s.fast {
			fast++
		}
	}
	return fast, total
}
