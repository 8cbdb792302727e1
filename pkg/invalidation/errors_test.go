package invalidation

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

// driverError is an error of another driver than pgx.
type driverError struct{ code, text string }

func (e *driverError) Error() string    { return "driver: " + e.text }
func (e *driverError) SQLState() string { return e.code }

func TestErrorsOfAnotherDriverAreThoseOfAPush(t *testing.T) {
	for code, want := range sentinels {
		err := withDuty(fmt.Errorf("scan: %w", &driverError{code, "text of the function"}))
		if !errors.Is(err, want) || !strings.Contains(err.Error(), "text of the function") {
			t.Errorf("%s: %v, want %q with the text of the function", code, err, want)
		}
	}
	for _, missing := range []error{
		&driverError{"42501", "permission denied for table queue"},
		&pgconn.PgError{Code: "42501", Message: "keine Berechtigung für Tabelle queue", Routine: "aclcheck_error"}, // lc_messages
	} {
		if err := withDuty(missing); !strings.Contains(err.Error(), "penstock grants") {
			t.Errorf("an error about rights: %v, want the advice about duties", err)
		}
	}
}

// A line of a stream or of a batch, or a callback, that the server cannot hold or follow, as one that is too deep for its
// stack, is an error of this one alone. It is the same whether an error comes from Push or from a statement of SQL.
func TestAPushIsRefusedForWhatIsInItOrMayBeTriedAgain(t *testing.T) {
	for state, want := range map[string]bool{
		"PS002": true, "PS003": true, "PS004": true, "22P05": true, "54001": true,
		"PS001": false, "PS005": false, "PS013": false, "53200": false, "40001": false, "57P01": false,
	} {
		raw := fmt.Errorf("push: %w", &pgconn.PgError{Code: state})
		if got := RefusesPush(raw); got != want {
			t.Errorf("%s of a statement refuses the push: %t, want %t", state, got, want)
		}
		if got := RefusesPush(Translate(raw)); got != want {
			t.Errorf("%s of Push refuses it: %t, want %t", state, got, want)
		}
	}
	if RefusesPush(nil) {
		t.Error("a push without an error is refused")
	}
}

// As extensions ask for that bring the functions of another database: one that returns another type is met by the
// functions of the schema, which call those of Postgres by their bare names.
func TestAnErrorOfAHiddenFunctionNamesTheSearchPath(t *testing.T) {
	b := newBed(t, Config{})
	b.must(SetStatements(b.ctx, b.pool, "work", map[string]string{"run": "SELECT 1"}, By{Reason: "test"}))
	q, err := Open(b.ctx, b.pool, "work")
	b.must(err)
	b.pushAll(b.pool, Push{})
	lock := b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: 1}).Locks[0]
	tx := b.begin()
	b.exec(tx, `CREATE SCHEMA compatible`)
	b.exec(tx, `CREATE FUNCTION compatible.length(text) RETURNS boolean LANGUAGE sql AS 'SELECT true'`)
	b.exec(tx, `SET LOCAL search_path = compatible, pg_catalog`)
	_, err = Statement(b.ctx, tx, "run", []*Run{{Queue: q, Lock: lock, Entry: lock.Entries[0]}})
	if err == nil || !strings.Contains(err.Error(), "search_path of this session may hide") ||
		strings.Contains(err.Error(), "migrate") {
		t.Errorf("got %v, want an error that names the search_path", err)
	}
	b.must(tx.Rollback(b.ctx))
}

// A program that starts before the first migration, or with a role of few rights, reads what to do.
func TestAnErrorOfAMissingSchemaSaysWhatToDo(t *testing.T) {
	b := newBed(t, Config{})
	for statement, advice := range map[string]string{
		`CREATE ROLE embed_few; GRANT USAGE ON SCHEMA penstock TO embed_few; SET LOCAL ROLE embed_few`: "penstock grants",
		`ALTER TABLE penstock.queue RENAME COLUMN shards TO fragments`:                                 "penstock migrate up",
		`ALTER SCHEMA penstock RENAME TO elsewhere`:                                                    "penstock migrate up",
	} {
		tx := b.begin()
		b.exec(tx, statement)
		if _, err := List(b.ctx, tx); err == nil || !strings.Contains(err.Error(), advice) {
			t.Errorf("List after %s: %v, want %q in it", statement, err, advice)
		}
		b.must(tx.Rollback(b.ctx))
	}
	b.must(Drop(b.ctx, b.pool, b.q.Name, true, By{}))
	if _, err := b.q.Promote(b.ctx, 10); err == nil || strings.Contains(err.Error(), "migrate") {
		t.Errorf("Promote of a queue that was dropped: %v, want an error without advice about the schema", err)
	}
}
