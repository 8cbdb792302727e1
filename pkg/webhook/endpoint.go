package webhook

import (
	"cmp"
	"container/list"
	"sync"
	"time"
)

// BreakerConfig says when an endpoint gets no attempts for a while.
type BreakerConfig struct {
	Failures int           // in a row, after which the breaker opens; 5
	Open     time.Duration // how long it is open; 30 s, doubled after each failed trial
	OpenMax  time.Duration // 10 min
}

func (c BreakerConfig) withDefaults() BreakerConfig {
	c.Failures = cmp.Or(c.Failures, 5)
	c.Open = cmp.Or(c.Open, 30*time.Second)
	c.OpenMax = cmp.Or(c.OpenMax, 10*time.Minute)
	return c
}

// flightLimits bound the attempts in flight at once, since a receiver that does not answer holds one for the whole
// timeout.
type flightLimits struct {
	address  int // to one address
	host     int // to one host
	unproven int // to all hosts together whose last answer was not prompt
}

// endpoints keeps one receiver's trouble from the others: bounds on attempts in flight, and a breaker for each address.
// The breaker belongs to the address without its query, because strangers share hosts. Hosts that answered promptly
// last time are not bounded together; all others are, so that any number of slow names leaves threads for them.
// Addresses without trouble take no memory, and at most endpointsMax with trouble are remembered.
type endpoints struct {
	config BreakerConfig
	limits flightLimits

	mu       sync.Mutex
	byID     map[string]*endpoint
	idle     *list.List     // of *endpoint without attempts, the one that was used longest ago in front
	byHost   map[string]int // attempts in flight
	prompt   *promptHosts
	unproven int // attempts in flight to hosts that are not in prompt
}

type endpoint struct {
	id        string
	idle      *list.Element // nil while attempts are in flight
	active    int
	failures  int // in a row
	openFor   time.Duration
	openUntil time.Time // zero: the breaker is closed
	trial     bool      // the one attempt after the breaker was open is in flight
}

// target is where an attempt goes.
type target struct{ id, host string }

// flight is an attempt that was admitted.
type flight struct {
	endpoint *endpoint
	host     string
	unproven bool
}

const (
	endpointsMax = 4096
	// promptWithin is how soon a host answers whose attempts are not bounded together with those of others.
	promptWithin = 2 * time.Second
	// fullWait is how soon to come back to an endpoint that has enough attempts in flight.
	fullWait = time.Second
)

func newEndpoints(config BreakerConfig, limits flightLimits) *endpoints {
	return &endpoints{
		config: config, limits: limits, byID: map[string]*endpoint{}, idle: list.New(), byHost: map[string]int{},
		prompt: &promptHosts{order: list.New(), byName: map[string]*list.Element{}},
	}
}

// enter admits an attempt, or returns how long to wait before another one. Admitted attempts end by leave or forgo.
func (e *endpoints) enter(now time.Time, to target) (f *flight, wait time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := e.byID[to.id]
	if p == nil {
		p = &endpoint{id: to.id}
	}
	unproven := !e.prompt.has(to.host)
	switch {
	case p.openUntil.After(now):
		return nil, p.openUntil.Sub(now)
	case p.trial || p.active >= e.limits.address || e.byHost[to.host] >= e.limits.host,
		unproven && e.unproven >= e.limits.unproven:
		return nil, fullWait
	}
	e.byID[to.id] = p
	e.byHost[to.host]++
	if unproven {
		e.unproven++
	}
	if p.idle != nil {
		e.idle.Remove(p.idle)
		p.idle = nil
	}
	p.active++
	p.trial = !p.openUntil.IsZero()
	return &flight{endpoint: p, host: to.host, unproven: unproven}, 0
}

// leave ends an attempt that took so long and tells whether the endpoint is up.
func (e *endpoints) leave(now time.Time, f *flight, healthy bool, took time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := f.endpoint
	switch {
	case healthy:
		p.failures, p.openFor, p.openUntil = 0, 0, time.Time{}
	case p.trial:
		p.open(now, e.config)
	default:
		p.failures++
		if p.failures >= e.config.Failures && p.openUntil.IsZero() {
			p.open(now, e.config)
		}
	}
	e.prompt.set(f.host, healthy && took < promptWithin)
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
	p.trial = false
	if f.unproven {
		e.unproven--
	}
	if e.byHost[f.host]--; e.byHost[f.host] == 0 {
		delete(e.byHost, f.host)
	}
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

func (p *endpoint) open(now time.Time, config BreakerConfig) {
	p.openFor = min(max(2*p.openFor, config.Open), config.OpenMax)
	p.openUntil = now.Add(p.openFor)
}

// promptHosts are the hosts whose last answer came within promptWithin, at most endpointsMax, the newest.
type promptHosts struct {
	order  *list.List // of host names, the one that answered longest ago in front
	byName map[string]*list.Element
}

func (h *promptHosts) has(name string) bool { return h.byName[name] != nil }

func (h *promptHosts) set(name string, prompt bool) {
	at := h.byName[name]
	switch {
	case !prompt && at != nil:
		h.order.Remove(at)
		delete(h.byName, name)
	case prompt && at != nil:
		h.order.MoveToBack(at)
	case prompt:
		h.byName[name] = h.order.PushBack(name)
		if h.order.Len() > endpointsMax {
			oldest := h.order.Remove(h.order.Front()).(string) //nolint:errcheck,forcetypeassert // all are
			delete(h.byName, oldest)
		}
	}
}
