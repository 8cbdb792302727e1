package webhook

import (
	"cmp"
	"sync"
	"time"
)

// BreakerConfig says when an endpoint is left alone for a while.
type BreakerConfig struct {
	Failures int           // in a row; 5
	Rest     time.Duration // 30 s, doubled after each failed trial
	RestMax  time.Duration // 10 min
}

func (c BreakerConfig) withDefaults() BreakerConfig {
	c.Failures = cmp.Or(c.Failures, 5)
	c.Rest = cmp.Or(c.Rest, 30*time.Second)
	c.RestMax = cmp.Or(c.RestMax, 10*time.Minute)
	return c
}

// endpoints keeps one receiver's trouble from the others: a bound on attempts in
// flight, since a receiver that hangs holds each for the whole timeout, and a
// breaker. The breaker belongs to the address without its query, because
// strangers share hosts; a bound on the whole host is wider. Endpoints without
// trouble take no memory.
type endpoints struct {
	config                 BreakerConfig
	inFlight, hostInFlight int

	mu     sync.Mutex
	byID   map[string]*endpoint
	byHost map[string]int // attempts in flight
}

type endpoint struct {
	active   int
	failures int // in a row
	rest     time.Duration
	until    time.Time // resting until; zero: admitted
	trial    bool      // the one attempt after a rest is out
	used     time.Time // last
}

// place is where an attempt goes.
type place struct{ id, host string }

// endpointsMost is how many troubled endpoints are remembered before those that
// nobody has used for a while are dropped.
const endpointsMost = 4096

// crowded is how soon to come back to an endpoint that has enough in flight.
const crowded = time.Second

func newEndpoints(config BreakerConfig, inFlight, hostInFlight int) *endpoints {
	return &endpoints{
		config: config, inFlight: inFlight, hostInFlight: hostInFlight,
		byID: map[string]*endpoint{}, byHost: map[string]int{},
	}
}

// enter admits an attempt, or says when to come back.
func (e *endpoints) enter(now time.Time, to place) (wait time.Duration, admitted bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := e.byID[to.id]
	if p == nil {
		p = &endpoint{}
	}
	switch {
	case p.until.After(now):
		return p.until.Sub(now), false
	case p.trial || p.active >= e.inFlight || e.byHost[to.host] >= e.hostInFlight:
		return crowded, false
	}
	e.byID[to.id] = p
	e.byHost[to.host]++
	p.active++
	p.used = now
	p.trial = !p.until.IsZero()
	e.prune(now)
	return 0, true
}

// leave ends an attempt that says whether the endpoint is up.
func (e *endpoints) leave(now time.Time, to place, healthy bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := e.byID[to.id]
	switch {
	case healthy:
		p.failures, p.rest, p.until = 0, 0, time.Time{}
	case p.trial:
		p.pause(now, e.config)
	default:
		p.failures++
		if p.failures >= e.config.Failures && p.until.IsZero() {
			p.pause(now, e.config)
		}
	}
	e.release(to, p)
}

// forgo ends an attempt that says nothing.
func (e *endpoints) forgo(to place) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.release(to, e.byID[to.id])
}

func (e *endpoints) release(to place, p *endpoint) {
	p.active--
	p.trial = false
	if p.active == 0 && p.failures == 0 && p.until.IsZero() {
		delete(e.byID, to.id)
	}
	if e.byHost[to.host]--; e.byHost[to.host] == 0 {
		delete(e.byHost, to.host)
	}
}

func (p *endpoint) pause(now time.Time, config BreakerConfig) {
	p.rest = min(max(2*p.rest, config.Rest), config.RestMax)
	p.until = now.Add(p.rest)
}

func (e *endpoints) prune(now time.Time) {
	if len(e.byID) <= endpointsMost {
		return
	}
	for id, p := range e.byID {
		if p.active == 0 && now.Sub(p.used) > 2*e.config.RestMax {
			delete(e.byID, id)
		}
	}
}
