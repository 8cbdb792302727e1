package api

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/penstock/penstock/pkg/operator"
)

// ask sends a request with a token and returns its answer; an empty secret sends none.
func (w *world) ask(secret, method, path, body string, header ...string) *httptest.ResponseRecorder {
	w.t.Helper()
	r := httptest.NewRequestWithContext(w.t.Context(), method, "http://localhost"+path, strings.NewReader(body))
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	if secret != "" {
		r.Header.Set("Authorization", "Bearer "+secret)
	}
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	answered := httptest.NewRecorder()
	w.api.ServeHTTP(answered, r)
	return answered
}

// changed counts the rows that a request could have added or removed, and the ids it could have taken.
func (w *world) changed() (n int64) {
	w.t.Helper()
	const sql = `
SELECT (SELECT count(*) FROM penstock.audit) + (SELECT count(*) FROM penstock.entry)
     + (SELECT count(*) FROM penstock.result) + (SELECT count(*) FROM penstock.queue)
     + (SELECT count(*) FROM penstock.operation) + (SELECT count(*) FROM penstock.batch)
     + (SELECT count(*) FROM penstock.model) + (SELECT count(*) FROM penstock.failure)
     + (SELECT last_value FROM penstock.entry_id_seq)`
	if err := w.pool.QueryRow(w.t.Context(), sql).Scan(&n); err != nil {
		w.t.Fatal(err)
	}
	return n
}

// TestEachRoleDoesWhatItMayAndNothingElse plays the story of all addresses with valid bodies. Each request
// is sent by
// every role that is not let in first, which must change nothing, and then by the least role that is.
func TestEachRoleDoesWhatItMayAndNothingElse(t *testing.T) {
	w := newWorld(t)
	w.api = New(w.pool, Config{Reports: reports{}, Webhooks: receivers{}})
	secrets := map[string]string{"none": "", "unknown": operator.NewSecret()}
	for _, role := range []string{"push", "read", "operate", "admin", "announce"} {
		secrets[role] = newToken(t, w.pool, operator.Grant{Name: role, Scopes: []string{role}})
	}
	// All scopes, but for an application that has nothing here.
	secrets["elsewhere"] = newToken(t, w.pool, operator.Grant{
		Name: "elsewhere", Scopes: []string{"push", "read", "operate", "admin"}, Applications: []string{"other"},
	})
	least := map[scope]string{"": "none", push: "push", read: "read", operate: "operate", admin: "admin", announce: "announce"}
	for _, s := range story() {
		if s.before != nil {
			s.before(w)
		}
		path, body := w.fill(s.path), w.fill(s.body)
		name := w.pattern(s.method, path)
		var header []string
		if s.tagOf != "" {
			header = []string{"If-Match", w.tags[s.tagOf]}
		}
		need := needs[name]
		before := w.changed()
		for role, secret := range secrets {
			if strings.Contains(" "+lets[need]+" ",
				" "+role+" ") || need == "" || role == "elsewhere" && s.status == http.StatusOK {
				continue // a list may answer an outsider with nothing; TestUnracedNothingOfOneApplicationReachesAnother
			}
			status := w.ask(secret, s.method, path, body, header...).Code
			if status != http.StatusUnauthorized && status != http.StatusForbidden {
				t.Errorf("%s %s by %s: %d, want 401 or 403", s.method, path, role, status)
			}
		}
		if after := w.changed(); after != before {
			t.Errorf("%s %s: requests that were refused changed %d rows", s.method, path, after-before)
		}
		answered := w.ask(secrets[least[need]], s.method, path, body, header...)
		if answered.Code != s.status {
			t.Fatalf("%s %s by %s: %d %s, want %d", s.method, path, least[need], answered.Code, answered.Body, s.status)
		}
		w.note(s, path, answered)
	}
}
