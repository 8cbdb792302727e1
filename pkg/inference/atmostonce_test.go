package inference

import (
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// heldCall is a worker of which the first call goes on until it is let go; later ones are answered at once.
type heldCall struct {
	*workertest.Script
	calls atomic.Int32
	began chan struct{}
	goOn  func()
}

func newHeldCall(t *testing.T) *heldCall {
	ended := make(chan struct{})
	h := &heldCall{began: make(chan struct{}), goOn: sync.OnceFunc(func() { close(ended) })}
	h.Script = workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/health" {
			workertest.Says(200, `{"active_jobs":0}`)(w, r)
			return
		}
		if h.calls.Add(1) == 1 {
			close(h.began)
			<-ended
		}
		workertest.Says(200, `{"status":"success","result":1}`)(w, r)
	})
	t.Cleanup(h.goOn)
	return h
}

// recoverHeld ends all locks as the leader does: because their node died, or because it does not list them.
func (b *bed) recoverHeld(died bool) {
	b.Helper()
	b.must(postgres.InTx(b.ctx, b.pool, func(tx pgx.Tx) error {
		reason := `UPDATE penstock.node SET tokens = '{}'` // a heartbeat since the claim has listed the lock
		if died {
			reason = `UPDATE penstock.node SET beat_at = clock_timestamp() - interval '5 minutes'`
		}
		if _, err := tx.Exec(b.ctx, reason); err != nil {
			return err
		}
		locks, err := invalidation.HeldLocks(b.ctx, tx)
		if err != nil {
			return err
		}
		r, err := b.queue.WithTx(tx).Recover(b.ctx, refs(locks), nil, died)
		if err == nil && len(r.Freed) != 1 {
			err = errors.New("the lock was not freed")
		}
		return err
	}))
}

// An entry that must not run twice is refused after another than its node has ended its lock: the node may have sent it
// to its worker, and may even be in the call still.
func TestAtMostOnceHoldsWhereALockIsEndedByAnother(t *testing.T) {
	for name, end := range map[string]func(*bed, *miniNode){
		"its node is silent for a lease, and heard again": func(b *bed, m *miniNode) {
			b.recoverHeld(true)
			b.await(1, `SELECT count(*) FROM penstock.node WHERE beat_at > clock_timestamp() - interval '1 minute'`)
			b.await(1, `SELECT penstock.take_back_crashes($1)`, m.id)
			if n := b.count(`SELECT crashes FROM penstock.entry`); n != 0 {
				b.Errorf("%d crashes are left", n)
			}
		},
		"its node died, and a leader of the version before freed it": func(b *bed, _ *miniNode) {
			b.recoverHeld(true)
			_, err := b.pool.Exec(b.ctx, `UPDATE penstock.entry SET may_have_run = NULL`)
			b.must(err)
		},
		"its node lives and does not list it": func(b *bed, _ *miniNode) { b.recoverHeld(false) },
		"an operator unlocks it": func(b *bed, _ *miniNode) {
			b.must(postgres.InTx(b.ctx, b.pool, func(tx pgx.Tx) error {
				locks, err := invalidation.HeldLocks(b.ctx, tx)
				if err != nil {
					return err
				}
				return b.queue.ForceUnlock(b.ctx, tx, locks[0].Key, locks[0].Token, true)
			}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, worker.Model{OnUnknown: worker.AtMostOnce})
			h := newHeldCall(t)
			b.instance("gpu-1", h.URL, 1)
			m := b.start(ServiceConfig{})
			id := b.push(`{}`)[0]
			<-h.began
			end(b, m)
			h.goOn()
			o := b.outcome(id)
			if h.calls.Load() != 1 || o.Outcome != "failed" || o.Class != classUnknown {
				t.Errorf("%d calls, outcome %+v, want 1 call and a failure of class unknown", h.calls.Load(), o)
			}
		})
	}
}

// A run that was accepted goes with its instance, and nobody learns how it ended.
func TestAtMostOnceHoldsWhereTheInstanceOfARunIsRemoved(t *testing.T) {
	model := asyncModel()
	model.OnUnknown = worker.AtMostOnce
	b := newBed(t, model)
	w := b.longWorker(`{}`)
	b.instance("gpu-1", w.URL, 1)
	first := b.start(ServiceConfig{})
	id := b.push(`{}`)[0]
	awaitAtLeast(t, &w.polls, 1)
	first.die()
	b.must(RemoveInstance(b.ctx, b.pool, b.model.Name, "gpu-1", true, By{}))
	b.instance("gpu-2", w.URL, 1)
	w.finished.Store(true)
	b.start(ServiceConfig{})
	if o := b.outcome(id); w.submits.Load() != 1 || o.Outcome != "failed" || o.Class != classUnknown {
		t.Errorf("%d calls, outcome %+v, want 1 call and a failure of class unknown", w.submits.Load(), o)
	}
}

// What ends the context of a run that must not run twice is no reason to run it again.
func TestAtMostOnceHoldsWhateverEndsTheRun(t *testing.T) {
	for _, cause := range []error{
		invalidation.ErrLeaseLost, invalidation.ErrDraining, invalidation.ErrRunTimeout, errPreempted,
	} {
		t.Run(cause.Error(), func(t *testing.T) {
			b := newBed(t, worker.Model{OnUnknown: worker.AtMostOnce})
			h := newHeldCall(t)
			b.instance("gpu-1", h.URL, 1)
			m := b.start(ServiceConfig{})
			id := b.push(`{}`)[0]
			<-h.began
			m.endRun(id, cause)
			o := b.outcome(id)
			h.goOn()
			if h.calls.Load() != 1 || o.Outcome != "failed" || o.Class != classUnknown {
				t.Errorf("%d calls, outcome %+v, want 1 call and a failure of class unknown", h.calls.Load(), o)
			}
		})
	}
}

// endRun ends the context of a run, as the node and the slot pool do.
func (m *miniNode) endRun(id invalidation.EntryID, cause error) {
	if errors.Is(cause, errPreempted) {
		m.Dispatcher.runs.mu.Lock()
		defer m.Dispatcher.runs.mu.Unlock()
		for _, run := range m.Dispatcher.runs.byToken {
			run.end(cause)
		}
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.running[id](cause)
}
