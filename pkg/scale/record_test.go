package scale

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// An answer of a backend may have any characters. Postgres takes no NUL in a text.
func TestAFailureWithAnyTextIsRecorded(t *testing.T) {
	db, c := driven(t), &cluster{before: errors.New("status 500: a\x00b \x1b[31mred\r\n")}
	w := newTerm(t, db, c)
	w.round()
	override(t, db, 2)
	for range 3 {
		w.round()
	}
	text := one[string](t, db, `SELECT failures || ' ' || coalesce(error, '') FROM penstock.deployment_state`)
	if text != "1 status 500: a\ufffdb \ufffd[31mred" {
		t.Errorf("recorded is %q after %d orders", text, len(c.orders))
	}
}

// unsteady is a fence whose transactions fail as often as it says.
type unsteady struct {
	free
	fails int
}

func (u *unsteady) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	if u.fails > 0 {
		u.fails--
		return errors.New("the database is away")
	}
	return u.free.InTx(ctx, fn)
}

// A replacement of stuck starts that could not be stored is stored by the next pass, with its count: a new leader goes on
// with that.
func TestAReplacementThatCouldNotBeStoredIsStoredLater(t *testing.T) {
	db, c := driven(t), &cluster{}
	fence := &unsteady{free: free{db}}
	w := &term{t, db, New(db, fence, Config{keep: time.Hour, Backends: map[string]Backend{backendLocal: c}})}
	w.round()
	override(t, db, 1)
	for range 3 {
		w.round()
	}
	do(t, db, `SELECT penstock.set_scale_override('llama-own', NULL)`)
	do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"policy": {"slots": 2, "max": 8, "min": 1}}')`)
	w.round()
	do(t, db, `UPDATE penstock.instance SET created_at = created_at - interval '1 hour'`)
	fence.fails = 1
	if err := w.duty.Pass(t.Context()); err == nil {
		t.Fatal("the pass stored its decisions")
	}
	w.round()
	if n := one[int](t, db, `SELECT count(replace_before) FROM penstock.deployment_state`); n != 1 {
		t.Error("the stuck start is not replaced")
	}
	if n := one[int](t, db, `SELECT coalesce((state->'stuck'->'llama-own'->>'replaced')::int, 0) FROM penstock.scale_state`); n != 1 {
		t.Errorf("%d rounds of replacements are stored", n)
	}
}

// failing is a fence whose next transactions end in these errors.
type failing struct {
	free
	errs []error
}

func (f *failing) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	if len(f.errs) > 0 {
		err := f.errs[0]
		f.errs = f.errs[1:]
		return err
	}
	return f.free.InTx(ctx, fn)
}

// A row is refused, and the database is away while each model is stored alone: the next pass decides again for all that are
// not stored, so that each change has its row.
func TestModelsBehindOneThatCouldNotBeStoredAreStoredLater(t *testing.T) {
	db := pair(t)
	s := New(db, &failing{free{db}, []error{errData, errors.New("the database is away")}}, Config{})
	if err := s.Pass(t.Context()); err == nil {
		t.Fatal("the pass stored its decisions")
	}
	if err := s.Pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := one[string](t, db, `SELECT string_agg(model || ' ' || desired, ', ' ORDER BY model) FROM penstock.scale_decision`); got != "llama 1, usual 1" {
		t.Errorf("the decisions are %q", got)
	}
}

// The times of a deployment are those of the database's clock. A leader whose own clock is an hour off writes the reports
// of backends as often as another one.
func TestReportsAreWrittenByTheClockOfTheDatabase(t *testing.T) {
	for _, off := range []time.Duration{-time.Hour, 0, time.Hour} {
		at := time.Now().Add(off)
		existing := 0
		for age, want := range map[time.Duration]bool{time.Second: false, seenEvery: true} {
			seen := at.Add(-age)
			s := applied{
				deploymentRow: deploymentRow{At: at, SeenAt: &seen, Existing: &existing, Backend: backendLocal}, readAt: time.Now(),
			}
			if got := (steps{}).changes(s, s); got != want {
				t.Errorf("clock %s off: a report that is %s old is written again: %v", -off, age, got)
			}
		}
	}
}

// An instance that was named for removal and that an operator, or a leader of the version before, took back is to go no
// more.
func TestAnInstanceThatWasTakenBackIsToGoNoMore(t *testing.T) {
	s := decided(2, 2)
	s.Removing = []string{"a", "b"}
	s.RemovingSince = map[string]time.Time{"a": began(time.Hour), "b": began(time.Minute)}
	back, going := ready(1, 0), drains(ready(2, 1))
	p := plan(s, []registration{back, going}, in(back, going), true, noon)
	if _, named := p.removing["b"]; !named || len(p.removing) != 1 || p.overdue != "" {
		t.Errorf("to go are %v: %q", p.removing, p.overdue)
	}
}
