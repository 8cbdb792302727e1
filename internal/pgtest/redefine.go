package pgtest

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Redefine replaces a text in the definition of a function, in the database of a test: a time that a busy machine may
// exceed. It fails where the definition does not have that text.
func Redefine(t testing.TB, db *pgxpool.Pool, function, text, by string) {
	t.Helper()
	var definition string
	const sql = `SELECT pg_get_functiondef($1::regproc)`
	if err := db.QueryRow(t.Context(), sql, function).Scan(&definition); err != nil {
		t.Fatalf("read the definition of %s: %v", function, err)
	}
	if !strings.Contains(definition, text) {
		t.Fatalf("the definition of %s has no %q", function, text)
	}
	if _, err := db.Exec(t.Context(), strings.ReplaceAll(definition, text, by)); err != nil {
		t.Fatalf("redefine %s: %v", function, err)
	}
}
