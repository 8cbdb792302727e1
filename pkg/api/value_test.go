package api

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// bomb is a small JSON text whose numbers take a gigabyte when Postgres writes them as text.
var bomb = "[" + strings.TrimSuffix(strings.Repeat("1e131071,", 8300), ",") + "]"

// TestUnracedHostileValuesAreRefusedByField sends values that would harm readers of the entry, wherever a body holds them. The
// answer names the field, and nothing is stored.
func TestUnracedHostileValuesAreRefusedByField(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('work')`)
	w.exec(`SELECT penstock.create_queue('parts', '{"kind": "batch"}')`)
	w.exec(`SELECT penstock.register_model('m', '{"protocol": "openai"}')`)
	const entries = "/v1/queues/work/entries"
	large := strings.Repeat("x", 10_000_000)
	for _, c := range []struct{ name, path, body, field string }{
		{"numbers in a payload", entries, `{"payload": ` + bomb + `}`, "payload"},
		{"numbers in a list", entries, `[{"payload": 1}, {"payload": {"a": ` + bomb + `}}]`, "payload"},
		{
			"numbers in a callback", entries,
			`{"payload": 1, "callback": {"url": "https://example.com", "context": ` + bomb + `}}`, "callback",
		},
		{"numbers for a model", "/queue/submit", `{"model": "m", "payload": ` + bomb + `}`, "payload"},
		{
			"numbers in items", "/v1/queues/parts/batches",
			`{"name": "b", "options": {"items": ` + bomb + `}, ` + reason + `}`, "options.items",
		},
		{
			"numbers in a detail", "/v1/queues/parts/batches",
			`{"name": "b", "options": {"items": [1], "detail": ` + bomb + `}, ` + reason + `}`, "options.detail",
		},
		{"a line break in a trace", entries, `{"payload": 1, "trace": "a\nb"}`, "trace"},
		{"a trace of zeros", entries, `{"payload": 1, "trace": "00-` + strings.Repeat("0", 32) + "-" + strings.Repeat("0", 16) + `-01"}`, "trace"},
		{"a long trace", entries, `{"payload": 1, "trace": "` + strings.Repeat("0", 70_000) + `"}`, "trace"},
		{
			"a callback of 10 MB", entries,
			`{"payload": 1, "callback": {"url": "https://example.com", "context": "` + large + `"}}`, "callback",
		},
		{
			"a callback address of 10 MB", entries,
			`{"payload": 1, "callback": {"url": "https://example.com/` + large + `"}}`, "callback",
		},
	} {
		status, answer := w.send("POST", c.path, c.body)
		if status < 400 || status >= 500 {
			t.Errorf("%s: status %d, want 4xx: %.300v", c.name, status, answer)
		}
		want := "body." + c.field
		if strings.HasPrefix(c.body, "[") {
			want = "body[1]." + c.field
		}
		if location := flawAt(answer); !strings.HasPrefix(location, want) {
			t.Errorf("%s: the flaw is at %q, want %s: %.300v", c.name, location, want, answer)
		}
	}
	var stored int
	if err := w.pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.entry`).Scan(&stored); err != nil || stored != 0 {
		t.Errorf("%d entries were stored (%v), want 0", stored, err)
	}
}

// flawAt is the location of the first flaw in a problem document.
func flawAt(answer map[string]any) string {
	flaws, _ := answer["errors"].([]any)
	if len(flaws) == 0 {
		return ""
	}
	first, _ := flaws[0].(map[string]any)
	return fmt.Sprint(first["location"])
}

// TestHostileLineOfAStreamKeepsNoOtherOut sends a number bomb between two lines that are fine.
func TestHostileLineOfAStreamKeepsNoOtherOut(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('work')`)
	body := `{"payload": 1}` + "\n" + `{"payload": ` + bomb + `}` + "\n" + `{"payload": 2, "trace": "x"}` + "\n" + `{"payload": 3}` + "\n"
	status, answer := w.send("POST", "/v1/queues/work/entries", body, "Content-Type", "application/x-ndjson")
	summary, _ := answer["summary"].(map[string]any)
	if status != http.StatusOK || written(summary["inserted"]) != "2" || written(summary["refused"]) != "2" {
		t.Errorf("%d %.500v, want 2 lines inserted and 2 refused", status, answer)
	}
	if text := fmt.Sprint(summary["errors"]); !strings.Contains(text, "payload") || !strings.Contains(text, "trace") {
		t.Errorf("errors name no field: %.500s", text)
	}
}
