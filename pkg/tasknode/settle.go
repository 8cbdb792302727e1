package tasknode

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// settler records endings in batches. While one batch is on its way, the endings that arrive make the next one:
// batches are small when little happens and large under load, without a timer. The endings of a queue go in two
// shards, so that two batches are on their way at once; those of one lock stay in one shard, where no batch
// overtakes another, since the lock record goes with the last of them. A third shard has the deferred locks, see
// settle_deferred.go.
type settler struct {
	mu       sync.Mutex
	arrived  *sync.Cond
	piles    map[shard]*pile
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

// pile is the endings of one shard that wait to be recorded.
type pile struct {
	queue    *invalidation.Queue
	endings  []invalidation.Ending
	jobs     []*job
	sending  bool
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
	s := &settler{piles: map[shard]*pile{}}
	s.arrived = sync.NewCond(&s.mu)
	return s
}

// end passes on how entries of a job ended.
func (n *Node) end(j *job, endings ...invalidation.Ending) {
	s := n.settler
	s.mu.Lock()
	defer s.mu.Unlock()
	key := shard{queue: j.queue.ID, part: j.lock.Token % 2}
	if s.isDeferred(j) {
		key.part = partDeferred
	}
	p := s.piles[key]
	if p == nil {
		p = &pile{}
		s.reuse(p)
		s.piles[key] = p
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
	p := s.piles[key]
	p.sending = true
	if n := fitting(p.endings); len(p.endings) > n {
		batch := &pile{queue: p.queue, endings: p.endings[:n:n], jobs: p.jobs[:n:n]}
		p.endings, p.jobs = p.endings[n:], p.jobs[n:]
		return key, batch
	}
	batch := &pile{queue: p.queue, endings: p.endings, jobs: p.jobs}
	p.endings, p.jobs = nil, nil
	s.reuse(p)
	return key, batch
}

// reuse gives an empty pile memory that was laid by.
func (s *settler) reuse(p *pile) {
	if last := len(s.blank) - 1; last >= 0 {
		p.endings, p.jobs = s.blank[last].endings, s.blank[last].jobs
		s.blank = s.blank[:last]
	}
}

// sent lets the next batch of a shard go. Held are the endings of the batch that were left out since another
// transaction has locked a row of theirs: each lock of them is deferred, with what came for it meanwhile.
func (s *settler) sent(key shard, batch *pile, held pile) {
	clear(batch.endings)
	clear(batch.jobs)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keep(batch)
	p := s.piles[key]
	if key.part == partDeferred {
		s.triedDeferred(key, p, len(batch.endings), held)
		return
	}
	s.deferLocks(key.queue, p, held)
	p.sending = false
	if len(p.endings) > 0 {
		s.turn = append(s.turn, key)
		s.arrived.Signal()
	} else {
		delete(s.piles, key)
		s.keep(p)
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

// settle is one of the settling threads. It returns when the settler is closed and empty. When ctx ends it gives
// up on what cannot be recorded: that is left to recovery.
func (n *Node) settle(ctx context.Context) {
	for {
		key, batch := n.settler.next()
		if batch == nil {
			return
		}
		n.settler.sent(key, batch, n.record(ctx, *batch, key.part != partDeferred))
	}
}

// record writes a batch, again and again while the reason that it fails is one that passes. One that takes too long
// twice is divided: heartbeats list its locks meanwhile, so that recovery does not end them. The endings of locks of
// which another transaction keeps a row locked are returned, and not recorded; wait says whether to wait a moment for
// such rows.
func (n *Node) record(ctx context.Context, p pile, wait bool) (held pile) {
	timeouts := 0
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		start := time.Now()
		statement, end := n.bound(ctx)
		ours, left, err := p.queue.SettleFree(statement, n.ID(), p.endings, wait)
		end()
		if err == nil {
			held = p.extract(left)
			if wait && len(left) > 0 {
				n.cfg.Log.Warn("settle entries: another transaction has locked rows of them", "queue", p.queue.Name,
					"endings", len(held.endings), "entry", held.endings[0].Entry)
			}
			n.recorded(p, ours, time.Since(start))
			return held
		}
		if tookTooLong(err) {
			timeouts++
		}
		switch {
		case ctx.Err() != nil:
			n.leaveToRecovery(p, err)
			return held
		case !postgres.Passes(err):
			return n.isolateRefused(ctx, p, err)
		case timeouts > 1 && len(p.endings) > 1:
			return n.recordHalves(ctx, p)
		}
		n.cfg.Log.Warn("settle entries", "queue", p.queue.Name, "endings", len(p.endings), "error", err)
		select {
		case <-ctx.Done():
		case <-time.After(n.jitter(pause)):
		}
	}
}

// tookTooLong says that a statement ended at a bound on its time: the server's, or that of the node.
func tookTooLong(err error) bool {
	return postgres.Code(err) == postgres.QueryCanceled || errors.Is(err, context.DeadlineExceeded)
}

// refusesContent says that the database refused the values of a statement: data exceptions, violated constraints, and
// exceeded limits of the server.
func refusesContent(err error) bool {
	code := postgres.Code(err)
	return strings.HasPrefix(code, "22") || strings.HasPrefix(code, "23") || strings.HasPrefix(code, "54")
}

// recordHalves divides a batch of several endings, and records the first half before the second. It returns the endings
// of both that are held; one behind a held one of its lock waits with it.
func (n *Node) recordHalves(ctx context.Context, p pile) (held pile) {
	half := len(p.endings) / 2
	held = n.record(ctx, pile{queue: p.queue, endings: p.endings[:half], jobs: p.jobs[:half]}, true)
	second := pile{queue: p.queue, endings: p.endings[half:], jobs: p.jobs[half:]}
	behind := second.extract(held.tokens())
	if len(second.endings) > 0 {
		behind.addAll(n.record(ctx, second, true))
	}
	held.queue = p.queue
	held.addAll(behind)
	return held
}

// isolateRefused divides a batch that is refused until those endings are alone that are the reason, so that none holds
// up others. An ending whose values are refused becomes a failure of its entry, without what the
// handler noted. One that cannot be recorded for any other reason (its queue was dropped, a privilege is
// missing) is left to recovery.
func (n *Node) isolateRefused(ctx context.Context, p pile, err error) pile {
	if len(p.endings) > 1 {
		return n.recordHalves(ctx, p)
	}
	e, held := p.endings[0], p.jobs[0].lock
	if !refusesContent(err) || e.Lock != held { // or this is the failure that is made below
		n.leaveToRecovery(p, err)
		return pile{}
	}
	n.cfg.Log.Error("ending cannot be recorded, its entry fails", "queue", p.queue.Name, "entry", e.Entry, "error", err)
	failed := invalidation.Fail(held.WithoutNotes(), e.Entry,
		invalidation.Failure{Class: "result", Error: "result cannot be recorded: " + err.Error()}, 0)
	failed.Last = e.Last
	return n.record(ctx, pile{queue: p.queue, endings: []invalidation.Ending{failed}, jobs: p.jobs}, true)
}

// leaveToRecovery gives endings up that cannot be recorded. Heartbeats do not list their locks any more, so that
// recovery frees those after a lease, and their entries run again.
func (n *Node) leaveToRecovery(p pile, err error) {
	n.cfg.Log.Error("endings cannot be recorded and are left to recovery: their entries run again", "queue",
		p.queue.Name,
		"endings", len(p.endings), "entry", p.endings[0].Entry, "error", err)
	n.stats.Unrecorded.Add(int64(len(p.endings)))
	n.free(p)
}

// recorded frees what the endings held. Endings whose token was not ours any more changed nothing; another node
// has the entry.
func (n *Node) recorded(p pile, ours []invalidation.Token, took time.Duration) {
	refused := 0
	mine := map[invalidation.Token]bool{}
	if len(ours) < len(p.endings) {
		for _, t := range ours {
			mine[t] = true
		}
		for i := range p.endings {
			if !mine[p.endings[i].Lock.Token] {
				refused++
			}
		}
	}
	n.traceEndings(p, func(t invalidation.Token) bool { return refused == 0 || mine[t] })
	n.free(p)
	n.stats.settled(len(p.endings), refused, took)
	if refused > 0 {
		n.cfg.Log.Warn("endings refused: locks were lost", "queue", p.queue.Name, "refused", refused)
	}
}

// free forgets the locks that ended and releases what was reserved for them, all at once: the scheduling
// threads wake once for a batch, not for each entry.
func (n *Node) free(p pile) {
	var ended []*job
	for i := range p.endings {
		if l := p.endings[i].Lock; p.endings[i].Last {
			ended = append(ended, p.jobs[i])
			if l.Requeued != nil { // no other node knows
				n.lanes.readyAgain(p.queue.ID, *l.Requeued)
			}
		}
	}
	if len(ended) == 0 {
		return
	}
	n.jobs.remove(ended)
	n.fetched.ended(ended)
	for _, j := range ended {
		j.reserved.giveBack(j.reserved.locks)
	}
	n.Freed()
}
