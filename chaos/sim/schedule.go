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
	detail  func() string // its arguments
	decided chan fate
	wait    time.Duration
}

// schedule lets one call of the store go on after another. Which one, and what becomes of it, follows
// from a seed: only the goroutine of steer draws numbers, and before each of its choices every other
// goroutine of the simulation is blocked. What the goroutines brought in the meantime is put in order
// by its contents, so that the order in which they were run makes no difference.
type schedule struct {
	random  *rand.Rand
	began   time.Time
	arrived chan struct{} // holds one: a call waits
	over    chan struct{} // closed at the end

	mu      sync.Mutex
	waiting []*call
	planned []appointment
	calm    bool     // no faults any more
	fresh   []string // steps since the last moment in which all were blocked
	steps   []string
	faults  map[string]int // that happened, by kind
}

// appointment is something that the schedule does at a time.
type appointment struct {
	at time.Time
	do func()
}

func newSchedule(seed uint64) *schedule {
	return &schedule{
		random:  rand.New(rand.NewPCG(seed, 18)),
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
	s.fresh = append(s.fresh, fmt.Sprintf("%11.6f ", time.Since(s.began).Seconds())+fmt.Sprintf(format, args...))
}

// settle puts the steps of the goroutines that ran since the last call in order: by time, then by text.
func (s *schedule) settle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.Sort(s.fresh)
	s.steps, s.fresh = append(s.steps, s.fresh...), s.fresh[:0]
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

func (p *process) enter(ctx context.Context, what string, detail func() string) (fate, time.Duration, error) {
	p.mu.Lock()
	dead := p.dead
	cutOff := time.Now().Before(p.cutUntil)
	p.mu.Unlock()
	if dead || cutOff && strings.HasPrefix(what, "in a transaction") {
		time.Sleep(retryPause)
		return cut, 0, nil
	}
	s := p.schedule
	c := &call{process: p, what: what, detail: detail, decided: make(chan fate, 1)}
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
	}
	if s.withdraw(c) {
		return cut, 0, ctx.Err()
	}
	return <-c.decided, c.wait, nil // the decision came first
}

// withdraw takes a call back, unless it was chosen.
func (s *schedule) withdraw(c *call) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.waiting, c)
	if i >= 0 {
		s.waiting = slices.Delete(s.waiting, i, i+1)
	}
	return i >= 0
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

// steer makes steps until the simulation is over. After each one it lets happen, now and then, what
// disturb decides.
func (s *schedule) steer(disturb func()) {
	for s.still() {
		if do := s.due(); do != nil {
			do()
			continue
		}
		if len(s.able()) == 0 {
			s.await()
			continue
		}
		time.Sleep(time.Duration(s.random.Int64N(int64(4 * time.Millisecond))))
		if !s.still() {
			return
		}
		// Others may have come meanwhile, and some have given up.
		if c := s.pick(); c != nil {
			s.decide(c)
			if s.still() {
				disturb()
			}
		}
	}
}

// still waits until every other goroutine is blocked: for a time, for another one, or for its call. It
// says whether the simulation goes on.
func (s *schedule) still() bool {
	synctest.Wait()
	s.settle()
	select {
	case <-s.over:
		return false
	default:
		return true
	}
}

// plan makes an appointment.
func (s *schedule) plan(after time.Duration, do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.planned = append(s.planned, appointment{time.Now().Add(after), do})
	slices.SortStableFunc(s.planned, func(a, b appointment) int { return a.at.Compare(b.at) })
}

// due takes the first appointment whose time has come; nil: there is none.
func (s *schedule) due() func() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.planned) == 0 || s.planned[0].at.After(time.Now()) {
		return nil
	}
	do := s.planned[0].do
	s.planned = s.planned[1:]
	return do
}

// await returns when a call has come, when an appointment is due, or after the time within which the end of
// a partition is noticed.
func (s *schedule) await() {
	wait := 20 * time.Millisecond
	s.mu.Lock()
	if len(s.planned) > 0 {
		wait = min(wait, time.Until(s.planned[0].at))
	}
	s.mu.Unlock()
	select {
	case <-s.arrived:
	case <-s.over:
	case <-time.After(wait):
	}
}

// able are the calls whose processes reach the store, in the order of processes, statements and arguments: goroutines
// arrive in an order of their own, and the choice must not depend on it.
func (s *schedule) able() []*call {
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
	slices.SortStableFunc(able, func(a, b *call) int {
		if by := cmp.Or(cmp.Compare(a.process.name, b.process.name), cmp.Compare(a.what, b.what)); by != 0 {
			return by
		}
		return cmp.Compare(a.detail(), b.detail())
	})
	return able
}

// pick draws one of the calls that may go on.
func (s *schedule) pick() *call {
	able := s.able()
	if len(able) == 0 {
		return nil
	}
	chosen := able[s.random.IntN(len(able))]
	s.withdraw(chosen)
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
