package tasknode

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// runsTogether says that the entries of a lock are given to a handler of batches at once. They are not where one of
// them is a suspect, since a death of the node would blame the others as well, nor where a failure blocks the key,
// since none may run beside the one that fails.
func runsTogether(j *job) bool {
	return j.queue.Config.OnFailure != invalidation.OnFailureBlockKey &&
		!slices.ContainsFunc(j.lock.Entries, func(e invalidation.Entry) bool { return suspect(j.queue, &e) })
}

// processBatch gives all entries of a lock to the handler at once.
func (n *Node) processBatch(j *job, h invalidation.BatchHandler) {
	entries := j.lock.Entries
	if n.leaseLost(j) || n.handingBack.Load() {
		n.endLast(j, last(invalidation.Release(j.lock, entries[0].ID, 0)))
		return
	}
	var runs []*invalidation.Run
	var over []invalidation.Ending
	var finishIn time.Duration // the latest
	sinceClaim := time.Since(j.lock.ClaimedAt)
	for i := range entries {
		if min(entries[i].StartIn, entries[i].FinishIn) <= sinceClaim {
			over = append(over, invalidation.Expire(j.lock, entries[i].ID, "its deadline has passed"))
			continue
		}
		if reason, asked := n.jobs.asked(j, entries[i].ID); asked {
			over = append(over, invalidation.Cancel(j.lock, entries[i].ID, reason))
			continue
		}
		finishIn = max(finishIn, entries[i].FinishIn)
		runs = append(runs, &invalidation.Run{Queue: j.queue, Entry: entries[i], Lock: j.lock, Node: n.ID()})
	}
	endings := over
	if len(runs) > 0 {
		endings = n.runBatch(j, h, runs, over, finishIn, sinceClaim)
	}
	endings[len(endings)-1].Last = true
	n.endLast(j, endings...)
}

// batchOfOne is a BatchHandler as a Handler: its batches have one entry.
func batchOfOne(h invalidation.BatchHandler) invalidation.Handler {
	return invalidation.HandlerFunc(func(ctx context.Context, r *invalidation.Run) (json.RawMessage, error) {
		answers, err := answersOf(ctx, h, []*invalidation.Run{r})
		if err != nil {
			return nil, err
		}
		return answers[0].Result, answers[0].Err
	})
}

// runBatch runs entries together, and returns their endings behind those of entries that do not run. A cancel ends the
// run once it was asked for of all of them, and a deadline once those of all of them have passed: else it goes on for
// the others.
func (n *Node) runBatch(
	j *job, h invalidation.BatchHandler, runs []*invalidation.Run, endings []invalidation.Ending,
	finishIn, sinceClaim time.Duration,
) []invalidation.Ending {
	first := &runs[0].Entry
	ctx, stop := n.runContext(j, &invalidation.Entry{ID: first.ID, FinishIn: finishIn, Cost: first.Cost}, sinceClaim)
	defer stop()
	ids := make([]invalidation.EntryID, len(runs))
	for i, r := range runs {
		ids[i] = r.Entry.ID
	}
	if reason, asked := n.jobs.begin(j, ids...); asked {
		for _, id := range ids {
			endings = append(endings, invalidation.Cancel(j.lock, id, reason))
		}
		return endings
	}
	// The lease may have been lost before the table of jobs knew how to end this run.
	if n.leaseLost(j) {
		return append(endings, invalidation.Release(j.lock, runs[0].Entry.ID, 0))
	}
	start := time.Now()
	var entries []*invalidation.Entry
	if j.traced != nil {
		for _, r := range runs {
			entries = append(entries, &r.Entry)
		}
	}
	ctx, span := n.startRun(ctx, j, entries...)
	judge := func(answers []invalidation.BatchAnswer, err error) []invalidation.Ending {
		ran := time.Since(start)
		endRun(span, j, err, entries...)
		n.holdings.ran(j.served, ran, true)
		n.stats.ran(err)
		for _, r := range runs {
			used := r.Charged(ran / time.Duration(len(runs)))
			n.jobs.ran(j, cost([]invalidation.Entry{r.Entry}, used.Seconds()))
			n.cfg.Observer.Ran(j.served.name, r.Entry.Waited+sinceClaim, ran, err)
		}
		for i, r := range runs {
			answer := invalidation.BatchAnswer{Err: err}
			if err == nil {
				answer = answers[i]
			}
			if answer.Err != nil {
				answer.Err = withCause(ctx, answer.Err)
			}
			endings = append(endings,
				invalidation.Judge(r, answer.Result, answer.Err, ran/time.Duration(len(runs)), n.cfg.Random()))
		}
		return endings
	}
	var answers []invalidation.BatchAnswer
	var err error
	unlessExit(
		func() { answers, err = n.handleBatch(ctx, h, runs) },
		func() { n.exit(j, judge(nil, n.panicked(errExit, runs[0]))...) })
	return judge(answers, err)
}

// handleBatch calls the handler; a panic is an error of each entry.
func (n *Node) handleBatch(ctx context.Context, h invalidation.BatchHandler, runs []*invalidation.Run) (
	answers []invalidation.BatchAnswer, err error,
) {
	defer func() {
		if v := recover(); v != nil {
			err = n.panicked(v, runs[0])
		}
	}()
	answers, err = answersOf(ctx, h, runs)
	for i := range answers {
		answers[i].Err = n.readable(answers[i].Err, runs[i])
	}
	return answers, err
}

func answersOf(ctx context.Context, h invalidation.BatchHandler, runs []*invalidation.Run) (
	[]invalidation.BatchAnswer, error,
) {
	answers := h.HandleBatch(ctx, runs)
	if len(answers) != len(runs) {
		return nil, fmt.Errorf("handler answered %d of %d entries", len(answers), len(runs))
	}
	return answers, nil
}
