package tasknode

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/pkg/fairness"
	"github.com/penstock/penstock/pkg/invalidation"
)

// settled is a Ranker that keeps what entries cost in the end.
type settled struct{ costs []float64 }

func (s *settled) Next([]int, []*fairness.Candidate, int, bool) []int { return nil }
func (s *settled) Charge(fairness.Candidate, float64)                 {}
func (s *settled) Extend(fairness.Candidate, float64)                 {}
func (s *settled) Correct(_ fairness.Candidate, _, actual float64) {
	s.costs = append(s.costs, actual)
}

// chargingBatch says of each entry of a batch what it used.
type chargingBatch struct{ invalidation.HandlerFunc }

func (chargingBatch) HandleBatch(_ context.Context, runs []*invalidation.Run) []invalidation.BatchAnswer {
	time.Sleep(8 * time.Second)
	for i, r := range runs {
		r.Charge(time.Duration(i) * time.Second)
	}
	return make([]invalidation.BatchAnswer, len(runs))
}

// A flow is booked with what a handler says that a run used, and with the run's time where it says nothing.
func TestHandlersSayWhatRunsUsed(t *testing.T) {
	charging := func(used time.Duration) invalidation.Handler {
		return invalidation.HandlerFunc(func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
			time.Sleep(10 * time.Second)
			r.Charge(used)
			return nil, nil
		})
	}
	answering := func(err error) invalidation.Handler {
		return invalidation.HandlerFunc(func(context.Context, *invalidation.Run) (json.RawMessage, error) {
			time.Sleep(10 * time.Second)
			return nil, err
		})
	}
	for name, c := range map[string]struct {
		handler  invalidation.Handler
		declared float64
		want     float64
	}{
		"less than its time":    {charging(2 * time.Second), 0, 4},
		"nothing at all":        {charging(0), 0, 0},
		"more than its time":    {charging(80 * time.Second), 0, 160},
		"nothing was said":      {charging(-1), 0, 20},
		"the cost was declared": {charging(2 * time.Second), 7, 14},
		"a batch":               {chargingBatch{}, 0, 1},

		"the cost was declared, and runs fail":       {answering(errors.New("refused")), 7, 14},
		"the cost was declared, and nothing used":    {charging(0), 7, 0},
		"the cost was declared, and runs snooze":     {answering(invalidation.Snooze(time.Second)), 7, 0},
		"the cost was declared, and there's no room": {answering(invalidation.NoCapacity(0, errors.New("busy"))), 7, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ranker := &settled{}
				n := New(Config{Threads: 1, Ranker: ranker}, nil, nil)
				n.runs = t.Context()
				j := assigned(1, 2)
				j.handler, j.queue.Config.QuantumTime = c.handler, time.Hour
				for i := range j.lock.Entries {
					j.lock.Entries[i].Cost = c.declared
				}
				n.jobs.add(j)
				n.process(j)
				booked := 0.0
				for _, cost := range ranker.costs {
					booked += cost
				}
				if booked != c.want {
					t.Errorf("booked %v s, want %v", ranker.costs, c.want)
				}
			})
		})
	}
}

// ledger is a Ranker that keeps what is charged and not settled, and the most that ever was.
type ledger struct {
	settled
	open, most float64
}

func (l *ledger) Charge(_ fairness.Candidate, estimate float64) { l.add(estimate) }
func (l *ledger) Extend(_ fairness.Candidate, more float64)     { l.add(more) }
func (l *ledger) Correct(_ fairness.Candidate, charged, _ float64) {
	l.add(-charged)
}

func (l *ledger) add(estimate float64) {
	l.open += estimate
	l.most = max(l.most, l.open)
}

// A group is charged for the entry that runs, not for those behind it, to which another flow may be preferred.
func TestGroupIsChargedEntryByEntry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ranker := &ledger{}
		n := New(Config{Threads: 1, Ranker: ranker}, nil, nil)
		n.runs = t.Context()
		group := assigned(1, 2, 3, 4)
		n.holdings.noteDone(group.served, 10*time.Second, 10, 10, true)
		group.handler = invalidation.HandlerFunc(func(context.Context, *invalidation.Run) (json.RawMessage, error) {
			time.Sleep(10 * time.Second)
			return nil, nil
		})
		group.queue.Config.QuantumTime = time.Hour
		lease := &laneLease{servedLane: servedLane{served: group.served, queue: group.queue, handler: group.handler, lane: &lane{}}}
		answer := &claimAnswer{node: n, start: time.Now(), reserved: reservation{node: n, queue: group.served, locks: 1}}
		answer.accept(lease, []*invalidation.Lock{group.lock})
		n.process(n.waiting.next())
		if ranker.most > 11 || ranker.open > 0.001 || ranker.open < -0.001 {
			t.Errorf("at most %.1f s were charged at once and %.1f stay, want one run of 10 s and none", ranker.most,
				ranker.open)
		}
	})
}

// Entries that run together are charged for one run, and not each of them for all.
func TestEntriesThatRunTogetherAreChargedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ranker := &ledger{}
		n := New(Config{Threads: 1, Ranker: ranker}, nil, nil)
		n.runs = t.Context()
		group := assigned(1, 2, 3, 4)
		n.holdings.noteDone(group.served, 10*time.Second, 10, 10, true)
		group.handler = batchFunc(func(_ context.Context, runs []*invalidation.Run) []invalidation.BatchAnswer {
			time.Sleep(10 * time.Second)
			return make([]invalidation.BatchAnswer, len(runs))
		})
		lease := &laneLease{servedLane: servedLane{served: group.served, queue: group.queue, handler: group.handler, lane: &lane{}}}
		answer := &claimAnswer{node: n, start: time.Now(), reserved: reservation{node: n, queue: group.served, locks: 1}}
		answer.accept(lease, []*invalidation.Lock{group.lock})
		n.process(n.waiting.next())
		if ranker.most < 9 || ranker.most > 11 || ranker.open > 0.001 || ranker.open < -0.001 {
			t.Errorf("at most %.1f s were charged at once and %.1f stay, want one run of 10 s and none", ranker.most,
				ranker.open)
		}
	})
}

// An answer that comes too late is handed back, and its flow is not behind others for it.
func TestALateClaimCostsItsFlowNothing(t *testing.T) {
	ranker := &ledger{}
	n := New(Config{Threads: 1, Ranker: ranker}, nil, nil)
	group := assigned(1, 2)
	n.holdings.noteDone(group.served, 10*time.Second, 10, 10, true)
	lease := &laneLease{servedLane: servedLane{served: group.served, queue: group.queue, handler: group.handler, lane: &lane{}}}
	answer := &claimAnswer{
		node: n, start: time.Now().Add(-time.Hour), reserved: reservation{node: n, queue: group.served, locks: 1},
	}
	answer.accept(lease, []*invalidation.Lock{group.lock})
	if ranker.most == 0 || ranker.open != 0 {
		t.Errorf("%.1f s of %.1f s that were charged stay, want none", ranker.open, ranker.most)
	}
}

// A run of a batch uses a part of its time, one on several GPUs a multiple of it. A flow that was charged the time would
// get most of it back at the end, or owe it only then.
func TestARunIsChargedWhatRunsOfItsQueueUse(t *testing.T) {
	for name, use := range map[string]time.Duration{"a batch of 8": time.Second, "8 GPUs": 64 * time.Second} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ranker := &ledger{}
				n := New(Config{Threads: 1, Ranker: ranker}, nil, nil)
				n.runs = t.Context()
				open := func(when string, want time.Duration) {
					t.Helper()
					n.jobs.extend(time.Now(), n.holdings.usedIn, ranker.Extend)
					if math.Abs(ranker.open-want.Seconds()) > 0.001 {
						t.Errorf("%.2f s are charged %s, want %.2f s", ranker.open, when, want.Seconds())
					}
				}
				run := func(handle func()) {
					j := assigned(1)
					j.handler = invalidation.HandlerFunc(func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
						time.Sleep(8 * time.Second)
						handle()
						r.Charge(use)
						return nil, nil
					})
					lease := &laneLease{servedLane: servedLane{served: j.served, queue: j.queue, handler: j.handler, lane: &lane{}}}
					answer := &claimAnswer{node: n, start: time.Now(), reserved: reservation{node: n, queue: j.served, locks: 1}}
					answer.accept(lease, []*invalidation.Lock{j.lock})
					answer.enqueue()
					n.process(n.waiting.next())
				}
				run(func() {})
				run(func() {
					open("after the time of a run", use)
					time.Sleep(4 * time.Second)
					open("after half as long again", use*3/2)
				})
				open("when all has ended", 0)
			})
		})
	}
}

// A handler may charge for each call, however long it takes: a run that hangs would be charged thousands of calls.
func TestARunThatHangsIsChargedItsTimeOrTwiceTheUsual(t *testing.T) {
	h := newHoldings()
	calls, gpus := &servedQueue{id: 1}, &servedQueue{id: 2}
	h.noteDone(calls, time.Millisecond, 10, 10, true)
	h.noteDone(gpus, time.Minute, 480, 480, true)
	for _, c := range []struct {
		queue *servedQueue
		after time.Duration
		want  float64
	}{
		{calls, time.Millisecond, 10},
		{calls, 5 * time.Second, 20},
		{calls, time.Hour, 3600},
		{gpus, time.Second, 8},
		{gpus, 90 * time.Second, 720},
		{gpus, 5 * time.Minute, 960},
	} {
		if got := h.usedIn(c.queue, c.after); math.Abs(got-c.want) > 0.001 {
			t.Errorf("a run of queue %d is expected to have used %v after %v, want %v", c.queue.id, got, c.after, c.want)
		}
	}
}
