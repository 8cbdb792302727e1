package sim

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing/synctest"
	"time"
)

// call is a call of the store that waits for its turn.
type call struct {
	process *process
	what    string
	decided chan fate
	wait    time.Duration
}

// schedule lets one call of the store go on after another. Which one, and what becomes of it, follows
// from a seed: between two of its steps every goroutine of the simulation is blocked.
type schedule struct {
	random  *rand.Rand
	began   time.Time
	arrived chan struct{} // holds one: a call waits
	over    chan struct{} // closed at the end

	mu      sync.Mutex
	waiting []*call
	calm    bool // no faults any more
	steps   []string
	faults  map[string]int // that happened, by kind
}

func newSchedule(seed uint64) *schedule {
	return &schedule{
		random: rand.New(
			rand.NewPCG(seed, 18),
		),
		began:   time.Now(),
		arrived: make(chan struct{}, 1),
		over:    make(chan struct{}),
		faults:  map[string]int{},
	}
}

// say notes a step for the report of a failing seed.
func (s *schedule) say(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.steps = append(s.steps, fmt.Sprintf("%8.3f ", time.Since(s.began).Seconds())+fmt.Sprintf(format, args...))
}

// count notes a fault that happened.
func (s *schedule) count(fault string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults[fault]++
}

// process is a program of the simulation. It is the gate of its own connections.
type process struct {
	name     string
	schedule *schedule

	mu       sync.Mutex
	dead     bool
	died     time.Time
	cutUntil time.Time // no call goes on before
	stop     context.CancelFunc
}

// retryPause keeps a dead process, whose goroutines go on, from spinning.
const retryPause = 100 * time.Millisecond

func (p *process) enter(ctx context.Context, what string) (fate, time.Duration, error) {
	p.mu.Lock()
	dead := p.dead
	cutOff := time.Now().Before(p.cutUntil)
	p.mu.Unlock()
	if dead || cutOff && strings.HasPrefix(what, "in a transaction") {
		time.Sleep(retryPause)
		return cut, 0, nil
	}
	s := p.schedule
	c := &call{process: p, what: what, decided: make(chan fate, 1)}
	s.mu.Lock()
	s.waiting = append(s.waiting, c)
	s.mu.Unlock()
	select {
	case s.arrived <- struct{}{}:
	default:
	}
	select {
	case f := <-c.decided:
		return f, c.wait, nil
	case <-s.over:
		return cut, 0, nil
	case <-ctx.Done():
		s.mu.Lock()
		s.waiting = slices.DeleteFunc(s.waiting, func(o *call) bool { return o == c })
		s.mu.Unlock()
		return cut, 0, ctx.Err()
	}
}

// alive says whether the process has died by now, and when.
func (p *process) alive() (bool, time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.dead, p.died
}

func (p *process) crash() {
	p.mu.Lock()
	p.dead, p.died = true, time.Now()
	p.mu.Unlock()
	p.stop()
}

// steer makes steps until the simulation is over. Before each one it lets happen, now and then, what
// disturb decides.
func (s *schedule) steer(disturb func()) {
	for {
		synctest.Wait() // every other goroutine waits: for a time, for another one, or for its call
		select {
		case <-s.over:
			return
		default:
		}
		if c := s.pick(); c != nil {
			time.Sleep(time.Duration(s.random.Int64N(int64(4 * time.Millisecond))))
			s.decide(c)
			disturb()
			continue
		}
		select {
		case <-s.arrived:
		case <-s.over:
			return
		case <-time.After(20 * time.Millisecond): // the end of a partition
		}
	}
}

// pick takes one of the calls whose processes reach the store.
func (s *schedule) pick() *call {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	var able []*call
	for _, c := range s.waiting {
		c.process.mu.Lock()
		if c.process.dead || !now.Before(c.process.cutUntil) {
			able = append(able, c)
		}
		c.process.mu.Unlock()
	}
	if len(able) == 0 {
		return nil
	}
	// Goroutines arrive in an order of their own; the choice must not depend on it.
	slices.SortStableFunc(able, func(a, b *call) int {
		return cmp.Or(cmp.Compare(a.process.name, b.process.name), cmp.Compare(a.what, b.what))
	})
	chosen := able[s.random.IntN(len(able))]
	s.waiting = slices.DeleteFunc(s.waiting, func(c *call) bool { return c == chosen })
	return chosen
}

// Of a hundred calls while there are faults, so many meet one.
const (
	cutShare     = 2
	swallowShare = 3
	lateShare    = 2
)

func (s *schedule) decide(c *call) {
	f := pass
	s.mu.Lock()
	calm := s.calm
	s.mu.Unlock()
	roll, wait := s.random.IntN(100), time.Duration(s.random.Int64N(int64(2*lease)))
	switch {
	case !dead(c) && calm:
	case dead(c), roll < cutShare:
		f = cut
	case roll < cutShare+swallowShare:
		f = swallow
	case roll < cutShare+swallowShare+lateShare:
		f, c.wait = late, wait
	}
	if f != pass && !dead(c) {
		s.count(map[fate]string{cut: "connection cut", swallow: "answer lost", late: "answer late"}[f])
	}
	s.say("%-8s %s%s", c.process.name, c.what, map[fate]string{
		cut:     ": connection cut before",
		swallow: ": done, answer lost",
		late:    fmt.Sprintf(": done, answer %v later", c.wait),
	}[f])
	c.decided <- f
}

func dead(c *call) bool {
	up, _ := c.process.alive()
	return !up
}
