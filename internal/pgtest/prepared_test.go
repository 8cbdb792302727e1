package pgtest

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

func TestPreparedDatabaseIsFilledOnceAndCopied(t *testing.T) {
	fills := 0
	fill := func(ctx context.Context, pool *pgxpool.Pool) error {
		fills++
		_, err := pool.Exec(ctx, `CREATE TABLE filled AS SELECT 1 AS n`)
		return err
	}
	for range 2 {
		conn := connect(t, Prepared(t, t.Name(), fill))
		if _, err := conn.Exec(t.Context(), `INSERT INTO filled VALUES (2)`); err != nil {
			t.Fatal(err)
		}
		var rows int
		if err := conn.QueryRow(t.Context(), `SELECT count(*) FROM filled`).Scan(&rows); err != nil || rows != 2 {
			t.Errorf("the copy has %d rows, want 2: %v", rows, err)
		}
	}
	if fills != 1 {
		t.Errorf("filled %d times, want once", fills)
	}
}
