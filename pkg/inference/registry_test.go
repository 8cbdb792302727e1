package inference

import (
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/pkg/worker"
)

// Each process polls the registry once a second, and each poll reads the load of all instances: of 20,000, a call of a
// function for each took the database 90 ms.
func TestPollOfRegistryCallsNoFunctionForAnInstance(t *testing.T) {
	b := newBed(t, worker.Model{})
	call := regexp.MustCompile(`\bpenstock\.\w+\(`)
	for name, sql := range map[string]string{"version": versionSQL, "catalog": catalogSQL} {
		rows, err := b.pool.Query(b.ctx, "EXPLAIN (VERBOSE, COSTS OFF) "+sql)
		b.must(err)
		plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
		b.must(err)
		if slices.ContainsFunc(plan, call.MatchString) {
			t.Errorf("%s: the plan calls a function:\n%q", name, plan)
		}
	}
}

// The version of models and instances is one row, which a change locks until its commit: a probe that finds a worker
// busy, or ready again, does not wait for those of other instances.
func TestBusyAndReadyAgainIsNoChangeOfInstance(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.instance("a", nowhere, 1)
	version := func() int { return b.count(`SELECT version FROM penstock.inference_version`) }
	before := version()
	for _, c := range []struct {
		state   string
		changes bool
	}{
		{"ready", true}, {"busy", false}, {"ready", false}, {"unhealthy", true}, {"busy", true}, {"starting", true},
	} {
		_, err := b.pool.Exec(b.ctx, `UPDATE penstock.instance SET state = $1`, c.state)
		b.must(err)
		after := version()
		if changed := after != before; changed != c.changes {
			t.Errorf("state %s: changed is %v, want %v", c.state, changed, c.changes)
		}
		before = after
	}
}

// A slow database must not end a quarantine early: calls would be sent to an instance that fails them.
func TestAQuarantineIsNoShorterWhereItsReadingWaited(t *testing.T) {
	b := newBed(t, worker.Model{})
	id := b.instance("a", nowhere, 1)
	_, err := b.pool.Exec(b.ctx, `SELECT penstock.quarantine_instance($1, '1 hour', 'it fails')`, id)
	b.must(err)
	gate, err := b.pool.Begin(b.ctx)
	b.must(err)
	_, err = gate.Exec(b.ctx, `LOCK TABLE penstock.model`)
	b.must(err)
	r := NewRegistry(b.pool, worker.Config{}, 0, quiet)
	read := make(chan error, 1)
	go func() { read <- r.Refresh(b.ctx) }()
	b.await(1, `SELECT count(*) FROM pg_stat_activity
	             WHERE $1::int = ANY (pg_blocking_pids(pid)) AND query_start < clock_timestamp() - interval '50 ms'`,
		gate.Conn().PgConn().PID())
	b.must(gate.Commit(b.ctx))
	b.must(<-read)
	var until time.Time
	b.must(b.pool.QueryRow(b.ctx, `SELECT quarantined_until FROM penstock.instance WHERE id = $1`, id).Scan(&until))
	if r.Endpoint(id).Usable(until.Add(-10 * time.Millisecond)) {
		t.Error("the instance takes calls before its quarantine ends")
	}
}
