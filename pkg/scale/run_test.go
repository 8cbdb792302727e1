package scale

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

// free is a fence whose term does not end.
type free struct{ db *pgxpool.Pool }

func (f free) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, f.db, fn)
}

// over is a fence whose term is over.
type over struct{}

func (over) InTx(context.Context, func(pgx.Tx) error) error { return fmt.Errorf("the term is over") }

func do(t *testing.T, db *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := db.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func one[T any](t *testing.T, db *pgxpool.Pool, sql string, args ...any) T {
	t.Helper()
	var found T
	if err := db.QueryRow(t.Context(), sql, args...).Scan(&found); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return found
}

// fleet is a database with the model llama, its queue and one deployment of at most eight instances.
func fleet(t *testing.T) *pgxpool.Pool {
	t.Helper()
	db := pgtest.New(t)
	do(t, db, `SELECT penstock.register_model('llama', '{"protocol": "openai"}')`)
	do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"policy": {"slots": 2, "max": 8}}')`)
	return db
}

func push(t *testing.T, db *pgxpool.Pool, n int) {
	t.Helper()
	do(t, db, `SELECT penstock.push('llama', '{}'::jsonb) FROM generate_series(1, $1)`, n)
}

func TestMetricCountsWhatMayStart(t *testing.T) {
	db := fleet(t)
	metric := func() float64 { return one[float64](t, db, `SELECT penstock.scale_metric('llama')`) }
	if got := metric(); got != 0 {
		t.Errorf("an empty queue: %g", got)
	}
	push(t, db, 7)
	if got := metric(); got != 7 {
		t.Errorf("seven wait: %g", got)
	}
	do(t, db, `SELECT penstock.pause_queue('llama', 'test', 'test', NULL)`)
	if got := metric(); got != 0 {
		t.Errorf("a paused queue: %g", got)
	}
	do(t, db, `SELECT penstock.resume_queue('llama', 'test', 'test')`)
	do(t, db, `UPDATE penstock.ready SET not_before = clock_timestamp() + interval '1 hour' WHERE pos = (SELECT min(pos) FROM penstock.ready)`)
	if got := metric(); got != 6 {
		t.Errorf("one is held back: %g", got)
	}
	if _, err := db.Exec(t.Context(), `SELECT penstock.scale_metric('nobody')`); err == nil {
		t.Error("an unknown model has a metric: it must not read as zero")
	}
}

// A gateway that misses slots repeats its demand. One of a time in the future, from before the clock was set back, is over.
func TestADemandFromTheFutureIsNotCounted(t *testing.T) {
	db := fleet(t)
	do(t, db, `SELECT penstock.register_gateway(7, 'g', 'default', '1 hour')`)
	do(t, db, `INSERT INTO penstock.slot_demand (model, node_id, missing) VALUES ('llama', 7, 3)`)
	check := func(at string, want float64) {
		t.Helper()
		do(t, db, `UPDATE penstock.slot_demand SET wanted_at = clock_timestamp() + interval `+at)
		if got := one[float64](t, db, `SELECT penstock.scale_metric('llama')`); got != want {
			t.Errorf("a demand of now and %s counts %g, want %g", at, got, want)
		}
	}
	check("'1 hour'", 0)
	check("'-4 seconds'", 0)
	pgtest.Redefine(t, db, "penstock.scale_slots_missing", "interval '3 seconds'", "interval '1 minute'")
	check("'0'", 3)
	check("'1 hour'", 0)
}

// KEDA's trigger asks with a login of its own: the duty read is enough for it, also where throttles, limits and a gateway matter.
func TestTheMetricNeedsNoMoreThanTheDutyRead(t *testing.T) {
	db := fleet(t)
	push(t, db, 7)
	do(t, db, `SELECT penstock.alter_queue('llama', '{"max_concurrent": 5}')`)
	do(t, db, `INSERT INTO penstock.throttle (until, queue_id, queue_wide, flow, reason)
	           SELECT clock_timestamp() + interval '1 minute', id, false, 'tenant', 'test' FROM penstock.queue WHERE name = 'llama'`)
	do(t, db, `SELECT penstock.register_gateway(7, 'g', 'default', '1 hour')`)
	role := fmt.Sprintf("keda_%d", time.Now().UnixNano())
	do(t, db, `CREATE ROLE `+role)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		_, _ = db.Exec(ctx, `DROP OWNED BY `+role)
		_, _ = db.Exec(ctx, `DROP ROLE `+role)
	})
	do(t, db, `SELECT penstock.grant_duty('read', $1)`, role)
	err := pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `SET LOCAL ROLE `+role); err != nil {
			return err
		}
		var metric float64
		if err := tx.QueryRow(t.Context(), `SELECT penstock.scale_metric('llama')`).Scan(&metric); err != nil {
			return err
		}
		if metric != 5 {
			t.Errorf("%g, want 5 of the 7 that wait", metric)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Entries whose deadline comes before an instance is ready count as late only where they count as waiting: those of a paused
// flow, of a throttled one and of a paused lock key, and those that wait behind others of their key, count as neither.
func TestLateIsPartOfWhatWaits(t *testing.T) {
	db := fleet(t)
	push := func(n int, options string) {
		t.Helper()
		do(t, db, `SELECT penstock.push('llama', '{}'::jsonb, `+options+`) FROM generate_series(1, $1)`, n)
	}
	want := func(waiting, late int) {
		t.Helper()
		w := one[int](t, db, `SELECT waiting::int FROM penstock.scale_input WHERE model = 'llama'`)
		if l := one[int](t, db, `SELECT late::int FROM penstock.scale_input WHERE model = 'llama'`); w != waiting || l != late {
			t.Errorf("%d wait and %d of them are late, want %d and %d", w, l, waiting, late)
		}
	}
	push(10, `flow => 'a'`)
	want(10, 0)
	push(50, `flow => 'b', start_by => now() + interval '5 seconds'`)
	want(60, 50)
	do(t, db, `SELECT penstock.pause('flow', 'b', 'llama', 'test', 'test')`)
	want(10, 0)
	do(t, db, `SELECT penstock.resume('flow', 'b', 'llama', 'test', 'test')`)
	do(t, db, `INSERT INTO penstock.throttle (until, queue_id, queue_wide, flow, reason)
	           SELECT clock_timestamp() + interval '1 minute', id, false, 'b', 'test' FROM penstock.queue WHERE name = 'llama'`)
	want(10, 0)
	do(t, db, `DELETE FROM penstock.throttle`)
	push(20, `lock_key => 'k', start_by => now() + interval '5 seconds'`)
	want(61, 51)
	do(t, db, `SELECT penstock.pause('lock_key', 'k', 'llama', 'test', 'test')`)
	want(60, 50)
	// Of what concurrency has room for, entries that are in time come first.
	do(t, db, `SELECT penstock.alter_queue('llama', '{"max_concurrent": 14}')`)
	want(14, 4)
	do(t, db, `SELECT penstock.alter_queue('llama', '{"max_concurrent": 5}')`)
	want(5, 0)
}

// What one flow may not start costs no reading, and hides nobody behind it.
func TestLongAPausedBacklogIsNotRead(t *testing.T) {
	const backlog = 100_000
	db := fleet(t)
	do(t, db, `SELECT penstock.pause('flow', 'tenant', 'llama', 'test', 'test')`)
	do(t, db, `INSERT INTO penstock.ready (pos, entry_id, queue_id, priority, flow)
	           SELECT g, g, q.id, p, 'tenant' FROM penstock.queue q, generate_series(1, $1) g, generate_series(0, 9, 9) p
	            WHERE q.name = 'llama'`, backlog)
	do(t, db, `ANALYZE penstock.ready`)
	push(t, db, 3)
	do(t, db, `SELECT penstock.push('llama', '{}'::jsonb, flow => 'zebra')`)
	if n := one[int](t, db, `SELECT penstock.scale_waiting('llama')::int`); n != 4 {
		t.Errorf("%d may start, want 4", n)
	}
	if n := buffers(t, db, `SELECT penstock.scale_waiting('llama')`); n > 200 {
		t.Errorf("%d buffers are read", n)
	}
	do(t, db, `SELECT penstock.resume('flow', 'tenant', 'llama', 'test', 'test')`)
	if n := one[int](t, db, `SELECT penstock.scale_waiting('llama')::int`); n != 10_000 {
		t.Errorf("%d may start, want the bound", n)
	}
	do(t, db, `UPDATE penstock.ready SET not_before = clock_timestamp() + interval '1 hour' WHERE flow = 'tenant'`)
	if n := buffers(t, db, `SELECT penstock.scale_waiting('llama')`); n > 50_000 {
		t.Errorf("%d buffers are read for delayed rows", n)
	}
}

// Throttled flows are left out one by one, and what waits in the others, and is late there, is found without comparing each
// entry with each of them: that took half a minute for 5,000.
func TestFiveThousandThrottledFlowsAreLeftOut(t *testing.T) {
	const flows = 5000
	db := fleet(t)
	do(t, db, `INSERT INTO penstock.throttle (until, queue_id, queue_wide, flow, reason)
	           SELECT clock_timestamp() + interval '1 hour', id, false, 'tenant-' || i, 'test'
	             FROM penstock.queue, generate_series(1, $1::int) i WHERE name = 'llama'`, flows)
	do(t, db, `INSERT INTO penstock.entry (id, queue_id, status, priority, flow, payload, start_by)
	           SELECT g, q.id, 'pending', g % 2, 'tenant-' || (g % (2 * $1::int) + 1), '{}', now() + interval '5 seconds'
	             FROM penstock.queue q, generate_series(1, 2 * $1::int) g WHERE q.name = 'llama'`, flows)
	do(t, db, `INSERT INTO penstock.ready (pos, entry_id, queue_id, priority, flow) SELECT id, id, queue_id, priority, flow FROM penstock.entry`)
	do(t, db, `ANALYZE penstock.ready, penstock.throttle, penstock.entry_llama`)
	tx, err := product(t, db).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	var waiting, late int
	if _, err := tx.Exec(t.Context(), `SET LOCAL statement_timeout = '10s'`); err != nil {
		t.Fatal(err)
	}
	const sql = `SELECT penstock.scale_waiting('llama'), penstock.scale_late('llama', 60)`
	if err := tx.QueryRow(t.Context(), sql).Scan(&waiting, &late); err != nil || waiting != flows || late != flows {
		t.Errorf("%d wait and %d of them are late, want %d: %v", waiting, late, flows, err)
	}
	if n := buffers(t, db, `SELECT penstock.scale_waiting('llama')`); n > 12*flows {
		t.Errorf("%d buffers are read for %d flows", n, flows)
	}
}

// buffers is how many buffers a second run of a statement reads: the first fills the caches of the session.
func buffers(t *testing.T, db *pgxpool.Pool, sql string) int {
	t.Helper()
	tx, err := db.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	var text string
	for range 2 {
		if err := tx.QueryRow(t.Context(), `EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) `+sql).Scan(&text); err != nil {
			t.Fatal(err)
		}
	}
	var plans []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	if err := json.Unmarshal([]byte(text), &plans); err != nil {
		t.Fatal(err)
	}
	return plans[0].Plan.Hit + plans[0].Plan.Read
}

func TestPassDecidesAndANewLeaderGoesOn(t *testing.T) {
	db := fleet(t)
	push(t, db, 40)
	first := New(db, free{db}, Config{})
	if err := first.Pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	desired := one[int](t, db, `SELECT desired FROM penstock.scale_state WHERE model = 'llama'`)
	if desired < 1 {
		t.Fatalf("40 wait and %d are desired", desired)
	}
	why := one[string](t, db, `SELECT why FROM penstock.scale_decision WHERE model = 'llama'`)
	if !strings.HasPrefix(why, fmt.Sprintf("0 -> %d: ", desired)) {
		t.Errorf("why: %q", why)
	}

	// The next leader knows the starts that the first one asked for, and asks for no second wave.
	second := New(db, free{db}, Config{})
	if err := second.Pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := one[int](t, db, `SELECT (state->>'desired')::integer FROM penstock.scale_state WHERE model = 'llama'`)
	if before < desired || before > max(5, 2*desired) {
		t.Errorf("the first leader desired %d, the second %d", desired, before)
	}
}

// An entry is an arrival when it may start: what is delayed, or comes to a queue or a flow that is paused, is one when it is due
// or its pause ends. What was held back for a while is no arrival again. Each queue has a counter of its own, and one that is
// dropped takes nothing from the others.
func TestLongAnEntryIsAnArrivalWhenItMayStart(t *testing.T) {
	db := fleet(t)
	do(t, db, `SELECT penstock.create_queue('second', '{"kind": "inference", "model": "llama"}')`)
	tx, err := db.Acquire(t.Context()) // one session: its statistics are read as soon as it has written them
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Release()
	var before counters
	arrived := func(want float64, change string) {
		t.Helper()
		for _, sql := range []string{change, `SELECT pg_stat_force_next_flush()`} {
			if _, err := tx.Exec(t.Context(), sql); err != nil {
				t.Fatalf("%s: %v", sql, err)
			}
		}
		rows, err := pgx.CollectRows(postgres.Query(t.Context(), tx, inputSQL, []string{"llama"}), pgx.RowToStructByName[input])
		if err != nil {
			t.Fatal(err)
		}
		if got := rows[0].since(before).queued; got != want {
			t.Errorf("%s: %g arrived, want %g", change, got, want)
		}
		before = rows[0].counters(before)
	}
	pushed := func(queue string) string {
		return `SELECT count(penstock.push('` + queue + `', '{}'::jsonb)) FROM generate_series(1, 40)`
	}
	arrived(0, `SELECT`)
	arrived(40, pushed("llama"))
	arrived(40, pushed("second"))
	arrived(0, `SELECT penstock.pause_queue('llama', 'incident', 'test', NULL)`)
	arrived(0, pushed("llama"))
	arrived(40, pushed("second"))
	arrived(40, `SELECT penstock.resume_queue('llama', 'test', 'test')`)
	arrived(0, `SELECT penstock.pause('model', 'llama', NULL, 'test', 'test')`)
	arrived(0, pushed("llama"))
	arrived(40, `SELECT penstock.resume('model', 'llama', NULL, 'test', 'test')`)
	arrived(0, `SELECT penstock.drop_queue('second', true, 'test', 'test')`)
	arrived(40, pushed("llama"))

	arrived(0, `SELECT count(penstock.push('llama', '{}'::jsonb, due_at => now() + interval '1 hour')) FROM generate_series(1, 10000)`)
	arrived(1, `SELECT penstock.push('llama', '{}'::jsonb)`)
	arrived(10, `WITH due AS (
	                 UPDATE penstock.entry e SET status = 'pending', due_at = now()
	                  WHERE e.id IN (SELECT id FROM penstock.entry WHERE status = 'initial' ORDER BY id LIMIT 10) RETURNING e.*)
	             INSERT INTO penstock.ready (pos, entry_id, queue_id, priority, flow) SELECT id, id, queue_id, priority, flow FROM due`)

	arrived(0, `SELECT penstock.pause('flow', 'tenant', 'llama', 'test', 'test')`)
	arrived(0, `SELECT count(penstock.push('llama', '{}'::jsonb, flow => 'tenant')) FROM generate_series(1, 30)`)
	arrived(1, `SELECT penstock.push('llama', '{}'::jsonb)`)
	arrived(30, `SELECT penstock.resume('flow', 'tenant', 'llama', 'test', 'test')`)
	throttle := `INSERT INTO penstock.throttle (until, queue_id, queue_wide, flow, reason)
	             SELECT clock_timestamp() + interval '1 minute', id, false, 'tenant', 'test' FROM penstock.queue WHERE name = 'llama'`
	for range 3 {
		arrived(0, throttle)
		arrived(0, `DELETE FROM penstock.throttle`)
	}
}

// Entries of a queue that is not open are no demand when they come due: an instance that starts for them has no work.
func TestWhatComesDueInAPausedQueueIsNotCounted(t *testing.T) {
	db := fleet(t)
	do(t, db, `SELECT penstock.alter_queue('llama', '{"application": "chat"}')`)
	do(t, db, `SELECT penstock.push('llama', '{}'::jsonb, due_at => clock_timestamp() + interval '5 seconds')`)
	for _, step := range []struct {
		sql  string
		want int64
	}{
		{`SELECT`, 1},
		{`SELECT penstock.pause('application', 'chat', NULL, 'test', 'test')`, 0},
		{`SELECT penstock.resume('application', 'chat', NULL, 'test', 'test')`, 1},
		{`SELECT penstock.pause('model', 'llama', NULL, 'test', 'test')`, 0},
		{`UPDATE penstock.pause SET until = clock_timestamp()`, 1},
		{`SELECT penstock.pause_queue('llama', 'test', 'test')`, 0},
		{`SELECT penstock.resume_queue('llama', 'test', 'test')`, 1},
		{`SELECT penstock.disable_queue('llama', 'test', 'test')`, 0},
	} {
		do(t, db, step.sql)
		if n := one[int64](t, db, `SELECT penstock.scale_due('llama', 60)`); n != step.want {
			t.Errorf("after %s: %d entries are due, want %d", step.sql, n, step.want)
		}
	}
}

// A stale observation counts nothing: the next fresh one has the requests of its time.
func TestRequestsOfStaleSecondsAreCountedLater(t *testing.T) {
	s := New(nil, nil, Config{})
	deployments := []deploymentRow{{Name: "llama-own", Model: "llama", Backend: "advise", Policy: []byte(`{"slots": 2, "max": 8}`), Mode: "full"}}
	in := input{Model: "llama", At: noon, Hour: noon, Service: 5}
	counted := 0.0
	for _, age := range []float64{0, 0, 12, 20, 0} {
		in.At, in.GatewayAge = in.At.Add(time.Second), age
		in.Arrivals = map[string]arrivals{"1": {Deleted: in.Arrivals["1"].Deleted + 10}}
		in.OnlineCalls++
		v, err := s.decide(in, deployments)
		if err != nil {
			t.Fatal(err)
		}
		s.past[in.Model] = v.past()
		if age == 0 {
			counted += v.used.queued + v.used.online
		}
		if m := s.minutes[in.Model]; m.Arrived != counted {
			t.Errorf("%g requests of the minute, want %g", m.Arrived, counted)
		}
	}
	// The first observation is where counting begins.
	if counted != 44 {
		t.Errorf("%g requests were counted of 44 that came", counted)
	}
}

// A gateway that died makes the demand of a model unknown while it holds slots of it, and while there is no other.
func TestADeadGatewayWithoutSlotsIsNotMissed(t *testing.T) {
	db := fleet(t)
	age := func() float64 {
		return one[float64](t, db, `SELECT gateway_age FROM penstock.scale_input WHERE model = 'llama'`)
	}
	do(t, db, `SELECT penstock.register_gateway(7, 'g1', 'default', '1 hour')`)
	do(t, db, `SELECT penstock.register_gateway(8, 'g2', 'default', '10 seconds')`)
	do(t, db, `UPDATE penstock.node SET beat_at = clock_timestamp() - interval '1 minute' WHERE id = 8`)
	if got := age(); got != 0 {
		t.Errorf("a dead gateway without slots: %g s", got)
	}
	do(t, db, `SELECT penstock.register_instance('llama', 'gpu-1', 'http://gpu-1', 4)`)
	do(t, db, `INSERT INTO penstock.slot (instance_id, number, token, node_id)
	           SELECT id, 0, nextval('penstock.token_seq'), 8 FROM penstock.instance`)
	if got := age(); got < 60 {
		t.Errorf("one that holds a slot: %g s", got)
	}
	do(t, db, `DELETE FROM penstock.slot`)
	do(t, db, `UPDATE penstock.node SET beat_at = clock_timestamp() - interval '2 hours' WHERE id = 7`)
	if got := age(); got != 0 {
		t.Errorf("the only one, of a model without online requests: %g s", got)
	}
	do(t, db, `INSERT INTO penstock.model_online (model, calls) VALUES ('llama', 3)`)
	if got := age(); got < 60 || got > 120 {
		t.Errorf("the only one within five minutes: %g s", got)
	}
}

// Nothing of ours starts instances for backend advise: a number that nothing followed is no start that is stuck.
func TestAPublishedNumberIsNoStart(t *testing.T) {
	s := New(nil, nil, Config{})
	deployments := []deploymentRow{{Name: "llama-own", Model: "llama", Backend: "advise", Policy: []byte(`{"slots": 2, "max": 8}`), Mode: "full"}}
	in := input{Model: "llama", Waiting: 40, Arrived: 40, Service: 5}
	first := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	decide := func() Decision {
		t.Helper()
		v, err := s.decide(in, deployments)
		if err != nil {
			t.Fatal(err)
		}
		s.past[in.Model] = v.past()
		for _, note := range v.Notes {
			if len(in.Starting) == 0 && (note.Code == NoteStuck || note.Code == NoteReplace || note.Code == NoteBlocked) {
				t.Fatalf("at %v: %s", in.At.Sub(first), v.Explain())
			}
		}
		return v.Decision
	}
	var d Decision
	for second := range 3600 {
		in.At = first.Add(time.Duration(second) * time.Second)
		d = decide()
	}
	if d.Desired != 2 { // 2 slots in the 60 s of a drain: 120 of 200 slot-seconds
		t.Errorf("40 wait for an hour, nothing is ready, and %d are desired: %s", d.Desired, d.Explain())
	}
	// The next leader comes an hour after a number that changed last.
	state, err := json.Marshal(State{At: in.At, Desired: 2, Changes: []Step{{At: in.At, By: 2}}})
	if err != nil {
		t.Fatal(err)
	}
	in.State, in.At = state, in.At.Add(time.Hour)
	s = New(nil, nil, Config{})
	decide()

	in.Starting = []time.Time{first}
	decide()
	in.At = in.At.Add(10 * time.Second)
	if d := decide(); !strings.Contains(d.Explain(), "are stuck: not ready after") {
		t.Errorf("an instance that is registered and starts for an hour is not stuck: %s", d.Explain())
	}
}

// Alerts leave out starts that are in time: stuck ones are counted apart, and requests that wait apart from those that run.
func TestFiguresTellStartsInTimeFromStuckOnes(t *testing.T) {
	s := New(nil, nil, Config{})
	at := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	deployments := []deploymentRow{{Name: "own", Model: "llama", Backend: "advise", Policy: []byte(`{"slots": 2}`), Mode: "full"}}
	in := input{Model: "llama", At: at, Waiting: 3, Urgent: 1, Running: 5, ColdStartP95: 300}
	in.Starting = []time.Time{at.Add(-16 * time.Minute), at.Add(-14 * time.Minute), at.Add(-time.Minute)}
	v, err := s.decide(in, deployments)
	if err != nil {
		t.Fatal(err)
	}
	s.publish([]string{"llama"}, []*modelDecision{v}, nil, nil)
	if m := s.Status().Models[0]; m.Started != 2 || m.Stuck != 1 || m.Waiting != 4 || m.Metric != 9 {
		t.Errorf("%d starts in time, %d stuck, %d waiting of %g; want 2, 1, 4 of 9", m.Started, m.Stuck, m.Waiting, m.Metric)
	}
}

// Alerts go by the figures: advice that nobody follows is no start that is missing, and a model that could not be decided
// is not one without figures.
func TestFiguresTellAdviceAndOutlastFailedDecisions(t *testing.T) {
	s := New(nil, nil, Config{})
	for mode, applied := range map[Mode]bool{Full: true, Advise: false} {
		in := input{Model: "llama", At: time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC), Waiting: 3}
		v, err := s.decide(in, []deploymentRow{{Name: "own", Model: "llama", Backend: "advise", Policy: []byte(`{"slots": 2}`), Mode: mode}})
		if err != nil {
			t.Fatal(err)
		}
		s.publish([]string{"llama"}, []*modelDecision{v}, nil, nil)
		if m := s.Status().Models[0]; m.Applied != applied || m.Desired == 0 {
			t.Errorf("mode %s: applied %v, %d desired", mode, m.Applied, m.Desired)
		}
	}
	s.publish([]string{"llama"}, nil, map[string]bool{"llama": true}, nil)
	if len(s.Status().Models) != 1 {
		t.Error("a model that could not be decided has no figures")
	}
	s.publish([]string{"llama"}, nil, nil, nil)
	if len(s.Status().Models) != 0 {
		t.Error("a model without a decision has figures")
	}
}

func TestSwitchesReachTheNextPass(t *testing.T) {
	db := fleet(t)
	push(t, db, 40)
	do(t, db, `SELECT penstock.set_scale_setting('scale.off', 'true', 'incident')`)
	s := New(db, free{db}, Config{})
	pass := func() int {
		t.Helper()
		if err := s.Pass(t.Context()); err != nil {
			t.Fatal(err)
		}
		return s.past["llama"].state.Desired
	}
	if got := pass(); got != 0 {
		t.Errorf("scaling is off and %d are desired", got)
	}
	do(t, db, `SELECT penstock.set_scale_setting('scale.off', NULL)`)
	do(t, db, `SELECT penstock.set_scale_override('llama-own', 6, clock_timestamp() + interval '1 hour', 'launch')`)
	if got := pass(); got != 6 {
		t.Errorf("the override is 6 and %d are desired", got)
	}
	do(t, db, `SELECT penstock.set_scale_setting('scale.max_all', '3')`)
	if got := pass(); got != 3 {
		t.Errorf("the cap is 3 and %d are desired", got)
	}
	do(t, db, `SELECT penstock.set_scale_override('llama-own', NULL)`)
	do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"mode": "manual"}')`)
	if got := pass(); got != 3 {
		t.Errorf("the mode is manual at 3 and %d are desired", got)
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.audit WHERE verb LIKE 'set_scale%'`); n != 5 {
		t.Errorf("%d orders are in the audit", n)
	}
}

func TestATermThatIsOverStoresNothing(t *testing.T) {
	db := fleet(t)
	push(t, db, 40)
	if err := New(db, over{}, Config{}).Pass(t.Context()); err == nil {
		t.Error("no error")
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.scale_state`); n != 0 {
		t.Errorf("%d states", n)
	}
}

func TestABadPolicyStopsNoOtherModel(t *testing.T) {
	db := fleet(t)
	push(t, db, 40)
	do(t, db, `SELECT penstock.register_model('aaa', '{"protocol": "openai"}')`)
	do(t, db, `SELECT penstock.set_deployment('aaa', 'aaa', '{"policy": {"min": 9, "max": 1}}')`)
	if err := New(db, free{db}, Config{}).Pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.scale_state WHERE model = 'llama'`); n != 1 {
		t.Error("llama was not decided")
	}
}

func TestOrdersAreChecked(t *testing.T) {
	db := fleet(t)
	for namespace := range strings.SplitSeq("a b", " ") {
		do(t, db, `SELECT penstock.set_deployment('pods-' || $1, 'llama', jsonb_build_object('backend', 'kubernetes',
		           'target', jsonb_build_object('name', 'pods', 'port', 1, 'namespace', $1::text)))`, namespace)
	}
	for _, sql := range []string{
		`SELECT penstock.set_deployment('x', 'nobody')`,
		`SELECT penstock.set_deployment('x', 'llama', '{"colour": 1}')`,
		`SELECT penstock.set_deployment('x', 'llama', '{"mode": "odd"}')`,
		`SELECT penstock.set_scale_override('nobody', 1, now() + interval '1 hour')`,
		`SELECT penstock.set_scale_override('llama-own', 1)`,
		`SELECT penstock.set_scale_override('llama-own', -1, now() + interval '1 hour')`,
		`SELECT penstock.set_scale_setting('scale.off', '3')`,
		`SELECT penstock.set_scale_setting('colour', 'true')`,
		`SELECT penstock.set_scale_setting('scale.max_all', '3000000000')`,
		`SELECT penstock.set_scale_setting('scale.max_all', '-1')`,
		`SELECT penstock.set_scale_setting('scale.max_all', '0')`,
		`SELECT penstock.set_scale_setting('scale.max_all', '0.5')`,
		`SELECT penstock.set_scale_setting('scale.budget', '0')`,
		`SELECT penstock.set_scale_setting('scale.budget', '1e-400')`,
		`SELECT penstock.set_scale_override('llama-own', 1, 'infinity')`,
		`SELECT penstock.set_scale_override('llama-own', 1, '9999-12-31 12:00 UTC')`,
		`SELECT penstock.set_deployment('llama-own', 'llama', '{"policy": {"max": 0}}')`,
		`SELECT penstock.set_deployment_template('llama', '{"policy": {"emergency_max": 0}}')`,
		`SELECT penstock.set_deployment('x', 'llama', '{"backend": "kubernetes", "target": {"name": "pods", "port": 1, "namespace": "b"}}')`,
		`SELECT penstock.set_deployment('x', 'llama', '{"backend": "kubernetes", "target": {"name": "pods", "port": 2}}')`,
		`SELECT penstock.set_deployment('x', 'llama', '{"backend": "kubernetes", "target": {"name": "y", "port": 2, "resource": "statefulsets"}}')`,
		`SELECT penstock.set_deployment_template('llama', '{"backend": "kubernetes", "target": {"name": "y", "port": 2, "kind": "StatefulSet"}}')`,
		`SELECT penstock.remove_deployment('nobody')`,
	} {
		if _, err := db.Exec(t.Context(), sql); err == nil {
			t.Errorf("%s was accepted", sql)
		} else if !strings.Contains(err.Error(), "SQLSTATE PS0") {
			t.Errorf("%s: %v", sql, err)
		}
	}
}

// Two deployments that have one target since before that was refused can be disabled, and told apart.
func TestOneOfTwoDeploymentsWithOneTargetCanBeChanged(t *testing.T) {
	db := fleet(t)
	for _, name := range []string{"a", "b"} {
		do(t, db, `SELECT penstock.set_deployment($1, 'llama', jsonb_build_object('backend', 'kubernetes',
		           'target', jsonb_build_object('name', $1::text, 'port', 1)))`, name)
	}
	do(t, db, `UPDATE penstock.deployment SET target = '{"name": "pods", "port": 1}' WHERE backend = 'kubernetes'`)
	do(t, db, `SELECT penstock.set_deployment('a', 'llama', '{"policy": {"max": 3}, "mode": "disabled"}')`)
	const same = `SELECT penstock.set_deployment('a', 'llama', '{"target": {"name": "pods", "port": 2}}')`
	if _, err := db.Exec(t.Context(), same); err == nil || !strings.Contains(err.Error(), `target of deployment "b"`) {
		t.Errorf("got %v", err)
	}
	do(t, db, `SELECT penstock.set_deployment('a', 'llama', '{"target": {"name": "other", "port": 2}}')`)
}

func TestInstancesThatTakeNoRequestsAreNoPartOfTheNumber(t *testing.T) {
	db := fleet(t)
	for server, change := range map[string]string{
		"good": `state = 'ready'`, "sick": `state = 'unhealthy'`, "held": `quarantined_until = clock_timestamp() + interval '1 hour'`,
		"late": `state = 'ready', expires_at = clock_timestamp()`,
		"gone": `state = 'ready', expires_at = clock_timestamp(), draining_at = clock_timestamp()`,
		"dead": `state = 'starting', expires_at = clock_timestamp()`, "new": `state = 'starting'`,
	} {
		do(t, db, `SELECT penstock.register_instance('llama', $1, 'http://' || $1, 2)`, server)
		do(t, db, `UPDATE penstock.instance SET `+change+` WHERE server = $1`, server)
	}
	if n := one[int](t, db, `SELECT unmanaged FROM penstock.scale_input WHERE model = 'llama'`); n != 3 {
		t.Errorf("%d count, want those that are ready, one of which is not given up yet, and the one that starts", n)
	}
}

// Another instance is started for each of those that are replaced when they stay as they are.
func TestADefunctInstanceIsUnhealthy(t *testing.T) {
	db := fleet(t)
	for server, change := range map[string]string{
		"good": `state = 'ready'`, "sick": `state = 'unhealthy'`, "dead": `state = 'defunct'`, "new": `state = 'starting'`,
		"ends": `state = 'defunct', draining_at = clock_timestamp()`,
	} {
		do(t, db, `SELECT penstock.register_instance('llama', $1, 'http://' || $1, 2)`, server)
		do(t, db, `UPDATE penstock.instance SET `+change+` WHERE server = $1`, server)
	}
	if n := one[int](t, db, `SELECT unhealthy FROM penstock.scale_input WHERE model = 'llama'`); n != 2 {
		t.Errorf("%d are unhealthy, want 2", n)
	}
}

func TestDueEntriesAreCountedWhereThereAreSome(t *testing.T) {
	db := fleet(t)
	due := func() int { return one[int](t, db, `SELECT due FROM penstock.scale_input WHERE model = 'llama'`) }
	if n := due(); n != 0 {
		t.Errorf("%d become due in an empty queue", n)
	}
	for _, in := range []string{"20 seconds", "30 seconds", "1 hour"} {
		do(t, db, `SELECT penstock.push('llama', '{}'::jsonb, due_at => now() + $1::interval)`, in)
	}
	if n := due(); n != 2 {
		t.Errorf("%d become due within a minute, want 2", n)
	}
}

func TestAPausedQueueHasNothingThatIsLate(t *testing.T) {
	db := fleet(t)
	push(t, db, 3)
	do(t, db, `UPDATE penstock.entry SET start_by = clock_timestamp() + interval '1 second'`)
	late := func() int { return one[int](t, db, `SELECT penstock.scale_late('llama', 60)`) }
	if n := late(); n != 3 {
		t.Errorf("%d are late, want 3", n)
	}
	do(t, db, `SELECT penstock.pause_queue('llama', 'test', 'test', NULL)`)
	if n := late(); n != 0 {
		t.Errorf("%d are late in a paused queue", n)
	}
}

// A gateway keeps slots for a while after its calls: they are no requests that run. Slots that it leased after its last
// heartbeat are, as is each slot of one that reported nothing.
func TestIdleSlotsOfGatewaysAreNoRequests(t *testing.T) {
	db := fleet(t)
	do(t, db, `SELECT penstock.register_instance('llama', 'gpu-1', 'http://10.0.0.1:80', 16)`)
	for node, load := range map[int]string{
		1: `{"pools": {"llama": {"stock": 2}}}`, 2: `{}`, 3: `{"pools": {"llama": {"stock": 90}}}`, 4: `{"pools": {"llama": {"stock": "x"}}}`,
	} {
		do(t, db, `SELECT penstock.register_gateway($1, $2, 'default', '1 minute')`, node, fmt.Sprint("g", node))
		do(t, db, `UPDATE penstock.node SET load = $2, beat_at = clock_timestamp() + interval '1 hour' WHERE id = $1`, node, load)
	}
	lease := func(node, first, n int) {
		do(t, db, `INSERT INTO penstock.slot (instance_id, number, token, node_id)
		           SELECT i.id, g, nextval('penstock.token_seq'), $1 FROM penstock.instance i, generate_series($2::int, $2 + $3 - 1) g`, node, first, n)
	}
	running := func() int {
		n := one[int](t, db, `SELECT penstock.scale_running('llama')::int`)
		if online := one[int](t, db, `SELECT online_running::int FROM penstock.scale_input WHERE model = 'llama'`); online != n {
			t.Errorf("decisions read that %d requests run at gateways, want %d", online, n)
		}
		return n
	}
	lease(1, 0, 5)
	if n := running(); n != 2 {
		t.Errorf("%d of 5 slots with 2 calls run", n)
	}
	lease(2, 5, 1)
	lease(3, 6, 3)
	lease(4, 9, 1)
	if n := running(); n != 2+1+3+1 {
		t.Errorf("%d run, want 7: a report is worth no more than the slots, and none means all of them", n)
	}
	do(t, db, `UPDATE penstock.node SET beat_at = clock_timestamp() - interval '1 minute' WHERE id = 1`)
	do(t, db, `UPDATE penstock.slot SET leased_at = clock_timestamp() - interval '2 minutes' WHERE number < 4`)
	if n := running(); n != 3+1+3+1 {
		t.Errorf("%d run, want 8: one slot was leased since", n)
	}
}

func TestAModelWithADeploymentIsNotRemoved(t *testing.T) {
	db := fleet(t)
	_, err := db.Exec(t.Context(), `SELECT penstock.remove_model('llama')`)
	if postgres.Code(err) != "PS006" || !strings.Contains(err.Error(), "llama-own") {
		t.Fatalf("got %v", err)
	}
	do(t, db, `SELECT penstock.remove_deployment('llama-own')`)
	do(t, db, `SELECT penstock.set_deployment_template('llama', '{"backend": "advise"}')`)
	do(t, db, `SELECT penstock.remove_model('llama')`)
	if n := one[int](t, db, `SELECT count(*)::int FROM penstock.deployment_template`); n != 0 {
		t.Errorf("%d templates are left", n)
	}
}

// The budget is one of all deployments: those that may not change have their part of it.
func TestTheBudgetCountsDeploymentsThatDoNotChange(t *testing.T) {
	db := fleet(t)
	do(t, db, `SELECT penstock.register_model('fixed', '{"protocol": "openai"}')`)
	do(t, db, `SELECT penstock.set_deployment('fixed', 'fixed', '{"backend": "keda", "policy": {"slots": 2, "max": 8}}')`)
	do(t, db, `INSERT INTO penstock.deployment_state (name, desired, decided_at) VALUES ('fixed', 3, now())`)
	do(t, db, `SELECT penstock.set_deployment('fixed', 'fixed', '{"mode": "disabled"}')`)
	do(t, db, `SELECT penstock.set_scale_setting('scale.budget', '5')`)
	push(t, db, 400)
	d := New(db, free{db}, Config{})
	for range 2 {
		if err := d.Pass(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := one[int](t, db, `SELECT desired FROM penstock.scale_state WHERE model = 'llama'`); n != 2 {
		t.Errorf("%d are desired where the budget has room for 2", n)
	}
	if why := one[string](t, db, `SELECT why FROM penstock.scale_decision WHERE model = 'llama'`); !strings.Contains(why, "the budget of all deployments leaves 2 of ") {
		t.Errorf("the reason is %q", why)
	}
}

// What is paid for is told apart from what is desired: instances that drain, that exist beyond the number, and that do not go.
func TestFiguresTellWhatIsPaidFor(t *testing.T) {
	seven, nan := 7, math.NaN()
	own := deploymentRow{
		Name: "own", Backend: backendLocal, Mode: Full, Cost: 2.5, Registered: 4, Draining: 2, Existing: &seven,
		Removing: []string{"a", "b"}, RemovingSince: map[string]time.Time{"a": noon.Add(-time.Hour), "b": noon.Add(-time.Minute)},
	}
	advised := deploymentRow{Name: "advised", Backend: backendKEDA, Mode: Advise, Cost: 1, Registered: 3}
	followed := deploymentRow{Name: "followed", Backend: backendKEDA, Mode: Full, Cost: nan, Registered: 3}
	d := &modelDecision{
		in: input{At: noon, Draining: 2, Unmanaged: 1}, deployments: []deploymentRow{own, advised, followed},
		parts: map[string]int{"own": 4, "advised": 0, "followed": 2},
	}
	want := Fleet{Existing: 14, Draining: 2, Surplus: 2, Overdue: 1, Cost: 20.5}
	if got := d.fleet(); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
