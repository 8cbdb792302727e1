package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

func newPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: pgtest.DSN(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func exec(t *testing.T, db postgres.DB, sql string, args ...any) {
	t.Helper()
	if _, err := db.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

// find examines the database and returns what one check found.
func find(t *testing.T, db postgres.DB, check string, cfg Config) Finding {
	t.Helper()
	findings, err := Examine(t.Context(), db, cfg)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(findings, func(f Finding) bool { return f.Check == check })
	if i < 0 {
		t.Fatalf("there is no check %q among %v", check, findings)
	}
	return findings[i]
}

// want fails unless the finding has this severity and says each of the texts; whatever is not fine gives advice.
func want(t *testing.T, f Finding, s Severity, says ...string) {
	t.Helper()
	all := f.Summary + "\n" + strings.Join(f.Details, "\n") + "\n" + f.Advice
	if f.Severity != s {
		t.Errorf("%s is %s, want %s: %s", f.Check, f.Severity, s, all)
	}
	if f.Severity != Fine && f.Advice == "" {
		t.Errorf("%s says nothing about what to do: %s", f.Check, all)
	}
	for _, text := range says {
		if !strings.Contains(all, text) {
			t.Errorf("%s does not say %q: %s", f.Check, text, all)
		}
	}
}

func TestAFreshDatabaseNeedsNothingButALeader(t *testing.T) {
	findings, err := Examine(t.Context(), newPool(t), Config{})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range findings {
		switch f.Check {
		case "leader":
			want(t, f, Warning, "no leader leads")
		case "durability", "connections": // of the server that the tests share
		default:
			want(t, f, Fine)
		}
	}
	if len(findings) != len(checks)-1 {
		t.Errorf("%d findings of %d checks without that of the schema", len(findings), len(checks)-1)
	}
}

func TestAsynchronousCommitIsCritical(t *testing.T) {
	pool := newPool(t)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	exec(t, tx, `SET LOCAL synchronous_commit = off`)
	want(t, find(t, tx, "durability", Config{}), Critical, "synchronous_commit off", "fencing tokens")

	exec(t, pool, `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off', current_database()); END $$`)
	f := find(t, pool, "durability", Config{})
	if !strings.Contains(strings.Join(f.Details, " "), "synchronous_commit=off of every role in database") {
		t.Errorf("the database's own setting is not named: %+v", f)
	}
}

// A crash of the server empties them: each partition of the entries by itself, and a sequence begins anew.
func TestWhatIsUnloggedIsCritical(t *testing.T) {
	pool := newPool(t)
	exec(t, pool, `SELECT penstock.create_queue('work'); ALTER TABLE penstock.entry_work SET UNLOGGED;
		ALTER SEQUENCE penstock.token_seq SET UNLOGGED`)
	want(t, find(t, pool, "durability", Config{}), Critical, "penstock.entry_work is unlogged", "penstock.token_seq is unlogged",
		"SET LOGGED")
}

func TestSerializableByDefaultIsCritical(t *testing.T) {
	pool := newPool(t)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	exec(t, conn, `SET default_transaction_isolation = 'serializable'`)
	want(t, find(t, conn, "isolation", Config{}), Critical, "read committed")
	exec(t, conn, `RESET default_transaction_isolation`)
}

func TestAPublicSchemaOpenToAllIsAWarning(t *testing.T) {
	pool := newPool(t)
	want(t, find(t, pool, "public schema", Config{}), Fine)
	exec(t, pool, `GRANT CREATE ON SCHEMA public TO PUBLIC`)
	want(t, find(t, pool, "public schema", Config{}), Warning, "REVOKE CREATE")
}

// Tools of change data capture publish all tables by default.
func TestAPublicationThatKeepsRowsFromBeingDeletedIsCritical(t *testing.T) {
	pool := newPool(t)
	exec(t, pool, `SELECT penstock.make_partition('result', 1); CREATE TABLE public.t (); CREATE PUBLICATION mine FOR TABLE public.t, penstock.entry`)
	exec(t, pool, `CREATE PUBLICATION arrivals FOR ALL TABLES WITH (publish = 'insert')`)
	want(t, find(t, pool, "publications", Config{}), Fine)
	exec(t, pool, `CREATE PUBLICATION everything FOR ALL TABLES`)
	f := find(t, pool, "publications", Config{})
	want(t, f, Critical, "publication everything: failure, flow_weight, result", "55000")
	if _, err := pool.Exec(t.Context(), `DELETE FROM penstock.result`); postgres.Code(err) != "55000" || len(f.Details) != 1 {
		t.Errorf("a delete ends with %v, and named are %q", err, f.Details)
	}
}

func TestClockSkewIsMeasuredAgainstTheDatabase(t *testing.T) {
	pool := newPool(t)
	for skew, says := range map[time.Duration]string{time.Minute: "ahead of the database's", -time.Minute: "behind the database's"} {
		f := find(t, pool, "clock", Config{Now: func() time.Time { return time.Now().Add(skew) }})
		want(t, f, Warning, "time service", says)
	}
}

func TestHorizonHoldersAreNamedWithTheWayToEndThem(t *testing.T) {
	pool := newPool(t)
	tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	exec(t, tx, `SELECT count(*) FROM penstock.queue`)
	// No test waits a minute for a transaction to be old: the same statement finds it with the age left out.
	aged := strings.ReplaceAll(horizonSQL, "interval '1 minute'", "interval '0 seconds'")
	aged = strings.ReplaceAll(aged, "interval '10 minutes'", "interval '0 seconds'")
	rows, err := pool.Query(t.Context(), aged)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	var line string
	var critical bool
	if _, err = pgx.ForEachRow(rows, []any{&line, &critical}, func() error {
		found = append(found, fmt.Sprint(line, " ", critical))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	pid := fmt.Sprintf("SELECT pg_terminate_backend(%d) true", tx.Conn().PgConn().PID())
	if !strings.Contains(strings.Join(found, "\n"), pid) {
		t.Errorf("%q is not among %q", pid, found)
	}
}

func TestStuckLocksLateEntriesAndUnservedQueuesAreFound(t *testing.T) {
	pool := newPool(t)
	q, err := invalidation.Create(t.Context(), pool, "work", invalidation.Config{Application: "gpu"})
	if err != nil {
		t.Fatal(err)
	}
	push := invalidation.Push{Payload: []byte(`{}`)}
	if _, err := q.Push(t.Context(), push, push); err != nil {
		t.Fatal(err)
	}
	node := invalidation.Node{ID: 7, Name: "gpu-1", Application: "gpu", Lease: 10 * time.Second, Queues: []int32{q.ID}}
	if err := invalidation.Register(t.Context(), pool, node); err != nil {
		t.Fatal(err)
	}
	if _, err := q.Claim(t.Context(), invalidation.ClaimRequest{Node: 7, Lane: invalidation.Lane{Priority: 1}, Limit: 1}); err != nil {
		t.Fatal(err)
	}
	want(t, find(t, pool, "stuck locks", Config{}), Fine)
	want(t, find(t, pool, "unserved queues", Config{}), Fine)
	want(t, find(t, pool, "late entries", Config{}), Fine)

	exec(t, pool, `UPDATE penstock.node SET beat_at = now() - interval '20 seconds'`)
	want(t, find(t, pool, "stuck locks", Config{}), Warning, "queue work, key #", "silent for 2")
	exec(t, pool, `UPDATE penstock.node SET beat_at = now() - interval '2 minutes'`)
	want(t, find(t, pool, "stuck locks", Config{}), Critical, "silent for 2 m ")
	exec(t, pool, `UPDATE penstock.entry SET created_at = now() - interval '1 minute'`)
	want(t, find(t, pool, "unserved queues", Config{}), Warning, "queue work of application gpu: the first entry has waited 1 m ")
	exec(t, pool, `UPDATE penstock.entry SET created_at = now() - interval '1 hour'`)
	want(t, find(t, pool, "unserved queues", Config{}), Critical)

	push.DueAt = time.Now().Add(time.Hour)
	if _, err := q.Push(t.Context(), push); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `UPDATE penstock.entry SET due_at = now() - interval '20 seconds' WHERE status = 'initial'`)
	want(t, find(t, pool, "late entries", Config{}), Warning, "came due 2")
	exec(t, pool, `UPDATE penstock.entry SET due_at = now() - interval '2 minutes' WHERE status = 'initial'`)
	want(t, find(t, pool, "late entries", Config{}), Critical)

	exec(t, pool, `SELECT penstock.pause_queue('work', 'a test', 'ada')`)
	want(t, find(t, pool, "unserved queues", Config{}), Fine)
	want(t, find(t, pool, "pauses", Config{}), Fine)
	exec(t, pool, `UPDATE penstock.queue SET paused_at = now() - interval '3 days'`)
	exec(t, pool, `SELECT penstock.pause('flow', 'acme', NULL, 'a test', 'bob')`)
	exec(t, pool, `UPDATE penstock.pause SET created_at = now() - interval '2 days'`)
	want(t, find(t, pool, "pauses", Config{}), Warning, "queue work: by ada 3 d 0 h ago, a test", "flow acme: by bob 2 d 0 h ago")
}

func TestALeaderThatFellSilentIsCritical(t *testing.T) {
	pool := newPool(t)
	exec(t, pool, `INSERT INTO penstock.leader (name, holder, elected_at, renewed_at) VALUES ('main', 'a', now(), now())`)
	want(t, find(t, pool, "leader", Config{}), Fine, "a leads")
	exec(t, pool, `UPDATE penstock.leader SET renewed_at = now() - interval '5 minutes'`)
	want(t, find(t, pool, "leader", Config{}), Critical, "fell silent 5 m ", "Start a leader")
}

func TestABrokenInvariantIsCriticalAndManyRowsAreLeftForADeepExamination(t *testing.T) {
	pool := newPool(t)
	q, err := invalidation.Create(t.Context(), pool, "work", invalidation.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := q.Push(t.Context(), invalidation.Push{Payload: []byte(`{}`)}); err != nil {
		t.Fatal(err)
	}
	want(t, find(t, pool, "invariants", Config{}), Fine)
	exec(t, pool, `DELETE FROM penstock.ready`)
	want(t, find(t, pool, "invariants", Config{}), Critical, "a pending entry has a ready row or a lock, or its key is blocked: entry")

	exec(t, pool, `SELECT pg_stat_force_next_flush()`)
	exec(t, pool, `ANALYZE penstock.entry_work`)
	want(t, find(t, pool, "invariants", Config{RowsMax: -1}), Critical)
	tiny := Config{RowsMax: 1}
	exec(t, pool, `INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key) SELECT $1, 1, '', g, 'x' FROM generate_series(1, 50) g`, q.ID)
	exec(t, pool, `ANALYZE penstock.ready`)
	want(t, find(t, pool, "invariants", tiny), Skipped, "--deep")
	exec(t, pool, `SELECT pg_stat_reset()`) // as in a crash
	want(t, find(t, pool, "invariants", tiny), Skipped, "--deep")
	tiny.Deep = true
	want(t, find(t, pool, "invariants", tiny), Critical)
}

func TestAutovacuumSwitchedOffForATableIsCritical(t *testing.T) {
	pool := newPool(t)
	exec(t, pool, `ALTER TABLE penstock.ready SET (autovacuum_enabled = false)`)
	want(t, find(t, pool, "vacuum", Config{}), Critical, "penstock.ready")
}

func TestOutcomesWithoutPartitionsAreAWarning(t *testing.T) {
	pool := newPool(t)
	exec(t, pool, `INSERT INTO penstock.result (entry_id, created_at, queue_id, attempt, outcome) VALUES (1, now(), 1, 0, 'done')`)
	f := find(t, pool, "partitions", Config{})
	if f.Severity != Warning {
		// Partitions were there already: then those for what is to come must be too.
		want(t, f, Fine, "partitions, until")
	}
	later := Config{Now: func() time.Time { return time.Now().AddDate(1, 0, 0) }}
	want(t, find(t, pool, "partitions", later), Warning, "leader")
}

func TestACheckThatFailsIsAFindingAndTheOthersRun(t *testing.T) {
	pool := newPool(t)
	exec(t, pool, `DROP SCHEMA penstock CASCADE`)
	findings, err := Examine(t.Context(), pool, Config{})
	if err != nil || len(findings) != len(checks)-1 {
		t.Fatalf("%d findings (%v)", len(findings), err)
	}
	want(t, find(t, pool, "leader", Config{}), Warning, "could not be checked", "penstock migrate up")
	want(t, find(t, pool, "isolation", Config{}), Fine)
}

func TestWithoutItsSchemaTheDoctorSaysSoOnce(t *testing.T) {
	pool := newPool(t)
	exec(t, pool, `DROP SCHEMA penstock CASCADE`)
	cfg := Config{Schema: func(context.Context) (Finding, error) {
		return Finding{Severity: Warning, Summary: "pending", Advice: "migrate"}, nil
	}}
	findings, err := Examine(t.Context(), pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range findings {
		if f.Severity == Warning && f.Check != "schema" {
			t.Errorf("%s warns of the same: %s", f.Check, f.Summary)
		}
	}
	if Worst(findings) == Fine {
		t.Error("a missing schema is fine")
	}
}

func TestADatabaseThatIsNotThereIsAnErrorNotAFinding(t *testing.T) {
	pool := newPool(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if findings, err := Examine(ctx, pool, Config{}); err == nil || len(findings) > 0 {
		t.Errorf("findings %v, error %v", findings, err)
	}
}

func TestWorstIsTheMostUrgent(t *testing.T) {
	for want, findings := range map[Severity][]Finding{
		Fine:     {{Severity: Fine}, {Severity: Skipped}},
		Warning:  {{Severity: Warning}, {Severity: Fine}},
		Critical: {{Severity: Warning}, {Severity: Critical}, {Severity: Fine}},
	} {
		if got := Worst(findings); got != want {
			t.Errorf("worst of %v is %s", findings, got)
		}
	}
}

// Logical replication copies rows, and no sequence.
func TestSequencesThatAreBehindTheRowsAreNamed(t *testing.T) {
	s := newStandstill(t)
	want(t, find(t, s.pool, "sequences", Config{}), Fine)
	exec(t, s.pool, `SELECT setval('penstock.entry_id_seq', 1, false)`)
	want(t, find(t, s.pool, "sequences", Config{}), Critical, "entry_id_seq is at 0, and there is", "given out again")
	exec(t, s.pool, `SELECT setval('penstock.entry_id_seq', $1)`, s.entry)
	want(t, find(t, s.pool, "sequences", Config{}), Fine)
	exec(t, s.pool, `INSERT INTO penstock.result (queue_id, entry_id, attempt, created_at, outcome) SELECT id, $1, 1, now(), 'done'
	    FROM penstock.queue WHERE name = $2`, s.entry+1, s.queue.Name)
	want(t, find(t, s.pool, "sequences", Config{}), Critical, "entry_id_seq")
}
