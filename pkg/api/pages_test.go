package api

import (
	"fmt"
	"net/http"
	"net/url"
	"testing"

	"github.com/penstock/penstock/pkg/operator"
)

// A page is read behind the last key of the page before: no list ends with the rows that one statement returns, and
// rows that are alike but for their ids are neither left out nor repeated.
func TestUnracedPagesReachTheLastRowOfAList(t *testing.T) {
	w := newWorld(t)
	const rows = operator.PageMax + 2
	series := fmt.Sprintf(" FROM generate_series(1, %d) n", rows)
	for _, l := range []struct {
		path string
		make string   // the statement that makes the rows
		key  []string // the fields that tell rows apart
	}{
		{"/v1/nodes?", `INSERT INTO penstock.node (id, name, application, kind)
		                SELECT n, 'n' || n % 3, 'default', 'task'`, []string{"id"}},
		{"/v1/models?", `INSERT INTO penstock.model (name, config) SELECT 'm' || n, '{}'`, []string{"name"}},
		{"/v1/instances?", `INSERT INTO penstock.instance (model, server, endpoint, slots)
		                    SELECT 'm' || n % 3 + 1, 's' || n, 'http://gpu:1', 1`, []string{"model", "server"}},
		{"/v1/limits?", `INSERT INTO penstock."limit" (name, max_units) SELECT 'l' || n, 1`, []string{"name"}},
		{"/v1/tokens?", `INSERT INTO penstock.api_token (name, hash, scopes, created_by)
		                 SELECT 't' || n % 3, sha256(n::text::bytea), '{read}', 'ann'`, []string{"id"}},
		{"/v1/pauses?", `INSERT INTO penstock.pause (scope, value, actor, reason, created_at)
		                 SELECT 'flow', 'f' || n, 'ann', 'test', '2026-01-02T03:04:05.678901Z'`, []string{"value"}},
		{"/v1/gateway/flows?", `INSERT INTO penstock.flow_criticality (flow, criticality)
		                        SELECT 'f' || n, 'sheddable'`, []string{"flow"}},
		{"/v1/slots/dead?", `INSERT INTO penstock.slot (instance_id, number, token, node_id)
		                     SELECT (SELECT min(id) FROM penstock.instance), n, n, 1000000 + n`, []string{"node_id"}},
		{"/v1/gateway/batches?", `INSERT INTO penstock.gateway_batch (id, owner, flow, endpoint, input_file_id,
		                              output_file_id, error_file_id, completion_window, expires_at, created_at)
		                          SELECT 'b' || n, '', '', '', '', '', '', '', 'tomorrow', '2026-01-02T03:04:05.678901Z'`, []string{"id"}},
		{"/v1/locks/suspects?", `INSERT INTO penstock.lock (token, node_id, pos, last_entry_id, claimed_at, queue_id, claim_id,
		                             entry_count, cost, priority, flow, lock_key)
		                         SELECT n, 5000000, n, n, now() - interval '1 minute', (SELECT min(id) FROM penstock.queue), 1, 1, 0, 1,
		                                '', 'key-' || n`, []string{"token"}},
		{
			"/v1/scale/minutes?model=m1&minutes=43200&", `
		     CREATE TABLE penstock.minute_ever PARTITION OF penstock.model_minute FOR VALUES FROM (MINVALUE) TO (MAXVALUE);
		     INSERT INTO penstock.model_minute (minute, model, arrived, online, calls, busy_seconds, refused, starts,
		         cold_seconds, waiting, running, base, raw, stabilised, desired, ready, starting)
		     SELECT date_trunc('minute', now()) - n * interval '1 minute', 'm1', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0`,
			[]string{"minute"},
		},
	} {
		w.exec(l.make + series)
		seen, pages := map[string]bool{}, 0
		for cursor := ""; ; pages++ {
			status, page := w.send("GET", l.path+"limit=1000&cursor="+url.QueryEscape(cursor), "")
			if status != http.StatusOK {
				t.Fatalf("%s: %d %v", l.path, status, page)
			}
			items, _ := page["items"].([]any)
			for _, item := range items {
				row, _ := item.(map[string]any)
				var key []any
				for _, field := range l.key {
					key = append(key, row[field])
				}
				if seen[fmt.Sprint(key)] {
					t.Fatalf("%s: %v stands on two pages", l.path, key)
				}
				seen[fmt.Sprint(key)] = true
			}
			if cursor, _ = page["next_cursor"].(string); cursor == "" {
				break
			}
		}
		if len(seen) != rows {
			t.Errorf("%s: %d rows on %d pages, want %d", l.path, len(seen), pages, rows)
		}
	}
}
