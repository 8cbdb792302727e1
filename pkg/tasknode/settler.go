package tasknode

import (
	"sync"

	"github.com/penstock/penstock/pkg/invalidation"
)

// settler makes batches of the endings that wait to be recorded. While one batch is on its way, the endings that arrive
// make the next one: batches are small when little happens and large under load, without a timer. The endings of a
// queue go in two shards, so that two batches are on their way at once; those of one lock stay in one shard, where no
// batch overtakes another, since the lock record goes with the last of them. A third shard has the deferred locks, see
// deferred.go.
type settler struct {
	mu       sync.Mutex
	arrived  *sync.Cond
	unsent   map[shard]*unsent
	turn     []shard // shards with endings and no batch on its way, in the order in which they are served
	blank    []pile  // whose memory is used again
	deferred int     // queues with deferred locks
	closed   bool
}

// shard is a half of the locks of a queue, or its deferred locks.
type shard struct {
	queue int32
	part  invalidation.Token // 0 or 1 for the halves, or partDeferred
}

// pile is endings of one queue in their order, each with its job.
type pile struct {
	queue   *invalidation.Queue
	endings []invalidation.Ending
	jobs    []*job
}

// unsent is the endings of one shard that wait to be recorded.
type unsent struct {
	pile
	sending  bool      // a batch of the shard is on its way, or its deferred locks wait for their next try
	deferral *deferral // of partDeferred
}

// extract takes the endings under some tokens out of p, and keeps both in order.
func (p *pile) extract(tokens []invalidation.Token) (taken pile) {
	taken.queue = p.queue
	if len(tokens) == 0 {
		return taken
	}
	out := make(map[invalidation.Token]bool, len(tokens))
	for _, t := range tokens {
		out[t] = true
	}
	endings, jobs := p.endings, p.jobs
	p.endings, p.jobs = nil, nil
	for i := range endings {
		into := p
		if out[endings[i].Lock.Token] {
			into = &taken
		}
		into.add(endings[i], jobs[i])
	}
	return taken
}

// part shares the endings from one to another with p, until either is added to.
func (p *pile) part(from, to int) pile {
	return pile{queue: p.queue, endings: p.endings[from:to:to], jobs: p.jobs[from:to:to]}
}

func (p *pile) add(e invalidation.Ending, j *job) {
	p.endings, p.jobs = append(p.endings, e), append(p.jobs, j)
}

// addAll adds the endings of another pile behind those of p.
func (p *pile) addAll(other pile) {
	p.endings, p.jobs = append(p.endings, other.endings...), append(p.jobs, other.jobs...)
}

// tokens are those of the endings, one for each ending.
func (p *pile) tokens() []invalidation.Token {
	tokens := make([]invalidation.Token, len(p.endings))
	for i := range p.endings {
		tokens[i] = p.endings[i].Lock.Token
	}
	return tokens
}

// settleMax and settleBytesMax bound a transaction. What is beyond them makes the next one: a message to
// Postgres has at most 1 GB, and one that it refuses would be sent again for ever.
const (
	settleMax      = 1000
	settleBytesMax = 32 << 20
)

// fitting is how many of the endings go in one transaction.
func fitting(endings []invalidation.Ending) int {
	bytes := 0
	for i := range endings {
		bytes += endings[i].Bytes()
		if i == settleMax || i > 0 && bytes > settleBytesMax {
			return i
		}
	}
	return len(endings)
}

func newSettler() *settler {
	s := &settler{unsent: map[shard]*unsent{}}
	s.arrived = sync.NewCond(&s.mu)
	return s
}

// add takes in how entries of a job ended. Those of one call go together, as far as they fit.
func (s *settler) add(j *job, endings ...invalidation.Ending) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := shard{queue: j.queue.ID, part: j.lock.Token % 2}
	if s.isDeferred(j) {
		key.part = partDeferred
	}
	p := s.unsent[key]
	if p == nil {
		p = &unsent{pile: s.blankPile(j.queue)}
		s.unsent[key] = p
	}
	if len(p.endings) == 0 && !p.sending {
		s.turn = append(s.turn, key)
		s.arrived.Signal()
	}
	p.queue = j.queue
	for _, e := range endings {
		p.add(e, j)
		if e.Last {
			j.ended.Store(true)
		}
	}
}

// next waits for endings and takes as many of one shard as fit into a transaction; sent must follow. It
// returns nil when the settler is closed and empty.
func (s *settler) next() (shard, *pile) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.turn) == 0 {
		if s.closed && s.deferred == 0 {
			return shard{}, nil
		}
		s.arrived.Wait()
	}
	key := s.turn[0]
	s.turn = s.turn[1:]
	p := s.unsent[key]
	p.sending = true
	batch := p.pile
	if n := fitting(p.endings); len(p.endings) > n {
		batch = p.part(0, n)
		p.endings, p.jobs = p.endings[n:], p.jobs[n:]
	} else {
		p.pile = s.blankPile(p.queue)
	}
	return key, &batch
}

// blankPile returns an empty pile, with memory that was laid by if there is some.
func (s *settler) blankPile(q *invalidation.Queue) (p pile) {
	if last := len(s.blank) - 1; last >= 0 {
		p, s.blank = s.blank[last], s.blank[:last]
	}
	p.queue = q
	return p
}

// sent lets the next batch of a shard go. Busy are the endings of the batch that were left out since another
// transaction has locked a row of theirs: each lock of them is deferred, with what came for it meanwhile.
func (s *settler) sent(key shard, batch *pile, busy pile) {
	clear(batch.endings)
	clear(batch.jobs)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keep(batch)
	p := s.unsent[key]
	if key.part == partDeferred {
		s.triedDeferred(key, p, len(batch.endings), busy)
		return
	}
	s.deferLocks(key.queue, p, busy)
	p.sending = false
	if len(p.endings) > 0 {
		s.turn = append(s.turn, key)
		s.arrived.Signal()
	} else {
		delete(s.unsent, key)
		s.keep(&p.pile)
	}
}

// keep lays the memory of an empty pile by.
func (s *settler) keep(p *pile) {
	if cap(p.endings) > 0 && len(s.blank) < 4 {
		s.blank = append(s.blank, pile{endings: p.endings[:0], jobs: p.jobs[:0]})
	}
}

func (s *settler) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.arrived.Broadcast()
}
