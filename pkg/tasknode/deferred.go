package tasknode

import (
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// A lock is deferred when its endings could not be recorded, since another transaction has locked a row that they
// change. The deferred locks of a queue are tried again together, in one transaction, for as long as it takes; the
// other locks of the queue do not wait for them.

// partDeferred is the shard of the deferred locks of a queue.
const partDeferred invalidation.Token = 2

// Deferred locks are tried again after deferMin. The pause doubles up to deferMax while none of them can be recorded
// and none is added.
const (
	deferMin = 20 * time.Millisecond
	deferMax = time.Second
)

// deferral is which locks are in a pile of deferred ones, and when they are tried again.
type deferral struct {
	tokens map[invalidation.Token]bool
	pause  time.Duration
	timer  *time.Timer
	waits  bool // for the timer
}

// isDeferred reports whether the lock of a job is deferred: its further endings go behind those that wait.
func (s *settler) isDeferred(j *job) bool {
	if s.deferred == 0 {
		return false
	}
	p := s.unsent[shard{queue: j.queue.ID, part: partDeferred}]
	return p != nil && p.deferral.tokens[j.lock.Token]
}

// deferLocks defers the locks of busy endings, with these and those that came for them since, which are in p.
func (s *settler) deferLocks(queue int32, p *unsent, busy pile) {
	if len(busy.endings) == 0 {
		return
	}
	key := shard{queue: queue, part: partDeferred}
	into := s.unsent[key]
	if into == nil {
		into = &unsent{pile: pile{queue: busy.queue}, sending: true, deferral: &deferral{
			tokens: map[invalidation.Token]bool{}, pause: deferMin, waits: true,
		}}
		into.deferral.timer = time.AfterFunc(deferMin, func() { s.retryDeferred(key, into) })
		s.unsent[key] = into
		s.deferred++
	}
	tokens := busy.tokens()
	into.addAll(busy)
	into.addAll(p.extract(tokens))
	for _, t := range tokens {
		into.deferral.tokens[t] = true
	}
	if into.deferral.waits && into.deferral.pause > deferMin {
		into.deferral.timer.Reset(deferMin)
	}
	into.deferral.pause = deferMin
}

// retryDeferred gives deferred locks their turn, when their pause has ended.
func (s *settler) retryDeferred(key shard, p *unsent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.deferral.waits {
		p.deferral.waits = false
		s.turn = append(s.turn, key)
		s.arrived.Signal()
	}
}

// triedDeferred defers the locks again that are busy still. They go behind those that were not tried, with the endings
// that came for them since.
func (s *settler) triedDeferred(key shard, p *unsent, tried int, busy pile) {
	since := p.extract(busy.tokens())
	p.addAll(busy)
	p.addAll(since)
	if len(p.endings) == 0 {
		delete(s.unsent, key)
		s.deferred--
		s.arrived.Broadcast() // of those that wait for the end of the last
		return
	}
	clear(p.deferral.tokens)
	for _, t := range p.tokens() {
		p.deferral.tokens[t] = true
	}
	p.deferral.pause = min(2*p.deferral.pause, deferMax)
	if len(busy.endings) < tried {
		p.deferral.pause = deferMin
	}
	p.deferral.waits = true
	p.deferral.timer.Reset(p.deferral.pause)
}
