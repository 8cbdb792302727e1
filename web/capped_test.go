package web

import (
	"html"
	"net/http"
	"strings"
	"testing"

	"github.com/penstock/penstock/pkg/invalidation"
)

// A page that does not list everything says so.
func TestPagesSayWhatTheyLeaveOut(t *testing.T) {
	s := newSite(t)
	q, err := invalidation.Create(t.Context(), s.pool, "work", invalidation.Config{})
	if err != nil {
		t.Fatal(err)
	}
	s.exec(`INSERT INTO penstock.pause (scope, value, queue_id, actor, reason)
	        SELECT 'flow', 'flow-' || n, $1, 'ann', 'a migration' FROM generate_series(1, 201) n`, q.ID)
	s.exec(`INSERT INTO penstock."limit" (name, max_units) SELECT 'limit-' || n, 4 FROM generate_series(1, 501) n`)
	s.exec(`INSERT INTO penstock.api_token (name, hash, scopes, created_by)
	        SELECT 'token-' || n, sha256(n::text::bytea), '{read}', 'ann' FROM generate_series(1, 501) n`)
	s.exec(`INSERT INTO penstock.flow_criticality (flow, criticality) SELECT 'flow-' || n, 'critical' FROM generate_series(1, 101) n`)
	s.exec(`INSERT INTO penstock.model (name, config) VALUES ('llama', '{"protocol": "openai"}')`)
	s.exec(`INSERT INTO penstock.deployment (name, model) SELECT 'deployment-' || n, 'llama' FROM generate_series(1, 201) n`)
	s.exec(`INSERT INTO penstock.node (id, name, application, threads, kind, lease, draining_at)
	        SELECT n, 'node-' || n, 'default', 4, CASE WHEN n = 4 THEN 'gateway' ELSE 'task' END, '1 hour', CASE WHEN n = 3 THEN now() END
	          FROM generate_series(1, 4) n`)
	b := s.as(viewer)
	for path, texts := range map[string][]string{
		"":           {"150+ more", "200+ pauses", "2 nodes live, 1 draining"},
		"pauses":     {"it has the oldest 200"},
		"limits":     {"it has the first 500 by name"},
		"tokens":     {"it has the first 500 by name"},
		"autoscaler": {"it has the first 200 by name"},
		"gateways":   {"these are the first 100 by flow"},
	} {
		got := b.get(path)
		_, part, _ := strings.Cut(html.UnescapeString(got.text), `id="live"`)
		for _, text := range texts {
			if got.status != http.StatusOK || !strings.Contains(part, text) {
				t.Errorf("%q: %d without %q: %.2000s", path, got.status, text, part)
			}
		}
	}
}
