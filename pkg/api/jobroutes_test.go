package api

import (
	"fmt"
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

// A model that cannot be retried keeps no other one from it, and what was begun is told in any case.
func TestAllIsRetriedButWhatCannotBe(t *testing.T) {
	w := newWorld(t)
	for _, model := range []string{"a", "b_refused", "c_empty", "d_dropped", "e"} {
		w.exec(`SELECT penstock.register_model('` + model + `', '{"protocol": "cog"}')`)
	}
	w.exec(`
INSERT INTO penstock.failure (queue_id, entry_id, created_at, payload, priority, flow, attempt, crashes, class, error, fingerprint)
SELECT q.id, q.id, now(), '1', 1, 'default', 1, 0, 'gpu', 'out of memory', 'out of memory' FROM penstock.queue q WHERE q.model <> 'c_empty'`)
	w.exec(`SELECT penstock.drop_queue('d_dropped', true, 'a test')`)
	w.exec(`
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF new.queue_id = (SELECT id FROM penstock.queue WHERE model = 'b_refused') THEN RAISE 'steps of ended batches' USING ERRCODE = 'PS006'; END IF;
    RETURN new;
END $$`)
	w.exec(`CREATE TRIGGER refuse BEFORE INSERT ON penstock.operation FOR EACH ROW EXECUTE FUNCTION refuse()`)
	status, answer := w.send("POST", "/admin/dlq/retry-all", "")
	errs, _ := answer["errors"].([]any)
	if status != http.StatusAccepted || fmt.Sprint(answer["operation_ids"]) != "[1 3]" || len(errs) != 1 {
		t.Fatalf("%d %v, want the operations of a and e, and the error about b_refused", status, answer)
	}
	if e, _ := errs[0].(map[string]any); e["model"] != "b_refused" || e["code"] != "state_conflict" {
		t.Errorf("got %v", errs[0])
	}
	status, answer = w.send("POST", "/admin/dlq/retry-all", "")
	if status != http.StatusAccepted || fmt.Sprint(answer["operation_ids"]) != "[]" || fmt.Sprint(answer["running"]) != "[1 3]" {
		t.Errorf("again: %d %v, want no operation beside those that run", status, answer)
	}
}
