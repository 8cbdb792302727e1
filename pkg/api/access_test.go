package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// needs is the scope that each address must ask for, written down a second time: one that is not here fails the test.
var needs = map[string]scope{
	"GET /livez":                                            "",
	"GET /readyz":                                           "",
	"GET /{$}":                                              "",
	"GET /openapi.yaml":                                     "",
	"GET /v1/queues":                                        read,
	"POST /v1/queues":                                       admin,
	"GET /v1/queues/{queue}":                                read,
	"PATCH /v1/queues/{queue}":                              admin,
	"DELETE /v1/queues/{queue}":                             admin,
	"GET /v1/queues/{queue}/lanes":                          read,
	"GET /v1/queues/{queue}/samples":                        read,
	"POST /v1/queues/{queue}/pause":                         operate,
	"POST /v1/queues/{queue}/resume":                        operate,
	"POST /v1/queues/{queue}/disable":                       operate,
	"POST /v1/queues/{queue}/enable":                        operate,
	"GET /v1/entries":                                       read,
	"GET /v1/entries/{id}":                                  read,
	"GET /v1/entries/{id}/events":                           read,
	"POST /queue/submit":                                    push,
	"POST /tasks/callback/{id}":                             "", // the address carries its own key
	"POST /admin/register":                                  admin,
	"GET /admin/model-configs/{model}":                      read,
	"PUT /admin/model-configs/{model}":                      admin,
	"DELETE /admin/model-configs/{model}":                   admin,
	"GET /admin/dlq":                                        read,
	"POST /admin/dlq/{id}/retry":                            operate,
	"POST /admin/dlq/retry-all":                             operate,
	"DELETE /admin/dlq/{id}":                                operate,
	"POST /v1/entries/{id}/cancel":                          operate,
	"POST /v1/entries/{id}/disable":                         operate,
	"POST /v1/entries/{id}/enable":                          operate,
	"POST /v1/queues/{queue}/entries/disable":               operate,
	"POST /v1/queues/{queue}/entries/enable":                operate,
	"POST /v1/queues/{queue}/entries":                       push,
	"GET /v1/groups":                                        read,
	"POST /v1/queues/{queue}/compact":                       operate,
	"GET /v1/blocked-keys":                                  read,
	"POST /v1/queues/{queue}/blocked-keys/unblock":          operate,
	"GET /v1/failures":                                      read,
	"GET /v1/queues/{queue}/causes":                         read,
	"GET /v1/failures/{id}":                                 read,
	"POST /v1/failures/{id}/retry":                          operate,
	"POST /v1/failures/{id}/discard":                        operate,
	"GET /v1/locks":                                         read,
	"GET /v1/locks/suspects":                                read,
	"POST /v1/queues/{queue}/locks/{token}/unlock":          admin,
	"GET /v1/nodes":                                         read,
	"GET /v1/nodes/{id}":                                    read,
	"POST /v1/nodes/{id}/drain":                             operate,
	"GET /v1/cron":                                          read,
	"POST /v1/queues/{queue}/cron":                          admin,
	"GET /v1/cron/{name}":                                   read,
	"PATCH /v1/cron/{name}":                                 admin,
	"DELETE /v1/cron/{name}":                                admin,
	"POST /v1/cron/{name}/pause":                            operate,
	"POST /v1/cron/{name}/resume":                           operate,
	"POST /v1/cron/{name}/run":                              operate,
	"GET /v1/batches":                                       read,
	"POST /v1/queues/{queue}/batches":                       operate,
	"GET /v1/batches/{id}":                                  read,
	"POST /v1/batches/{id}/pause":                           operate,
	"POST /v1/batches/{id}/resume":                          operate,
	"POST /v1/batches/{id}/cancel":                          operate,
	"POST /v1/batches/{id}/retry":                           operate,
	"GET /v1/models":                                        read,
	"GET /v1/models/{model}":                                read,
	"PUT /v1/models/{model}":                                admin,
	"DELETE /v1/models/{model}":                             admin,
	"PUT /v1/models/{model}/override":                       admin,
	"DELETE /v1/models/{model}/override":                    admin,
	"GET /v1/instances":                                     read,
	"PUT /v1/instances/{model}/{server}":                    admin,
	"POST /v1/instances/{model}/{server}/drain":             operate,
	"DELETE /v1/instances/{model}/{server}":                 admin,
	"GET /v1/slots":                                         read,
	"GET /v1/slots/dead":                                    read,
	"POST /v1/models/{model}/slots/free":                    operate,
	"PUT /v1/device-groups/{name}":                          admin,
	"GET /v1/scale/deployments":                             read,
	"GET /v1/scale/deployments/{deployment}":                read,
	"PUT /v1/scale/deployments/{deployment}":                admin,
	"DELETE /v1/scale/deployments/{deployment}":             admin,
	"GET /v1/scale/decisions":                               read,
	"GET /v1/scale/templates":                               read,
	"PUT /v1/scale/templates/{model}":                       admin,
	"DELETE /v1/scale/templates/{model}":                    admin,
	"GET /models/scale":                                     operate,
	"POST /models/scale":                                    operate,
	"POST /models/schedule":                                 operate,
	"POST /models/schedule_externally":                      operate,
	"POST /models/remove":                                   operate,
	"GET /models/status":                                    read,
	"POST /models/schedule_externally_on_specific_provider": operate,
	"GET /v1/scale/minutes":                                 read,
	"POST /v1/scale/simulate":                               read,
	"POST /v1/instances/{model}/{server}/announce":          announce,
	"PUT /v1/scale/override":                                operate,
	"DELETE /v1/scale/override":                             operate,
	"GET /v1/scale/settings":                                read,
	"PUT /v1/scale/settings":                                operate,
	"GET /v1/limits":                                        read,
	"GET /v1/limits/{limit}":                                read,
	"PUT /v1/limits/{limit}":                                admin,
	"PUT /v1/queues/{queue}/limits/{limit}":                 admin,
	"GET /v1/applications":                                  read,
	"PUT /v1/applications/{application}/quota":              admin,
	"DELETE /v1/applications/{application}/quota":           admin,
	"GET /v1/usage":                                         read,
	"GET /v1/usage/hours":                                   read,
	"POST /v1/flows/weight":                                 admin,
	"GET /v1/gateway/pools":                                 read,
	"PUT /v1/gateway/pools/{model}":                         admin,
	"GET /v1/gateway/batches":                               read,
	"POST /v1/gateway/batches/{name}/cancel":                operate,
	"GET /v1/gateway/flows":                                 read,
	"POST /v1/gateway/flows":                                admin,
	"GET /v1/pauses":                                        read,
	"POST /v1/pauses":                                       operate,
	"DELETE /v1/pauses":                                     operate,
	"GET /v1/operations":                                    read,
	"POST /v1/queues/{queue}/operations":                    operate,
	"GET /v1/operations/{id}":                               read,
	"POST /v1/operations/{id}/cancel":                       operate,
	"POST /v1/operations/{id}/step":                         operate,
	"GET /v1/audit":                                         read,
	"GET /v1/doctor":                                        operate,
	"GET /v1/migrations":                                    read,
	"GET /v1/snapshot":                                      read,
	"GET /v1/tokens":                                        admin,
	"POST /v1/tokens":                                       admin,
	"POST /v1/tokens/{name}/rotate":                         admin,
	"POST /v1/tokens/{name}/revoke":                         admin,
	"GET /v1/webhooks":                                      read,
	"GET /v1/webhooks/keys":                                 read,
	"GET /v1/webhooks/secrets":                              admin,
	"POST /v1/webhooks":                                     admin,
	"POST /v1/webhooks/rotate":                              admin,
	"POST /v1/webhooks/disable":                             admin,
}

// lets says which scopes of a token are good for what an address needs.
var lets = map[scope]string{
	"": "none push read operate admin announce", push: "push admin", read: "read operate admin", operate: "operate admin",
	admin: "admin", announce: "announce admin",
}

func TestEachAddressLetsInExactlyTheRolesThatItShould(t *testing.T) {
	pool := pgtest.New(t)
	a := New(pool, Config{})
	secrets := map[string]string{"none": ""}
	for _, role := range []string{"push", "read", "operate", "admin", "announce"} {
		secrets[role] = newToken(t, pool, operator.Grant{Name: role, Scopes: []string{role}})
	}
	secrets["expired"] = newToken(t, pool, operator.Grant{Name: "lapsed", Scopes: []string{"admin"}})
	if _, err := pool.Exec(t.Context(), `UPDATE penstock.api_token SET expires_at = now() - interval '1 hour' WHERE name = 'lapsed'`); err != nil {
		t.Fatal(err)
	}
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

func TestLimitedTokenReachesItsOwnAndNothingElse(t *testing.T) {
	w := newWorld(t)
	for _, sql := range []string{
		`SELECT penstock.create_queue(q, jsonb_build_object('application', a, 'kind', k))
		   FROM (VALUES ('mine', 'here', 'task'), ('near', 'here', 'task'), ('far', 'there', 'task'), ('mine_c', 'here', 'cron'), ('far_c', 'there', 'cron'),
		                ('mine_b', 'here', 'batch'), ('far_b', 'there', 'batch')) v(q, a, k)`,
		`SELECT penstock.push('mine', '1'), penstock.push('far', '1')`,
		`SELECT penstock.create_cron_job('mine', 'mine_c', '@every 1h'), penstock.create_cron_job('far', 'far_c', '@every 1h')`,
		`SELECT penstock.create_batch(q, q, '{"items": [1]}') FROM (VALUES ('mine_b'), ('far_b')) v(q)`,
		`SELECT penstock.start_operation(q, 'cancel', '{"name": "x"}') FROM (VALUES ('mine'), ('far')) v(q)`,
		`SELECT penstock.register_model('m', '{"protocol": "cog"}'), penstock.register_instance('m', 'gpu', 'http://gpu:5000', 1),
		        penstock.alter_queue('m', '{"application": "here"}')`,
		`INSERT INTO penstock.node (id, name, application, lease, threads) VALUES (1, 'h', 'here', '1 hour', 1), (2, 't', 'there', '1 hour', 1)`,
	} {
		w.exec(sql)
	}
	id := func(sql string) (id int64) {
		if err := w.pool.QueryRow(t.Context(), sql).Scan(&id); err != nil {
			t.Fatal(err)
		}
		return id
	}
	a := New(w.pool, Config{})
	all := []string{"admin"}
	byQueue := newToken(t, w.pool, operator.Grant{Name: "by-queue", Scopes: all, Queues: []string{"mine", "mine_c", "mine_b", "m"}})
	byApplication := newToken(t, w.pool, operator.Grant{Name: "by-application", Scopes: all, Applications: []string{"here"}})
	const yes, no = true, false
	for _, c := range []struct {
		method, path, body     string
		byQueue, byApplication bool
	}{
		{"GET", "/v1/queues/mine", "", yes, yes},
		{"GET", "/v1/queues/near", "", no, yes},
		{"GET", "/v1/queues/far", "", no, no},
		{"POST", "/v1/queues/mine/entries", `{"payload": 1}`, yes, yes},
		{"POST", "/v1/queues/far/entries", `{"payload": 1}`, no, no},
		{"GET", "/v1/entries?queue=mine", "", yes, yes},
		{"GET", "/v1/entries?queue=far", "", no, no},
		{"GET", "/v1/entries?queue=mine&queue=far", "", yes, yes}, // the first counts, for both who ask
		{"GET", "/v1/entries?%71ueue=far", "", no, no},
		{"GET", "/v1/locks", "", no, no},
		{"GET", "/v1/locks?queue=mine", "", yes, yes},
		{"GET", fmt.Sprint("/v1/entries/", id(`SELECT id FROM penstock.entry_mine LIMIT 1`)), "", yes, yes},
		{"GET", fmt.Sprint("/v1/entries/", id(`SELECT id FROM penstock.entry_far LIMIT 1`)), "", no, no},
		{"GET", "/v1/cron/mine", "", yes, yes},
		{"GET", "/v1/cron/far", "", no, no},
		{"GET", fmt.Sprint("/v1/batches/", id(`SELECT id FROM penstock.batch WHERE name = 'mine_b'`)), "", yes, yes},
		{"GET", fmt.Sprint("/v1/batches/", id(`SELECT id FROM penstock.batch WHERE name = 'far_b'`)), "", no, no},
		{"GET", fmt.Sprint("/v1/operations/", id(`SELECT min(id) FROM penstock.operation`)), "", yes, yes},
		{"GET", fmt.Sprint("/v1/operations/", id(`SELECT max(id) FROM penstock.operation`)), "", no, no},
		{"GET", "/v1/nodes/1", "", no, yes},
		{"GET", "/v1/nodes/2", "", no, no},
		{"GET", "/v1/models/m", "", yes, yes},
		{"POST", "/v1/instances/m/gpu/drain", "{" + reason + "}", yes, yes},
		{"PUT", "/v1/instances/m/evil", `{"endpoint": "http://evil:1/", "slots": 1, ` + reason + `}`, no, no},
		{"PUT", "/v1/models/m/override", `{"override": {"headers": {"X": "${file:/etc/passwd}"}}, ` + reason + `}`, no, no},
		{"PUT", "/admin/model-configs/m", `{"headers": {"X": "${env:PGPASSWORD}"}}`, no, no},
		{"DELETE", "/admin/model-configs/m", "", no, no},
		{"GET", "/v1/audit", "", no, no},
		{"GET", "/v1/tokens", "", no, no},
		{"POST", "/v1/queues", `{"name": "new", ` + reason + `}`, no, no},
		{"POST", "/v1/pauses?queue=mine", `{"scope": "flow", "value": "f", ` + reason + `}`, yes, yes},
		{"POST", "/v1/pauses", `{"scope": "flow", "value": "f", ` + reason + `}`, no, no},
		{"PATCH", "/v1/queues/mine", `{"settings": {"application": "there"}, ` + reason + `}`, no, no},
		{"PATCH", "/v1/queues/mine", `{"settings": {"statements": {"run": "SELECT 1"}}, ` + reason + `}`, no, no},
		{"POST", "/v1/queues/mine_b/batches", `{"name": "b", "options": {"items": [1], "completion_queue": "far"}, ` + reason + `}`, no, no},
		{"POST", "/v1/queues/mine_b/batches", `{"name": "b", "options": {"items": [1], "completion_queue": "mine"}, ` + reason + `}`, yes, yes},
		{"POST", "/v1/queues/mine_b/batches", `{"name": "b", "options": {"query": "SELECT 1"}, ` + reason + `}`, no, no},
	} {
		for secret, want := range map[string]bool{byQueue: c.byQueue, byApplication: c.byApplication} {
			answered := call(a, c.method, c.path, c.body, secret)
			if let := answered.Code < 300; let != want || !let && answered.Code != http.StatusForbidden {
				t.Errorf("%s %s, limited to queues %v: %d %s, want it let in: %v", c.method, c.path, secret == byQueue, answered.Code, answered.Body, want)
			}
		}
	}
	for secret, want := range map[string]int{byQueue: 4, byApplication: 5} {
		var page list[operator.Queue]
		if err := json.Unmarshal(call(a, "GET", "/v1/queues", "", secret).Body.Bytes(), &page); err != nil || len(page.Items) != want {
			t.Errorf("%d queues are shown, want %d (%v)", len(page.Items), want, err)
		}
	}
}

// TestOperateCannotPushThroughABatch: the entry that a completion queue gets is a push like any other.
func TestOperateCannotPushThroughABatch(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('parts', '{"kind": "batch"}'), penstock.create_queue('other')`)
	a := New(w.pool, Config{})
	body := `{"name": "b", "options": {"items": [1], "completion_queue": "other"}, ` + reason + `}`
	for scopes, want := range map[string]int{"operate": 403, "operate,push": 201, "admin": 201} {
		secret := newToken(t, w.pool, operator.Grant{Name: strings.ReplaceAll(scopes, ",", "-"), Scopes: strings.Split(scopes, ",")})
		if answer := call(a, "POST", "/v1/queues/parts/batches", body, secret); answer.Code != want {
			t.Errorf("%s: %d %s, want %d", scopes, answer.Code, answer.Body, want)
		}
	}
}

// A token of scope push may see what became of its own pushes, which the key of the push proves, and of no others.
func TestPusherSeesItsOwnEntriesAndNoOthers(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('mine'), penstock.create_queue('far')`)
	var one, two, far int64
	if err := w.pool.QueryRow(t.Context(), `SELECT penstock.push('mine', '1', idempotency_key => 'k1'), penstock.push('mine', '2', flow => 'f', idempotency_key => 'k2'),
		penstock.push('far', '3', idempotency_key => 'k3')`).Scan(&one, &two, &far); err != nil {
		t.Fatal(err)
	}
	secret := newToken(t, w.pool, operator.Grant{Name: "pusher", Scopes: []string{"push"}, Queues: []string{"mine"}})
	a := New(w.pool, Config{})
	for _, c := range []struct {
		id        int64
		key, rest string
		want      int
	}{
		{one, `"k1"`, "", 200},
		{one, "k1", "?wait=1ms", 200},
		{two, "k2", "?flow=f", 200},
		{one, "", "", 403},
		{one, "k2", "", 403},
		{two, "k1", "", 403},
		{two, "k2", "", 403},
		{far, "k3", "", 403}, // its own by the key, but the token is for another queue
		{987654, "k1", "", 403},
		{one, `"k1`, "", 400},
		{one, "k1", "/events", 403},
	} {
		r := httptest.NewRequestWithContext(t.Context(), "GET", fmt.Sprint("/v1/entries/", c.id, c.rest), nil)
		r.Header.Set("Authorization", "Bearer "+secret)
		if c.key != "" {
			r.Header.Set("Idempotency-Key", c.key)
		}
		answered := httptest.NewRecorder()
		a.ServeHTTP(answered, r)
		if answered.Code != c.want {
			t.Errorf("entry %d%s with key %s: %d %s, want %d", c.id, c.rest, c.key, answered.Code, answered.Body, c.want)
		}
	}
}

// A worker may repeat parts of a call in its answer, so that it is for readers and for the client of that call.
func TestPusherIsToldNoAnswerToACallOfOthers(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('mine')`)
	var own, refused int64
	if err := w.pool.QueryRow(t.Context(), `SELECT penstock.push('mine', '1', idempotency_key => 'own'),
		penstock.push('mine', '2', idempotency_key => 'refused')`).Scan(&own, &refused); err != nil {
		t.Fatal(err)
	}
	w.exec(fmt.Sprintf(`INSERT INTO penstock.node (id, name, application, lease, threads, queue_ids, load)
		SELECT 7, 'small', 'default', '1 hour', 1, ARRAY[q.id], jsonb_build_object('handed_back', jsonb_build_object('mine',
		       jsonb_build_object('reason', 'no prompt of this kind', 'entry', %d, 'seconds', 0)))
		  FROM penstock.queue q WHERE q.name = 'mine'`, refused))
	pusher := newToken(t, w.pool, operator.Grant{Name: "pusher", Scopes: []string{"push"}})
	both := newToken(t, w.pool, operator.Grant{Name: "both", Scopes: []string{"push", "read"}})
	a := New(w.pool, Config{})
	for _, c := range []struct {
		name, secret, key string
		id                int64
		told              bool
	}{
		{"its client", pusher, "refused", refused, true},
		{"another client", pusher, "own", own, false},
		{"a reader", both, "", own, true},
		{"a reader with the key of its own push", both, "own", own, true},
	} {
		r := httptest.NewRequestWithContext(t.Context(), "GET", fmt.Sprint("/v1/entries/", c.id), nil)
		r.Header.Set("Authorization", "Bearer "+c.secret)
		r.Header.Set("Idempotency-Key", c.key)
		answered := httptest.NewRecorder()
		a.ServeHTTP(answered, r)
		text := answered.Body.String()
		if answered.Code != 200 || !strings.Contains(text, "handed_back") {
			t.Errorf("%s: %d %s, want the reason handed_back", c.name, answered.Code, text)
		}
		if told := strings.Contains(text, "no prompt of this kind"); told != c.told {
			t.Errorf("%s is told the answer: %t, want %t: %s", c.name, told, c.told, text)
		}
		if told := strings.Contains(text, fmt.Sprintf(`"entry_id":%d`, refused)); told != c.told {
			t.Errorf("%s is told the entry: %t, want %t: %s", c.name, told, c.told, text)
		}
	}
}

// The error of a failure that blocks a lock key is that of another entry.
func TestPusherIsToldNoErrorOfAnotherEntryOfItsKey(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('mine')`)
	var own int64
	if err := w.pool.QueryRow(t.Context(), `SELECT penstock.push('mine', '1', lock_key => 'K', idempotency_key => 'own')`).
		Scan(&own); err != nil {
		t.Fatal(err)
	}
	w.exec(`INSERT INTO penstock.blocked_key (queue_id, lock_key, entry_id, class, error, blocked_at)
		SELECT id, 'K', 4711, 'oom', 'a prompt of another', now() FROM penstock.queue WHERE name = 'mine'`)
	a := New(w.pool, Config{})
	for name, told := range map[string]bool{"push": false, "read": true} {
		r := httptest.NewRequestWithContext(t.Context(), "GET", fmt.Sprint("/v1/entries/", own), nil)
		r.Header.Set("Authorization", "Bearer "+newToken(t, w.pool, operator.Grant{Name: name, Scopes: []string{name}}))
		r.Header.Set("Idempotency-Key", "own")
		answered := httptest.NewRecorder()
		a.ServeHTTP(answered, r)
		text := answered.Body.String()
		if answered.Code != 200 || !strings.Contains(text, "key_blocked") {
			t.Errorf("%s: %d %s, want the reason key_blocked", name, answered.Code, text)
		}
		if strings.Contains(text, "a prompt of another") != told || strings.Contains(text, "4711") != told {
			t.Errorf("with %s the error of another entry is told, want %t: %s", name, told, text)
		}
	}
}

// A token that pushes for some flows sees by a key that it guessed no entry of another flow.
func TestPusherOfSomeFlowsSeesNoEntryOfOthers(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('mine')`)
	var acme, zeta, globex, none int64
	if err := w.pool.QueryRow(t.Context(), `SELECT penstock.push('mine', '1', flow => 'acme', idempotency_key => 'k'),
		penstock.push('mine', '2', flow => 'zeta', idempotency_key => 'k'), penstock.push('mine', '3', flow => 'globex', idempotency_key => 'k'),
		penstock.push('mine', '4', idempotency_key => 'k')`).Scan(&acme, &zeta, &globex, &none); err != nil {
		t.Fatal(err)
	}
	a := New(w.pool, Config{})
	one := newToken(t, w.pool, operator.Grant{Name: "one", Scopes: []string{"push"}, Flows: []string{"acme"}})
	two := newToken(t, w.pool, operator.Grant{Name: "two", Scopes: []string{"push"}, Flows: []string{"acme", "zeta"}})
	for _, c := range []struct {
		secret string
		id     int64
		rest   string
		want   int
	}{
		{one, acme, "", 200},
		{one, acme, "?flow=acme", 200},
		{one, globex, "?flow=globex", 403},
		{one, zeta, "?flow=zeta", 403},
		{two, zeta, "?flow=zeta", 200},
		{two, none, "", 403},
		{two, globex, "?flow=globex", 403},
	} {
		r := httptest.NewRequestWithContext(t.Context(), "GET", fmt.Sprint("/v1/entries/", c.id, c.rest), nil)
		r.Header.Set("Authorization", "Bearer "+c.secret)
		r.Header.Set("Idempotency-Key", "k")
		answered := httptest.NewRecorder()
		a.ServeHTTP(answered, r)
		if answered.Code != c.want {
			t.Errorf("entry %d%s: %d %s, want %d", c.id, c.rest, answered.Code, answered.Body, c.want)
		}
	}
}

func TestRotatedTokenWorksForItsOverlapAndARevokedOneNotAtAll(t *testing.T) {
	w := newWorld(t)
	d := operator.New(w.pool)
	// An API of its own for each look: what a leader has just seen it lets in for a few seconds.
	status := func(secret string) int { return call(New(w.pool, Config{}), "GET", "/v1/queues", "", secret).Code }
	by := invalidation.By{Actor: "ada", Reason: "test"}
	first := newToken(t, w.pool, operator.Grant{Name: "ci", Scopes: []string{"read"}})
	if _, err := d.CreateToken(t.Context(), operator.Grant{Name: "ci", Scopes: []string{"admin"}}, by); !errors.Is(err, invalidation.ErrState) {
		t.Errorf("a second token of the name: %v, want it refused", err)
	}
	second, err := d.RotateToken(t.Context(), "ci", time.Hour, time.Time{}, by)
	if err != nil || status(first) != 200 || status(second) != 200 {
		t.Errorf("during the overlap: %d and %d (%v)", status(first), status(second), err)
	}
	third, err := d.RotateToken(t.Context(), "ci", 0, time.Now().Add(time.Hour), by)
	if err != nil || status(first) != 401 || status(second) != 401 || status(third) != 200 {
		t.Errorf("after it: %d, %d and %d (%v)", status(first), status(second), status(third), err)
	}
	if _, err := d.RotateToken(t.Context(), "ci", 0, time.Time{}, by); err != nil {
		t.Error(err)
	}
	var left float64
	if err := w.pool.QueryRow(t.Context(), `SELECT extract(epoch FROM max(expires_at) - clock_timestamp()) FROM penstock.api_token`).Scan(&left); err != nil || left < 3500 || left > 3700 {
		t.Errorf("a token that lasted an hour lasts %v s after a rotation (%v)", left, err)
	}
	third = newToken(t, w.pool, operator.Grant{Name: "other", Scopes: []string{"read"}})
	if status(third) != 200 {
		t.Error("a living token is refused")
	}
	if err := d.RevokeToken(t.Context(), "other", by); err != nil || status(third) != 401 {
		t.Errorf("revoked: %d (%v)", status(third), err)
	}
	var kept string
	if err := w.pool.QueryRow(t.Context(), `SELECT string_agg(t::text, ' ') || (SELECT string_agg(a::text, ' ') FROM penstock.audit a) FROM penstock.api_token t`).Scan(&kept); err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{first, second, third} {
		if strings.Contains(kept, secret) || strings.Contains(kept, secret[4:20]) {
			t.Error("a secret is kept in the database")
		}
	}
	var used int
	if err := w.pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.api_token WHERE used_at IS NOT NULL`).Scan(&used); err != nil || used != 4 {
		t.Errorf("%d tokens are known to have been used, want 4 (%v)", used, err)
	}
}

func TestAuditNamesTheTokenAndCannotBeChanged(t *testing.T) {
	w := newWorld(t)
	secret := newToken(t, w.pool, operator.Grant{Name: "on-call", Scopes: []string{"operate"}})
	if got := call(New(w.pool, Config{}), "POST", "/v1/queues/webhook/pause", "{"+reason+"}", secret); got.Code != 204 {
		t.Fatalf("pause: %d %s", got.Code, got.Body)
	}
	found, err := operator.New(w.pool).Audits(t.Context(), operator.AuditFilter{Actor: "on-call", Verb: "pause_queue"})
	if err != nil || len(found) != 1 || found[0].Reason != "a test" {
		t.Errorf("audit: %+v (%v)", found, err)
	}
	for _, sql := range []string{`UPDATE penstock.audit SET actor = 'nobody'`, `DELETE FROM penstock.audit`, `TRUNCATE penstock.audit`} {
		if _, err := w.pool.Exec(t.Context(), sql); postgres.Code(err) != "42501" {
			t.Errorf("%s: %v, want it refused", sql, err)
		}
	}
}

func TestConfigurationIsChangedOnlyByWhoHasReadIt(t *testing.T) {
	w := newWorld(t)
	const path = "/v1/queues/webhook"
	body := `{"settings": {"crash_limit": 5}, ` + reason + `}`
	if status, answer := w.send("PATCH", path, body); status != 428 || answer["code"] != "precondition_required" {
		t.Errorf("without If-Match: %d %v", status, answer)
	}
	w.send("GET", path, "")
	tag := w.tags[path]
	var wg sync.WaitGroup
	statuses := make(chan int, 8)
	for i := range 8 {
		wg.Go(func() {
			status, _ := w.send("PATCH", path, fmt.Sprintf(`{"settings": {"crash_limit": %d}, %s}`, 10+i, reason), "If-Match", tag)
			statuses <- status
		})
	}
	wg.Wait()
	close(statuses)
	count := map[int]int{}
	for status := range statuses {
		count[status]++
	}
	if count[204] != 1 || count[412] != 7 {
		t.Errorf("of 8 changes at once with one ETag: %v, want one 204 and seven 412", count)
	}
	w.send("GET", path, "")
	if status, answer := w.send("PATCH", path, body, "If-Match", "W/"+w.tags[path]); status != 204 {
		t.Errorf("with the tag that a proxy made weak: %d %v", status, answer)
	}
}

func TestServerThatIsOpenServesThisMachineAlone(t *testing.T) {
	a := New(pgtest.New(t), Config{Open: true})
	for _, c := range []struct {
		host, origin string
		want         int
	}{
		{"localhost:8420", "", 204},
		{"127.0.0.1:8420", "", 204},
		{"[::1]:8420", "", 204},
		{"127.0.0.1", "http://127.0.0.1", 204},
		{"rebound.example", "", 421},
		{"10.0.0.7:8420", "", 421},
		{"localhost:8420", "https://evil.example", 421},
	} {
		r := httptest.NewRequestWithContext(t.Context(), "POST", "/v1/queues/webhook/resume", strings.NewReader("{"+reason+"}"))
		r.Host = c.host
		if c.origin != "" {
			r.Header.Set("Origin", c.origin)
		}
		answered := httptest.NewRecorder()
		a.ServeHTTP(answered, r)
		if answered.Code != c.want {
			t.Errorf("host %s, origin %q: %d %s, want %d", c.host, c.origin, answered.Code, answered.Body, c.want)
		}
	}
}

// Whoever lets visitors in while the database does not answer must not take the wait for a place for that.
func TestALookupThatWasNotBegunIsNoSilenceOfTheDatabase(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cache := tokens{lookups: make(chan struct{})}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := cache.authenticate(ctx, operator.NewSecret()); !errors.Is(err, errLookups) || postgres.Disconnected(err) {
			t.Errorf("without a place: %v", err)
		}
	})
}

func TestTokenIsLookedUpOnceInAWhileAndInventedOnesWaitForOneAnother(t *testing.T) {
	secret := operator.NewSecret()
	synctest.Test(t, func(t *testing.T) {
		var asked, at, most atomic.Int32
		good := map[string]bool{secret: true}
		cache := tokens{lookups: make(chan struct{}, lookupsMax), find: func(_ context.Context, s string) (operator.APIToken, error) {
			asked.Add(1)
			most.Store(max(most.Load(), at.Add(1)))
			time.Sleep(time.Second)
			at.Add(-1)
			if !good[s] {
				return operator.APIToken{}, invalidation.ErrNotFound
			}
			return operator.APIToken{Live: true}, nil
		}}
		for range 100 {
			if _, err := cache.authenticate(t.Context(), secret); err != nil {
				t.Fatal(err)
			}
		}
		if asked.Load() != 1 {
			t.Errorf("looked up %d times for 100 requests at once, want 1", asked.Load())
		}
		time.Sleep(tokenKept)
		delete(good, secret)
		if _, err := cache.authenticate(t.Context(), secret); !errors.Is(err, errNoToken) {
			t.Errorf("a revoked token after %s: %v, want it refused", tokenKept, err)
		}
		if _, err := cache.authenticate(t.Context(), "pst_0"); !errors.Is(err, errNoToken) || asked.Load() != 2 {
			t.Errorf("a mistyped secret: %v after %d lookups, want it refused without one", err, asked.Load())
		}
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				if _, err := cache.authenticate(t.Context(), operator.NewSecret()); !errors.Is(err, errNoToken) {
					t.Errorf("an invented secret: %v", err)
				}
			})
		}
		wg.Wait()
		if most.Load() != lookupsMax {
			t.Errorf("%d lookups of invented secrets at once, want %d", most.Load(), lookupsMax)
		}
	})
}

func TestEachSQLSTATEOfTheSchemaHasItsStatus(t *testing.T) {
	for code, want := range map[string]int{
		"PS001": 404, "PS002": 422, "PS003": 413, "PS004": 422, "PS005": 429, "PS006": 409, "PS007": 404, "PS008": 404, "PS010": 404, "PS011": 409, "PS012": 404,
		"40001": 409, "57014": 503, "22P05": 422, "25006": 503, "XX000": 500,
	} {
		err := fmt.Errorf("do something: %w", &pgconn.PgError{Code: code, Message: "no"})
		if p := problem(classify(t.Context(), err)); p.Status != want {
			t.Errorf("%s: %d %s, want %d", code, p.Status, p.Code, want)
		}
	}
}

func FuzzCursor(f *testing.F) {
	f.Add("MTc", "x")
	f.Add("WyJhIiwiYiJd", "y")
	f.Add("bnVsbA", "")
	f.Fuzz(func(t *testing.T, cursor, key string) {
		var number int64
		var text string
		var both [2]string
		for _, into := range []any{&number, &text, &both} {
			if err := (Paging{Cursor: cursor}).after(into); err != nil && !errors.Is(err, errInvalid) {
				t.Errorf("cursor %q: %v", cursor, err)
			}
		}
		page := pageOf([]string{key, "more"}, Paging{Limit: 1}, func(s string) any { return s })
		var back string
		if err := (Paging{Cursor: page.Body.NextCursor}).after(&back); err != nil || utf8.ValidString(key) && back != key {
			t.Errorf("key %q comes back as %q (%v)", key, back, err)
		}
	})
}

// A secret that is written out instead of named would stand in the audit, to which nothing can be done any more.
func TestModelThatNodesCouldNotReadIsNotStored(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.register_model('m', '{"protocol": "cog"}')`)
	w.api = New(w.pool, Config{Open: true, ReadModel: func(_ string, config, override []byte) ([]byte, error) {
		if strings.Contains(string(config)+string(override), "sk-") {
			return nil, errors.New("headers.X must refer to its secret as env:NAME")
		}
		return config, nil
	}})
	w.exec(`SELECT penstock.register_model('n', '{"protocol": "cog"}'), penstock.set_model_override('n', '{"headers": {"Y": "sk-"}}', 'by psql', 'ada')`)
	w.send("GET", "/v1/models/m", "")
	w.send("GET", "/v1/models/n", "")
	if status, answer := w.send("PUT", "/v1/models/n", `{"config": {"protocol": "cog"}, `+reason+`}`, "If-Match", w.tags["/v1/models/n"]); status != 422 {
		t.Errorf("a config that its override spoils: %d %v", status, answer)
	}
	for path, body := range map[string]string{
		"/v1/models/m": `"config": {"protocol": "cog", "headers": {"X": "sk-1"}}`, "/v1/models/m/override": `"override": {"headers": {"X": "sk-1"}}`,
	} {
		status, answer := w.send("PUT", path, "{"+body+", "+reason+"}", "If-Match", w.tags["/v1/models/m"])
		if status != 422 || !strings.Contains(fmt.Sprint(answer["detail"]), "headers.X") {
			t.Errorf("PUT %s: %d %v, want 422 that names the field", path, status, answer)
		}
	}
	if status, answer := w.send("PUT", "/v1/instances/m/gpu", `{"endpoint": "gopher://gpu:1", "slots": 1, `+reason+`}`); status != 422 {
		t.Errorf("an endpoint that cannot be called: %d %v", status, answer)
	}
	var found int
	if err := w.pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.audit WHERE detail::text LIKE '%sk-1%'`).Scan(&found); err != nil || found != 0 {
		t.Errorf("%d rows of the audit have the secret (%v)", found, err)
	}
}

func TestJobOfAPlainQueueIsNoModels(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('plain')`)
	a, secret := New(w.pool, Config{}), newToken(t, w.pool, operator.Grant{Name: "pusher", Scopes: []string{"push"}})
	unknown := call(a, "POST", "/queue/submit", `{"model": "nobody", "payload": 1}`, secret)
	if plain := call(a, "POST", "/queue/submit", `{"model": "plain", "payload": 1}`, secret); plain.Code != unknown.Code || plain.Code < 400 ||
		!strings.Contains(plain.Body.String(), "not registered") {
		t.Errorf("plain queue: %d %s; unknown model: %d", plain.Code, plain.Body, unknown.Code)
	}
}
