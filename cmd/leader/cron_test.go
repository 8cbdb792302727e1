package main

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
)

func TestALeaderRefusesAScheduleThatCannotBeRead(t *testing.T) {
	cfg := defaults()
	cfg.Database.URL, cfg.Leader.Open = pgtest.DSN(t), true
	p, err := open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	if _, err := p.api.Exec(t.Context(), `SELECT penstock.create_queue('reports', '{"kind": "cron"}')`); err != nil {
		t.Fatal(err)
	}
	l, err := newLeader(cfg, p, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	server, err := l.newAPI(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	const body = `{"name": "nightly", "spec": "@daily", "settings": {"zone": "Europe/Berln"}, "reason": "a test"}`
	r := httptest.NewRequestWithContext(t.Context(), "POST", "http://localhost/v1/queues/reports/cron", strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	answer := httptest.NewRecorder()
	server.ServeHTTP(answer, r)
	if answer.Code != http.StatusUnprocessableEntity || !strings.Contains(answer.Body.String(), "body.settings.zone") {
		t.Errorf("%d %s, want 422 for body.settings.zone", answer.Code, answer.Body)
	}
}
