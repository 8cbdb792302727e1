package scale

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/postgres"
)

// A decision pass reads all models once a second: one without work must cost a few look-ups by index,
// and no functions of its own, whatever queues without a model have running, and however often it was started from zero.
func TestLongAnIdleModelCostsFewBuffers(t *testing.T) {
	const models, each = 60, 40
	const starts = 1680   // of each in a week: one every six minutes
	const locks = 100_000 // of a queue without a model
	db := fleet(t)
	do(t, db, `SELECT penstock.register_model('m' || i, '{"protocol": "openai"}', 'test') FROM generate_series(1, $1) i`, models)
	do(t, db, `SELECT penstock.set_deployment('m' || i, 'm' || i, '{}', 'test') FROM generate_series(1, $1) i`, models)
	push(t, db, 7)
	do(t, db, `SELECT penstock.create_queue('tasks', '{}')`)
	do(t, db, `
INSERT INTO penstock.lock (token, node_id, pos, last_entry_id, claimed_at, queue_id, claim_id, entry_count, cost, priority, flow, lock_key)
SELECT i, 1, i, i, now(), q.id, 1, 1, 1, 1, '', '#' || i FROM penstock.queue q, generate_series(1, $1) i WHERE q.name = 'tasks'`, locks)
	do(t, db, `INSERT INTO penstock.cold_start (at, model, server, seconds)
	           SELECT now() - j * interval '6 minutes', 'm' || i, 's', 60 FROM generate_series(1, $2) j, generate_series(1, $1) i`, models, starts)
	do(t, db, `ANALYZE`)
	tx, err := db.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	names := one[[]string](t, db, `SELECT array_agg(model) FROM penstock.deployment`)
	// The first reading fills the catalog cache of the session.
	rows, err := pgx.CollectRows(query(t, tx, inputSQL, names), pgx.RowToStructByName[input])
	if err != nil || len(rows) != models+1 {
		t.Fatalf("%d models, %v", len(rows), err)
	}
	waiting := 0
	for _, row := range rows {
		waiting += row.Waiting
	}
	if metric := one[float64](t, db, `SELECT penstock.scale_metric('llama')`); waiting != 7 || metric != 7 {
		t.Errorf("%d wait, the metric is %g, want 7", waiting, metric)
	}
	var plans []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	var text string
	if err := tx.QueryRow(t.Context(), `EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) `+inputSQL, names).Scan(&text); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(text), &plans); err != nil {
		t.Fatal(err)
	}
	if n := plans[0].Plan.Hit + plans[0].Plan.Read; n > each*models {
		t.Errorf("%d buffers for %d models, want at most %d each", n, models, each)
	} else {
		t.Logf("%d buffers for %d models", n, models)
	}
}

func query(t *testing.T, tx pgx.Tx, sql string, args ...any) pgx.Rows {
	t.Helper()
	rows, err := tx.Query(t.Context(), sql, args...)
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

// product is a pool with the settings of the product's sessions.
func product(t testing.TB, db *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	p, err := postgres.Open(t.Context(), postgres.Config{DSN: db.Config().ConnString()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// The inputs of a thousand models are a pass over them only while each is found by an index, whatever the statistics say:
// here the tables were empty when they were analyzed.
func TestInputsAreReadByIndexes(t *testing.T) {
	db := fleet(t)
	do(t, db, `ANALYZE penstock.queue, penstock.instance, penstock.slot, penstock.cold_start, penstock.deployment`)
	p := product(t, db)
	for _, sql := range []string{
		`SELECT * FROM penstock.scale_input`, `SELECT * FROM penstock.scale_input WHERE model = ANY ('{llama}')`,
		`SELECT * FROM penstock.scale_input WHERE model = ANY ('{llama,mistral,qwen}')`,
		`SELECT * FROM penstock.scale_wanted`, `SELECT * FROM penstock.scale_wanted WHERE model = ANY ('{llama,mistral,qwen}')`,
	} {
		lines, err := pgx.CollectRows(postgres.Query(t.Context(), p, "EXPLAIN "+sql), pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range lines {
			for _, table := range []string{"queue", "pg_class", "instance", "slot", "lock", "ready", "cold_start", "slot_demand"} {
				if strings.Contains(line, "Seq Scan on "+table+" ") {
					t.Errorf("%s: %s", sql, strings.TrimSpace(line))
				}
			}
		}
	}
}

// The report of a gateway has all its pools and is stored compressed: a pass over many models reads each report a few times,
// not once for each model.
func TestLongReportsOfGatewaysAreReadOnceForAllModels(t *testing.T) {
	const models, gateways = 200, 4
	db := fleet(t)
	do(t, db, `SELECT penstock.register_model('m' || i, '{"protocol": "openai"}', 'test') FROM generate_series(1, $1) i`, models)
	do(t, db, `SELECT penstock.set_deployment('m' || i, 'm' || i, '{}', 'test') FROM generate_series(1, $1) i`, models)
	do(t, db, `SELECT penstock.register_gateway(i, 'g' || i, 'default', '1 minute') FROM generate_series(1, $1) i`, gateways)
	do(t, db, `UPDATE penstock.node SET beat_at = clock_timestamp() + interval '1 hour', load = jsonb_build_object('pools',
	           (SELECT jsonb_object_agg('m' || i, jsonb_build_object('stock', 1, 'over_limit', CASE i WHEN 7 THEN 3 ELSE 0 END,
	                   'dropped', md5(random()::text))) FROM generate_series(1, $1) i))`, models)
	do(t, db, `ANALYZE`)
	if urgent := one[string](t, db, `SELECT string_agg(model || ' ' || urgent, ',') FROM penstock.scale_input WHERE urgent > 0`); urgent != "m7 12" {
		t.Errorf("requests wait for %s, want 12 for m7", urgent)
	}
	if n := one[float64](t, db, `SELECT penstock.scale_metric('m7')`); n != 12 {
		t.Errorf("the metric is %g, want 12", n)
	}
	const reads = `SELECT pg_stat_get_xact_numscans(i.indexrelid) FROM pg_class c JOIN pg_index i ON i.indrelid = c.reltoastrelid
	               WHERE c.oid = 'penstock.node'::regclass`
	tx, err := db.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	var before, after int
	if err := tx.QueryRow(t.Context(), reads).Scan(&before); err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SELECT urgent FROM penstock.scale_input`); err != nil {
		t.Fatal(err)
	}
	if err := tx.QueryRow(t.Context(), reads).Scan(&after); err != nil {
		t.Fatal(err)
	}
	if n := after - before; n < gateways || n > 4*gateways {
		t.Errorf("%d reports were read for %d gateways", n, gateways)
	} else {
		t.Logf("%d reports were read for %d gateways", n, gateways)
	}
}

// A gateway that reports what cannot be ends the decisions about no model: counts are bounded before they are added up.
func TestAReportOutOfRangeEndsNoPass(t *testing.T) {
	for _, report := range []string{
		`{"over_limit": 1e30, "stock": 1}`, `{"over_limit": 4000000000, "stock": 1}`, `{"over_limit": -1e30, "stock": -1e30}`,
		`{"over_limit": "many", "stock": null}`, `{"over_limit": [], "stock": 1e30}`, `7`,
	} {
		db := fleet(t)
		do(t, db, `SELECT penstock.register_instance('llama', 'gpu-1', 'http://10.0.0.1:80', 1)`)
		do(t, db, `SELECT penstock.register_gateway(i, 'g' || i, 'default', '1 minute') FROM generate_series(7, 8) i`)
		do(t, db, `INSERT INTO penstock.slot (instance_id, number, token, node_id) SELECT i.id, 0, 1, 7 FROM penstock.instance i`)
		do(t, db, `INSERT INTO penstock.slot_demand (model, node_id, missing) VALUES ('llama', 7, 2000000000), ('llama', 8, 2000000000)`)
		do(t, db, `UPDATE penstock.node SET load = jsonb_build_object('pools', jsonb_build_object('llama', $1::jsonb)) WHERE id IN (7, 8)`, report)
		if err := New(db, free{db}, Config{}).Pass(t.Context()); err != nil {
			t.Errorf("%s: %v", report, err)
		}
		if n := one[int](t, db, `SELECT count(*) FROM penstock.scale_state WHERE decided_at IS NOT NULL`); n != 1 {
			t.Errorf("%s: %d models were decided", report, n)
		}
		if running := one[int](t, db, `SELECT running FROM penstock.scale_input WHERE model = 'llama'`); running < 0 || running > 1 {
			t.Errorf("%s: %d requests run", report, running)
		}
	}
}

// A queue whose entries are held back and released in turn, as by the throttle of a flow, has no arrivals by that. What is held
// back for longer than two spans arrives when it may start again, and hides no others until then.
func TestWhatIsHeldBackForAMomentIsNoArrival(t *testing.T) {
	at, b, arrived := noon, begun{}, int64(0)
	read := func(deleted, waits int64) {
		t.Helper()
		var n int64
		at = at.Add(time.Second)
		n, b = b.follow(arrivals{Inserted: 10_000 + deleted, Deleted: deleted, Running: 1}, waits, at)
		arrived += n
	}
	want := func(n int64, when string) {
		t.Helper()
		if arrived != n {
			t.Errorf("%s: %d arrived, want %d", when, arrived, n)
		}
		arrived = 0
	}
	read(5, 5000)
	want(0, "the first reading")
	for range 100 {
		read(5, 0)
		read(5, 5000)
	}
	want(0, "a throttle that comes and goes")
	for i := range int64(100) {
		read(5+i, 5000)
	}
	want(99, "one request a second")
	for range 100 {
		read(104, 0)
	}
	read(107, 0)
	want(3, "beside a flow that is paused for long")
	read(107, 5000)
	want(5000, "its end")
	read(108, waitingMax)
	read(208, waitingMax)
	want(100+1, "where more wait than are counted")
	read(3, waitingMax)
	want(0, "statistics that began again")
}

// What came since the decision before is told across the hours that counters are kept by.
func TestWhatCameSinceIsToldAcrossHours(t *testing.T) {
	in := input{
		Hour: noon, Calls: 5, CallsBefore: 20, BusyMS: 5000, BusyMSBefore: 20_000, BecameReady: 1, ReadyBefore: 7,
		ColdSeconds: 60, ColdBefore: 420,
	}
	for _, c := range []struct {
		when          string
		before        counters
		calls, starts int64
		busy, cold    float64
	}{
		{"the same hour", counters{Hour: noon, Calls: 3, BusyMS: 3000, Cold: 0}, 2, 1, 2, 60},
		{"the hour before", counters{Hour: noon.Add(-time.Hour), Calls: 18, BusyMS: 18_000, BecameReady: 5, Cold: 300}, 7, 3, 7, 180},
		{"hours ago", counters{Hour: noon.Add(-5 * time.Hour), Calls: 100, BecameReady: 100, Cold: 1e6}, 25, 8, 25, 480},
		{"a clock that was ahead", counters{Hour: noon.Add(time.Hour), Calls: 3, BecameReady: 3}, 0, 0, 0, 0},
		{"all starts of a week, of a version before", counters{Hour: noon, BecameReady: 1000, Cold: 1e6}, 5, 0, 5, 0},
	} {
		u := in.since(c.before)
		if u.calls != c.calls || u.busy != c.busy || u.becameReady != c.starts || u.cold != c.cold {
			t.Errorf("%s: %+v, want %+v", c.when, u, c)
		}
	}
}
