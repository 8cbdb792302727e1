package invalidation

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// asked keeps the text of a statement, and answers that the database is away.
type asked struct {
	postgres.DB
	sql chan string // holds one
}

func (a *asked) Query(_ context.Context, sql string, _ ...any) (pgx.Rows, error) {
	select {
	case a.sql <- sql:
	default:
	}
	return nil, errors.New("away")
}

// pollOf is the statement of a watch.
func pollOf(t *testing.T, queue int32) string {
	t.Helper()
	db := &asked{sql: make(chan string, 1)}
	w, err := NewEntryWatch(db, 0, slog.New(slog.DiscardHandler)).Wait(queue, 1, "")
	if err != nil {
		t.Fatal(err)
	}
	defer w.Leave()
	return <-db.sql
}

// What all who wait and follow share, and what each of them asks before, costs the same whatever the backlog, the output
// and the keys that are kept: planned once, on empty tables, as a leader's connections are.
func TestUnracedPollsOfRequestsThatWaitNeverScan(t *testing.T) {
	b := &bed{T: t, ctx: t.Context(), pool: openPool(t)} // its entries have no ready rows: no bed that checks invariants
	var err error
	if b.q, err = Create(b.ctx, b.pool, "work", Config{}); err != nil {
		t.Fatal(err)
	}
	x := b.explainer()
	ids := make([]string, 100)
	for i := range ids {
		ids[i] = fmt.Sprint(1 + 100*i)
	}
	looks := map[string]statement{
		"poll": {pollOf(t, b.q.ID), fmt.Sprintf(`array_fill(%d, ARRAY[100]), '{%s}'`, b.q.ID, strings.Join(ids, ","))},
		"find": {waitedSQL, `4242`},
		"own":  {pushedUnderSQL, `4242, 'k4242', ''`},
	}
	for name, s := range looks { // planned on empty tables
		x.explain(name, s)
	}
	read := func(from, to int) map[string]int {
		// Without ANALYZE: statistics go on saying that everything is empty.
		b.exec(b.pool, fmt.Sprintf(`INSERT INTO penstock.entry_work (id, queue_id, status, priority, payload) SELECT n, %d, 'pending', 1, '{}' FROM generate_series(%d, %d) n`, b.q.ID, from, to))
		b.exec(b.pool, fmt.Sprintf(`INSERT INTO penstock.output (queue_id, entry_id, token, attempt, seq, data) SELECT %d, n, 1, 1, s, 'x' FROM generate_series(%d, %d, 10) n, generate_series(1, 20) s`, b.q.ID, from, to))
		b.exec(b.pool, fmt.Sprintf(`INSERT INTO penstock.progress (queue_id, entry_id, token, done) SELECT %d, n, 1, 0.5 FROM generate_series(%d, %d, 10) n`, b.q.ID, from, to))
		b.exec(b.pool, fmt.Sprintf(`INSERT INTO penstock.idempotency (queue_id, flow, key, entry_id, fingerprint) SELECT %d, '', 'k' || n, n, '' FROM generate_series(%d, %d) n`, b.q.ID, from, to))
		buffers := map[string]int{}
		for name, s := range looks {
			x.explain(name, s) // the first run sets hint bits
			p := x.explain(name, s)
			p.walk(func(n *plan) {
				if n.Type == "Seq Scan" && !strings.HasPrefix(n.Relation, "queue") { // there are few, and find_entry tries them all
					t.Errorf("%s scans %s", name, n.Relation)
				}
			})
			buffers[name] = p.buffers()
		}
		return buffers
	}
	small, large := read(1, 10_000), read(10_001, 110_000)
	for name := range looks {
		t.Logf("%-5s 10k: %5d buffers, 110k: %5d", name, small[name], large[name])
		if large[name] > small[name]*3/2+50 {
			t.Errorf("%s reads %d buffers at 110k entries, %d at 10k", name, large[name], small[name])
		}
	}
}
