package pgtest

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// ClockAhead begins a transaction in which clock_timestamp() is ahead by an interval such as 2 hours, in its statements
// and in those of functions that they call. Defaults of columns keep the real one. It is rolled back at the end of the
// test.
func ClockAhead(t testing.TB, db *pgxpool.Pool, by string) pgx.Tx {
	t.Helper()
	tx, err := db.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tx.Rollback(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if _, err := tx.Exec(t.Context(), `CREATE SCHEMA ahead;
		CREATE FUNCTION ahead.clock_timestamp() RETURNS timestamptz LANGUAGE sql
		    AS $$ SELECT pg_catalog.clock_timestamp() + interval '`+by+`' $$;
		SET LOCAL search_path = ahead, pg_catalog`); err != nil {
		t.Fatal(err)
	}
	return tx
}
