package doctor

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// A standstill is made; the doctor, the rows behind the alert and the explanation of an entry that waits must name it.
type standstill struct {
	*testing.T
	pool  *pgxpool.Pool
	queue *invalidation.Queue
	entry int64 // waits at the head of the queue
}

const live, dead invalidation.NodeID = 1, 2

// newStandstill makes model m with two slots, its queue with a live node and an entry that waits.
func newStandstill(t *testing.T) *standstill {
	t.Helper()
	s := &standstill{T: t, pool: newPool(t)}
	exec(t, s.pool, `SELECT penstock.register_model('m', '{"protocol": "dispatcher", "type": "sync"}'), penstock.register_instance('m', 'gpu-1', 'http://127.0.0.1:9', 2)`)
	exec(t, s.pool, `UPDATE penstock.instance SET state = 'ready', checked_at = now()`)
	var name string
	if err := s.pool.QueryRow(t.Context(), `SELECT penstock.model_queue('m')`).Scan(&name); err != nil {
		t.Fatal(err)
	}
	var err error
	if s.queue, err = invalidation.Open(t.Context(), s.pool, name); err != nil {
		t.Fatal(err)
	}
	for id, beat := range map[invalidation.NodeID]time.Duration{live: 0, dead: 2 * time.Hour} {
		node := invalidation.Node{ID: id, Name: fmt.Sprint("node-", id), Application: "default", Lease: time.Hour, Threads: 8, Queues: []int32{s.queue.ID}}
		if err := invalidation.Register(t.Context(), s.pool, node); err != nil {
			t.Fatal(err)
		}
		exec(t, s.pool, `UPDATE penstock.node SET beat_at = clock_timestamp() - $2::interval, started_at = now() - interval '1 hour' WHERE id = $1`, id, beat)
	}
	pushed, err := s.queue.Push(t.Context(), invalidation.Push{Payload: []byte(`{}`)})
	if err != nil {
		t.Fatal(err)
	}
	s.entry = int64(pushed[0].ID)
	return s
}

// explained is the text of all reasons for which the entry does not run.
func (s *standstill) explained() string {
	s.Helper()
	var text string
	const sql = `SELECT coalesce(string_agg(r->>'text', '; '), '') FROM jsonb_array_elements(penstock.explain_entry($1)->'reasons') r`
	if err := s.pool.QueryRow(s.Context(), sql, s.entry).Scan(&text); err != nil {
		s.Fatal(err)
	}
	return text
}

// alerted fails unless the leader's metric has the code, and an alert fires on exactly that.
func (s *standstill) alerted(code, object string) {
	s.Helper()
	objects, err := pgx.CollectRows(postgres.Query(s.Context(), s.pool, `SELECT object FROM penstock.degradations() WHERE code = $1`, code), pgx.RowTo[string])
	if err != nil || len(objects) != 1 || objects[0] != object {
		s.Errorf("degradations of code %s are of %q (%v), want %q", code, objects, err, object)
	}
	rules, err := os.ReadFile("../../deploy/prometheus/alerts.yaml")
	if err != nil {
		s.Fatal(err)
	}
	if !strings.Contains(string(rules), `penstock_degraded{code="`+code+`"`) && !strings.Contains(string(rules), `|`+code+`"}`) &&
		!strings.Contains(string(rules), `penstock_degraded{code=~"`+code+`|`) {
		s.Errorf("no alert watches penstock_degraded of code %s", code)
	}
}

func TestSlotsOfDeadNodesAreNamed(t *testing.T) {
	s := newStandstill(t)
	exec(t, s.pool, holdSQL, dead, 1)
	want(t, find(t, s.pool, "dead slots", Config{}), Warning, "1 of 2 slots of model m")
	exec(t, s.pool, `DELETE FROM penstock.slot`)
	exec(t, s.pool, holdSQL, dead, 2)
	want(t, find(t, s.pool, "dead slots", Config{}), Critical, "2 of 2 slots of model m are held by calls of dead nodes", "5 m")
	s.alerted("dead_slots", "model m")
	if text := s.explained(); !strings.Contains(text, "2 of 2 slots of model m are held, 2 of them by calls of dead nodes") {
		t.Errorf("explained as %q", text)
	}
	exec(t, s.pool, `DELETE FROM penstock.slot`)
	want(t, find(t, s.pool, "dead slots", Config{}), Fine)
	exec(t, s.pool, holdSQL, live, 2) // idle in the block of a node, which claims for them at once
	want(t, find(t, s.pool, "dead slots", Config{}), Fine)
	if text := s.explained(); text != "" {
		t.Errorf("explained as %q, want nothing: a node has free slots", text)
	}
}

func TestAModelWithoutAUsableInstanceIsNamed(t *testing.T) {
	s := newStandstill(t)
	want(t, find(t, s.pool, "instances", Config{}), Fine)
	exec(t, s.pool, `UPDATE penstock.instance SET quarantined_until = clock_timestamp() + interval '5 minutes', quarantine_reason = 'CUDA error'`)
	want(t, find(t, s.pool, "instances", Config{}), Critical, "none of the 1 instances of model m takes calls: gpu-1 is quarantined for", "CUDA error")
	s.alerted("quarantined", "model m")
	if text := s.explained(); !strings.Contains(text, "none of the 1 instances of model m takes calls: gpu-1 is quarantined") {
		t.Errorf("explained as %q", text)
	}
	exec(t, s.pool, `UPDATE penstock.instance SET quarantined_until = NULL, state = 'unhealthy', reason = 'connection refused'`)
	want(t, find(t, s.pool, "instances", Config{}), Critical, "gpu-1 is unhealthy (connection refused)")
	s.alerted("no_instance", "model m")
}

// A model that is started for the first time, and one whose last instance the autoscaler drains, are as they should be.
func TestFirstStartsAndLastDrainsAreNoDegradation(t *testing.T) {
	s := newStandstill(t)
	exec(t, s.pool, `SELECT penstock.set_deployment('own', 'm', '{}')`)
	const starts = `UPDATE penstock.instance SET state = 'starting', ready_at = NULL, created_at = now() - $1::interval, deployment = 'own'`
	exec(t, s.pool, starts, "9 minutes")
	want(t, find(t, s.pool, "instances", Config{}), Fine)
	exec(t, s.pool, starts, "11 minutes")
	want(t, find(t, s.pool, "instances", Config{}), Critical, "gpu-1 is starting")
	s.alerted("no_instance", "model m")
	exec(t, s.pool, `INSERT INTO penstock.cold_start (model, server, seconds) VALUES ('m', 'gpu-1', 400)`)
	want(t, find(t, s.pool, "instances", Config{}), Fine)
	exec(t, s.pool, starts, "21 minutes")
	want(t, find(t, s.pool, "instances", Config{}), Critical, "gpu-1 is starting")
	exec(t, s.pool, `SELECT penstock.set_deployment('own', 'm', '{"policy": {"stuck_min_seconds": 3600}}')`)
	want(t, find(t, s.pool, "instances", Config{}), Fine)
	for seconds, state := range map[string]Severity{"600000000000": Fine, "1e400": Fine, "-1e400": Critical, "1e-400": Critical} { // of before
		exec(t, s.pool, `UPDATE penstock.deployment SET policy = jsonb_build_object('stuck_min_seconds', $1::text::numeric)`, seconds)
		want(t, find(t, s.pool, "instances", Config{}), state)
	}
	exec(t, s.pool, `UPDATE penstock.deployment SET policy = '{}'`)
	exec(t, s.pool, `UPDATE penstock.cold_start SET seconds = 1e308`)
	want(t, find(t, s.pool, "instances", Config{}), Fine)

	exec(t, s.pool, `UPDATE penstock.instance SET state = 'ready', ready_at = now()`)
	exec(t, s.pool, `SELECT penstock.drain_instance('m', 'gpu-1', '0 desired', 'autoscaler')`)
	want(t, find(t, s.pool, "instances", Config{}), Fine)
	exec(t, s.pool, `SELECT penstock.drain_instance('m', 'gpu-1', 'a new disk', 'ada')`)
	want(t, find(t, s.pool, "instances", Config{}), Critical, "gpu-1 drains")
	exec(t, s.pool, `UPDATE penstock.instance SET drain_by = 'autoscaler'`)
	exec(t, s.pool, `SELECT penstock.register_instance('m', 'gpu-2', 'http://127.0.0.1:8', 2)`)
	exec(t, s.pool, `UPDATE penstock.instance SET state = 'unhealthy', checked_at = now() WHERE server = 'gpu-2'`)
	want(t, find(t, s.pool, "instances", Config{}), Critical, "gpu-2 is unhealthy")
}

func TestNodesThatHearNoHintsAreNamed(t *testing.T) {
	s := newStandstill(t)
	exec(t, s.pool, `UPDATE penstock.node SET load = '{"hints": "lost", "hints_error": "timeout"}'`) // of the dead one, nothing is said
	want(t, find(t, s.pool, "hints", Config{}), Warning, "node node-1 hears no hints", "timeout")
	s.alerted("no_hints", "node node-1")
	exec(t, s.pool, `UPDATE penstock.node SET load = '{"hints": "pooler"}'`)
	want(t, find(t, s.pool, "hints", Config{}), Warning, "database.direct_url is not set")
	exec(t, s.pool, `UPDATE penstock.node SET load = '{"hints": "off"}'`)
	want(t, find(t, s.pool, "hints", Config{}), Fine)
}

func TestKeysThatAFailureBlocksAreNamed(t *testing.T) {
	s := newStandstill(t)
	name := s.queue.Name
	exec(t, s.pool, `SELECT penstock.alter_queue($1, '{"on_failure": "block_key"}')`, name)
	want(t, find(t, s.pool, "blocked keys", Config{}), Fine)
	exec(t, s.pool, `UPDATE penstock.`+pgx.Identifier{"entry_" + name}.Sanitize()+` SET lock_key = 'acme'`)
	exec(t, s.pool, `DELETE FROM penstock.ready`) // as the claim does that meets a blocked key
	exec(t, s.pool, `
INSERT INTO penstock.blocked_key (queue_id, lock_key, entry_id, blocked_at, class, error)
VALUES ($1, 'acme', 41, now() - interval '5 minutes', 'permanent', 'no such address'),
       ($1, 'beta', 42, now(), 'permanent', 'another')`, s.queue.ID)
	want(t, find(t, s.pool, "blocked keys", Config{}), Warning, "2 lock keys of queue "+name+" are blocked by failures",
		"acme since entry 41 failed 5 m", "no such address")
	s.alerted("blocked_keys", "queue "+name)
	if text := s.explained(); !strings.Contains(text, "lock key acme is blocked since entry 41 failed") {
		t.Errorf("explained as %q", text)
	}
}

func TestCronJobsThatCannotFireAreNamed(t *testing.T) {
	s := newStandstill(t)
	exec(t, s.pool, `SELECT penstock.create_queue('reports', '{"kind": "cron"}')`)
	for _, job := range []string{"nightly", "waits", "refused"} {
		exec(t, s.pool, `SELECT penstock.create_cron_job($1, 'reports', '@daily')`, job)
	}
	want(t, find(t, s.pool, "cron jobs", Config{}), Fine)
	const breakSQL = `UPDATE penstock.cron_job SET problem = $2, check_at = $3 WHERE name = $1` // as the engine does
	exec(t, s.pool, breakSQL, "nightly", "zone \"Europe/Berln\" is unknown\nspec \"x\": want five fields", "infinity")
	want(t, find(t, s.pool, "cron jobs", Config{}), Warning,
		`cron job nightly of queue reports has no next run: zone "Europe/Berln" is unknown; spec "x"`)
	s.alerted("cron_broken", "cron job nightly")
	exec(t, s.pool, breakSQL, "refused", "queue \"reports\" is full", "now")
	want(t, find(t, s.pool, "cron jobs", Config{}), Warning, "without a next run: 2", "cron job refused of queue reports")
	exec(t, s.pool, `SELECT penstock.pause_cron_job(name, 'of no use') FROM penstock.cron_job WHERE problem IS NOT NULL`)
	want(t, find(t, s.pool, "cron jobs", Config{}), Fine)
}

func TestCronJobsThatAreSilentAfterAClockThatWasAheadAreNamed(t *testing.T) {
	s := newStandstill(t)
	exec(t, s.pool, `SELECT penstock.create_queue('reports', '{"kind": "cron"}')`)
	exec(t, s.pool, `SELECT penstock.create_cron_job('nightly', 'reports', '@daily')`)
	exec(t, s.pool, `UPDATE penstock.cron_job SET handled_at = clock_timestamp() + interval '10 days'`)
	want(t, find(t, s.pool, "cron jobs", Config{}), Fine) // the times until then were cancelled
	exec(t, s.pool, `UPDATE penstock.cron_job SET ended_at = clock_timestamp() + interval '10 days'`)
	want(t, find(t, s.pool, "cron jobs", Config{}), Warning, "cron job nightly of queue reports fires nothing before 2")
	exec(t, s.pool, `SELECT penstock.alter_cron_job('nightly', '{"spec": "@daily"}')`)
	want(t, find(t, s.pool, "cron jobs", Config{}), Fine)
}

// sampled writes what the leader would have seen over the last 30 seconds, in which so many entries left.
func (s *standstill) sampled(left int) {
	s.Helper()
	exec(s.T, s.pool, `CREATE TABLE IF NOT EXISTS penstock.sample_ever PARTITION OF penstock.sample FOR VALUES FROM (MINVALUE) TO (MAXVALUE)`)
	exec(s.T, s.pool, `DELETE FROM penstock.sample`)
	const sql = `
INSERT INTO penstock.sample
SELECT (m).queue_id, clock_timestamp() - ago * interval '1 second', (m).initial, (m).pending, (m).disabled, (m).computing, (m).failed, (m).estimated,
       (m).serving, (m).head_age, (m).blocked, (m).accepted, 100 - CASE WHEN ago > 15 THEN $2::int ELSE 0 END, 0, NULL, NULL
  FROM (SELECT penstock.measure(q) AS m FROM penstock.queue q WHERE q.id = $1) x, generate_series(0, 45, 5) ago`
	exec(s.T, s.pool, sql, s.queue.ID, left)
}

func TestUnracedAQueueThatStandsStillIsNamedWithTheReason(t *testing.T) {
	s := newStandstill(t)
	name := s.queue.Name
	exec(t, s.pool, fmt.Sprintf(`UPDATE penstock.%s SET created_at = now() - interval '2 minutes'`, pgx.Identifier{"entry_" + name}.Sanitize()))
	s.sampled(0)
	want(t, find(t, s.pool, "standstills", Config{}), Critical, "1 entries of queue "+name+" wait, the first for 2 m", "nothing that explain knows")
	s.alerted("standstill", "queue "+name)

	s.sampled(1) // one has left
	want(t, find(t, s.pool, "standstills", Config{}), Fine)

	exec(t, s.pool, `UPDATE penstock.instance SET state = 'unhealthy', reason = 'connection refused'`)
	s.sampled(0)
	want(t, find(t, s.pool, "standstills", Config{}), Critical, "none of the 1 instances of model m takes calls", "connection refused")
	exec(t, s.pool, `UPDATE penstock.instance SET state = 'ready', reason = NULL`)

	exec(t, s.pool, `SELECT penstock.pause_queue($1, 'a test', 'ada')`, name)
	s.sampled(0)
	want(t, find(t, s.pool, "standstills", Config{}), Fine)
	exec(t, s.pool, `SELECT penstock.resume_queue($1, 'a test', 'ada')`, name)

	exec(t, s.pool, `SELECT penstock.throttle($1, '1 minute', reason => '429')`, name)
	s.sampled(0)
	want(t, find(t, s.pool, "standstills", Config{}), Fine)
	exec(t, s.pool, `DELETE FROM penstock.throttle`)

	// What is meant for two flows hides nothing: the one has a lower priority and is paused, the other is the oldest and
	// throttled. An entry of a priority below the queue's stands still as any other.
	low := int16(0)
	for _, p := range []invalidation.Push{{Flow: "acme", Priority: &low}, {Flow: "beta"}} {
		p.Payload = []byte(`{}`)
		if _, err := s.queue.Push(t.Context(), p); err != nil {
			t.Fatal(err)
		}
	}
	exec(t, s.pool, fmt.Sprintf(`UPDATE penstock.%s SET created_at = now() - interval '3 minutes' WHERE flow IN ('acme', 'beta')`,
		pgx.Identifier{"entry_" + name}.Sanitize()))
	exec(t, s.pool, `SELECT penstock.pause('flow', 'acme'), penstock.throttle($1, '1 hour', 'beta', '429')`, name)
	s.sampled(0)
	want(t, find(t, s.pool, "standstills", Config{}), Critical, "3 entries of queue "+name+" wait, the first for 2 m")
	exec(t, s.pool, `SELECT penstock.pause('flow', '')`)
	s.sampled(0)
	want(t, find(t, s.pool, "standstills", Config{}), Fine)
	exec(t, s.pool, `SELECT penstock.resume('flow', 'acme')`)
	s.sampled(0)
	want(t, find(t, s.pool, "standstills", Config{}), Critical, "the first for 3 m")

	// A run that lasts is no standstill.
	lock := `INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, flow, priority, entry_count, last_entry_id, claimed_at, pos, cost)
	         VALUES ($1, '#999', 999, $2, 1, '', 1, 1, 999, now() - interval '20 seconds', 1, 1)`
	exec(t, s.pool, lock, s.queue.ID, live)
	s.sampled(0)
	want(t, find(t, s.pool, "standstills", Config{}), Fine)
	exec(t, s.pool, `UPDATE penstock.lock SET node_id = $1`, dead)
	want(t, find(t, s.pool, "standstills", Config{}), Critical)
}

// However many flows are kept back on purpose, one that waits for nothing is named.
func TestFlowsKeptBackHideNoStandstill(t *testing.T) {
	s := newStandstill(t)
	name := s.queue.Name
	const most = 130 // more flows than heads are read, and than are explained
	pushes := []invalidation.Push{{Payload: []byte(`{}`), Flow: "last"}}
	for i := range most {
		pushes = append(pushes, invalidation.Push{Payload: []byte(`{}`), Flow: fmt.Sprint("flow-", i)})
	}
	if _, err := s.queue.Push(t.Context(), pushes...); err != nil {
		t.Fatal(err)
	}
	exec(t, s.pool, `SELECT penstock.cancel_entry($1, 'a test', 'ada')`, s.entry)
	exec(t, s.pool, fmt.Sprintf(`UPDATE penstock.%s SET created_at = now() - interval '2 hours' * CASE flow WHEN 'last' THEN 1 ELSE 24 END`,
		pgx.Identifier{"entry_" + name}.Sanitize()))
	s.sampled(0)
	named := func() {
		t.Helper()
		want(t, find(t, s.pool, "standstills", Config{}), Critical, "entries of queue "+name+" wait, the first for 2 h")
	}

	exec(t, s.pool, `SELECT penstock.throttle($1, '1 hour', 'flow-' || i, '429') FROM generate_series(0, $2 - 1) i`, name, most)
	named()
	exec(t, s.pool, `DELETE FROM penstock.throttle`)

	exec(t, s.pool, `SELECT penstock.create_queue('other'), penstock.set_limit('few', '{"max_units": 1, "per_flow": true}'),
		penstock.use_limit('other', 'few'), penstock.use_limit($1, 'few')`, name)
	exec(t, s.pool, `
		INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, flow, priority, entry_count, last_entry_id, claimed_at, pos, cost)
		SELECT q.id, '#' || 900 + n, 900 + n, $1, 1, 'flow-' || n, 1, 1, 900 + n, now(), 1, 1
		  FROM penstock.queue q, generate_series(0, $2 - 1) n WHERE q.name = 'other'`, dead, most)
	named()
	exec(t, s.pool, `DELETE FROM penstock.lock`)
	exec(t, s.pool, `SELECT penstock.use_limit($1, 'few', 0)`, name)

	exec(t, s.pool, `SELECT penstock.set_limit('slow', '{"rate": 0.0001, "burst": 1, "per_flow": true}'), penstock.use_limit($1, 'slow')`, name)
	exec(t, s.pool, `INSERT INTO penstock.bucket (limit_id, flow, units, at)
		SELECT l.id, 'flow-' || i, 0, now() FROM penstock."limit" l, generate_series(0, $1 - 1) i WHERE l.name = 'slow'`, most)
	named()
	exec(t, s.pool, `INSERT INTO penstock.bucket (limit_id, flow, units, at) SELECT l.id, 'last', 0, now() FROM penstock."limit" l WHERE l.name = 'slow'`)
	want(t, find(t, s.pool, "standstills", Config{}), Fine)
}

// The leader asks for all degradations in one statement every few seconds: however many flows are kept back, that one does
// not read more for it.
func TestFlowsKeptBackDoNotDelayTheDegradations(t *testing.T) {
	s := newStandstill(t)
	exec(t, s.pool, `SELECT penstock.set_limit('slow', '{"rate": 0.0001, "burst": 1, "per_flow": true}')`)
	flows := 0
	more := func(n int) { // of which each is throttled, and has spent its rate
		exec(t, s.pool, `
WITH more AS (SELECT i, 'flow-' || lpad(i::text, 8, '0') AS flow FROM generate_series($2::int + 1, $2 + $3::int) i),
throttled AS (INSERT INTO penstock.throttle (queue_id, flow, queue_wide, until, reason)
              SELECT $1, flow, false, now() + interval '1 hour', '429' FROM more),
spent AS (INSERT INTO penstock.bucket (limit_id, flow, units, at)
          SELECT l.id, flow, 0, now() FROM more, penstock."limit" l WHERE l.name = 'slow')
INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id) SELECT $1, 1, flow, 1000000 + i, 1000000 + i FROM more`,
			s.queue.ID, flows, n)
		flows += n
	}
	reads := func() (n int) { // pages, of the second call in a session: the first one reads the catalogs
		conn, err := s.pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Release()
		for range 2 {
			var answer []struct {
				Plan struct {
					Hit  int `json:"Shared Hit Blocks"`
					Read int `json:"Shared Read Blocks"`
				}
			}
			if err := conn.QueryRow(t.Context(), `EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON)
				SELECT penstock.head_reasons(q) FROM penstock.queue q WHERE q.id = `+fmt.Sprint(s.queue.ID)).Scan(&answer); err != nil {
				t.Fatal(err)
			}
			n = answer[0].Plan.Hit + answer[0].Plan.Read
		}
		return n
	}
	exec(t, s.pool, `SELECT penstock.cancel_entry($1, 'a test', 'ada')`, s.entry)
	for _, keptBack := range []struct{ by, change string }{
		{"throttles", `SELECT $1::text`},
		{"a rate", `WITH over AS (DELETE FROM penstock.throttle) SELECT penstock.use_limit($1, 'slow')`},
	} {
		more(2500)
		exec(t, s.pool, keptBack.change, s.queue.Name)
		few := reads()
		more(10000)
		exec(t, s.pool, `DELETE FROM penstock.throttle WHERE $1 = 'a rate'`, keptBack.by)
		if many := reads(); many > 2*few {
			t.Errorf("kept back by %s, 12,500 flows cost %d pages, and 2,500 flows %d", keptBack.by, many, few)
		}
		exec(t, s.pool, `TRUNCATE penstock.ready`)
	}
}
