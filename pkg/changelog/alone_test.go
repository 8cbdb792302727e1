package changelog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// The impact is code of the user, which may call any server: its errors are no reason to give up the changes behind it,
// whatever they are, as long as the database begins transactions.
func TestAnErrorOfAnImpactIsThatOfItsChange(t *testing.T) {
	for name, c := range map[string]struct {
		err           error
		failed, calls int
	}{
		"a deadline of its own":   {fmt.Errorf("ask the price: %w", context.DeadlineExceeded), 1, 3},
		"a connection of its own": {&net.OpError{Op: "dial", Err: errors.New("refused")}, 1, 3},
		"a row that is locked":    {&pgconn.PgError{Code: "55P03"}, 1, 3},
		"a deadlock":              {&pgconn.PgError{Code: "40P01"}, 1, 3},
		"a transaction not begun": {fmt.Errorf("%w: no connection", postgres.ErrNotBegun), 3, 1},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t)
			calls, failed := 0, 0
			h, runs := b.batch(func(d Change) error {
				if calls++; string(d.To) == "1" {
					return c.err
				}
				return nil
			})
			for _, answer := range h.HandleBatch(b.ctx, runs) {
				if answer.Err != nil {
					failed++
				}
			}
			if failed != c.failed || calls != c.calls || b.count(`SELECT count(*) FROM penstock.entry_calc`) != 3-failed {
				t.Errorf("%d changes failed after %d calls of the impact, want %d and %d", failed, calls, c.failed, c.calls)
			}
		})
	}
}

// onCommit calls itself after each COMMIT that succeeded.
type onCommit func()

func (onCommit) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (f onCommit) TraceQueryEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	if data.CommandTag.String() == "COMMIT" {
		f()
	}
}

// A run that ends between two pushes of one change each has not pushed the later one.
func TestAChangeThatIsNotPushedAnyMoreIsNotDone(t *testing.T) {
	b := newBed(t)
	ctx, cancel := context.WithCancel(b.ctx)
	defer cancel()
	config := b.pool.Config()
	config.ConnConfig.Tracer = onCommit(cancel)
	pool, err := pgxpool.NewWithConfig(b.ctx, config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	b.pool, pool = pool, b.pool
	h, runs := b.batch(func(Change) error { return nil })
	b.pool = pool
	b.exec(`ALTER TABLE penstock.entry_calc ADD CHECK (payload <> '2')`)
	answers := h.HandleBatch(ctx, runs)
	if answers[0].Err != nil || answers[1].Err == nil || answers[2].Err == nil {
		t.Errorf("answers %v", answers)
	}
	if n := b.count(`SELECT count(*) FROM penstock.entry_calc`); n != 1 {
		t.Errorf("%d pushed, want 1", n)
	}
}

// An option that is dropped without a word would run the entry at once, or beside others of its key.
func TestAColumnOfAnImpactThatIsNoneOfAPushFailsTheChangeForGood(t *testing.T) {
	for _, column := range []string{"due_at", "weight", "lockkey"} {
		var p Push
		err := p.read(json.RawMessage(`{"queue": "calc", "payload": 1, "` + column + `": 2}`))
		r := &invalidation.Run{Queue: &invalidation.Queue{}, Lock: &invalidation.Lock{Key: "#1"}}
		if e := invalidation.Judge(r, nil, err, 0, 0); !e.Failed() || !strings.Contains(err.Error(), column) {
			t.Errorf("%s: judged %s after %v, want a failure that names it", column, e.Verb(), err)
		}
	}
	var p Push
	if err := p.read(json.RawMessage(`{"queue": "calc", "payload": null, "lock_key": "k", "flow": null, "name": "n", "priority": 3}`)); err != nil || p.LockKey != "k" || *p.Priority != 3 {
		t.Errorf("read %+v: %v", p, err)
	}
}

func TestToDescendFromNoRunsIsNothing(t *testing.T) {
	b := newBed(t)
	if err := pgx.BeginFunc(b.ctx, b.pool, func(tx pgx.Tx) error { return Descend(b.ctx, tx) }); err != nil {
		t.Error(err)
	}
}
