package e2e_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The first token can only be made on the database itself; from then on the API makes more of them.
func TestLeaderLetsInWhoHasATokenAndNobodyElse(t *testing.T) {
	t.Parallel()
	s := newSite(t, 0)
	l := &leader{program: start(t, "leader", "leader", "--listen", "127.0.0.1:0", "--debug-listen", "127.0.0.1:0", "--database-url", s.dsn)}
	l.address = "http://" + value(l.says("leader started"), "listen")
	dir, err := binaries()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), filepath.Join(dir, "penstock"), "--database-url", s.dsn, "-o", "json",
		"token", "create", "ops", "--scope", "admin", "--reason", "first one").Output()
	var made struct{ Answer string }
	if err != nil || json.Unmarshal(out, &made) != nil || made.Answer == "" {
		t.Fatalf("penstock token create: %s (%v)", out, err)
	}
	send := func(token, method, path, body string) (int, map[string]any) {
		r, err := http.NewRequestWithContext(t.Context(), method, l.address+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Authorization", "Bearer "+token)
		response, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		var answer map[string]any
		_ = json.NewDecoder(response.Body).Decode(&answer) // there may be none
		return response.StatusCode, answer
	}
	status, answer := send(made.Answer, "POST", "/v1/tokens", `{"name": "app", "scopes": ["push"], "queues": ["work"], "reason": "test"}`)
	pusher, _ := answer["secret"].(string)
	if status != 201 || pusher == "" {
		t.Fatalf("make a token: %d %v", status, answer)
	}
	for _, c := range []struct {
		who, token, method, path, body string
		want                           int
	}{
		{"nobody", "", "POST", "/v1/queues/work/entries", `{"payload": 1}`, 401},
		{"the pusher", pusher, "POST", "/v1/queues/work/entries", `{"payload": 1}`, 201},
		{"the pusher", pusher, "POST", "/v1/queues/webhook/entries", `{"payload": 1}`, 403},
		{"the pusher", pusher, "POST", "/v1/queues/work/pause", `{"reason": "test"}`, 403},
		{"the operator", made.Answer, "POST", "/v1/queues/work/pause", `{"reason": "test"}`, 204},
		{"nobody", "", "GET", "/readyz", "", 200},
	} {
		if status, answer := send(c.token, c.method, c.path, c.body); status != c.want {
			t.Errorf("%s, %s %s: %d %v, want %d", c.who, c.method, c.path, status, answer, c.want)
		}
	}
	if said := []byte(strings.Join(l.said(), "\n")); bytes.Contains(said, []byte(pusher)) || bytes.Contains(said, []byte(made.Answer)) {
		t.Error("a secret is in the log")
	}
}
