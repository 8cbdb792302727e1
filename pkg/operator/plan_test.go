package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// planned is the part of EXPLAIN's output that the test reads.
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

// small are the tables that are as small as the installation or its work in flight: a page may read them whole.
var small = []string{"queue", "lock", "node", "slot", "instance", "model", "flow_weight", "usage", "leader", "pause", "disabled"}

// The cost of status pages does not depend on the backlog, the failures or the history.
func TestUnracedPagesNeverScanTheBacklog(t *testing.T) {
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
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), fmt.Sprintf(sql, args...)); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	exec(`CREATE TABLE penstock.sample_ever PARTITION OF penstock.sample FOR VALUES FROM (MINVALUE) TO (MAXVALUE)`)
	pages := map[string][2]string{
		"queues":        {queuesSQL, `NULL, true, '', 51`},
		"last":          {`SELECT (penstock.last_sample($1, $2)).at`, fmt.Sprintf(`%d, '1 microsecond'`, q.ID)}, // as without a leader
		"samples":       {fmt.Sprintf(samplesSQL, "sample"), `'work', '1 minute'`},
		"lanes":         {lanesSQL, `'work', 20`},
		"locks":         {locksSQL, `NULL, NULL, 0, 50`},
		"nodes":         {nodesSQL, `'', 0, NULL, NULL, 50`},
		"node_states":   {nodesOfEachStateSQL, `50`},
		"slots":         {slotsSQL, `NULL, 0, 50`},
		"usage":         {usageSQL, `NULL, '', '', 50`},
		"server":        {serverSQL, ``},
		"trends":        {trendsSQL, `'1 minute', 15`},
		"leader":        {leaderSQL, ``},
		"gpu":           {gpuSQL, ``},
		"shares":        {queueSharesSQL, ``},
		"failing":       {failedSinceSQL, `'1 minute', 100`},
		"runs":          {recentRunsSQL, fmt.Sprintf(`%d, 200`, q.ID)},
		"meta":          {runMetaSQL, `'work', 5`},
		"held":          {heldKeysSQL, fmt.Sprintf(`%d, ARRAY['a', 'b']`, q.ID)},
		"causes":        {causeStepsSQL, fmt.Sprintf(`%d, 300, 12, 10000, 200`, q.ID)},
		"tables":        {tablesSQL, `50`},
		"hooks":         {receiversSQL, `'', 50`},
		"parts":         {partitionsSQL, `500`},
		"pools":         {poolsSQL, `'', 50`},
		"criticalities": {flowCriticalitiesSQL, `'', 50`},
		"calls":         {callbacksSQL, `5, 3`},
		"minutes":       {scaleMinutesSQL, `'llama', '1 hour', NULL, 50`},

		"suspects":       {suspectsSQL, `0, 50`},
		"models":         {modelsSQL, `'', 50`},
		"instances":      {instancesSQL, `NULL, '', '', 50`},
		"batches":        {batchesSQL, `NULL, NULL, 25, NULL`},
		"operations":     {operationsSQL, `NULL, false, 25, NULL`},
		"run_times":      {runTimesSQL, `ARRAY['work']`},
		"instance_times": {instanceTimesSQL, `NULL, 50`},
		"cron_schedules": {cronSchedulesSQL, `NULL, '', 100`},
		"audit_object":   {auditOfObjectSQL, `NULL, NULL, 'work', NULL, NULL, 10`},
		"audit_actor":    {auditOfActorSQL, `'nobody', NULL, NULL, NULL, NULL, 10`},
		"explain":        {`SELECT penstock.entry_reasons(e) FROM penstock.entry e WHERE queue_id = $1 AND id = 0`, fmt.Sprint(q.ID)},
	}
	for name, f := range map[string]EntryFilter{
		"entries": {}, "initial": {State: "initial"}, "disabled": {State: "disabled"}, "computing": {State: "computing"},
		"key": {LockKey: "no such key"}, "name": {Name: "no such name"}, "initial_key": {State: "initial", LockKey: "no such key"},
	} {
		f.Queue = "work"
		sql, values := f.statement()
		pages[name] = [2]string{sql, fmt.Sprintf(`%d, 0, 50`, q.ID) + strings.Repeat(`, 'no such value'`, len(values))}
	}
	exec(`INSERT INTO penstock.entry_work (id, queue_id, status, priority, payload) VALUES (0, %d, 'pending', -1, '{}')`, q.ID)
	for name, page := range pages {
		exec(`PREPARE %s AS %s`, name, page[0])
	}
	base := time.Now().Format(time.RFC3339Nano) // one for all rows: by the clock, two of them may be of one microsecond
	fill := func(from, to int) {
		exec(`INSERT INTO penstock.entry_work (id, queue_id, status, priority, payload) SELECT n, %d, 'pending', 1, '{}' FROM generate_series(%d, %d) n`, q.ID, from, to)
		exec(`INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id) SELECT %d, 1, '', n, n FROM generate_series(%d, %d) n`, q.ID, from, to)
		exec(`INSERT INTO penstock.sample (queue_id, at, initial, pending, disabled, computing, failed, estimated, serving, accepted, gone, dead_tuples)
		      SELECT %d, timestamptz '%s' - n * interval '10 ms', 0, 1, 0, 0, 0, false, 0, 1, 0, 0 FROM generate_series(%d, %d) n`, q.ID, base, from, to)
		// The newest one is of now, however long the rows before it took: else the list of queues counts them.
		exec(`INSERT INTO penstock.sample (queue_id, at, initial, pending, disabled, computing, failed, estimated, serving, accepted, gone, dead_tuples)
		      VALUES (%d, clock_timestamp(), 0, 1, 0, 0, 0, false, 0, 1, 0, 0)`, q.ID)
		exec(`INSERT INTO penstock.failure (queue_id, entry_id, created_at, failed_at, priority, attempt, crashes, flow, class, error, fingerprint, payload)
		      SELECT %d, n, now(), now() - interval '1 hour', 1, 1, 0, '', 'a', 'b', 'c', '{}' FROM generate_series(%d, %d) n`, q.ID, from, to)
		exec(`INSERT INTO penstock.result (entry_id, created_at, queue_id, run_ms, attempt, outcome, meta)
		      SELECT n, now(), %d, n, 1, 'done', '{"instance": "s1"}' FROM generate_series(%d, %d) n`, q.ID, from, to)
		exec(`INSERT INTO penstock.operation (queue_id, verb, filter, per_second, actor, reason, matched, until_id, status)
		      SELECT %d, 'cancel', '{"all": true}', 1000, 'ann', '', 1, 1, 'done' FROM generate_series(%d, %d) n`, q.ID, from, to/10)
		exec(`INSERT INTO penstock.cron_job (queue_id, name, spec) SELECT %d, 'job' || n, '@daily' FROM generate_series(%d, %d) n`, q.ID, from, to/10)
		exec(`INSERT INTO penstock.cron_firing (job_id, nominal_at, fired_at, entry_id, manual)
		      SELECT (SELECT min(id) FROM penstock.cron_job), now() - n * interval '1 minute', now(), n, false FROM generate_series(%d, %d) n`, from, to)
		exec(`INSERT INTO penstock.audit (actor, verb, object) SELECT 'ann', 'cancel_entry', 'entry ' || n FROM generate_series(%d, %d) n`, from, to)
		exec(`INSERT INTO penstock.batch (queue_id, name, actor) SELECT %d, 'b', 'ann' FROM generate_series(%d, %d) n`, q.ID, from, to/10)
	}
	read := func() map[string]int {
		buffers := map[string]int{}
		for name, page := range pages {
			var p planned
			call := name
			if page[1] != "" {
				call += `(` + page[1] + `)`
			}
			for range 2 { // the first sets hint bits
				var text []byte
				if err := conn.QueryRow(t.Context(), `EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE `+call).Scan(&text); err != nil {
					t.Fatalf("explain %s: %v", name, err)
				}
				var answer []struct{ Plan planned }
				if err := json.Unmarshal(text, &answer); err != nil {
					t.Fatal(err)
				}
				p = answer[0].Plan
			}
			for _, table := range p.scans() {
				if !slices.Contains(small, table) {
					t.Errorf("%s scans %s", name, table)
				}
			}
			buffers[name] = p.Hit + p.Read
		}
		return buffers
	}
	fill(1, 10_000)
	few := read()
	fill(10_001, 110_000)
	many := read() // statistics may say that everything is empty
	exec(`ANALYZE`)
	analyzed := read()
	for name := range pages {
		t.Logf("%-8s 10k: %5d buffers, 110k: %5d, after ANALYZE: %5d", name, few[name], many[name], analyzed[name])
		if most := max(many[name], analyzed[name]); most > few[name]*3/2+50 {
			t.Errorf("%s reads %d buffers at 110k entries, %d at 10k", name, most, few[name])
		}
	}
}
