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
	if text != "1 status 500: a b [31mred" {
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
	w := &term{t, db, New(db, fence, Config{Keep: time.Hour, Backends: map[string]Backend{backendLocal: c}})}
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
