package penstocktest_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/invalidation/penstocktest"
)

type mail struct {
	To string `json:"to"`
}

var mails = invalidation.Definition[mail]{Name: "mails", Config: invalidation.Config{
	Grouping: "to", Retry: invalidation.RetryPolicy{Base: invalidation.Seconds(time.Hour)}, // no retry comes due while a test runs
}}

func begin(t *testing.T) (pgx.Tx, *pgxpool.Pool) {
	t.Helper()
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: pgtest.DSN(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if err := invalidation.Sync(t.Context(), pool, mails); err != nil {
		t.Fatal(err)
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx, pool
}

func push(t *testing.T, db postgres.DB, to ...string) {
	t.Helper()
	for _, one := range to {
		if _, err := mails.Push(t.Context(), db, mail{one}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestWhatWasPushedInTheTransactionIsAsserted(t *testing.T) {
	tx, _ := begin(t)
	push(t, tx, "ann", "bob")
	if e := penstocktest.AssertPushed(t, tx, mails, mail{"ann"}); e.LockKey != "ann" || e.Deferred || e.Priority != 1 {
		t.Errorf("entry is %+v", e)
	}
	penstocktest.AssertNotPushed(t, tx, mails, mail{"eve"})
	if n := len(penstocktest.Entries(t, tx, mails)); n != 2 {
		t.Errorf("%d entries, want 2", n)
	}
}

// judge is a testing.TB that notes a failure instead of ending the test.
type judge struct {
	testing.TB
	failed bool
}

func (j *judge) Fatalf(string, ...any) { j.failed = true; panic(j) }

func fails(t *testing.T, fn func(testing.TB)) bool {
	t.Helper()
	j := &judge{TB: t}
	func() {
		defer func() {
			if v := recover(); v != nil && v != any(j) {
				panic(v)
			}
		}()
		fn(j)
	}()
	return j.failed
}

func TestAssertionsFailWhereTheyShould(t *testing.T) {
	tx, _ := begin(t)
	push(t, tx, "ann", "bob", "bob")
	for name, assert := range map[string]func(testing.TB){
		"nothing pushed": func(t testing.TB) { penstocktest.AssertPushed(t, tx, mails, mail{"eve"}) },
		"pushed twice":   func(t testing.TB) { penstocktest.AssertPushed(t, tx, mails, mail{"bob"}) },
		"pushed":         func(t testing.TB) { penstocktest.AssertNotPushed(t, tx, mails, mail{"ann"}) },
	} {
		if !fails(t, assert) {
			t.Errorf("%s: the assertion did not fail", name)
		}
	}
}

func TestDrainRunsEverythingInOrderAndLeavesNothing(t *testing.T) {
	tx, pool := begin(t)
	push(t, tx, "ann", "bob", "ann")
	var to []string
	ran := penstocktest.Drain(t, tx, "mails", mails.Handler(func(_ context.Context, _ *invalidation.Run, m mail) (any, error) {
		to = append(to, m.To)
		return "sent", nil
	}))
	slices.Sort(to)
	if !slices.Equal(to, []string{"ann", "ann", "bob"}) || len(ran) != 3 || string(ran[0].Result) != `"sent"` {
		t.Errorf("ran %v: %+v", to, ran)
	}
	if n := len(penstocktest.Entries(t, tx, mails)); n != 0 {
		t.Errorf("%d entries are left", n)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	var left int
	if err := pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM penstock.entry) + (SELECT count(*) FROM penstock.result)`).Scan(&left); err != nil || left != 0 {
		t.Errorf("%d rows are left after the rollback (%v)", left, err)
	}
}

func TestRunOneRunsOneAndPutsTheRestBack(t *testing.T) {
	_, pool := begin(t)
	push(t, pool, "ann", "ann", "ann")
	ok := mails.Handler(func(context.Context, *invalidation.Run, mail) (any, error) { return nil, nil })
	first := penstocktest.RunOne(t, pool, "mails", ok)
	second := penstocktest.RunOne(t, pool, "mails", ok)
	if first.Entry.ID >= second.Entry.ID || first.Key != "ann" {
		t.Errorf("ran %d, then %d", first.Entry.ID, second.Entry.ID)
	}
	if n := len(penstocktest.Entries(t, pool, mails)); n != 1 {
		t.Errorf("%d entries are left, want 1", n)
	}
	penstocktest.RunOne(t, pool, "mails", ok)
	if !fails(t, func(t testing.TB) { penstocktest.RunOne(t, pool, "mails", ok) }) {
		t.Error("RunOne of an empty queue did not fail")
	}
}

func TestErrorsAreJudgedAsANodeWould(t *testing.T) {
	_, pool := begin(t)
	push(t, pool, "ann", "bob", "cleo", "dora")
	answers := map[string]error{
		"ann": errors.New("busy"), "bob": invalidation.Permanent(errors.New("no such address")),
		"cleo": invalidation.NoCapacity(0, errors.New("full")),
	}
	h := mails.Handler(func(_ context.Context, _ *invalidation.Run, m mail) (any, error) {
		if m.To == "dora" {
			panic("dora")
		}
		return nil, answers[m.To]
	})
	if ran := penstocktest.Drain(t, pool, "mails", h); len(ran) != 4 {
		t.Fatalf("ran %d times, want 4", len(ran))
	}
	left := map[string]penstocktest.Queued[mail]{}
	for _, e := range penstocktest.Entries(t, pool, mails) {
		left[e.Payload.To] = e
	}
	if len(left) != 3 || !left["ann"].Deferred || left["ann"].Attempt != 1 || left["cleo"].Deferred || left["cleo"].Attempt != 0 || !left["dora"].Deferred {
		t.Errorf("left %+v", left)
	}
	var class string
	if err := pool.QueryRow(t.Context(), `SELECT class FROM penstock.failure`).Scan(&class); err != nil || class != "error" {
		t.Errorf("failure of class %q (%v)", class, err)
	}
	delete(answers, "ann")
	if n := penstocktest.MakeDue(t, pool, "mails"); n != 2 {
		t.Errorf("made %d due, want 2", n)
	}
	if ran := penstocktest.Drain(t, pool, "mails", h); len(ran) != 3 {
		t.Errorf("ran %d times, want 3", len(ran))
	}
}

func TestDeferredEntriesWait(t *testing.T) {
	tx, _ := begin(t)
	queue, err := mails.Open(t.Context(), tx)
	if err != nil {
		t.Fatal(err)
	}
	push, err := mails.NewPush(mail{"ann"}, invalidation.Push{DueAt: time.Now().Add(time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := queue.Push(t.Context(), push); err != nil {
		t.Fatal(err)
	}
	ok := mails.Handler(func(context.Context, *invalidation.Run, mail) (any, error) { return nil, nil })
	if ran := penstocktest.Drain(t, tx, "mails", ok); len(ran) != 0 {
		t.Errorf("ran %v before its time", ran)
	}
	penstocktest.MakeDue(t, tx, "mails")
	penstocktest.RunOne(t, tx, "mails", ok)
}

func TestMergedEntriesRunAsOne(t *testing.T) {
	tx, _ := begin(t)
	push(t, tx, "ann", "ann", "ann")
	calls := 0
	d := mails
	d.Merge = func(all []mail) mail { return all[0] }
	ran := penstocktest.Drain(t, tx, "mails", d.Handler(func(context.Context, *invalidation.Run, mail) (any, error) {
		calls++
		return calls, nil
	}))
	if calls != 1 || len(ran) != 3 {
		t.Errorf("%d calls for %d entries", calls, len(ran))
	}
}
