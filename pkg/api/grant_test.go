package api

import (
	"encoding/json"
	"net/http"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/operator"
)

// TestATokenPushesWithinItsFlowsAndItsPriority pushes by each way that a token of scope push has.
func TestATokenPushesWithinItsFlowsAndItsPriority(t *testing.T) {
	w := newWorld(t)
	w.api = New(w.pool, Config{})
	w.exec(`SELECT penstock.create_queue('work')`)
	w.exec(`SELECT penstock.register_model('m', '{"protocol": "openai"}')`)
	highest := int16(5)
	secrets := map[string]string{
		"one": newToken(t, w.pool, operator.Grant{Name: "one", Scopes: []string{"push"}, Flows: []string{"acme"}, PriorityMax: &highest}),
		"two": newToken(t, w.pool, operator.Grant{Name: "two", Scopes: []string{"push"}, Flows: []string{"acme", "zeta"}}),
		"any": newToken(t, w.pool, operator.Grant{Name: "any", Scopes: []string{"push"}}),
	}
	const entries, ndjson = "/v1/queues/work/entries", "application/x-ndjson"
	for _, c := range []struct {
		token, path, body string
		status            int
		flow              string // of the entry
	}{
		{"one", entries, `{"payload": 1}`, 201, "acme"},
		{"one", entries, `{"payload": 1, "flow": "acme", "priority": 5}`, 201, "acme"},
		{"one", entries, `{"payload": 1, "flow": "zeta"}`, 403, ""},
		{"one", entries, `{"payload": 1, "priority": 6}`, 403, ""},
		{"one", entries, `[{"payload": 1}, {"payload": 1, "flow": "zeta"}]`, 403, ""},
		{"one", "/queue/submit", `{"model": "m", "payload": 1}`, 200, "acme"},
		{"one", "/queue/submit", `{"model": "m", "payload": 1, "priority": true}`, 403, ""},
		{"two", entries, `{"payload": 1}`, 403, ""},
		{"two", entries, `{"payload": 1, "flow": "zeta", "priority": 9}`, 201, "zeta"},
		{"two", "/queue/submit", `{"model": "m", "payload": 1}`, 403, ""},
		{"any", entries, `{"payload": 1, "flow": "other", "priority": 9}`, 201, "other"},
	} {
		before := lastEntry(w)
		status, answer := w.send("POST", c.path, c.body, "Authorization", "Bearer "+secrets[c.token])
		after := lastEntry(w)
		if status != c.status || (after.id != before.id) != (c.status < 300) || c.status < 300 && after.flow != c.flow {
			t.Errorf("token %s, %s %s: %d %v, entry %+v, want %d, flow %q", c.token, c.path, c.body, status, answer, after, c.status, c.flow)
		}
	}
	lines := `{"payload": 1}` + "\n" + `{"payload": 1, "flow": "zeta"}` + "\n"
	status, answer := w.send("POST", entries, lines, "Authorization", "Bearer "+secrets["one"], "Content-Type", ndjson)
	summary, _ := answer["summary"].(map[string]any)
	if status != http.StatusOK || written(summary["inserted"]) != "1" || written(summary["refused"]) != "1" {
		t.Errorf("stream: %d %v, want 1 line inserted and 1 refused", status, answer)
	}
}

type pushedEntry struct {
	id   int64
	flow string
}

// lastEntry is the newest entry, zero if there is none.
func lastEntry(w *world) (e pushedEntry) {
	w.t.Helper()
	const sql = `SELECT coalesce(max(id), 0), coalesce((array_agg(flow ORDER BY id DESC))[1], '') FROM penstock.entry`
	if err := w.pool.QueryRow(w.t.Context(), sql).Scan(&e.id, &e.flow); err != nil {
		w.t.Fatal(err)
	}
	return e
}

// TestPushLimitsOfATokenAreKept covers the way of a grant: made, shown, rotated, and refused beside wider scopes.
func TestPushLimitsOfATokenAreKept(t *testing.T) {
	w := newWorld(t)
	const limits = `"applications": ["default"], "queues": ["work"], "flows": ["acme"], "priority_max": 0, "rate": 2, "burst": 3,
		"gpu_ms": 1000, "gpu_period": "day"`
	status, answer := w.send("POST", "/v1/tokens", `{"name": "ci", "scopes": ["push"], `+limits+`, `+reason+`}`)
	if status != http.StatusCreated {
		t.Fatalf("create: %d %v", status, answer)
	}
	made := reflect.ValueOf(liveToken(w))
	if status, answer = w.send("POST", "/v1/tokens/ci/rotate", `{"overlap_seconds": 0, `+reason+`}`); status != http.StatusCreated {
		t.Fatalf("rotate: %d %v", status, answer)
	}
	rotated := reflect.ValueOf(liveToken(w))
	renewed := []string{"ID", "CreatedAt", "ExpiresAt", "RevokedAt", "UsedAt"}
	for _, f := range reflect.VisibleFields(made.Type()) {
		switch before, after := made.FieldByIndex(f.Index), rotated.FieldByIndex(f.Index); {
		case slices.Contains(renewed, f.Name):
		case before.IsZero():
			t.Errorf("the token has no %s: add it to the limits of this test", f.Name)
		case !reflect.DeepEqual(before.Interface(), after.Interface()):
			t.Errorf("the rotated token has another %s", f.Name)
		}
	}
	for _, limit := range []string{`"flows": ["acme"]`, `"priority_max": 3`} {
		for _, scope := range []string{"operate", "admin"} {
			status, answer := w.send("POST", "/v1/tokens", `{"name": "x", "scopes": ["push", "`+scope+`"], `+limit+`, `+reason+`}`)
			if status != http.StatusUnprocessableEntity {
				t.Errorf("%s with scope %s: %d %v, want 422", limit, scope, status, answer)
			}
		}
	}
}

// TestATokenEndsUnlessItIsToldNotTo reads the end of tokens that were made with and without one.
func TestATokenEndsUnlessItIsToldNotTo(t *testing.T) {
	w := newWorld(t)
	for name, option := range map[string]string{"default": "", "never": `"never_expires": true,`, "given": `"expires_at": "2100-01-01T00:00:00Z",`} {
		if status, answer := w.send("POST", "/v1/tokens", `{"name": "`+name+`", "scopes": ["push"], `+option+reason+`}`); status != http.StatusCreated {
			t.Fatalf("create %s: %d %v", name, status, answer)
		}
	}
	for _, token := range tokensOf(w) {
		switch {
		case token.Name == "never" && token.ExpiresAt != nil, token.Name != "never" && token.ExpiresAt == nil:
			t.Errorf("token %s ends at %v", token.Name, token.ExpiresAt)
		case token.Name == "given" && token.ExpiresAt.Year() != 2100:
			t.Errorf("token %s ends at %v, want 2100", token.Name, token.ExpiresAt)
		case token.Name == "default":
			if left := time.Until(*token.ExpiresAt); left < 364*24*time.Hour || left > 366*24*time.Hour {
				t.Errorf("token %s ends in %s, want 365 days", token.Name, left)
			}
		}
	}
	both := `{"name": "x", "scopes": ["push"], "never_expires": true, "expires_at": "2100-01-01T00:00:00Z", ` + reason + `}`
	if status, answer := w.send("POST", "/v1/tokens", both); status != http.StatusUnprocessableEntity {
		t.Errorf("both: %d %v, want 422", status, answer)
	}
}

// liveToken is the only token that is live.
func liveToken(w *world) operator.APIToken {
	w.t.Helper()
	live := slices.DeleteFunc(tokensOf(w), func(t operator.APIToken) bool { return !t.Live })
	if len(live) != 1 {
		w.t.Fatalf("%d live tokens, want 1", len(live))
	}
	return live[0]
}

func tokensOf(w *world) []operator.APIToken {
	w.t.Helper()
	_, answer := w.send("GET", "/v1/tokens", "")
	text, err := json.Marshal(answer["items"])
	if err != nil {
		w.t.Fatal(err)
	}
	var tokens []operator.APIToken
	if err := json.Unmarshal(text, &tokens); err != nil {
		w.t.Fatal(err)
	}
	return tokens
}
