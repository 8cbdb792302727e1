package tasknode

import (
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Locks apart are those whose endings could not be recorded since another transaction has locked a row that the
// endings change. Those of a queue are tried again together, in one transaction, for as long as it takes; the other
// locks of the queue do not wait for them.

// partApart is the shard of the locks apart of a queue.
const partApart invalidation.Token = 2

// Locks apart are tried again after apartMin. The pause doubles up to apartMax while none of them can be recorded
// and none is added.
const (
	apartMin = 20 * time.Millisecond
	apartMax = time.Second
)

// apart is which locks are in a pile of locks apart, and when they are tried again.
type apart struct {
	tokens map[invalidation.Token]bool
	pause  time.Duration
	timer  *time.Timer
	waits  bool // for the timer
}

// isApart reports whether the lock of a job is set apart: its further endings go behind those that wait.
func (s *settler) isApart(j *job) bool {
	if s.apart == 0 {
		return false
	}
	p := s.piles[shard{queue: j.queue.ID, part: partApart}]
	return p != nil && p.apart.tokens[j.lock.Token]
}

// setApart sets the locks of held apart, with their endings and those that came for them since, which are in p.
func (s *settler) setApart(queue int32, p *pile, held pile) {
	if len(held.endings) == 0 {
		return
	}
	key := shard{queue: queue, part: partApart}
	into := s.piles[key]
	if into == nil {
		into = &pile{queue: held.queue, sending: true, apart: &apart{
			tokens: map[invalidation.Token]bool{}, pause: apartMin, waits: true,
		}}
		into.apart.timer = time.AfterFunc(apartMin, func() { s.goApart(key, into) })
		s.piles[key] = into
		s.apart++
	}
	tokens := held.tokens()
	into.addAll(held)
	into.addAll(p.without(tokens))
	for _, t := range tokens {
		into.apart.tokens[t] = true
	}
	if into.apart.waits && into.apart.pause > apartMin {
		into.apart.timer.Reset(apartMin)
	}
	into.apart.pause = apartMin
}

// goApart gives locks apart their turn, when their pause has ended.
func (s *settler) goApart(key shard, p *pile) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.apart.waits {
		p.apart.waits = false
		s.turn = append(s.turn, key)
		s.arrived.Signal()
	}
}

// triedApart puts the locks off that are held still. They go behind those that were not tried, with the endings
// that came for them since.
func (s *settler) triedApart(key shard, p *pile, tried int, held pile) {
	since := p.without(held.tokens())
	p.addAll(held)
	p.addAll(since)
	if len(p.endings) == 0 {
		delete(s.piles, key)
		s.apart--
		s.arrived.Broadcast() // of those that wait for the end of the last
		return
	}
	clear(p.apart.tokens)
	for _, t := range p.tokens() {
		p.apart.tokens[t] = true
	}
	p.apart.pause = min(2*p.apart.pause, apartMax)
	if len(held.endings) < tried {
		p.apart.pause = apartMin
	}
	p.apart.waits = true
	p.apart.timer.Reset(p.apart.pause)
}
