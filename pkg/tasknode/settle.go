package tasknode

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

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

// settleStep is the name in the log of what record does.
const settleStep = "settle entries"

// record writes a batch, again and again while the reason that it fails is one that passes. One that takes too long
// twice is divided: heartbeats list its locks meanwhile, so that recovery does not end them. The endings of locks of
// which another transaction keeps a row locked are not recorded, and returned as busy; wait says whether to wait a
// moment for such rows.
func (n *Node) record(ctx context.Context, p pile, wait bool) (busy pile) {
	timeouts := 0
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		start := time.Now()
		statement, end := n.bound(ctx)
		ours, left, err := p.queue.SettleFree(statement, n.ID(), p.endings, wait)
		end()
		if err == nil {
			n.note(ctx, slog.LevelWarn, settleStep, p.queue, nil)
			busy = p.extract(left)
			if wait && len(left) > 0 {
				n.cfg.Log.Warn("settle entries: another transaction has locked rows of them", "queue", p.queue.Name,
					"endings", len(busy.endings), "entry", busy.endings[0].Entry)
			}
			n.recorded(p, ours, time.Since(start))
			for i, j := range p.jobs { // what was ours still had not ended by an earlier try
				if j.unanswered && slices.Contains(ours, p.endings[i].Lock.Token) {
					j.unanswered = false
				}
			}
			return busy
		}
		for _, j := range p.jobs {
			j.unanswered = true
		}
		if tookTooLong(err) {
			timeouts++
		}
		switch {
		case ctx.Err() != nil:
			n.leaveToRecovery(p, err)
			return pile{}
		case !postgres.Passes(err):
			return n.isolateRefused(ctx, p, err)
		case timeouts > 1 && len(p.endings) > 1:
			return n.recordHalves(ctx, p)
		}
		n.note(ctx, slog.LevelWarn, settleStep, p.queue, err)
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

// recordHalves divides a batch of several endings, and records the first half before the second. It returns the endings
// of both that are busy; one behind a busy one of its lock waits with it.
func (n *Node) recordHalves(ctx context.Context, p pile) (busy pile) {
	half := len(p.endings) / 2
	busy = n.record(ctx, p.part(0, half), true)
	second := p.part(half, len(p.endings))
	behind := second.extract(busy.tokens())
	if len(second.endings) > 0 {
		behind.addAll(n.record(ctx, second, true))
	}
	busy.queue = p.queue
	busy.addAll(behind)
	return busy
}

// isolateRefused divides a batch that is refused until those endings are alone that are the reason, so that none holds
// up others. An ending whose values are refused becomes a failure of its entry, without what the
// handler noted. One that cannot be recorded for any other reason (its queue was dropped, a privilege is
// missing) is left to recovery.
func (n *Node) isolateRefused(ctx context.Context, p pile, err error) pile {
	if len(p.endings) > 1 {
		return n.recordHalves(ctx, p)
	}
	e := &p.endings[0]
	failed, ok := e.Refused(err)
	if !ok || !postgres.RefusesRow(err) {
		n.leaveToRecovery(p, err)
		return pile{}
	}
	n.cfg.Log.Error("ending cannot be recorded, its entry fails", "queue", p.queue.Name, "entry", e.Entry, "error", err)
	return n.record(ctx, pile{queue: p.queue, endings: []invalidation.Ending{failed}, jobs: p.jobs}, true)
}

// leaveToRecovery gives endings up that cannot be recorded. Heartbeats do not list their locks any more, so that
// recovery frees those after a lease, and their entries run again.
func (n *Node) leaveToRecovery(p pile, err error) {
	n.cfg.Log.Error("endings cannot be recorded and are left to recovery: their entries run again",
		"queue", p.queue.Name, "endings", len(p.endings), "entry", p.endings[0].Entry, "error", err)
	n.stats.Unrecorded.Add(int64(len(p.endings)))
	n.forget(p)
}

// recorded frees what the endings held. Endings whose token was not ours any more changed nothing: another node has the
// entry, or an earlier try has recorded them and its answer was lost. No other node can have a lock of a node that kept
// its lease.
func (n *Node) recorded(p pile, ours []invalidation.Token, took time.Duration) {
	refused, repeated := 0, 0
	mine := map[invalidation.Token]bool{}
	if len(ours) < len(p.endings) {
		for _, t := range ours {
			mine[t] = true
		}
		for i := range p.endings {
			switch t := p.endings[i].Lock.Token; {
			case mine[t]:
			case p.jobs[i].unanswered && !n.leaseLost(p.jobs[i]):
				mine[t] = true
				repeated++
			default:
				refused++
			}
		}
	}
	n.traceEndings(p, func(t invalidation.Token) bool { return refused == 0 || mine[t] })
	n.forget(p)
	n.stats.settled(len(p.endings), refused, repeated, took)
	if refused > 0 {
		n.cfg.Log.Warn("endings refused: locks were lost", "queue", p.queue.Name, "refused", refused)
	}
}

// forget drops the locks that ended and releases what was reserved for them, all at once: the scheduling
// threads wake once for a batch, not for each entry.
func (n *Node) forget(p pile) {
	var ended []*job
	refunded := false
	for i := range p.endings {
		e := &p.endings[i]
		refunded = refunded || p.queue.Refunds(e)
		if e.Last {
			ended = append(ended, p.jobs[i])
			if e.Lock.Requeued != nil { // no other node knows
				n.lanes.readyAgain(p.queue.ID, *e.Lock.Requeued)
			}
		}
	}
	n.jobs.remove(ended)
	n.holdings.ended(ended)
	for _, j := range ended {
		j.reserved.giveBack(j.reserved.locks)
	}
	switch {
	case refunded:
		n.tryLimited()
	case len(ended) > 0:
		n.TryAgain()
	}
}
