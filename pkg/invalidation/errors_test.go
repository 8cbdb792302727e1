package invalidation

import (
	"errors"
	"fmt"
	"strings"
	"testing"
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
	err := withDuty(&driverError{"42501", "permission denied for table queue"})
	if !strings.Contains(err.Error(), "penstock grants") {
		t.Errorf("an error about rights: %v, want the advice about duties", err)
	}
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
