package inference

import (
	"context"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// broken is an adapter whose calls panic.
type broken struct{ worker.Adapter }

func (broken) Submit(context.Context, worker.Call) worker.Outcome { panic("a bug") }

// brokenBatch is a broken one of a protocol whose calls carry several entries.
type brokenBatch struct {
	broken
	worker.BatchCodec
}

// It is unknown how far the call got, and the instance is not held by it for ever.
func TestACallThatPanicsLeavesItsSlotInDoubtAndItsInstanceToOthers(t *testing.T) {
	b := newBed(t, worker.Model{})
	instance := b.instance("gpu-1", b.gpu(answers).URL, 1)
	m := b.start(ServiceConfig{})
	m.leave()
	m.work.Wait()
	m.Registry.reading.Lock() // a reading that began before would undo it
	now, e := *m.Registry.current.Load(), *m.Registry.Endpoint(instance)
	e.adapter = broken{e.adapter}
	now.instances, now.byModel = map[int32]*Endpoint{instance: &e}, map[string][]*Endpoint{b.model.Name: {&e}}
	m.Registry.current.Store(&now)
	m.Registry.reading.Unlock()
	b.pushApart(`{}`)
	n, release := m.Pool.Take(b.queue.Name, 1)
	for ; n == 0; n, release = m.Pool.Take(b.queue.Name, 1) {
		pause(b.ctx, time.Millisecond)
	}
	c, err := m.queue.Claim(b.ctx, invalidation.ClaimRequest{
		Node: m.id, ClaimID: 1, Lane: invalidation.Lane{Priority: apartPriority}, Limit: 1, IgnoreRowLocks: true,
	})
	b.must(err)
	m.Pool.mu.Lock()
	breaker := m.Pool.breakerOf(b.model.Name)
	breaker.Condemn(time.Now().Add(-time.Hour), e.Server, "ill") // the call is to show that it is well again
	m.Pool.mu.Unlock()
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the call did not panic")
			}
		}()
		_, _ = m.Dispatcher.Handle(b.ctx, &invalidation.Run{Queue: m.queue, Entry: c.Locks[0].Entries[0], Lock: c.Locks[0], Node: m.id})
	}()
	release(1)
	b.await(1, `SELECT count(*) FROM penstock.slot WHERE doubt = $1`, leftByPanic)
	m.Pool.mu.Lock()
	defer m.Pool.mu.Unlock()
	if _, probe := breaker.Admit(time.Now(), e.Server); !probe {
		t.Error("no other call may show that the instance is well again")
	}
}

func TestACallOfSeveralEntriesThatPanicsHasAnUnknownOutcome(t *testing.T) {
	b := newBed(t, worker.Model{Batch: worker.BatchLimits{Items: 2}})
	instance := b.instance("gpu-1", nowhere, 1)
	m := b.start(ServiceConfig{})
	e := m.Registry.Endpoint(instance)
	codec, _ := e.adapter.(worker.BatchCodec)
	l := m.Dispatcher.waitlistOf(b.model.Name)
	calls := []worker.Call{{RunRef: worker.RunRef{Entry: "1"}, Payload: []byte(`{}`)}, {RunRef: worker.RunRef{Entry: "2"}, Payload: []byte(`{}`)}}
	held := &slotRef{pool: m.Pool, model: b.model.Name, endpoint: &Endpoint{ID: instance, Server: e.Server, adapter: brokenBatch{broken{}, codec}}}
	whole, each := l.callAll(b.ctx, &dispatch{Dispatcher: m.Dispatcher, model: b.model, held: held}, calls)
	if whole.Kind != worker.Unknown || !whole.MaybeRunning || len(each) != 2 || each[0].Kind != worker.Unknown {
		t.Errorf("outcome %+v, of each %+v", whole, each)
	}
}
