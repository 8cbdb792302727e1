package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
)

// world is an API on a database in which there is something of everything.
type world struct {
	t    *testing.T
	pool *pgxpool.Pool
	api  *API
	seen map[string]any // answers by the name of their step
	tags map[string]string
	// rename is applied to the names of the story
	rename func(string) string
}

// Patient gives the checks of readiness the time that a busy machine takes.
func Patient(c Config) Config {
	c.checkTimeout = time.Minute
	return c
}

func newWorld(t *testing.T) *world {
	t.Helper()
	pool := pgtest.New(t)
	return &world{
		t: t, pool: pool, api: New(pool, Patient(Config{Open: true, Reports: reports{}, Webhooks: receivers{}})),
		seen: map[string]any{}, tags: map[string]string{}, rename: func(name string) string { return name },
	}
}

func (w *world) exec(sql string) {
	w.t.Helper()
	if _, err := w.pool.Exec(w.t.Context(), w.rename(sql)); err != nil {
		w.t.Fatal(err)
	}
}

// named is what a name of the story is here.
func (w *world) named(name string) string { return strings.Trim(w.rename(`"`+name+`"`), `"`) }

// send calls an address; every GET remembers the ETag.
func (w *world) send(method, path, body string, header ...string) (int, map[string]any) {
	w.t.Helper()
	r := httptest.NewRequestWithContext(w.t.Context(), method, "http://localhost"+path, strings.NewReader(body))
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	answered := httptest.NewRecorder()
	w.api.ServeHTTP(answered, r)
	w.described(w.pattern(method, path), answered)
	if tag := answered.Header().Get("ETag"); tag != "" {
		w.tags[path] = tag
	}
	var answer map[string]any
	if answered.Body.Len() > 0 && json.Unmarshal(answered.Body.Bytes(), &answer) != nil && !strings.HasSuffix(path, ".yaml") &&
		answered.Header().Get("Content-Type") != "text/event-stream" {
		w.t.Errorf("%s %s: answer is not JSON: %s", method, path, answered.Body)
	}
	return answered.Code, answer
}

// step is a request that should go well. In path and body, {word} stands for what an earlier step named word answered.
type step struct {
	method, path, body string
	status             int
	name, take         string // remember field take of the answer as {name}
	tagOf              string // send the ETag of this path
	want               string // field=value of the answer, or of its first item
	before             func(*world)
}

const reason = `"reason": "a test"`

func story() []step {
	const ok, none, made, accepted = http.StatusOK, http.StatusNoContent, http.StatusCreated, http.StatusAccepted
	why := "{" + reason + "}"
	return []step{
		{method: "GET", path: "/", status: ok, want: "name=Penstock"},
		{method: "GET", path: "/livez", status: ok},
		{method: "GET", path: "/readyz", status: ok},
		{method: "GET", path: "/openapi.yaml", status: ok},
		{method: "POST", path: "/v1/queues", body: `{"name": "work", "settings": {"grouping": "k", "mergeable": true}, ` + reason + `}`, status: made},
		{method: "GET", path: "/v1/queues", status: ok, want: "name=webhook"},
		{method: "GET", path: "/v1/queues/work", status: ok, want: "kind=task"},
		{method: "PATCH", path: "/v1/queues/work", body: `{"settings": {"capacity": 100000}, ` + reason + `}`, tagOf: "/v1/queues/work", status: none},
		{method: "GET", path: "/v1/queues/work", status: ok, want: "capacity=100000"},
		{method: "PATCH", path: "/v1/queues/work", body: `{"settings": {"capacity": null}, ` + reason + `}`, tagOf: "/v1/queues/work", status: none},
		{method: "GET", path: "/v1/queues/work", status: ok, want: "capacity=<nil>"},
		{method: "POST", path: "/v1/queues/work/pause", body: `{"until": "2100-01-01T00:00:00Z", ` + reason + `}`, status: none},
		{method: "POST", path: "/v1/queues/work/pause", body: why, status: ok},
		{method: "GET", path: "/v1/pauses?queue=work", status: ok, want: "value=work"},
		{method: "POST", path: "/v1/queues/work/resume", body: why, status: none},
		{method: "POST", path: "/v1/queues/work/disable", body: why, status: none},
		{method: "POST", path: "/v1/queues/work/enable", body: why, status: none},

		{method: "POST", path: "/v1/queues/work/entries", body: `{"payload": {"k": "a"}, "name": "n"}`, status: made, name: "one", take: "id"},
		{method: "POST", path: "/v1/queues/work/entries", body: `{"payload": {"k": "a"}}`, status: made, name: "two", take: "id"},
		{method: "GET", path: "/v1/entries?queue=work&state=pending", status: ok, want: "lock_key=a"},
		{method: "GET", path: "/v1/entries/{one}", status: ok, want: "state=pending"},
		{method: "GET", path: "/v1/groups?queue=work", status: ok, want: "lock_key=a"},
		{method: "GET", path: "/v1/queues/work/lanes", status: ok, want: "queue=work"},
		{method: "GET", path: "/v1/queues/work/samples?minutes=90", status: ok},
		{method: "POST", path: "/v1/queues/work/compact", body: why, status: ok, want: "replaced=1"},
		{before: (*world).blockKeys, method: "GET", path: "/v1/blocked-keys?queue=work", status: ok, want: "lock_key=gone"},
		{method: "POST", path: "/v1/queues/work/blocked-keys/unblock", body: `{"lock_key": "gone", ` + reason + `}`, status: ok, want: "unblocked=1"},
		{method: "POST", path: "/v1/queues/work/blocked-keys/unblock", body: `{"all": true, "retry": true, ` + reason + `}`, status: ok, want: "more=false"},
		{method: "POST", path: "/v1/queues/work/entries", body: `{"payload": {"k": "b"}, "name": "n"}`, status: made, name: "three", take: "id"},
		{method: "POST", path: "/v1/entries/{three}/disable", body: why, status: none},
		{method: "POST", path: "/v1/entries/{three}/enable", body: why, status: none},
		{method: "POST", path: "/v1/queues/work/entries/disable", body: `{"scope": "name", "value": "n", ` + reason + `}`, status: accepted},
		{method: "POST", path: "/v1/queues/work/entries/enable", body: `{"scope": "name", "value": "n", ` + reason + `}`, status: accepted},
		{method: "POST", path: "/v1/entries/{three}/cancel", body: why, status: ok, want: "verdict=cancelled"},
		{method: "GET", path: "/v1/entries/{three}?wait=20s", status: ok, want: "state=cancelled"},
		{method: "GET", path: "/v1/entries/{three}/events", status: ok},

		{before: (*world).failAndRun, method: "GET", path: "/v1/failures?queue=work", status: ok, want: "class=input", name: "bad", take: "id"},
		{method: "GET", path: "/v1/queues/work/causes", status: ok, want: "failures=2"},
		{method: "GET", path: "/v1/failures/{bad}", status: ok, want: "class=input"},
		{method: "POST", path: "/v1/failures/{bad}/retry", body: why, status: none},
		{method: "GET", path: "/v1/failures?queue=work", status: ok, name: "worse", take: "id"},
		{method: "POST", path: "/v1/failures/{worse}/discard", body: why, status: none},
		{method: "GET", path: "/v1/locks?queue=work&node=7", status: ok, want: "node_id=7"},
		{method: "GET", path: "/v1/locks/suspects", status: ok},
		{method: "GET", path: "/v1/usage", status: ok, want: "queue=work"},
		{before: (*world).useModel, method: "GET", path: "/v1/usage/hours?flow=f&from=2026-01-01T00:00:00Z", status: ok, want: "gpu_ms=1500"},
		{method: "GET", path: "/v1/nodes", status: ok, want: "id=7"},
		{method: "GET", path: "/v1/nodes/7", status: ok, want: "name=gpu"},
		{method: "GET", path: "/v1/locks?queue=work", status: ok, name: "held", take: "token"},
		{method: "GET", path: "/v1/locks?queue=work", status: ok, name: "key", take: "lock_key"},
		{method: "POST", path: "/v1/queues/work/locks/{held}/unlock", body: `{"lock_key": "{key}", "even_listed": true, ` + reason + `}`, status: none},
		{method: "POST", path: "/v1/nodes/7/drain", body: why, status: none},

		{method: "POST", path: "/v1/queues/work/operations", body: `{"verb": "cancel", "filter": {"all": true, "older_than_seconds": 3600}, "dry_run": true, ` + reason + `}`, status: accepted, want: "matching=0"},
		{method: "POST", path: "/v1/queues/work/operations", body: `{"verb": "cancel", "filter": {"all": true}, ` + reason + `}`, status: accepted, name: "op", take: "operation_id"},
		{method: "GET", path: "/v1/operations?queue=work&running=true", status: ok, want: "verb=cancel"},
		{method: "GET", path: "/v1/operations/{op}", status: ok, want: "status=running"},
		{method: "POST", path: "/v1/operations/{op}/cancel", body: why, status: none},
		{method: "POST", path: "/v1/queues/work/operations", body: `{"verb": "cancel", "filter": {"all": true}, ` + reason + `}`, status: accepted, name: "op", take: "operation_id"},
		{method: "POST", path: "/v1/operations/{op}/step", status: ok, want: "wait_ms=0"},

		{method: "POST", path: "/v1/queues", body: `{"name": "tick", "settings": {"kind": "cron"}, ` + reason + `}`, status: made},
		{method: "POST", path: "/v1/queues/tick/cron", body: `{"name": "daily", "spec": "0 6 * * *", "settings": {"payload": {"n": 1}}, ` + reason + `}`, status: made},
		{method: "GET", path: "/v1/cron?queue=tick", status: ok, want: "name=daily"},
		{method: "GET", path: "/v1/cron/daily", status: ok, want: "spec=0 6 * * *"},
		{method: "PATCH", path: "/v1/cron/daily", body: `{"settings": {"spec": "0 7 * * *"}, ` + reason + `}`, tagOf: "/v1/cron/daily", status: none},
		{method: "POST", path: "/v1/cron/daily/pause", body: why, status: none},
		{method: "POST", path: "/v1/cron/daily/resume", body: why, status: none},
		{method: "POST", path: "/v1/cron/daily/run", body: why, status: accepted},
		{method: "DELETE", path: "/v1/cron/daily?reason=test", status: none},

		{method: "POST", path: "/v1/queues", body: `{"name": "parts", "settings": {"kind": "batch"}, ` + reason + `}`, status: made},
		{method: "POST", path: "/v1/queues/parts/batches", body: `{"name": "b", "options": {"items": [1, 2, 3], "part_size": 2}, ` + reason + `}`, status: made, name: "batch", take: "id"},
		{method: "GET", path: "/v1/batches?queue=parts", status: ok, want: "name=b"},
		{method: "GET", path: "/v1/batches/{batch}", status: ok, want: "queue=parts"},
		{method: "POST", path: "/v1/batches/{batch}/pause", body: why, status: none},
		{method: "POST", path: "/v1/batches/{batch}/resume", body: why, status: none},
		{method: "POST", path: "/v1/batches/{batch}/cancel", body: why, status: none},
		{method: "POST", path: "/v1/batches/{batch}/retry", body: why, status: none, before: func(w *world) {
			w.exec(`UPDATE penstock.batch SET status = 'cancelled', ended_at = now()`)
			w.exec(`INSERT INTO penstock.batch_part (batch_id, no, items, outcome, ended_at) SELECT id, 1, '[1]', 'cancelled', now() FROM penstock.batch ON CONFLICT DO NOTHING`)
		}},

		{method: "PUT", path: "/v1/models/flux", body: `{"config": {"protocol": "cog"}, ` + reason + `}`, status: ok, name: "queue", take: "queue"},
		{method: "GET", path: "/v1/models", status: ok, want: "name=flux"},
		{method: "GET", path: "/v1/models/flux", status: ok, want: "protocol=cog"},
		{method: "PUT", path: "/v1/gateway/pools/flux", body: `{"settings": {"total": 7}, ` + reason + `}`, status: none},
		{method: "GET", path: "/v1/gateway/pools", status: ok, want: "policy=map[total:7]"},
		{method: "PUT", path: "/v1/gateway/pools/flux", body: `{` + reason + `}`, status: none},
		{before: func(w *world) {
			w.exec(`INSERT INTO penstock.gateway_batch (id, owner, flow, endpoint, input_file_id, output_file_id, error_file_id,
			                                            completion_window, expires_at)
			        VALUES ('batch_1', 'shop', 'shop', '/v1/responses', 'a', 'b', 'c', '24h', now() + interval '1 day')`)
		}, method: "GET", path: "/v1/gateway/batches", status: ok, want: "client=shop"},
		{method: "POST", path: "/v1/gateway/batches/batch_1/cancel", body: why, status: none},
		{method: "GET", path: "/v1/gateway/batches", status: ok, want: "status=cancelling"},
		{method: "PUT", path: "/v1/models/flux/override", body: `{"override": {"poll_interval": 5}, ` + reason + `}`, tagOf: "/v1/models/flux", status: none},
		{method: "GET", path: "/v1/models/flux", status: ok},
		{method: "DELETE", path: "/v1/models/flux/override?reason=test", tagOf: "/v1/models/flux", status: none},
		{method: "PUT", path: "/v1/instances/flux/a", body: `{"endpoint": "http://127.0.0.1:9/", "slots": 2, "labels": {"zone": "x"}, ` + reason + `}`, status: none},
		{method: "GET", path: "/v1/instances?model=flux", status: ok, want: "server=a"},
		{method: "GET", path: "/v1/slots?model=flux", status: ok},
		{before: (*world).leaveSlots, method: "GET", path: "/v1/slots/dead?model=flux", status: ok, want: "slots=2"},
		{method: "POST", path: "/v1/models/flux/slots/free", body: `{"server": "a", ` + reason + `}`, status: ok, want: "freed=2"},
		{method: "PUT", path: "/v1/device-groups/card-0", body: `{"slots": 3, ` + reason + `}`, status: none},
		{method: "POST", path: "/v1/instances/flux/a/drain", body: why, status: none},
		{method: "DELETE", path: "/v1/instances/flux/a?reason=test&force=true", status: none},
		{method: "DELETE", path: "/v1/models/flux?reason=test", status: none},

		{method: "PUT", path: "/v1/models/llama", body: `{"config": {"protocol": "openai"}, ` + reason + `}`, status: ok},
		{method: "PUT", path: "/v1/scale/deployments/own", body: `{"model": "llama", "settings": {"policy": {"max": 8}}, ` + reason + `}`, status: none},
		{method: "GET", path: "/v1/scale/deployments", status: ok, want: "name=own"},
		{method: "GET", path: "/v1/scale/deployments/own", status: ok, want: "decides=true"},
		{method: "PUT", path: "/v1/scale/deployments/own", body: `{"model": "llama", "settings": {"mode": "up-only"}, ` + reason + `}`, tagOf: "/v1/scale/deployments/own", status: none},
		{method: "GET", path: "/v1/scale/deployments/own", status: ok, want: "mode=up-only"},
		{before: (*world).decide, method: "GET", path: "/v1/scale/deployments", status: ok, want: "state=map[base:1 decided_at:2026-01-02T03:04:05Z desired:3 metric:9 raw:2 ready:1 stabilised:3 why:1 -> 3]"},
		{method: "GET", path: "/v1/scale/minutes?model=llama", status: ok, want: "busy_seconds=20"},
		{method: "POST", path: "/v1/scale/simulate", body: `{"model": "llama", "policy": {"slots": 2}}`, status: ok, want: "cold_seconds=60"},
		{method: "POST", path: "/v1/instances/llama/gpu-9/announce", body: `{"endpoint": "http://gpu-9:8000", "slots": 2, "ttl_seconds": 60}`, status: ok, want: "order=serve"},
		{method: "GET", path: "/v1/scale/decisions", status: ok, want: "why=1 -> 3"},
		{method: "PUT", path: "/v1/scale/override", body: `{"deployment": "own", "instances": 5, "until": "2h", ` + reason + `}`, status: none},
		{method: "GET", path: "/v1/scale/deployments/own", status: ok, want: "override=5"},
		{method: "DELETE", path: "/v1/scale/override?deployment=own&reason=test", status: none},
		{method: "GET", path: "/v1/scale/deployments/own", status: ok, want: "override=<nil>"},
		{method: "PUT", path: "/v1/scale/settings", body: `{"settings": {"scale.off": true, "scale.max_all": 7}, ` + reason + `}`, status: none},
		{method: "PUT", path: "/v1/scale/settings", body: `{"settings": {"scale.max_all": null}, ` + reason + `}`, status: none},
		{method: "GET", path: "/v1/scale/settings", status: ok, want: "name=scale.off"},
		{method: "GET", path: "/models/scale?model=llama&amount=2", status: ok, want: "instances=5"},
		{method: "POST", path: "/models/scale?model=llama&until=2h", status: ok, want: "instances=6"},
		{method: "GET", path: "/models/scale?model=nobody", status: 404, want: "nobody"},
		{method: "POST", path: "/models/schedule_externally", body: `{"model": "llama", "replicas": 3}`, status: 404, want: "external deployment"},
		{method: "PUT", path: "/v1/scale/deployments/spot", body: `{"model": "llama", "settings": {"fill_order": 1}, ` + reason + `}`, status: none},
		{method: "POST", path: "/models/schedule_externally", body: `{"model": "llama", "replicas": 3}`, status: ok, want: "deployment=spot"},
		{method: "PUT", path: "/v1/scale/deployments/far", body: `{"model": "llama", "settings": {"fill_order": 2}, ` + reason + `}`, status: none},
		{method: "POST", path: "/models/schedule_externally", body: `{"model": "llama", "replicas": 3}`, status: 422, want: "provider"},
		{method: "POST", path: "/models/schedule_externally_on_specific_provider", body: `{"model": "llama", "provider": "far", "replicas": 4}`, status: ok, want: "deployment=far"},
		{method: "GET", path: "/models/status?model=llama", status: ok, want: "model=llama"},
		{before: (*world).goOnDeciding, method: "POST", path: "/models/schedule", body: `{"model": "llama"}`, status: ok, want: "model=llama"},
		{method: "POST", path: "/models/remove", body: `{"model": "llama", "server": "nobody"}`, status: 404},
		{method: "PUT", path: "/v1/scale/templates/llama", body: `{"settings": {"backend": "local", "idle_seconds": 600}, ` + reason + `}`, status: none},
		{method: "GET", path: "/v1/scale/templates", status: ok, want: "idle_seconds=600"},
		{method: "DELETE", path: "/v1/scale/templates/llama?reason=test", status: none},
		{method: "DELETE", path: "/v1/scale/deployments/spot?reason=test", status: none},
		{method: "DELETE", path: "/v1/scale/deployments/far?reason=test", status: none},
		{method: "DELETE", path: "/v1/scale/deployments/own?reason=test", status: none},

		{method: "POST", path: "/admin/register", body: `{"model": "sdxl", "server": "s1", "endpoint": "https://sdxl.example.com/generate", "slots": 2}`, status: ok, want: "queue=sdxl"},
		{method: "PUT", path: "/admin/model-configs/sdxl", body: `{"model_type": "async", "poll_interval": 5.0, "max_retries": 3}`, status: ok, want: "max_retries=3"},
		{method: "GET", path: "/admin/model-configs/sdxl", status: ok, want: "poll_interval=5"},
		{method: "DELETE", path: "/admin/model-configs/sdxl", status: ok, want: "protocol=dispatcher"},
		{method: "POST", path: "/queue/submit", body: `{"model": "sdxl", "payload": {"prompt": "a sunset"}, "callback_url": "https://example.com/hook"}`, status: ok, want: "status=queued", name: "job", take: "job_id"},
		{method: "POST", path: "/tasks/callback/{job}?token=7&key=good", body: `{"status": "success", "result": 1}`, status: ok, want: "status=reported"},
		{before: (*world).failJob, method: "GET", path: "/admin/dlq", status: ok, want: "count=1"},
		{method: "POST", path: "/admin/dlq/{job}/retry", status: ok, want: "status=queued"},
		{before: (*world).failJob, method: "POST", path: "/admin/dlq/retry-all", status: accepted},
		{method: "DELETE", path: "/admin/dlq/{job}", status: ok, want: "status=deleted"},

		{method: "PUT", path: "/v1/limits/gpu", body: `{"settings": {"max_units": 4}, ` + reason + `}`, status: none},
		{method: "GET", path: "/v1/limits", status: ok, want: "name=gpu"},
		{method: "GET", path: "/v1/limits/gpu", status: ok, want: "max_units=4"},
		{method: "PUT", path: "/v1/limits/gpu", body: `{"settings": {"max_units": 8}, ` + reason + `}`, tagOf: "/v1/limits/gpu", status: none},
		{method: "PUT", path: "/v1/queues/work/limits/gpu", body: `{"units": 2, ` + reason + `}`, status: none},
		{method: "GET", path: "/v1/applications", status: ok, want: "name=default"},
		{method: "PUT", path: "/v1/applications/default/quota", body: `{"max_units": 9, ` + reason + `}`, status: none},
		{method: "GET", path: "/v1/limits/application:default", status: ok, want: "max_units=9"},
		{method: "DELETE", path: "/v1/applications/default/quota?reason=test", tagOf: "/v1/limits/application:default", status: none},

		{method: "POST", path: "/v1/pauses?queue=work", body: `{"scope": "flow", "value": "f", ` + reason + `}`, status: none},
		{method: "DELETE", path: "/v1/pauses?queue=work&scope=flow&value=f&reason=test", status: none},
		{method: "POST", path: "/v1/gateway/flows", body: `{"flow": "f", "criticality": "critical", ` + reason + `}`, status: none},
		{method: "GET", path: "/v1/gateway/flows", status: ok, want: "criticality=critical"},
		{method: "POST", path: "/v1/gateway/flows", body: `{"flow": "f", ` + reason + `}`, status: none},
		{method: "POST", path: "/v1/flows/weight?queue=work", body: `{"flow": "f", "weight": 2, ` + reason + `}`, status: none},
		{method: "GET", path: "/v1/audit?verb=pause&actor=anybody", status: ok, want: "reason=a test"},
		{method: "GET", path: "/v1/snapshot", status: ok},
		{method: "GET", path: "/v1/doctor", status: ok, want: "check=version"},
		{method: "GET", path: "/v1/migrations", status: ok, want: "state=applied"},

		{method: "POST", path: "/v1/webhooks", body: `{"url": "https://example.com/hook", ` + reason + `}`, status: made},
		{method: "POST", path: "/v1/webhooks/rotate", body: `{"url": "https://example.com/hook", "overlap_seconds": 60, ` + reason + `}`, status: made},
		{method: "POST", path: "/v1/webhooks/disable", body: `{"url": "https://example.com/hook", ` + reason + `}`, status: none},
		{before: func(w *world) {
			w.exec(`INSERT INTO penstock.webhook_endpoint (url, disabled_at) VALUES ('https://example.com/hook', now())`)
		}, method: "GET", path: "/v1/webhooks", status: ok, want: "url=https://example.com/hook"},
		{method: "GET", path: "/v1/webhooks/keys", status: ok},
		{method: "GET", path: "/v1/webhooks/secrets?url=https://example.com/hook", status: ok},

		{method: "POST", path: "/v1/tokens", body: `{"name": "ci", "scopes": ["push"], "queues": ["work"], ` + reason + `}`, status: made, name: "secret", take: "secret"},
		{method: "GET", path: "/v1/tokens", status: ok, want: "name=ci"},
		{method: "POST", path: "/v1/tokens/ci/rotate", body: `{"overlap_seconds": 60, ` + reason + `}`, status: made},
		{method: "POST", path: "/v1/tokens/ci/revoke", body: why, status: none},
		{method: "DELETE", path: "/v1/queues/work?force=true&reason=test", status: none},
	}
}

// blockKeys blocks two lock keys of the queue work, as failures do where the queue says so.
func (w *world) blockKeys() {
	w.exec(`INSERT INTO penstock.blocked_key (queue_id, lock_key, entry_id, class, error)
	        SELECT id, k, 1, 'input', 'wrong' FROM penstock.queue, unnest('{gone,more}'::text[]) k WHERE name = 'work'`)
}

// failAndRun makes two failures, and a lock that a node holds.
func (w *world) failAndRun() {
	w.t.Helper()
	ctx := w.t.Context()
	const node = invalidation.NodeID(7)
	if err := invalidation.Register(ctx, w.pool, invalidation.Node{ID: node, Name: w.named("gpu"), Application: "default", Lease: time.Hour}); err != nil {
		w.t.Fatal(err)
	}
	q, err := invalidation.Open(ctx, w.pool, w.named("work"))
	if err != nil {
		w.t.Fatal(err)
	}
	for i := range 2 {
		if _, err := q.Push(ctx, invalidation.Push{Payload: json.RawMessage(`{}`), LockKey: fmt.Sprint("key", i)}); err != nil {
			w.t.Fatal(err)
		}
	}
	for i := range int32(3) { // the group of before, and these two: the last one goes on running
		c, err := q.Claim(ctx, invalidation.ClaimRequest{Node: node, ClaimID: i + 1, Lane: invalidation.Lane{Priority: 1}, Limit: 1})
		if err != nil || len(c.Locks) != 1 {
			w.t.Fatalf("claim: %v (%v)", c, err)
		}
		l := c.Locks[0]
		failed := invalidation.Fail(l, l.Entries[0].ID, invalidation.Failure{Class: "input", Error: w.named("bad input")}, time.Second)
		failed.Last = true
		if i == 2 {
			break
		}
		if _, err := q.Settle(ctx, node, []invalidation.Ending{failed}); err != nil {
			w.t.Fatal(err)
		}
	}
}

// leaveSlots makes a node that died with two slots of an instance.
func (w *world) leaveSlots() {
	w.t.Helper()
	w.exec(`INSERT INTO penstock.node (id, name, application, lease, threads, queue_ids, beat_at)
		VALUES (9, 'dead', 'default', '1s', 1, '{}', now() - interval '1 minute')`)
	w.exec(`INSERT INTO penstock.slot (instance_id, number, token, node_id)
		SELECT id, n, nextval('penstock.token_seq'), 9 FROM penstock.instance, generate_series(0, 1) n WHERE model = 'flux'`)
}

// useModel makes an hour of usage.
func (w *world) useModel() {
	w.t.Helper()
	w.exec(`INSERT INTO penstock.usage_hour SELECT date_trunc('hour', now()), id, 3, 1500, 0, 10, 0, 20, 'flux', 'f'
		FROM penstock.queue WHERE name = 'work'`)
}

// audited counts what the audit says that the API did for a reason.
func (w *world) audited() (n int) {
	w.t.Helper()
	if err := w.pool.QueryRow(w.t.Context(), `SELECT count(*) FROM penstock.audit WHERE actor = 'anybody' AND reason IN ('a test', 'test')`).Scan(&n); err != nil {
		w.t.Fatal(err)
	}
	return n
}

// decide stores a decision about model llama, as a leader does.
func (w *world) decide() {
	w.t.Helper()
	w.exec(`INSERT INTO penstock.scale_state (model, state, arrived, desired, base, raw, stabilised, ready, metric, why, decided_at)
	        VALUES ('llama', '{}', 9, 3, 1, 2, 3, 1, 9, '1 -> 3', '2026-01-02T03:04:05Z')`)
	w.exec(`INSERT INTO penstock.scale_decision (at, model, before, desired, base, raw, stabilised, ready, applied, notes, why)
	        VALUES ('2026-01-02T03:04:05Z', 'llama', 1, 3, 1, 2, 3, 1, true, '[]', '1 -> 3')`)
	w.exec(`INSERT INTO penstock.model_minute SELECT date_trunc('minute', now()), 'llama', 10, 0, 10, 20, 0, 0, 0, 4, 2, 1, 2, 3, 3, 3, 0`)
}

// goOnDeciding makes a decision about the model every 100 ms, as an elected leader does, until the test ends.
func (w *world) goOnDeciding() {
	ctx := w.t.Context()
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(100 * time.Millisecond):
			}
			_, err := w.pool.Exec(ctx, `UPDATE penstock.scale_state SET decided_at = clock_timestamp()`)
			if err != nil && ctx.Err() == nil {
				w.t.Error(err)
			}
		}
	}()
}

// failJob fails the one job of model sdxl.
func (w *world) failJob() {
	w.t.Helper()
	ctx := w.t.Context()
	const node = invalidation.NodeID(8)
	if err := invalidation.Register(ctx, w.pool, invalidation.Node{ID: node, Name: "cpu", Application: "default", Lease: time.Hour}); err != nil {
		w.t.Fatal(err)
	}
	q, err := invalidation.Open(ctx, w.pool, w.named("sdxl"))
	if err != nil {
		w.t.Fatal(err)
	}
	c, err := q.Claim(ctx, invalidation.ClaimRequest{Node: node, ClaimID: int32(time.Now().UnixNano()), Lane: invalidation.Lane{Priority: 1}, Limit: 1})
	if err != nil || len(c.Locks) != 1 {
		w.t.Fatalf("claim: %v (%v)", c, err)
	}
	failed := invalidation.Fail(c.Locks[0], c.Locks[0].Entries[0].ID, invalidation.Failure{Class: "gpu", Error: w.named("out of memory")}, time.Second)
	failed.Last = true
	if _, err := q.Settle(ctx, node, []invalidation.Ending{failed}); err != nil {
		w.t.Fatal(err)
	}
}

func TestEachAddressDoesWhatItSays(t *testing.T) {
	w := newWorld(t)
	done := map[string]bool{}
	for _, s := range story() {
		if s.before != nil {
			s.before(w)
		}
		path, body := w.fill(s.path), w.fill(s.body)
		var header []string
		if s.tagOf != "" {
			header = []string{"If-Match", w.tags[s.tagOf]}
		}
		audited := w.audited()
		status, answer := w.send(s.method, path, body, header...)
		if changes := strings.Contains(body, reason) && !strings.Contains(path, "/webhooks") || strings.Contains(path, "reason="); changes && !strings.Contains(body, "dry_run") && w.audited() == audited {
			t.Errorf("%s %s: the audit does not say who did it and why", s.method, path)
		}
		if status != s.status {
			t.Fatalf("%s %s: %d %v, want %d", s.method, path, status, answer, s.status)
		}
		done[w.pattern(s.method, path)] = true
		answer = w.remember(s, answer)
		if field, value, given := strings.Cut(s.want, "="); given && written(answer[field]) != value {
			t.Errorf("%s %s: %s is %v, want %s", s.method, path, field, written(answer[field]), value)
		}
	}
	for _, r := range w.api.routes {
		if name := r.method + " " + r.path; !done[name] {
			t.Errorf("%s is in no step of the story", name)
		}
	}
}

// Whatever an address takes, it does not take what is misspelt, without a reason, too large, no JSON, or about what
// does not exist.
func TestEachAddressRefusesWhatIsWrong(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('there')`)
	refused := func(name, method, path, body string, want int, code string) {
		t.Helper()
		status, answer := w.send(method, path, body, "If-Match", "*")
		if status != want || code != "" && answer["code"] != code || answer["detail"] == "" {
			t.Errorf("%s: %s %s: %d %v, want %d %s", name, method, path, status, answer, want, code)
		}
	}
	good := map[string]step{}
	for _, s := range story() {
		good[w.pattern(s.method, s.path)] = s
	}
	for _, r := range w.api.routes {
		s := good[r.method+" "+r.path]
		if r.id == "" || r.id == "push" {
			continue // probes; api_test.go has the push
		}
		unknown := nobody(s.path)
		if strings.Contains(s.body, reason) {
			refused("unknown field", r.method, unknown, strings.Replace(s.body, reason, reason+`, "nonsense": 1`, 1), 422, "invalid")
			refused("no reason", r.method, unknown, strings.Replace(strings.Replace(s.body, ", "+reason, "", 1), reason, "", 1), 422, "invalid")
			refused("empty reason", r.method, unknown, strings.Replace(s.body, "a test", "", 1), 422, "invalid")
			refused("no JSON", r.method, unknown, s.body[1:], 400, "malformed")
			refused("too large", r.method, unknown, `{"reason": "`+strings.Repeat("x", int(max(r.bytesMax, defaultBytesMax)))+`"}`, 413, "payload_too_large")
			refused("no body", r.method, unknown, "", 400, "malformed")
		}
		if strings.Contains(s.path, "reason=") {
			refused("no reason", r.method, strings.Replace(unknown, "reason=test", "", 1), "", 422, "invalid")
		}
		separator := map[bool]string{true: "&", false: "?"}[strings.Contains(unknown, "?")]
		refused("unknown parameter", r.method, unknown+separator+"nonsense=1", s.body, 422, "invalid")
		if about := strings.Contains(r.path, "{") || strings.Contains(s.path, "queue="); about && creates[r.id] == "" {
			refused("about nothing", r.method, unknown, s.body, 404, "")
		}
		if _, lists := good[r.method+" "+r.path]; lists && strings.HasPrefix(r.id, "list-") && r.id != "list-lanes" && r.id != "list-samples" && r.id != "list-causes" {
			there := strings.ReplaceAll(s.path, "work", "there")
			separator := map[bool]string{true: "&", false: "?"}[strings.Contains(there, "?")]
			refused("too many", r.method, there+separator+"limit=1001", "", 422, "invalid")
			refused("none", r.method, there+separator+"limit=0", "", 422, "invalid")
			refused("bad cursor", r.method, there+separator+"cursor=nonsense", "", 422, "invalid")
		}
	}
}

func TestTemplateWithBadSettingsIsRefused(t *testing.T) {
	w := newWorld(t)
	audited := w.audited()
	status, answer := w.send("PUT", "/v1/scale/templates/llama", `{"settings": {"policy": {"slots": -1}}, `+reason+`}`)
	detail, _ := answer["detail"].(string)
	if status != http.StatusUnprocessableEntity || !strings.Contains(detail, "slots") || w.audited() != audited {
		t.Errorf("%d %v", status, answer)
	}
}

// creates are the addresses that make what is not there, or are fine with nothing.
var creates = map[string]string{
	"register-model": "", "set-limit": "makes it", "set-quota": "makes it", "set-device-group": "makes it",
	"set-deployment": "makes it", "set-deployment-template": "makes it",
	"list-pauses": "filters", "list-cron-jobs": "filters", "list-batches": "filters", "list-operations": "filters",
	"list-instances": "filters", "list-slots": "filters", "list-locks": "filters",
}

// nobody replaces what a path is about by what does not exist.
func nobody(path string) string {
	for _, name := range []string{"work", "parts", "tick", "daily", "flux", "gpu", "/ci", "/7", "{one}", "{three}", "{bad}", "{worse}", "{held}", "{op}", "{batch}", "{job}", "sdxl", "default", "/own"} {
		other := "987654"
		if strings.HasPrefix(name, "/") {
			other = "/" + other
		}
		path = strings.ReplaceAll(path, name, other)
	}
	return path
}

// fill puts what earlier steps answered for {name}.
func (w *world) fill(text string) string {
	for name, value := range w.seen {
		text = strings.ReplaceAll(text, "{"+name+"}", written(value))
	}
	return text
}

// written is a value of JSON without its quotes.
func written(value any) string {
	if n, is := value.(float64); is {
		return fmt.Sprintf("%.0f", n)
	}
	return fmt.Sprint(value)
}

// remember keeps the field of an answer that later steps refer to, and returns the answer, or its first item.
func (w *world) remember(s step, answer map[string]any) map[string]any {
	if items, is := answer["items"].([]any); is && len(items) > 0 {
		answer, _ = items[0].(map[string]any)
	}
	if s.name != "" {
		w.seen[s.name] = answer[s.take]
	}
	return answer
}

// note keeps what later steps need of an answer: its ETag and the field that they refer to.
func (w *world) note(s step, path string, answered *httptest.ResponseRecorder) {
	w.t.Helper()
	if tag := answered.Header().Get("ETag"); tag != "" {
		w.tags[path] = tag
	}
	var answer map[string]any
	if s.name == "" {
		return
	}
	if err := json.Unmarshal(answered.Body.Bytes(), &answer); err != nil {
		w.t.Fatalf("%s %s: %v", s.method, path, err)
	}
	w.remember(s, answer)
}

// pattern finds which address answers.
func (w *world) pattern(method, path string) string {
	path, _, _ = strings.Cut(strings.NewReplacer("{", "", "}", "").Replace(path), "?")
	r := httptest.NewRequestWithContext(w.t.Context(), method, path, nil)
	_, pattern := w.api.mux.Handler(r)
	return pattern
}
