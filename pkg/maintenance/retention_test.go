package maintenance_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/maintenance"
)

func TestOldPartitionsAreDroppedAndNewOnesMade(t *testing.T) {
	f := newFleet(t, pgtest.New(t), invalidation.Config{ResultRetention: 24 * time.Hour})
	f.exec(`CREATE TABLE penstock.result_20200101 PARTITION OF penstock.result FOR VALUES FROM ('2020-01-01Z') TO ('2020-01-02Z')`)
	f.exec(`CREATE TABLE penstock.failure_20200101 PARTITION OF penstock.failure FOR VALUES FROM ('2020-01-01Z') TO ('2020-01-02Z')`)
	f.exec(`INSERT INTO penstock.uniqueness (queue_id, key, entry_id) SELECT $1, n::text, -n FROM generate_series(1, 2500) n`, f.q.ID)
	duty := maintenance.NewRetention(f.pool, &term{db: f.pool}, maintenance.Config{Pause: 10 * time.Millisecond, RetentionPause: 20 * time.Millisecond})
	run(t, duty)
	partitions := func(pattern string) int {
		return f.count(`SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relnamespace = 'penstock'::regnamespace AND relname ~ $1`, pattern)
	}
	eventually(t, "the old partitions are gone", func() bool { return partitions(`_20200101$`) == 0 })
	eventually(t, "there are partitions for a week", func() bool { return partitions(`^(result|failure)_[0-9]{8}$`) >= 2*7 })
	eventually(t, "unique keys without an entry are swept", func() bool { return f.count(`SELECT count(*) FROM penstock.uniqueness`) == 0 })
	eventually(t, "all of it is counted", func() bool {
		s := duty.Status()
		return s.Dropped == 2 && s.Made >= 14 && s.Tidied >= 2500 && s.Behind == 0
	})
}

// The audit is only ever added to, but for whole days beyond its retention, 30 at least, by this duty.
func TestAuditIsKeptForItsRetentionAndPrunedByTheDutyAlone(t *testing.T) {
	f := newUsualFleet(t)
	f.exec(`INSERT INTO penstock.audit (at, actor, verb, object) SELECT now() - d * interval '1 day', 'ada', 'pause_queue', 'queue ' || d FROM unnest(ARRAY[500, 401, 399, 31, 29, 0]) d`)
	kept := func() int { return f.count(`SELECT count(*) FROM penstock.audit WHERE actor = 'ada'`) }
	if _, err := f.pool.Exec(t.Context(), `DELETE FROM penstock.audit WHERE object = 'queue 500'`); err == nil {
		t.Error("old audit rows could be deleted")
	}
	duty := maintenance.NewRetention(f.pool, &term{db: f.pool}, maintenance.Config{Pause: 10 * time.Millisecond, RetentionPause: 20 * time.Millisecond, AuditRetention: 400 * 24 * time.Hour})
	run(t, duty)
	eventually(t, "rows past the retention are gone", func() bool { return kept() == 4 })
	eventually(t, "the audit says so", func() bool {
		return f.count(`SELECT count(*) FROM penstock.audit WHERE actor = session_user AND verb = 'prune_audit' AND detail->>'rows' = '2'`) == 1
	})
	if n := f.count(`SELECT penstock.prune_audit('1 second', 100)`); n != 2 || kept() != 2 {
		t.Errorf("a retention of a second deleted %d and left %d, want those of 30 days kept", n, kept())
	}
	if _, err := f.pool.Exec(t.Context(), `SELECT set_config('penstock.pruning', 'audit', false); DELETE FROM penstock.audit WHERE actor = 'ada'`); err == nil || kept() != 2 {
		t.Errorf("a role that knows the setting could delete young audit rows (%v)", err)
	}
	f.exec(`INSERT INTO penstock.audit (at, actor, verb, object) SELECT now() - interval '40 days', 'bob', 'pause_queue', 'queue' FROM generate_series(1, 3)`)
	eraser := fmt.Sprint("eraser_", os.Getpid()) // roles are the server's
	f.exec(`CREATE ROLE ` + eraser + `; GRANT USAGE ON SCHEMA penstock TO ` + eraser + `; GRANT SELECT, DELETE ON penstock.audit TO ` + eraser)
	t.Cleanup(func() { _, _ = f.pool.Exec(context.Background(), `DROP OWNED BY `+eraser+`; DROP ROLE `+eraser) })
	erase := `BEGIN; SET LOCAL ROLE ` + eraser + `; SELECT set_config('penstock.pruning', 'audit', true); DELETE FROM penstock.audit WHERE actor = 'bob'; COMMIT`
	if _, err := f.pool.Exec(t.Context(), erase); err == nil || f.count(`SELECT count(*) FROM penstock.audit WHERE actor = 'bob'`) != 3 {
		t.Errorf("a role that may delete and not insert left no trace (%v)", err)
	}
	f.exec(`GRANT EXECUTE ON FUNCTION penstock.audit_log TO ` + eraser)
	f.exec(erase)
	if n := f.count(`SELECT count(*) FROM penstock.audit WHERE verb = 'prune_audit' AND actor = session_user AND detail->>'rows' = '3'`); n != 1 {
		t.Error("old audit rows were deleted with the setting, and the audit has no record of it")
	}
}

func TestRetentionThatIsHeldUpSaysHowFarItIsBehind(t *testing.T) {
	f := newUsualFleet(t)
	f.exec(`CREATE TABLE penstock.result_20200101 PARTITION OF penstock.result FOR VALUES FROM ('2020-01-01Z') TO ('2020-01-02Z')`)
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	if _, err := tx.Exec(t.Context(), `SELECT FROM penstock.result_20200101`); err != nil {
		t.Fatal(err)
	}
	duty := maintenance.NewRetention(f.pool, &term{db: f.pool}, maintenance.Config{Pause: 10 * time.Millisecond, RetentionPause: 20 * time.Millisecond})
	run(t, duty)
	eventually(t, "the duty is years behind", func() bool { return duty.Status().Behind > 365*24*time.Hour })
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the duty has caught up", func() bool { return duty.Status().Behind == 0 && duty.Status().Dropped == 1 })
}

// logged tells of each line that a duty logs.
type logged chan string

func (l logged) Write(line []byte) (int, error) {
	select {
	case l <- string(line):
	default:
	}
	return len(line), nil
}

// A clock that jumps ahead for a moment makes nothing old.
func TestRetentionDeletesNothingByAClockThatHasJumped(t *testing.T) {
	f := newFleet(t, pgtest.New(t), invalidation.Config{ResultRetention: 24 * time.Hour})
	f.exec(`CREATE TABLE penstock.result_20200101 PARTITION OF penstock.result FOR VALUES FROM ('2020-01-01Z') TO ('2020-01-02Z')`)
	f.exec(`INSERT INTO penstock.result (queue_id, entry_id, outcome, finished_at, created_at, attempt)
		SELECT $1, 1, 'done', at, at, 1 FROM (SELECT '2020-01-01 12:00Z'::timestamptz AS at) x`, f.q.ID)
	clock := &duty.Clock{} // the time that has passed is that of five hours ago: the database's clock is ahead
	if err := clock.Check(time.Now().Add(-5 * time.Hour)); err != nil {
		t.Fatal(err)
	}
	lines := make(logged, 1)
	cfg := maintenance.Config{
		Pause: time.Millisecond, RetentionPause: time.Millisecond, GiveUp: time.Millisecond, Clock: clock,
		Log: slog.New(slog.NewTextHandler(lines, nil)),
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- maintenance.NewRetention(f.pool, &term{db: f.pool}, cfg).Run(ctx) }()
	left := func() int { return f.count(`SELECT count(*) FROM penstock.result WHERE entry_id = 1`) }
	for range 5 { // passes
		select {
		case line := <-lines:
			if !strings.Contains(line, "clock") {
				t.Errorf("logged: %s", line)
			}
		case err := <-ended:
			t.Fatalf("the duty ended its term: %v", err)
		case <-time.After(time.Minute):
			t.Fatalf("no pass said that the clock has jumped; %d of 1 results are left", left())
		}
	}
	cancel()
	if err := <-ended; err != nil || left() != 1 {
		t.Errorf("the duty ended with %v, and %d of 1 results are left", err, left())
	}
	cfg.Clock = &duty.Clock{}
	run(t, maintenance.NewRetention(f.pool, &term{db: f.pool}, cfg))
	eventually(t, "the old result is gone by a clock that is believed", func() bool { return left() == 0 })
}

// One table that cannot be swept ends no term, and keeps no other from being swept.
func TestSweepThatIsRefusedKeepsNoOtherFromItsWork(t *testing.T) {
	f := newUsualFleet(t)
	f.exec(`INSERT INTO penstock.uniqueness (queue_id, key, entry_id) VALUES ($1, 'gone', 1)`, f.q.ID)
	f.exec(`INSERT INTO penstock.progress (queue_id, entry_id, token) VALUES ($1, 1, 1)`, f.q.ID)
	f.exec(`CREATE FUNCTION public.no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''no''; END'`)
	f.exec(`CREATE TRIGGER no BEFORE DELETE ON penstock.uniqueness FOR EACH ROW EXECUTE FUNCTION public.no()`)
	ctx, cancel := context.WithCancel(t.Context())
	duty := maintenance.NewRetention(f.pool, &term{db: f.pool}, maintenance.Config{Pause: time.Millisecond, RetentionPause: time.Millisecond, GiveUp: time.Millisecond})
	ended := make(chan error, 1)
	go func() { ended <- duty.Run(ctx) }()
	eventually(t, "progress of an entry that is gone is swept", func() bool { return f.count(`SELECT count(*) FROM penstock.progress`) == 0 })
	f.exec(`DROP TRIGGER no ON penstock.uniqueness`)
	eventually(t, "the refused sweep is tried again", func() bool { return f.count(`SELECT count(*) FROM penstock.uniqueness`) == 0 })
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("the duty ended its term: %v", err)
	}
}

// A long statement takes the term's lock after its work: it commits only if the term still holds
// then.
func TestDutiesWhoseTermEndsWhileTheyWorkChangeNothing(t *testing.T) {
	f := newFleet(t, pgtest.New(t), invalidation.Config{Capacity: 100})
	f.exec(`CREATE TABLE penstock.result_20200101 PARTITION OF penstock.result FOR VALUES FROM ('2020-01-01Z') TO ('2020-01-02Z')`)
	f.push(1, "")
	f.exec(`SELECT penstock.start_operation('work', 'cancel', '{"all": true}')`)
	f.exec(`UPDATE penstock.depth SET counted = 77`)
	over := &term{db: f.pool, over: true}
	cfg := maintenance.Config{Pause: time.Millisecond, CountPause: time.Millisecond, GiveUp: 100 * time.Millisecond}
	for what, duty := range map[string]interface{ Run(context.Context) error }{
		"retention": maintenance.NewRetention(f.pool, over, cfg), "operations": maintenance.NewOperations(f.pool, over, cfg),
		"depths": maintenance.NewDepths(f.pool, over, cfg),
	} {
		if err := duty.Run(t.Context()); !errors.Is(err, errOver) {
			t.Errorf("%s: %v, want that the term is over", what, err)
		}
	}
	if n := f.count(`SELECT count(*) FROM penstock.entry, penstock.depth WHERE counted = 77 AND to_regclass('penstock.result_20200101') IS NOT NULL`); n != 1 {
		t.Error("a duty changed something outside its term")
	}
}
