package tasknode

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

func assigned(ids ...invalidation.EntryID) *assignment {
	lock := &invalidation.Lock{Key: "k", Token: 1, ClaimedAt: time.Now()}
	for _, id := range ids {
		lock.Entries = append(lock.Entries, invalidation.Entry{ID: id, StartIn: invalidation.NoDeadline, FinishIn: invalidation.NoDeadline})
	}
	q := &invalidation.Queue{ID: 1}
	return &assignment{lock: lock, queue: q, service: &service{}, home: &lane{}, lane: invalidation.Candidate{Queue: q}}
}

// A wish to cancel an entry is delivered until its ending is recorded, when the next of its group may be about to begin.
func TestCancelOfAnEntryThatHasRunDoesNotReachTheNextOfItsGroup(t *testing.T) {
	d, job := newDesk(), assigned(1, 2)
	d.add(job)
	d.cancelWith(job, func(error) {}, true)
	d.begin(job, 1)
	ctx, cancel := context.WithCancelCause(t.Context())
	d.cancelWith(job, cancel, true)
	d.cancelEntry(invalidation.CancelRequest{QueueID: 1, Entry: 1})
	if _, wished := d.begin(job, 2); wished || ctx.Err() != nil {
		t.Errorf("entry 2 is cancelled (%v, %v) by a wish for entry 1", wished, context.Cause(ctx))
	}
}

type batchFunc func(ctx context.Context, runs []*invalidation.Run) []invalidation.BatchAnswer

func (f batchFunc) Handle(context.Context, *invalidation.Run) (json.RawMessage, error) {
	return nil, nil
}

func (f batchFunc) HandleBatch(ctx context.Context, runs []*invalidation.Run) []invalidation.BatchAnswer {
	return f(ctx, runs)
}

func TestABatchLeavesOutWhatIsToBeCancelled(t *testing.T) {
	n := New(Config{}, nil, nil)
	n.runs = t.Context()
	job := assigned(1, 2, 3)
	n.desk.add(job)
	n.desk.cancelEntry(invalidation.CancelRequest{QueueID: 1, Entry: 2, Reason: "no"})
	var ran []invalidation.EntryID
	job.service.handler = batchFunc(func(_ context.Context, runs []*invalidation.Run) []invalidation.BatchAnswer {
		for _, r := range runs {
			ran = append(ran, r.Entry.ID)
		}
		return make([]invalidation.BatchAnswer, len(runs))
	})
	n.process(job, false)
	if len(ran) != 2 || ran[0] != 1 || ran[1] != 3 {
		t.Errorf("entries %v ran, want 1 and 3", ran)
	}
	if _, p := n.settler.next(); len(p.endings) != 3 {
		t.Errorf("%d endings, want 3", len(p.endings))
	}
}
