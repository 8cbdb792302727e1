package api

import (
	"net/http"
	"testing"
)

// The list is of all models together, the newest first, however many failures each has.
func TestDeadJobsAreBoundedOverAllModels(t *testing.T) {
	w := newWorld(t)
	for _, model := range []string{"flux", "llama"} {
		w.exec(`SELECT penstock.register_model('` + model + `', '{"protocol": "cog"}')`)
	}
	const failedSQL = `
INSERT INTO penstock.failure (queue_id, entry_id, created_at, failed_at, payload, priority, flow, attempt, crashes, class, error, fingerprint)
SELECT q.id, n, now(), now(), '1', 1, 'default', 1, 0, 'gpu', 'out of memory', 'out of memory'
  FROM generate_series(1, 1200) n JOIN penstock.queue q ON q.name = CASE WHEN n % 2 = 0 THEN 'flux' ELSE 'llama' END`
	w.exec(failedSQL)
	status, answer := w.send("GET", "/admin/dlq", "")
	jobs, _ := answer["jobs"].([]any)
	if status != http.StatusOK || len(jobs) != 1000 || answer["count"] != 1000. || answer["truncated"] != true {
		t.Fatalf("%d: %d jobs, count %v, truncated %v, want the newest 1,000 of 1,200", status, len(jobs), answer["count"], answer["truncated"])
	}
	newest, _ := jobs[0].(map[string]any)
	oldest, _ := jobs[999].(map[string]any)
	if newest["job_id"] != "1200" || newest["model"] != "flux" || oldest["job_id"] != "201" || oldest["model"] != "llama" {
		t.Errorf("from %v to %v, want from entry 1200 of flux to 201 of llama", newest, oldest)
	}
	w.exec(`DELETE FROM penstock.failure WHERE entry_id > 10`)
	if _, answer := w.send("GET", "/admin/dlq", ""); answer["count"] != 10. || answer["truncated"] != false {
		t.Errorf("of ten failures: count %v, truncated %v", answer["count"], answer["truncated"])
	}
}
