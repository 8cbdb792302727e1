package web

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/operator"
)

// A retry runs the parts that went wrong. Where all parts are done, it runs the completion that failed.
func TestARetryOfABatchIsConfirmedWithThePartsThatWentWrong(t *testing.T) {
	s := newSite(t)
	s.fill()
	for _, name := range []string{"parts failed", "completion failed", "never split"} {
		if _, err := s.change.CreateBatch(t.Context(), name, "work", map[string]any{"items": []int{1, 2, 3}, "part_size": 1}, tester); err != nil {
			t.Fatal(err)
		}
	}
	s.exec(`UPDATE penstock.batch_part SET outcome = (CASE WHEN no = 2 AND batch_id = 1 THEN 'failed' ELSE 'done' END)::penstock.outcome, ended_at = now()`)
	s.exec(`UPDATE penstock.batch SET status = 'failed', ended_at = now(), problem = CASE WHEN id = 3 THEN 'split: no rows' END`)
	b := s.as(operatorRole)
	page := b.get("operations").text
	for _, c := range []struct {
		batch, count string
		offered      bool
	}{
		{"1", "1 of 3 parts, those that failed, expired or were cancelled", true},
		{"2", "no part of 3: the completion alone runs again", true},
		{"3", "no part of", false},
	} {
		form := "do/retry_batch?batch=" + c.batch
		if got := b.get(form); got.status != http.StatusOK || !strings.Contains(got.text, c.count) {
			t.Errorf("%s: %d has no %q: %s", form, got.status, c.count, got.text)
		}
		if strings.Contains(page, form) != c.offered {
			t.Errorf("retry of batch %s: want offered %t: %s", c.batch, c.offered, page)
		}
	}
}

// An operation begins with what the first 100,000 entries of its queue match: from there on nobody knows how many are left.
func TestAnOperationThatIsPastItsCountShowsNoTotal(t *testing.T) {
	s := newSite(t)
	s.fill()
	s.exec(`INSERT INTO penstock.operation (queue_id, verb, filter, per_second, actor, reason, matched, changed, until_id)
	        SELECT id, 'cancel', '{"all": true}', 1, 'ann', 'test', 2000, 2000, 1 FROM penstock.queue WHERE name = 'work'`)
	b := s.as(operatorRole)
	for path, text := range map[string]string{
		"operations":                      "2,000 done, of a number that is not known",
		"do/cancel_operation?operation=1": "what is left of it, which is not known: 2,000 are changed so far",
	} {
		if got := b.get(path); got.status != http.StatusOK || !strings.Contains(got.text, text) {
			t.Errorf("%s: %d has no %q: %s", path, got.status, text, got.text)
		}
	}
}

// A filter without an index would read all of a deep queue before the form is there.
func TestLongAChangeOfAllThatMatchIsCountedAmongTheFirstOfADeepQueue(t *testing.T) {
	s := newSite(t)
	s.web.db = operator.New(openPool(t, postgres.Config{DSN: s.pool.Config().ConnString(), StatementTimeout: time.Minute, ReadOnly: true}))
	s.web.cfg.readTimeout = time.Minute
	s.exec(`SELECT penstock.create_queue('deep')`)
	s.exec(`INSERT INTO penstock.entry (id, queue_id, status, priority, flow, payload, due_at)
	        SELECT n, q.id, 'initial', 1, CASE WHEN n % 2 = 0 THEN 'red' ELSE '' END, '{}', now() + interval '1 day'
	          FROM generate_series(1, 100001) n, penstock.queue q WHERE q.name = 'deep'`)
	b := s.as(operatorRole)
	for flow, text := range map[string]string{
		"red": "at least 50,000 entries", "blue": "none of the first 100,000 of the queue, and perhaps later ones",
	} {
		if got := b.get("do/bulk_cancel?queue=deep&flow=" + flow); got.status != http.StatusOK || !strings.Contains(got.text, text) {
			t.Errorf("flow %s: %d has no %q: %s", flow, got.status, text, got.text)
		}
	}
}
