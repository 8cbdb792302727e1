package tasknode

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// processBatch gives all entries of a lock to the handler at once; or one after the other, if one of them is a suspect or
// a failure blocks the key, so that no later entry runs beside the one that fails.
func (n *Node) processBatch(j *job, h invalidation.BatchHandler) {
	entries := j.lock.Entries
	if n.leaseLost(j) || n.handingBack.Load() {
		n.endLast(j, last(invalidation.Release(j.lock, entries[0].ID, 0)))
		return
	}
	if j.queue.Config.OnFailure == invalidation.OnFailureBlockKey ||
		slices.ContainsFunc(entries, func(e invalidation.Entry) bool { return suspect(j.queue, &e) }) {
		n.processEach(j, h)
		return
	}
	var runs []*invalidation.Run
	var over []invalidation.Ending
	finishIn := invalidation.NoDeadline
	sinceClaim := time.Since(j.lock.ClaimedAt)
	for i := range entries {
		if min(entries[i].StartIn, entries[i].FinishIn) <= sinceClaim {
			over = append(over, invalidation.Expire(j.lock, entries[i].ID, "its deadline has passed"))
			continue
		}
		if reason, asked := n.running.asked(j, entries[i].ID); asked {
			over = append(over, invalidation.Cancel(j.lock, entries[i].ID, reason))
			continue
		}
		finishIn = min(finishIn, entries[i].FinishIn)
		runs = append(runs, &invalidation.Run{Queue: j.queue, Entry: entries[i], Lock: j.lock, Node: n.id()})
	}
	endings := over
	if len(runs) > 0 {
		endings = append(endings, n.runBatch(j, h, runs, finishIn, sinceClaim)...)
	}
	endings[len(endings)-1].Last = true
	n.endLast(j, endings...)
}

// processEach gives the entries of a lock to the handler one by one: a suspect must not run beside others
// that a death of the node would blame as well.
func (n *Node) processEach(j *job, h invalidation.BatchHandler) {
	entries, start := j.lock.Entries, time.Now()
	for i := range entries {
		if stop := n.stop(j, start, i); stop != nil {
			n.endLast(j, last(stop(j.lock, entries[i].ID)))
			return
		}
		ending := n.runEach(j, h, &entries[i])
		ending.Last = i == len(entries)-1 || j.queue.EndsLock(&ending)
		if ending.Last {
			n.endLast(j, ending)
			return
		}
		n.end(j, ending)
	}
}

func (n *Node) runEach(j *job, h invalidation.BatchHandler, e *invalidation.Entry) invalidation.Ending {
	sinceClaim := time.Since(j.lock.ClaimedAt)
	if min(e.StartIn, e.FinishIn) <= sinceClaim {
		return invalidation.Expire(j.lock, e.ID, "its deadline has passed")
	}
	if suspect(j.queue, e) {
		done := n.admitSuspect()
		if done == nil {
			return invalidation.Release(j.lock, e.ID, n.cfg.Lease)
		}
		defer done()
	}
	if reason, asked := n.running.asked(j, e.ID); asked {
		return invalidation.Cancel(j.lock, e.ID, reason)
	}
	runs := []*invalidation.Run{{Queue: j.queue, Entry: *e, Lock: j.lock, Node: n.id()}}
	return n.runBatch(j, h, runs, e.FinishIn, sinceClaim)[0]
}

func (n *Node) runBatch(
	j *job, h invalidation.BatchHandler, runs []*invalidation.Run, finishIn, sinceClaim time.Duration,
) []invalidation.Ending {
	ctx, stop := n.runContext(j, &invalidation.Entry{FinishIn: finishIn, Cost: runs[0].Entry.Cost}, sinceClaim)
	defer stop()
	// The lease may have been lost before the table of running jobs knew how to end this run.
	if n.leaseLost(j) {
		return []invalidation.Ending{invalidation.Release(j.lock, runs[0].Entry.ID, 0)}
	}
	start := time.Now()
	var entries []*invalidation.Entry
	if j.traced != nil {
		for _, r := range runs {
			entries = append(entries, &r.Entry)
		}
	}
	ctx, span := n.startRun(ctx, j, entries...)
	answers, err := callBatch(ctx, h, runs)
	ran := time.Since(start)
	endRun(span, j, err, entries...)
	n.fetched.ran(j.served, ran, true)
	n.stats.ran(err, ran)
	for _, r := range runs {
		used := r.Charged(ran / time.Duration(len(runs)))
		n.running.ran(j, cost([]invalidation.Entry{r.Entry}, used.Seconds()))
		n.cfg.Observer.Ran(j.served.name, r.Entry.Waited+sinceClaim, ran, err)
	}
	endings := make([]invalidation.Ending, len(runs))
	for i, r := range runs {
		answer := invalidation.BatchAnswer{Err: err}
		if err == nil {
			answer = answers[i]
		}
		if answer.Err != nil {
			answer.Err = withCause(ctx, answer.Err)
		}
		endings[i] = invalidation.Judge(r, answer.Result, answer.Err, ran/time.Duration(len(runs)), n.random())
	}
	return endings
}

func callBatch(
	ctx context.Context, h invalidation.BatchHandler, runs []*invalidation.Run,
) (answers []invalidation.BatchAnswer, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &invalidation.PanicError{Value: v, Stack: string(debug.Stack())}
		}
	}()
	answers = h.HandleBatch(ctx, runs)
	if len(answers) != len(runs) {
		return nil, fmt.Errorf("handler answered %d of %d entries", len(answers), len(runs))
	}
	return answers, nil
}
