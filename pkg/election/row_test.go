package election

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

// take polls a row and demands what comes of it.
func take(t *testing.T, r row, won bool) Term {
	t.Helper()
	s, err := r.poll(t.Context(), true)
	if err != nil || s.won != won {
		t.Fatalf("incarnation %d won: %v (%v), want %v", r.incarnation, s.won, err, won)
	}
	return s.term
}

// An incarnation that does not know of its term, since the answer was lost, takes the next one at once. Another one of
// the same name waits for the lease.
func TestAnIncarnationTakesItsOwnRowAgain(t *testing.T) {
	pool := pgtest.New(t)
	mine := row{db: pool, name: "leader", holder: "one", incarnation: 7, lease: time.Minute}
	other := mine
	other.incarnation = 8
	if _, err := mine.poll(t.Context(), false); err != nil { // which inserts the row
		t.Fatal(err)
	}
	first := take(t, mine, true)
	take(t, other, false)
	second := take(t, mine, true)
	if second <= first {
		t.Errorf("term %d after term %d", second, first)
	}
	nothing := func(pgx.Tx) error { return nil }
	if err := first.Fence(pool).InTx(t.Context(), nothing); !errors.Is(err, ErrTermOver) {
		t.Errorf("a write of the term before: %v, want ErrTermOver", err)
	}
	// A duty of the term that the process has lost may still write: the next term begins when it has committed.
	err := second.Fence(pool).InTx(t.Context(), func(tx pgx.Tx) error {
		// It is silent here for as long as a busy machine takes.
		_, err := tx.Exec(t.Context(), `SET LOCAL idle_in_transaction_session_timeout = 0`)
		take(t, mine, false)
		return err
	})
	if err != nil {
		t.Errorf("a write that began within the term: %v", err)
	}
	if third := take(t, mine, true); third <= second {
		t.Errorf("term %d after term %d", third, second)
	}
}

// A process that was stopped for longer than its lease goes on with its term over: it neither prolongs that nor ends the
// next one.
func TestALateRenewalOrResignationChangesNothing(t *testing.T) {
	pool := pgtest.New(t)
	mine := row{db: pool, name: "leader", holder: "one", incarnation: 7, lease: time.Minute}
	other := mine
	other.incarnation = 8
	if _, err := mine.poll(t.Context(), false); err != nil { // which inserts the row
		t.Fatal(err)
	}
	first := take(t, mine, true)
	if _, err := pool.Exec(t.Context(), `UPDATE penstock.leader SET renewed_at = clock_timestamp() - 2 * lease`); err != nil {
		t.Fatal(err)
	}
	if renewed, err := mine.renew(t.Context(), first); renewed || err != nil {
		t.Errorf("a term that has lapsed was renewed: %v (%v)", renewed, err)
	}
	second := take(t, other, true)
	if renewed, err := mine.renew(t.Context(), first); renewed || err != nil {
		t.Errorf("the term before was renewed: %v (%v)", renewed, err)
	}
	if err := mine.resign(t.Context(), first); err != nil {
		t.Error(err)
	}
	if err := second.Fence(pool).InTx(t.Context(), func(pgx.Tx) error { return nil }); err != nil {
		t.Errorf("a write of the newest term after the resignation of the one before: %v", err)
	}
}

// losing loses the answers to the first take-overs.
type losing struct {
	postgres.DB
	left int
}

func (l *losing) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	found := l.DB.QueryRow(ctx, sql, args...)
	if strings.Contains(sql, "nextval('penstock.term_seq')") {
		return lostRow{found, l}
	}
	return found
}

type lostRow struct {
	pgx.Row
	of *losing
}

func (r lostRow) Scan(into ...any) error {
	err := r.Row.Scan(into...)
	if won, ok := into[1].(*bool); err == nil && ok && *won && r.of.left > 0 {
		r.of.left--
		*won = false
		return io.ErrUnexpectedEOF
	}
	return err
}

func TestALostAnswerToATakeOverCostsNoLease(t *testing.T) {
	pool := pgtest.New(t)
	db := &losing{DB: pool, left: 2}
	const lease = 10 * time.Minute // the test's own timeout is shorter
	ctx, stop := context.WithTimeout(t.Context(), lease/5)
	defer stop()
	var won Term
	err := New(db, Config{Lease: lease, Poll: 20 * time.Millisecond}).Run(ctx, func(_ context.Context, term Term) error {
		defer stop()
		won = term
		return term.Fence(pool).InTx(t.Context(), func(pgx.Tx) error { return nil })
	})
	if err != nil || won == 0 || db.left != 0 {
		t.Fatalf("term %d (%v), %d answers were not lost", won, err, db.left)
	}
	for lost := won - 2; lost < won; lost++ {
		err := lost.Fence(pool).InTx(t.Context(), func(pgx.Tx) error { return nil })
		if !errors.Is(err, ErrTermOver) {
			t.Errorf("a write of term %d, of which nobody knows: %v, want ErrTermOver", lost, err)
		}
	}
}
