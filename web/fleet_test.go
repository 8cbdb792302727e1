package web

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// hourly is a timetable of jobs that fire once an hour.
func hourly(_ operator.CronSchedule, from, to time.Time, most int) (fires []time.Time, words string, err error) {
	for at := from.Add(time.Hour); at.Before(to) && len(fires) < most; at = at.Add(time.Hour) {
		fires = append(fires, at)
	}
	return fires, "every hour", nil
}

var fleetPages = []string{"locks", "nodes", "models", "fairness", "cron", "operations", "gateways", "autoscaler"}

// fillFleet adds to fill locks, models with instances, cron jobs, a batch and an operation.
func (s *site) fillFleet() {
	s.Helper()
	ctx := s.Context()
	s.fill()
	q, err := invalidation.Open(ctx, s.pool, "work")
	if err != nil {
		s.Fatal(err)
	}
	claimed, err := q.Claim(ctx, invalidation.ClaimRequest{
		Node: 7001, Lane: invalidation.Lane{Priority: 1, Flow: "red"}, Limit: 6, ClaimID: 1,
	})
	if err != nil || len(claimed.Locks) == 0 {
		s.Fatalf("claimed %+v, %v", claimed, err)
	}
	tokens := make([]invalidation.Token, 0, len(claimed.Locks))
	for _, l := range claimed.Locks {
		tokens = append(tokens, l.Token)
	}
	load := map[string]any{
		"version": "v1.2.3", "hints": "heard", "claims": 900, "claimed": 1200, "runs": 1100, "run_errors": 11, "claim_ms": 1800,
		"refusals": map[string]int{"memory_high": 12, "slots": 340},
		"governor": map[string]any{"levels": []map[string]any{
			{"resource": "cpu", "used": 0.62, "high": 0.9, "low": 0.75, "closed": false},
			{"resource": "memory", "used": 0.93, "high": 0.9, "low": 0.8, "closed": true},
		}},
	}
	if _, err := invalidation.Renew(ctx, s.pool, 7001, invalidation.Beat{Tokens: tokens, Load: load}); err != nil {
		s.Fatal(err)
	}
	s.exec(`UPDATE penstock.node SET threads = 16 WHERE id = 7001`)
	s.exec(`INSERT INTO penstock.result (entry_id, created_at, queue_id, run_ms, attempt, outcome)
	        SELECT n, now(), $1, n * 10, 1, 'done' FROM generate_series(1, 200) n`, q.ID)
	if _, err := s.change.RegisterModel(ctx, "llama", []byte(`{"protocol": "openai"}`), tester); err != nil {
		s.Fatal(err)
	}
	for i, server := range []string{"gpu-1", "gpu-2"} {
		instance := operator.Instance{
			Model: "llama", Server: server, Endpoint: fmt.Sprintf("http://10.0.0.%d:8000", i+1), Slots: 8, Labels: json.RawMessage(`{}`),
		}
		if err := s.change.RegisterInstance(ctx, instance, tester); err != nil {
			s.Fatal(err)
		}
	}
	s.exec(`UPDATE penstock.instance SET state = 'ready', active = 5, queued = 1, checked_at = now() WHERE server = 'gpu-1'`)
	s.exec(`UPDATE penstock.instance SET state = 'unhealthy', quarantined_until = now() + interval '5 min',
	               quarantine_reason = 'four device errors in a minute' WHERE server = 'gpu-2'`)
	s.exec(`INSERT INTO penstock.slot (instance_id, number, token, node_id, doubt_at, doubt)
	        SELECT id, n, n + 100, 7001, CASE WHEN n = 3 THEN now() END, CASE WHEN n = 3 THEN 'its node is gone' END
	          FROM penstock.instance, generate_series(0, 3) n WHERE server = 'gpu-1'`)
	s.exec(`INSERT INTO penstock.usage (service, lift, at, queue_id, priority, whole, flow)
	        SELECT x.service, 0, now(), $1, 1, false, x.flow FROM (VALUES (600.0, 'red'), (200.0, 'blue')) x(service, flow)`, q.ID)
	if err := s.change.CreateQueue(ctx, "reports", map[string]any{"kind": "cron"}, tester); err != nil {
		s.Fatal(err)
	}
	if err := s.change.CreateCronJob(ctx, "nightly", "reports", "30 2 * * *", nil, tester); err != nil {
		s.Fatal(err)
	}
	if _, err := s.change.CreateBatch(ctx, "import", "work", map[string]any{"items": []int{1, 2, 3}}, tester); err != nil {
		s.Fatal(err)
	}
	_, err = s.change.StartOperation(ctx, operator.OperationRequest{
		Queue: "work", Verb: operator.RetryFailures, Filter: operator.Filter{All: true}, By: tester,
	})
	if err != nil {
		s.Fatal(err)
	}
}

func TestFleetPagesOfAnEmptyDatabaseSayWhatToDo(t *testing.T) {
	b := newSite(t).as(viewer)
	for _, path := range fleetPages {
		got := b.get(path)
		if got.status != http.StatusOK || !strings.Contains(got.text, `class="empty"`) && !strings.Contains(got.text, `class="pic-empty"`) {
			t.Errorf("%s: %d without an empty state: %s", path, got.status, got.text)
		}
	}
}

func TestFleetPagesDisplayAPlatformAtWork(t *testing.T) {
	s := newSite(t)
	s.fillFleet()
	wanted := map[string][]string{
		"locks":            {"node-1", "Locks of node-1", "pic-a-"},
		"locks?queue=work": {"Groups by key of work", "user-0"},
		"nodes":            {"v1.2.3", "admits to 90 %", "93 %, closed until 80 %", "no free slot of the model", "340"},
		"models":           {"llama", "gpu-1", "quarantined", "four device errors in a minute", "in doubt", "more than leased"},
		"fairness":         {"red", "blue", "75 %", "Jain index", "now 0.800"},
		"cron":             {"nightly", "every hour", "30 2 * * *", "Next 24 hours"},
		"operations":       {"import", "retry failures", "running"},
	}
	for _, r := range []role{viewer, operatorRole, administrator} {
		b := s.as(r)
		for path, texts := range wanted {
			got := b.get(path)
			if got.status != http.StatusOK {
				t.Errorf("%s as %s: %d", path, r, got.status)
			}
			for _, text := range texts {
				if !strings.Contains(got.text, text) {
					t.Errorf("%s as %s has no %q: %s", path, r, text, got.text)
				}
			}
			if verbs := strings.Contains(got.text, "/ui/do/"); verbs && r == viewer {
				t.Errorf("%s offers a change to a viewer", path)
			}
			if strings.Contains(got.text, " style=") || strings.Contains(got.text, "ZgotmplZ") {
				t.Errorf("%s has an inline style or a value that a template refused", path)
			}
		}
	}
}

// A viewer is refused each change, whatever it names, and an operator those of administrators.
func TestChangesAreRefusedBelowTheirRole(t *testing.T) {
	s := newSite(t)
	s.fill()
	if len(s.web.verbs) < 15 {
		t.Fatalf("there are only %d verbs", len(s.web.verbs))
	}
	for _, r := range []role{viewer, operatorRole} {
		b := s.as(r)
		for name, v := range s.web.verbs {
			if r >= v.role {
				continue
			}
			form := url.Values{"reason": {"because"}}
			for _, object := range v.objects {
				form.Set(object, "work")
			}
			if got := b.get("do/" + name + "?" + form.Encode()); got.status != http.StatusForbidden {
				t.Errorf("the form of %s as %s: %d", name, r, got.status)
			}
			if got := b.post("do/"+name, form); got.status != http.StatusForbidden {
				t.Errorf("%s as %s: %d", name, r, got.status)
			}
		}
	}
	changed, err := s.change.Audits(t.Context(), operator.AuditFilter{Actor: "viewer"})
	if err != nil || len(changed) > 0 {
		t.Errorf("the audit has changes of a viewer: %+v, %v", changed, err)
	}
}

func TestFleetVerbsAreInTheAudit(t *testing.T) {
	s := newSite(t)
	s.fillFleet()
	b := s.as(administrator)
	locks, err := s.change.Locks(t.Context(), operator.LockFilter{Limit: 1})
	if err != nil || len(locks) == 0 {
		t.Fatal(err)
	}
	token := fmt.Sprint(locks[0].Token)
	lock := url.Values{"queue": {"work"}, "lock_key": {locks[0].LockKey}, "token": {token}, "confirm": {"no"}}
	with := func(form url.Values, pairs ...string) url.Values {
		changed := url.Values{"reason": {"it is on fire"}, "next": {"nodes"}}
		for name, values := range form {
			changed[name] = values
		}
		for i := 0; i+1 < len(pairs); i += 2 {
			changed.Set(pairs[i], pairs[i+1])
		}
		return changed
	}
	for _, c := range []struct {
		verb   string
		form   url.Values
		status int
		audit  string
	}{
		{"force_unlock", with(lock), http.StatusUnprocessableEntity, ""},
		{"force_unlock", with(lock, "confirm", token), http.StatusConflict, ""},
		{"force_unlock", with(lock, "confirm", token, "even_listed", "yes"), http.StatusOK, "force_unlock"},
		{"set_flow_weight", with(nil, "flow", "red", "weight", "abc"), http.StatusUnprocessableEntity, ""},
		{"set_flow_weight", with(nil, "flow", "red", "weight", "3"), http.StatusOK, "set_flow_weight"},
		{"drain_instance", with(nil, "model", "llama", "server", "gpu-1"), http.StatusOK, "drain_instance"},
		{"register_instance", with(nil, "model", "llama", "server", "gpu-2", "slots", "4"), http.StatusOK, "register_instance"},
		{"register_instance", with(nil, "model", "llama", "server", "none"), http.StatusNotFound, ""},
		{"run_cron_job_now", with(nil, "job", "nightly"), http.StatusOK, "run_cron_job_now"},
		{"pause_cron_job", with(nil, "job", "nightly"), http.StatusOK, "pause_cron_job"},
		{"resume_cron_job", with(nil, "job", "nightly"), http.StatusOK, "resume_cron_job"},
		{"pause_batch", with(nil, "batch", "1"), http.StatusOK, "pause_batch"},
		{"cancel_batch", with(nil, "batch", "1"), http.StatusOK, "cancel_batch"},
		{"cancel_operation", with(nil, "operation", "1"), http.StatusOK, "cancel_operation"},
		{"cancel_operation", with(nil, "operation", "x"), http.StatusUnprocessableEntity, ""},
		{"drain_node", with(nil, "node", "7001"), http.StatusOK, "drain_node"},
	} {
		if got := b.post("do/"+c.verb, c.form); got.status != c.status {
			t.Errorf("%s %v: got %d, want %d: %s", c.verb, c.form, got.status, c.status, got.text)
			continue
		}
		if c.audit == "" {
			continue
		}
		last, err := s.change.Audits(t.Context(), operator.AuditFilter{Limit: 1})
		if err != nil || len(last) != 1 || last[0].Verb != c.audit || last[0].Actor != "admin" || last[0].Reason != "it is on fire" {
			t.Errorf("after %s the audit has %+v, %v", c.verb, last, err)
		}
	}
	// The form of each says what it would touch.
	for path, text := range map[string]string{
		"do/drain_instance?model=llama&server=gpu-1":           "8 slots, 4 of them held",
		"do/set_flow_weight?flow=blue&queue=work":              "share with weight 2",
		"do/cancel_operation?operation=1":                      "are changed",
		"do/drain_node?node=7001":                              "of node node-1",
		"do/pause_batch?batch=1":                               "parts, those that have not ended",
		"do/force_unlock?queue=work&lock_key=user-0&token=999": "no such lock any more",
	} {
		if got := b.get(path); got.status != http.StatusOK || !strings.Contains(got.text, text) {
			t.Errorf("%s: %d has no %q: %s", path, got.status, text, got.text)
		}
	}
}

// hostile are texts that try to become markup, script or an address.
var hostile = []string{
	`<script>alert(1)</script>`, `"><img src=x onerror=alert(1)>`, `' autofocus onfocus='alert(1)`, `</td></table><h1>broken`,
	`{{.Page}}`, `javascript:alert(1)`, `</title><svg onload=alert(1)>`, "\u202Etxt.exe", `&lt;script&gt;`, strings.Repeat("W", 200),
}

// active is what hostile texts would become outside of quoted values of attributes, which cannot end in an unescaped quote.
var (
	quoted  = regexp.MustCompile(`"[^"]*"`)
	active  = regexp.MustCompile(`(?i)<img |<h1>broken|<script>alert|<[^>]*\son(error|focus|load|click)\s*=|<svg onload`)
	outward = regexp.MustCompile(`(?i)(href|action|src)="(javascript:|https?:|//)`)
)

// Texts of users stay texts on every page: payload, error, names of queues' objects, flows, nodes, reasons.
func TestHostileTextsStayTexts(t *testing.T) {
	s := newSite(t)
	s.fillFleet()
	q, err := invalidation.Open(t.Context(), s.pool, "work")
	if err != nil {
		t.Fatal(err)
	}
	for i, text := range hostile {
		payload, err := json.Marshal(map[string]string{text: text})
		if err != nil {
			t.Fatal(err)
		}
		push := invalidation.Push{Payload: payload, Flow: text, Name: text, LockKey: fmt.Sprint(i) + text}
		if _, err := q.Push(t.Context(), push); err != nil {
			t.Fatal(err)
		}
		s.exec(`INSERT INTO penstock.node (id, name, application, threads, load, drain_by, drain_reason, draining_at)
		        VALUES ($1, $2, 'default', 4, jsonb_build_object('version', $2::text, 'hints', $2::text, 'refusals', jsonb_build_object($2::text, 3)), $2, $2, now())`, 8000+i, text)
		s.exec(`INSERT INTO penstock.lock (token, node_id, pos, last_entry_id, claimed_at, queue_id, claim_id, entry_count, cost, priority, flow, lock_key)
		        VALUES ($1, $2, 1, 1, now(), $3, 1, 1, 0, 1, $4, $4)`, 900+i, 8000+i, q.ID, text)
		s.exec(`INSERT INTO penstock.failure (entry_id, created_at, queue_id, priority, attempt, crashes, flow, name, lock_key, class, error, fingerprint, payload, history)
		        VALUES ($1, now(), $2, 1, 1, 0, $3, $3, $3, $3, $3, $3, $4, jsonb_build_array(jsonb_build_object('error', $3::text, 'node', $3::text)))`,
			500000+i, q.ID, text, payload)
		s.exec(`INSERT INTO penstock.usage (service, lift, at, queue_id, priority, whole, flow) VALUES (50, 0, now(), $1, 1, false, $2)`, q.ID, text)
		s.exec(`INSERT INTO penstock.audit (actor, verb, object, reason, detail) VALUES ($1, $1, $1, $1, to_jsonb($1::text))`, text)
		s.exec(`INSERT INTO penstock.operation (queue_id, verb, filter, per_second, actor, reason, matched, until_id)
		        VALUES ($1, 'cancel', jsonb_build_object('name', $2::text), 1, $2, $2, 10, 1)`, q.ID, text)
		s.exec(`INSERT INTO penstock.batch (queue_id, name, actor, problem, paused_at, paused_by, paused_reason) VALUES ($1, $2, $2, $2, now(), $2, $2)`, q.ID, text)
		s.exec(`INSERT INTO penstock.cron_job (queue_id, name, spec, problem) VALUES ($1, $2, $2, $2)`, q.ID, text)
		s.exec(`INSERT INTO penstock.model (name, config, override) VALUES ($1, jsonb_build_object('protocol', $1::text), jsonb_build_object($1::text, $1::text))`, text)
		s.exec(`INSERT INTO penstock.instance (model, server, endpoint, slots, state, reason) VALUES ($1, $1, $1, 2, 'unhealthy', $1)`, text)
		s.exec(`INSERT INTO penstock.pause (scope, value, queue_id, actor, reason) VALUES ('flow', $1, $2, $1, $1)`, text, q.ID)
		s.hostilePlatform(i, text)
	}
	b := s.as(administrator)
	paths := []string{
		"", "queues", "queues/work", "entries", "entries?queue=work", "failures", "failures?queue=work", "audit", "database", "pauses",
		"limits", "tokens", "webhooks", "locks", "locks?queue=work", "nodes", "models", "fairness", "cron", "operations", "entries/500001",
		"gateways", "autoscaler",
	}
	for _, text := range hostile {
		paths = append(paths, "entries?"+url.Values{"queue": {text}, "key": {text}, "state": {text}}.Encode(),
			"locks?"+url.Values{"queue": {text}}.Encode(), "failures?"+url.Values{"queue": {text}, "class": {text}}.Encode(),
			"do/set_flow_weight?"+url.Values{"flow": {text}, "next": {text}}.Encode(), "queues/"+url.PathEscape(text))
	}
	for _, path := range paths {
		got := b.get(path)
		if got.status >= http.StatusInternalServerError {
			t.Errorf("%s: %d", path, got.status)
		}
		if found := active.FindString(quoted.ReplaceAllString(got.text, `""`)) + outward.FindString(got.text); found != "" {
			t.Errorf("%s has the active text %q", path, found)
		}
		if strings.Contains(got.text, "ZgotmplZ") {
			t.Errorf("%s has a value that a template refused", path)
		}
	}
}

// Nodes of the version before reported the levels of the governor as a list; during an upgrade the rest of their report
// is displayed.
func TestAReportInAnotherFormIsReadAsFarAsItGoes(t *testing.T) {
	c := nodeCardOf(operator.Node{Load: []byte(`{"governor": [{"resource": "cpu", "used": 0.5}], "version": "v1", "claims": 3}`)})
	if c.Version != "v1" || c.Claims != 3 || len(c.Gauges) != 0 {
		t.Errorf("read version %q, %d claims, %d gauges", c.Version, c.Claims, len(c.Gauges))
	}
}
