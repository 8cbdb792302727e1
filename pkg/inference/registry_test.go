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
