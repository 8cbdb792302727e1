package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/api"
	"github.com/penstock/penstock/pkg/webhook"
)

// TestUnracedReceiversAreKeptOverHTTP registers, rotates, lists and disables a receiver through the API of a
// leader with the
// key of the installation, and asks one without it.
func TestUnracedReceiversAreKeptOverHTTP(t *testing.T) {
	pool := pgtest.New(t)
	t.Setenv("HOOKS", "a key for tests alone")
	const at = "https://acme.example/hooks"
	send := func(section Webhook, method, path, body string) (int, map[string]any) {
		t.Helper()
		keeper, err := section.open(pool, webhook.AddressPolicy{})
		if err != nil {
			t.Fatal(err)
		}
		r := httptest.NewRequestWithContext(t.Context(), method, "http://localhost"+path, strings.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		// A busy machine takes long to stretch a key.
		api.New(pool, api.Config{Open: true, Webhooks: keeper, Timeout: time.Minute}).ServeHTTP(w, r)
		var answer map[string]any
		_ = json.Unmarshal(w.Body.Bytes(), &answer) // there may be none
		return w.Code, answer
	}
	with, without := Webhook{Key: "env:HOOKS"}, Webhook{}
	receiver := `{"url": "` + at + `", "reason": "test"}`
	if status, answer := send(without, "POST", "/v1/webhooks", receiver); status != http.StatusConflict {
		t.Errorf("without a key: %d %v, want 409", status, answer)
	}
	status, first := send(with, "POST", "/v1/webhooks", receiver)
	if secret, _ := first["secret"].(string); status != http.StatusCreated || !strings.HasPrefix(secret, "whsec_") {
		t.Fatalf("register: %d %v", status, first)
	}
	if status,
		again := send(with, "POST", "/v1/webhooks",
		receiver); status != http.StatusCreated || again["secret"] != first["secret"] {
		t.Errorf("register again: %d, want the same secret", status)
	}
	if status,
		second := send(with, "POST", "/v1/webhooks/rotate",
		receiver); status != http.StatusCreated || second["secret"] == first["secret"] {
		t.Errorf("rotate: %d, want another secret", status)
	}
	for _, inside := range []string{
		"http://127.0.0.1/x", "https://10.0.0.1/", "ftp://acme.example/",
		"https://u:p@acme.example/",
	} {
		body := `{"url": "` + inside + `", "reason": "test"}`
		if status, answer := send(with, "POST", "/v1/webhooks", body); status != http.StatusUnprocessableEntity {
			t.Errorf("%s: %d %v, want 422", inside, status, answer)
		}
	}
	if status, answer := send(without, "POST", "/v1/webhooks/disable", receiver); status != http.StatusNoContent {
		t.Errorf("disable: %d %v", status, answer)
	}
	status, listed := send(without, "GET", "/v1/webhooks", "")
	text, _ := json.Marshal(listed)
	if status != http.StatusOK || !strings.Contains(string(text), at) || !strings.Contains(string(text),
		"disabled_at") || strings.Contains(string(text), "whsec_") {
		t.Errorf("list: %d %s", status, text)
	}
	status, keys := send(with, "GET", "/v1/webhooks/keys", "")
	if text, _ := json.Marshal(keys); status != http.StatusOK || !strings.Contains(string(text), "whpk_") {
		t.Errorf("keys: %d %s", status, text)
	}
	var audited int
	const sql = `SELECT count(*) FROM penstock.audit WHERE verb IN ('register_webhook', 'rotate_webhook_secret', 'disable_webhook') AND reason = 'test'`
	if err := pool.QueryRow(t.Context(), sql).Scan(&audited); err != nil || audited != 4 {
		t.Errorf("%d lines of the audit, want 4 (%v)", audited, err)
	}
}
