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

// Suspicious locks beyond those that the page lists are not left out in silence.
func TestMoreSuspiciousLocksAreSaid(t *testing.T) {
	for n := suspectMax; n <= suspectMax+1; n++ {
		s := newSite(t)
		q, err := invalidation.Create(t.Context(), s.pool, "work", invalidation.Config{})
		if err != nil {
			t.Fatal(err)
		}
		s.exec(`INSERT INTO penstock.lock (token, node_id, pos, last_entry_id, claimed_at, queue_id, claim_id, entry_count, cost, priority, flow, lock_key)
		        SELECT n, 1, n, n, now() - interval '1 minute', $1, 1, 1, 0, 1, '', 'key-' || n FROM generate_series(1, $2::int) n`, q.ID, n)
		page := s.as(viewer).get("locks").text
		if strings.Contains(page, "penstock lock verify --limit 1000") != (n > suspectMax) {
			t.Errorf("of %d suspicious locks the page says: %.3000s", n, page)
		}
	}
}

// The page of locks draws the oldest 1,000 of all nodes. Threads that run one of the others are not free.
func TestBusyThreadsAreNotDrawnAsFree(t *testing.T) {
	s := newSite(t)
	q, err := invalidation.Create(t.Context(), s.pool, "work", invalidation.Config{})
	if err != nil {
		t.Fatal(err)
	}
	s.exec(`INSERT INTO penstock.node (id, name, application, threads, lease) VALUES (1, 'old', 'default', 1000, '1 hour'), (2, 'new', 'default', 8, '1 hour')`)
	s.exec(`INSERT INTO penstock.lock (token, node_id, pos, last_entry_id, claimed_at, queue_id, claim_id, entry_count, cost, priority, flow, lock_key)
	        SELECT n, CASE WHEN n <= 1000 THEN 1 ELSE 2 END, n, n, now(), $1, 1, 1, 0, 1, '', 'key-' || n FROM generate_series(1, 1007) n`, q.ID)
	page := s.as(viewer).get("locks").text
	_, card, _ := strings.Cut(page, `<article class="card" id="n-2">`)
	card, _, _ = strings.Cut(card, "</article>")
	if free := strings.Count(card, "<title>free thread</title>"); free != 1 {
		t.Errorf("node new has 7 locks and 8 threads, and %d free ones: %s", free, card)
	}
	if !strings.Contains(page, "1,000+ held") {
		t.Errorf("the page does not say that there are more locks: %.3000s", page)
	}
}
