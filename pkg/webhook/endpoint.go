package webhook

import (
	"container/list"
	"sync"
	"time"
)

// When an endpoint gets no attempts for a while.
const (
	breakerFailures = 5                // in a row, after which the breaker opens
	breakerOpen     = 30 * time.Second // how long it is open; doubled after each failed trial
	breakerOpenMax  = 10 * time.Minute
)

// flightLimits bound the attempts in flight at once, since a receiver that does not answer holds one for the whole
// timeout.
type flightLimits struct {
	address  int // to one address
	host     int // to one host
	unproven int // to all hosts together whose last answer was not prompt
}

// site bounds the attempts to the unproven hosts of one site, where any number of names costs nothing.
func (l flightLimits) site() int { return max(1, l.unproven/2) }

// slow bounds the attempts to the hosts of all slow sites together.
func (l flightLimits) slow() int { return max(1, l.unproven/4) }

// endpoints keeps one receiver's trouble from the others: bounds on attempts in flight, and a breaker for each address.
// The breaker belongs to the address without its query, because strangers share hosts. Hosts that answered promptly
// last time are not bounded together; all others are (they are unproven), so that any number of slow names leaves
// threads for them. Among unproven hosts those of one site, and those of sites at which an attempt lasted for the whole
// timeout, leave places for hosts that nothing is known of. Addresses without trouble take no memory, and at most
// endpointsMax with trouble are remembered.
type endpoints struct {
	limits flightLimits

	mu     sync.Mutex
	byID   map[string]*endpoint
	idle   *list.List // of *endpoint without attempts, the one that was used longest ago in front
	byHost tally      // attempts in flight
	prompt *recent    // hosts whose last answer came within promptWithin
	slow   *recent    // sites at which the last attempt to an unproven host lasted for the whole timeout

	// attempts in flight to hosts that are not in prompt, and to those of them whose site is slow
	unproven, toSlow int
	bySite           tally // attempts in flight to unproven hosts
}

type endpoint struct {
	id        string
	idle      *list.Element // nil while attempts are in flight
	active    int
	failures  int // in a row
	openFor   time.Duration
	openUntil time.Time // zero: the breaker is closed
	trial     *flight   // the one attempt after the breaker was open; nil: none is in flight, or the breaker is closed
	reason    string    // of the last failure
}

// target is where an attempt goes: an address without its query, its host, and the site of the host.
type target struct{ id, host, site string }

// flight is an attempt that was admitted.
type flight struct {
	endpoint       *endpoint
	to             target
	unproven, slow bool
}

// verdict is what an attempt says about its endpoint.
type verdict struct {
	healthy  bool
	took     time.Duration
	timedOut bool
	reason   string // where it is not healthy
}

// refusal is why an attempt was not admitted.
type refusal struct {
	wait time.Duration // until another one
	// down is the reason of the last failure where the breaker is open; empty where enough attempts are in flight.
	down string
}

const (
	endpointsMax = 4096
	// promptWithin is how soon a host answers whose attempts are not bounded together with those of others.
	promptWithin = 2 * time.Second
	// fullWait is how soon to come back to an endpoint that has enough attempts in flight.
	fullWait = time.Second
)

func newEndpoints(limits flightLimits) *endpoints {
	return &endpoints{
		limits: limits, byID: map[string]*endpoint{}, idle: list.New(),
		byHost: tally{}, bySite: tally{},
		prompt: newRecent(), slow: newRecent(),
	}
}

// enter admits an attempt, or returns why not. Admitted attempts end by leave or forgo.
func (e *endpoints) enter(now time.Time, to target) (*flight, refusal) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := e.byID[to.id]
	if p == nil {
		p = &endpoint{id: to.id}
	}
	f := &flight{endpoint: p, to: to, unproven: !e.prompt.has(to.host)}
	f.slow = f.unproven && e.slow.has(to.site)
	switch {
	case p.openUntil.After(now):
		return nil, refusal{wait: p.openUntil.Sub(now), down: p.reason}
	case p.trial != nil || p.active >= e.limits.address || e.byHost[to.host] >= e.limits.host,
		f.unproven && (e.unproven >= e.limits.unproven || e.bySite[to.site] >= e.limits.site()),
		f.slow && e.toSlow >= e.limits.slow():
		return nil, refusal{wait: fullWait}
	}
	e.byID[to.id] = p
	e.count(f, 1)
	if p.idle != nil {
		e.idle.Remove(p.idle)
		p.idle = nil
	}
	p.active++
	if !p.openUntil.IsZero() {
		p.trial = f
	}
	return f, refusal{}
}

// count adds n to what the attempt is counted by.
func (e *endpoints) count(f *flight, n int) {
	e.byHost.add(f.to.host, n)
	if f.unproven {
		e.unproven += n
		e.bySite.add(f.to.site, n)
	}
	if f.slow {
		e.toSlow += n
	}
}

// leave ends an attempt that tells whether the endpoint is up.
func (e *endpoints) leave(now time.Time, f *flight, v verdict) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := f.endpoint
	p.reason = v.reason
	switch {
	case v.healthy:
		p.failures, p.openFor, p.openUntil, p.trial = 0, 0, time.Time{}, nil
	case p.trial == f: // others may have begun before the breaker opened
		p.open(now)
	default:
		p.failures++
		if p.failures >= breakerFailures && p.openUntil.IsZero() {
			p.open(now)
		}
	}
	e.prompt.set(f.to.host, v.healthy && v.took < promptWithin)
	if f.unproven {
		e.slow.set(f.to.site, v.timedOut)
	}
	e.release(f)
}

// forgo ends an attempt that tells nothing about the endpoint.
func (e *endpoints) forgo(f *flight) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.release(f)
}

func (e *endpoints) release(f *flight) {
	p := f.endpoint
	p.active--
	if p.trial == f {
		p.trial = nil
	}
	e.count(f, -1)
	switch {
	case p.active > 0:
	case p.failures == 0 && p.openUntil.IsZero():
		delete(e.byID, p.id)
	default:
		p.idle = e.idle.PushBack(p)
		if e.idle.Len() > endpointsMax {
			oldest := e.idle.Remove(e.idle.Front()).(*endpoint) //nolint:errcheck,forcetypeassert // all are
			delete(e.byID, oldest.id)
		}
	}
}

func (p *endpoint) open(now time.Time) {
	p.openFor = min(max(2*p.openFor, breakerOpen), breakerOpenMax)
	p.openUntil = now.Add(p.openFor)
}

// tally counts by name, and has no names without a count.
type tally map[string]int

func (t tally) add(name string, n int) {
	t[name] += n
	if t[name] == 0 {
		delete(t, name)
	}
}

// recent is a set of names, at most endpointsMax, those that were put in last.
type recent struct {
	order  *list.List // of names, the one that was put in longest ago in front
	byName map[string]*list.Element
}

func newRecent() *recent { return &recent{order: list.New(), byName: map[string]*list.Element{}} }

func (r *recent) has(name string) bool { return r.byName[name] != nil }

func (r *recent) set(name string, in bool) {
	at := r.byName[name]
	switch {
	case !in && at != nil:
		r.order.Remove(at)
		delete(r.byName, name)
	case in && at != nil:
		r.order.MoveToBack(at)
	case in:
		r.byName[name] = r.order.PushBack(name)
		if r.order.Len() > endpointsMax {
			oldest := r.order.Remove(r.order.Front()).(string) //nolint:errcheck,forcetypeassert // all are
			delete(r.byName, oldest)
		}
	}
}
