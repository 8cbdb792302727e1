package web

import (
	"context"
	"encoding/json"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/operator"
)

// recording is a database that keeps each statement with its parameters.
type recording struct {
	postgres.DB
	mu  sync.Mutex
	ran map[string]call
}

// call is a statement with its parameters.
type call struct {
	sql  string
	args []any
}

func (r *recording) keep(sql string, args []any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := call{sql, args}
	text, _ := json.Marshal(args)
	r.ran[sql+string(text)] = c
}

func (r *recording) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	r.keep(sql, args)
	return r.DB.Exec(ctx, sql, args...)
}

func (r *recording) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	r.keep(sql, args)
	return r.DB.Query(ctx, sql, args...)
}

func (r *recording) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	r.keep(sql, args)
	return r.DB.QueryRow(ctx, sql, args...)
}

// plan is the part of EXPLAIN's output that the test reads.
type plan struct {
	Type     string `json:"Node Type"`
	Relation string `json:"Relation Name"`
	Hit      int    `json:"Shared Hit Blocks"`
	Read     int    `json:"Shared Read Blocks"`
	Plans    []plan
}

// each calls do for the nodes of a plan.
func (p plan) each(do func(plan)) {
	do(p)
	for _, below := range p.Plans {
		below.each(do)
	}
}

// ofBacklog reports whether a table has a row for each entry, result, failure or sample.
func ofBacklog(table string) bool {
	return slices.ContainsFunc([]string{"entry", "ready", "result", "failure", "sample", "output", "callback_sent"}, func(name string) bool {
		return table == name || strings.HasPrefix(table, name+"_")
	})
}

// String is the statement with its parameters.
func (c call) String() string {
	text, _ := json.Marshal(c.args)
	return c.sql + " with " + string(text)
}

// explain runs the statement as prepared by name, which is by its generic plan, and returns the plan.
func (c call) explain(t *testing.T, db postgres.DB, name string) plan {
	t.Helper()
	places := make([]string, len(c.args))
	values := []any{pgx.QueryExecModeSimpleProtocol} // EXECUTE takes literals alone
	for i, arg := range c.args {
		places[i] = "$" + strconv.Itoa(i+1)
		if filter, is := arg.(operator.Filter); is {
			text, _ := json.Marshal(filter)
			arg = string(text)
		}
		values = append(values, arg)
	}
	run := `EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE ` + name
	if len(places) > 0 {
		run += "(" + strings.Join(places, ", ") + ")"
	}
	var text string
	if err := db.QueryRow(t.Context(), run, values...).Scan(&text); err != nil {
		t.Fatalf("explain %s: %v", c, err)
	}
	var answer []struct{ Plan plan }
	if err := json.Unmarshal([]byte(text), &answer); err != nil {
		t.Fatal(err)
	}
	return answer[0].Plan
}

// Counts are of the first 100,000 of a queue, so that their statements may read more up to there; what those read is bounded
// by a test of pkg/operator.
const fewWaiting, manyWaiting = 20_000, 120_000

// Every statement of every page and of the preview of every change is recorded and explained: none reads a table of the
// backlog from end to end or starts a parallel worker, and none but counts reads more when six times as many
// entries wait.
func TestLongNoStatementOfAPageDependsOnTheBacklog(t *testing.T) {
	s := newSite(t)
	s.fillFleet()
	s.fillPlatform()
	s.keepStatistics()
	s.waiting(1, fewWaiting)
	read := &recording{DB: openPool(t, postgres.Config{
		DSN: s.pool.Config().ConnString(), MaxConns: 1, StatementTimeout: time.Minute, ReadOnly: true,
	}), ran: map[string]call{}}
	s.web.db = operator.New(read)
	s.visitAll()
	if len(read.ran) < 40 {
		t.Fatalf("only %d statements were recorded", len(read.ran))
	}
	s.exec(`UPDATE penstock.sample SET at = at + interval '1 h'`) // as with a leader, however long the test takes
	names := map[string]string{}
	for _, c := range read.ran {
		if names[c.sql] != "" {
			continue
		}
		names[c.sql] = "s" + strconv.Itoa(len(names))
		if _, err := read.DB.Exec(t.Context(), `PREPARE `+names[c.sql]+` AS `+c.sql, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatalf("prepare %s: %v", c.sql, err)
		}
	}
	buffers := func() map[string]int {
		found := make(map[string]int, len(read.ran))
		for key, c := range read.ran {
			c.explain(t, read.DB, names[c.sql]) // sets hint bits
			p := c.explain(t, read.DB, names[c.sql])
			p.each(func(p plan) {
				if p.Type == "Seq Scan" && ofBacklog(p.Relation) {
					t.Errorf("reads %s from end to end: %s", p.Relation, c)
				}
				if strings.HasPrefix(p.Type, "Gather") {
					t.Errorf("starts parallel workers: %s", c)
				}
			})
			found[key] = p.Hit + p.Read
		}
		return found
	}
	few := buffers()
	s.waiting(fewWaiting+1, manyWaiting)
	many := buffers()
	for key, c := range read.ran {
		most := few[key]*3/2 + 60
		if strings.Contains(c.sql, "count_first") {
			most = 10_000 // it reads up to 100,000 rows from pages that are as full as they happen to be
		}
		if many[key] > most {
			t.Errorf("reads %d buffers at %d entries, %d at %d: %s", many[key], manyWaiting, few[key], fewWaiting, c)
		}
	}
	t.Logf("%d statements, %d with their parameters", len(names), len(read.ran))
}

// keepStatistics keeps autovacuum from the tables: beside other load the test takes longer than its pause.
func (s *site) keepStatistics() {
	s.Helper()
	s.exec(`DO $$ DECLARE t regclass; BEGIN
	          FOR t IN SELECT oid::regclass FROM pg_class WHERE relnamespace = 'penstock'::regnamespace AND relkind = 'r' LOOP
	            EXECUTE format('ALTER TABLE %s SET (autovacuum_enabled = false)', t);
	          END LOOP; END $$`)
}

// waiting adds entries with their results and failures. Tables are not analyzed: statistics go on saying that they are
// nearly empty.
func (s *site) waiting(from, to int) {
	s.Helper()
	s.exec(`INSERT INTO penstock.entry_work (id, queue_id, status, priority, flow, payload)
	        SELECT 10000000 + n, q.id, 'pending', 1, 'flow-' || n % 50, '{}' FROM penstock.queue q, generate_series($1::int, $2::int) n
	         WHERE q.name = 'work'`, from, to)
	s.exec(`INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id)
	        SELECT q.id, 1, 'flow-' || n % 50, 10000000 + n, 10000000 + n FROM penstock.queue q, generate_series($1::int, $2::int) n
	         WHERE q.name = 'work'`, from, to)
	s.exec(`INSERT INTO penstock.result (entry_id, created_at, finished_at, queue_id, node_id, token, run_ms, attempt, outcome, meta)
	        SELECT 50000000 + n, now() - interval '2 h', now() - interval '1 h' - n * interval '1 ms', q.id, 7001, n, n % 5000, 1, 'done',
	               '{"instance": "gpu-1"}' FROM penstock.queue q, generate_series($1::int, $2::int) n WHERE q.name = 'work'`, from, to)
	s.exec(`INSERT INTO penstock.failure (entry_id, created_at, queue_id, priority, attempt, crashes, flow, class, error, fingerprint, payload,
	                failed_at)
	        SELECT 70000000 + n, now(), q.id, 1, 3, 0, 'flow-' || n % 50, 'permanent', 'cause ' || n % 30, 'cause ' || n % 30, '{}',
	               now() - interval '1 h' - n * interval '1 ms' FROM penstock.queue q, generate_series($1::int, $2::int) n
	         WHERE q.name = 'work'`, from, to)
}

// visitAll opens each page, the filtered ones and those of single objects among them, and the form of each change.
func (s *site) visitAll() {
	s.Helper()
	b := s.as(administrator)
	// No index has the flows and names of entries: a filter by them reads entries in order until a page is full or the
	// statement's time is over, and the page says then how to narrow it.
	paths := slices.DeleteFunc(slices.Clone(filtered), func(path string) bool { return strings.Contains(path, "flow=red") })
	paths = append(paths, "entries/10000005", "entries/50000005", "entries/70000005", "locks?queue=work",
		"autoscaler?model=llama&over=6h&whatif=1&past=1h&max=2&slots=4", "webhooks?after=https", "operations?queue=work", "cron?queue=reports")
	for path := range s.addresses() {
		paths = append(paths, path)
	}
	for name, v := range s.web.verbs {
		form := url.Values{}
		for _, object := range v.objects {
			form.Set(object, map[string]string{
				"queue": "work", "name": "work", "id": "10000005", "model": "llama", "server": "gpu-1", "flow": "red", "operation": "1",
				"batch": "1", "node": "7001", "job": "nightly", "deployment": "llama-own", "entry": "10000005", "token": "100",
			}[object])
		}
		paths = append(paths, "do/"+name+"?"+form.Encode())
	}
	for _, path := range paths {
		s.web.reads.expire()
		if got := b.get(path); got.status >= 500 {
			s.Errorf("%s: %d: %s", path, got.status, got.text)
		}
	}
}
