package inference

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
)

// refusing is a database that stores no runs while it is told to refuse them.
type refusing struct {
	postgres.DB
	refuses atomic.Bool
	refused atomic.Int32
}

func (r *refusing) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if sql == saveRunSQL && r.refuses.Load() {
		r.refused.Add(1)
		return pgconn.CommandTag{}, errors.New("the database is away")
	}
	return r.DB.Exec(ctx, sql, args...)
}

// saving is a database that does something else where a run is to be stored.
type saving struct {
	postgres.DB
	do func(ctx context.Context) error
}

func (s saving) Exec(ctx context.Context, _ string, _ ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, s.do(ctx)
}

// A run may end while it is being stored. A statement that was cut off then might be committed after the run is
// forgotten.
func TestARunThatEndsWhileItIsBeingStoredIsStored(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	defer end()
	d := accepted(saving{do: func(ctx context.Context) error {
		end()
		return ctx.Err()
	}})
	if err := d.saveAgain(ctx, "job-1"); err != nil || !d.stored {
		t.Errorf("the run is stored: %t (%v)", d.stored, err)
	}
}

// A panic there would end the process, which counts as a crash of all entries that run.
func TestAPanicWhileARunIsBeingStoredDoesNotEndTheProcess(t *testing.T) {
	d := accepted(saving{do: func(context.Context) error { panic("a bug") }})
	if err := d.saveAgain(t.Context(), "job-1"); err != nil || d.stored {
		t.Errorf("the run is stored: %t (%v)", d.stored, err)
	}
}

// accepted is the dispatch of a run that a worker has accepted.
func accepted(db postgres.DB) *dispatch {
	return &dispatch{
		Dispatcher: &Dispatcher{db: db, log: quiet}, run: &invalidation.Run{Queue: &invalidation.Queue{}},
		held: &slotRef{slot: &heldSlot{}},
	}
}

// A run that must not run twice, and could not be stored when its worker accepted it, is stored later, or else is not
// handed over.
func TestARunThatCouldNotBeStoredDoesNotRunTwice(t *testing.T) {
	model := asyncModel()
	model.OnUnknown = worker.AtMostOnce
	b := newBed(t, model)
	db := &refusing{DB: b.pool}
	b.lossy = &lossy{DB: db}
	for i, c := range []struct {
		name    string
		store   func() // before the drain
		outcome string
	}{
		{"it is stored while it is followed", func() {
			db.refuses.Store(false)
			b.eventually("the run is stored", func() bool { return b.count(stored) == 1 })
		}, "done"},
		{"it is stored when it is handed over", func() { db.refuses.Store(false) }, "done"},
		{"it is never stored", func() {}, "failed"},
	} {
		w := b.longWorker(`{}`)
		server := fmt.Sprint("gpu-", i)
		b.instance(server, w.URL, 4)
		db.refuses.Store(true)
		refused := db.refused.Load()
		first := b.start(ServiceConfig{})
		id := b.push(`{}`)[0]
		awaitAtLeast(t, &db.refused, refused+1)
		awaitAtLeast(t, &w.polls, 2)
		c.store()
		first.leave()
		first.drain(invalidation.ErrDraining)
		first.work.Wait()
		db.refuses.Store(false)
		if kept := b.count(stored+` AND ran_ms > 0`) == 1; kept != (c.outcome == "done") {
			t.Errorf("%s: the run is stored, and how long it ran: %t", c.name, kept)
		}
		w.finished.Store(true)
		next := b.start(ServiceConfig{})
		o := b.outcome(id)
		if w.submits.Load() != 1 || o.Outcome != c.outcome || o.Outcome == "failed" && o.Class != classUnknown {
			t.Errorf("%s: %d calls, outcome %+v, want 1 call and %q", c.name, w.submits.Load(), o, c.outcome)
		}
		next.leave()
		next.work.Wait()
		b.must(RemoveInstance(b.ctx, b.pool, b.model.Name, server, true, By{}))
	}
}

// That a worker gave a run the id of another one may show only when it is stored at last.
func TestARunThatIsStoredLateUnderTheIDOfAnotherIsNotFollowedOn(t *testing.T) {
	model := asyncModel()
	model.OnUnknown = worker.AtMostOnce
	b := newBed(t, model)
	db := &refusing{DB: b.pool}
	b.lossy = &lossy{DB: db}
	w := b.longWorker(`{}`)
	instance := b.instance("gpu-1", w.URL, 1)
	db.refuses.Store(true)
	b.start(ServiceConfig{})
	id := b.push(`{}`)[0]
	awaitAtLeast(t, &w.polls, 1)
	b.must(saveRun(b.ctx, b.pool, remoteRun{
		Queue: b.queue.ID, Entry: id + 1, Token: 1, Slot: slot.Held{Instance: instance, Number: 1, Token: 1}, Remote: "job-1",
	}))
	db.refuses.Store(false)
	b.eventually("the entry has ended", func() bool {
		return b.count(`SELECT count(*) FROM penstock.failure WHERE entry_id = $1 AND class = 'unknown'`, id) == 1
	})
}

// While it is not stored its worker is told to report again, and may be taken for one that went silent: the lock key
// would come free beside the run.
func TestACancelledRunWithAKeyIsStoredWhileItIsFollowedOn(t *testing.T) {
	b := newBed(t, asyncModel())
	db := &refusing{DB: b.pool}
	b.lossy = &lossy{DB: db}
	w := b.longWorker("") // refuses the cancel: none is waited for
	b.instance("gpu-1", w.URL, 1)
	db.refuses.Store(true)
	m := b.start(ServiceConfig{}, folding)
	t.Cleanup(func() { w.finished.Store(true) })
	pushed, err := b.queue.Push(b.ctx, invalidation.Push{Payload: json.RawMessage(`{}`), LockKey: "k"})
	b.must(err)
	awaitAtLeast(t, &w.polls, 1)
	m.endRun(pushed[0].ID, invalidation.ErrCancelled)
	awaitAtLeast(t, &w.cancels, 1)
	db.refuses.Store(false)
	b.eventually("the run is stored", func() bool { return b.count(stored) == 1 })
	w.finished.Store(true)
	b.ended(pushed[0].ID)
	if o := b.outcome(pushed[0].ID); o.Outcome != "cancelled" || b.count(stored) != 0 {
		t.Errorf("outcome %+v, and %d runs are stored, want a cancel and none", o, b.count(stored))
	}
	b.used(b.model.PollInterval.Duration(), false)
}
