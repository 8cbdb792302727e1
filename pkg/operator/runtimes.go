package operator

import "context"

// RunTimes are percentiles of the run times of a queue's last results, in seconds; nil if there are none.
type RunTimes struct {
	Queue string   `json:"queue"`
	Runs  int64    `json:"runs"`
	P50   *float64 `json:"p50_seconds"`
	P95   *float64 `json:"p95_seconds"`
	P99   *float64 `json:"p99_seconds"`
}

// runTimesSQL reads the newest 500 results of each queue in $1.
const runTimesSQL = `
SELECT q.name AS queue, r.runs, r.p50, r.p95, r.p99
  FROM penstock.queue q CROSS JOIN LATERAL (
       SELECT count(x.run_ms) AS runs, percentile_cont(0.50) WITHIN GROUP (ORDER BY x.run_ms) / 1000 AS p50,
              percentile_cont(0.95) WITHIN GROUP (ORDER BY x.run_ms) / 1000 AS p95,
              percentile_cont(0.99) WITHIN GROUP (ORDER BY x.run_ms) / 1000 AS p99
         FROM penstock.last_results(q.id, 500) x) r
 WHERE q.name = ANY ($1)
 ORDER BY q.name`

// RunTimes returns the run times of the queues of these names, by name.
func (d *Database) RunTimes(ctx context.Context, queues ...string) ([]RunTimes, error) {
	return list[RunTimes](ctx, d.db, "run times", runTimesSQL, queues)
}

// InstanceTimes are the run times of the last calls to an instance.
type InstanceTimes struct {
	Model      string   `json:"model"`
	Server     string   `json:"server"`
	Calls      int64    `json:"calls"`
	P95        *float64 `json:"p95_seconds"`
	ColdStarts int64    `json:"cold_starts"` // calls that waited for a model or an adapter to be loaded
}

// instanceTimesSQL reads the newest 500 results of each model's queue.
const instanceTimesSQL = `
SELECT m.name AS model, x.meta->>'instance' AS server, count(*) AS calls,
       percentile_cont(0.95) WITHIN GROUP (ORDER BY x.run_ms) / 1000 AS p95,
       count(*) FILTER (WHERE x.meta->'swapped' = 'true') AS cold_starts
  FROM penstock.model m
  JOIN penstock.queue q ON q.name = penstock.model_queue(m.name)
 CROSS JOIN LATERAL penstock.last_results(q.id, 500) x
 WHERE ($1::text IS NULL OR m.name = $1) AND x.meta ? 'instance'
 GROUP BY 1, 2
 ORDER BY 1, 2
 LIMIT $2`

// InstanceTimes returns the run times of instances, of one model if it is not empty.
func (d *Database) InstanceTimes(ctx context.Context, model string, limit int) ([]InstanceTimes, error) {
	return list[InstanceTimes](ctx, d.db, "run times of instances", instanceTimesSQL, given(model), page(limit))
}
