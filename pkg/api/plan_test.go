package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// planned is as much of EXPLAIN's answer as the test looks at.
type planned struct {
	Type     string `json:"Node Type"`
	Relation string `json:"Relation Name"`
	Hit      int    `json:"Shared Hit Blocks"`
	Read     int    `json:"Shared Read Blocks"`
	Plans    []planned
}

func (p planned) scans() (tables []string) {
	if p.Type == "Seq Scan" {
		tables = append(tables, p.Relation)
	}
	for _, below := range p.Plans {
		tables = append(tables, below.scans()...)
	}
	return tables
}

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
func pollOf(queue int32) string {
	db := &asked{sql: make(chan string, 1)}
	w, err := invalidation.NewEntryWatch(db, 0, slog.New(slog.DiscardHandler)).Wait(queue, 1, "")
	if err != nil {
		panic(err)
	}
	defer w.Leave()
	return <-db.sql
}

// What all who wait and follow share, and what each of them asks before, costs the same whatever the backlog, the output
// and the keys that are kept: planned once, on empty tables, as a leader's connections are.
func TestPollsOfRequestsThatWaitNeverScan(t *testing.T) {
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: pgtest.DSN(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	q, err := invalidation.Create(t.Context(), pool, "work", invalidation.Config{})
	if err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.ConnectConfig(t.Context(), pool.Config().ConnConfig)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	exec := func(sql string) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	ids := make([]string, 100)
	for i := range ids {
		ids[i] = fmt.Sprint(1 + 100*i)
	}
	looks := map[string][2]string{
		"poll": {pollOf(q.ID), fmt.Sprintf(`array_fill(%d, ARRAY[100]), '{%s}'`, q.ID, strings.Join(ids, ","))},
		"find": {findSQL, `4242`},
		"own":  {ownSQL, `4242, 'k4242', ''`},
	}
	for name, look := range looks {
		exec(`PREPARE ` + name + ` AS ` + look[0])
	}
	read := func(from, to int) map[string]int {
		// Without ANALYZE: statistics go on saying that everything is empty.
		exec(fmt.Sprintf(`INSERT INTO penstock.entry_work (id, queue_id, status, priority, payload) SELECT n, %d, 'pending', 1, '{}' FROM generate_series(%d, %d) n`, q.ID, from, to))
		exec(fmt.Sprintf(`INSERT INTO penstock.output (queue_id, entry_id, token, attempt, seq, data) SELECT %d, n, 1, 1, s, 'x' FROM generate_series(%d, %d, 10) n, generate_series(1, 20) s`, q.ID, from, to))
		exec(fmt.Sprintf(`INSERT INTO penstock.progress (queue_id, entry_id, token, done) SELECT %d, n, 1, 0.5 FROM generate_series(%d, %d, 10) n`, q.ID, from, to))
		exec(fmt.Sprintf(`INSERT INTO penstock.idempotency (queue_id, flow, key, entry_id, fingerprint) SELECT %d, '', 'k' || n, n, '' FROM generate_series(%d, %d) n`, q.ID, from, to))
		buffers := map[string]int{}
		for name, look := range looks {
			var p planned
			for range 2 { // the first sets hint bits
				var text []byte
				if err := conn.QueryRow(t.Context(), `EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE `+name+`(`+look[1]+`)`).Scan(&text); err != nil {
					t.Fatalf("explain %s: %v", name, err)
				}
				var answer []struct{ Plan planned }
				if err := json.Unmarshal(text, &answer); err != nil {
					t.Fatal(err)
				}
				p = answer[0].Plan
			}
			for _, table := range p.scans() {
				if !strings.HasPrefix(table, "queue") { // there are few, and find_entry tries them all
					t.Errorf("%s scans %s", name, table)
				}
			}
			buffers[name] = p.Hit + p.Read
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
