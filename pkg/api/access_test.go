package api

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// needs is the scope that each address must ask for, written down a second time: one that is not here fails the test.
var needs = map[string]scope{
	"GET /livez":                                  "",
	"GET /readyz":                                 "",
	"GET /metrics":                                "",
	"GET /openapi.yaml":                           "",
	"GET /v1/queues":                              read,
	"POST /v1/queues":                             admin,
	"GET /v1/queues/{queue}":                      read,
	"PATCH /v1/queues/{queue}":                    admin,
	"DELETE /v1/queues/{queue}":                   admin,
	"GET /v1/queues/{queue}/lanes":                read,
	"POST /v1/queues/{queue}/pause":               operate,
	"POST /v1/queues/{queue}/resume":              operate,
	"POST /v1/queues/{queue}/disable":             operate,
	"POST /v1/queues/{queue}/enable":              operate,
	"GET /v1/entries":                             read,
	"GET /v1/entries/{id}":                        read,
	"POST /v1/entries/{id}/cancel":                operate,
	"POST /v1/entries/{id}/disable":               operate,
	"POST /v1/entries/{id}/enable":                operate,
	"POST /v1/queues/{queue}/entries/disable":     operate,
	"POST /v1/queues/{queue}/entries/enable":      operate,
	"POST /v1/queues/{queue}/entries":             push,
	"GET /v1/groups":                              read,
	"POST /v1/queues/{queue}/compact":             operate,
	"GET /v1/failures":                            read,
	"GET /v1/queues/{queue}/causes":               read,
	"GET /v1/failures/{id}":                       read,
	"POST /v1/failures/{id}/retry":                operate,
	"POST /v1/failures/{id}/discard":              operate,
	"GET /v1/locks":                               read,
	"GET /v1/locks/suspects":                      read,
	"GET /v1/nodes":                               read,
	"GET /v1/nodes/{id}":                          read,
	"POST /v1/nodes/{id}/drain":                   operate,
	"GET /v1/cron":                                read,
	"POST /v1/queues/{queue}/cron":                admin,
	"GET /v1/cron/{name}":                         read,
	"PATCH /v1/cron/{name}":                       admin,
	"DELETE /v1/cron/{name}":                      admin,
	"POST /v1/cron/{name}/pause":                  operate,
	"POST /v1/cron/{name}/resume":                 operate,
	"POST /v1/cron/{name}/run":                    operate,
	"GET /v1/batches":                             read,
	"POST /v1/queues/{queue}/batches":             operate,
	"GET /v1/batches/{id}":                        read,
	"POST /v1/batches/{id}/pause":                 operate,
	"POST /v1/batches/{id}/resume":                operate,
	"POST /v1/batches/{id}/cancel":                operate,
	"POST /v1/batches/{id}/retry":                 operate,
	"GET /v1/models":                              read,
	"GET /v1/models/{model}":                      read,
	"PUT /v1/models/{model}":                      admin,
	"DELETE /v1/models/{model}":                   admin,
	"PUT /v1/models/{model}/override":             admin,
	"DELETE /v1/models/{model}/override":          admin,
	"GET /v1/instances":                           read,
	"PUT /v1/instances/{model}/{server}":          admin,
	"POST /v1/instances/{model}/{server}/drain":   operate,
	"DELETE /v1/instances/{model}/{server}":       operate,
	"GET /v1/slots":                               read,
	"GET /v1/limits":                              read,
	"GET /v1/limits/{limit}":                      read,
	"PUT /v1/limits/{limit}":                      admin,
	"PUT /v1/queues/{queue}/limits/{limit}":       admin,
	"GET /v1/applications":                        read,
	"PUT /v1/applications/{application}/quota":    admin,
	"DELETE /v1/applications/{application}/quota": admin,
	"GET /v1/usage":                               read,
	"GET /v1/pauses":                              read,
	"POST /v1/pauses":                             operate,
	"DELETE /v1/pauses":                           operate,
	"GET /v1/operations":                          read,
	"POST /v1/queues/{queue}/operations":          operate,
	"GET /v1/operations/{id}":                     read,
	"POST /v1/operations/{id}/cancel":             operate,
	"GET /v1/audit":                               read,
	"GET /v1/snapshot":                            read,
	"GET /v1/tokens":                              admin,
	"POST /v1/tokens":                             admin,
	"POST /v1/tokens/{name}/rotate":               admin,
	"POST /v1/tokens/{name}/revoke":               admin,
}

// lets says which scopes of a token are good for what an address needs.
var lets = map[scope]string{"": "none push read operate admin", push: "push admin", read: "read operate admin", operate: "operate admin", admin: "admin"}

func TestEachAddressLetsInExactlyTheRolesThatItShould(t *testing.T) {
	pool := pgtest.New(t)
	a := New(pool, Config{})
	secrets := map[string]string{"none": ""}
	for _, role := range []string{"push", "read", "operate", "admin"} {
		secrets[role] = newToken(t, pool, operator.Grant{Name: role, Scopes: []string{role}})
	}
	secrets["expired"] = newToken(t, pool, operator.Grant{Name: "expired", Scopes: []string{"admin"}, ExpiresAt: time.Now().Add(-time.Hour)})
	secrets["unknown"] = operator.NewSecret()
	secrets["mistyped"] = secrets["admin"][:10] + "x" + secrets["admin"][11:]
	seen := map[string]bool{}
	for _, r := range a.routes {
		name := r.method + " " + r.path
		seen[name] = true
		need, listed := needs[name]
		if !listed {
			t.Errorf("%s is not in the table of this test", name)
			continue
		}
		for role, secret := range secrets {
			status := call(a, r.method, path(r.path), "", secret).Code
			let := status != http.StatusUnauthorized && status != http.StatusForbidden
			if want := strings.Contains(" "+lets[need]+" ", " "+role+" ") || need == ""; let != want {
				t.Errorf("%s with token %s: status %d, want it let in: %v", name, role, status, want)
			}
			if known := secrets[role] != "" && need != "" && (role == "expired" || role == "unknown" || role == "mistyped"); known && status != http.StatusUnauthorized {
				t.Errorf("%s with token %s: status %d, want 401", name, role, status)
			}
		}
	}
	for name := range needs {
		if !seen[name] {
			t.Errorf("%s is in the table of this test, but is no address", name)
		}
	}
}

// path fills in the parameters of a pattern with what does not exist.
func path(pattern string) string {
	parts := strings.Split(pattern, "/")
	for i, part := range parts {
		if strings.HasPrefix(part, "{") {
			parts[i] = "9"
		}
	}
	return strings.Join(parts, "/")
}

func call(a *API, method, path, body, secret string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, path, strings.NewReader(body)) //nolint:noctx // a test
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	if secret != "" {
		r.Header.Set("Authorization", "Bearer "+secret)
	}
	w := httptest.NewRecorder()
	a.ServeHTTP(w, r)
	return w
}

func newToken(t *testing.T, pool *pgxpool.Pool, g operator.Grant) string {
	t.Helper()
	secret, err := operator.New(pool).CreateToken(t.Context(), g, invalidation.By{Actor: "test", Reason: "test"})
	if err != nil {
		t.Fatal(err)
	}
	return secret
}
