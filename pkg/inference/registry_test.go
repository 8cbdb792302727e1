package inference

import (
	"regexp"
	"slices"
	"testing"

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
