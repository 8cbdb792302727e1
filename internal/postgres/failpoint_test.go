//go:build failpoints

package postgres

import (
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
)

// A failpoint ends the program before the commit of the transactions that it names, or after it and before the
// program hears of it, whether the transaction is a statement, a batch or a block.
func TestFailpointsLieBeforeAndAfterCommits(t *testing.T) {
	const plan = `{"points": [{"name": "writing", "text": "INSERT INTO one", "before": 1, "after": 1},
	                          {"name": "reading", "text": "FROM one"}]}`
	tracer, err := failpointOf(plan)
	if err != nil {
		t.Fatal(err)
	}
	dsn := pgtest.Empty(t)
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	config.Tracer = tracer
	conn, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	watcher, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.Close(t.Context())
	rows := func() (n string) {
		if err := watcher.QueryRow(t.Context(), `SELECT count(*)::text FROM one`).Scan(&n); err != nil {
			t.Error(err)
		}
		return n
	}
	var met []string
	tracer.end = func(at string) { met = append(met, at+", rows: "+rows()) }
	do := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	do(conn.Exec(t.Context(), `CREATE TABLE one (n int)`))
	do(conn.Exec(t.Context(), `INSERT INTO one VALUES (1)`))
	batch := &pgx.Batch{}
	batch.Queue(`SELECT count(*) FROM one`)
	batch.Queue(`INSERT INTO one VALUES (2)`)
	do(nil, conn.SendBatch(t.Context(), batch).Close())
	do(nil, pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
		do(tx.Exec(t.Context(), `INSERT INTO one VALUES (3)`))
		_, err := tx.Exec(t.Context(), `SELECT count(*) FROM one`)
		return err
	}))
	do(conn.Exec(t.Context(), `SELECT count(*) FROM one`))
	want := []string{
		"before the commit of writing, rows: 0", "after the commit of writing, rows: 1",
		"before the commit of writing, rows: 1", "after the commit of writing, rows: 2",
		"before the commit of writing, rows: 2", "after the commit of writing, rows: 3",
	}
	if !slices.Equal(met, want) {
		t.Errorf("met %q, want %q", met, want)
	}
}
