package web

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/doctor"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// fillPlatform adds to the models of fillFleet two gateways, pools, a deployment with its decisions, and what
// the queue of the model recorded.
func (s *site) fillPlatform() {
	s.Helper()
	ctx := s.Context()
	for i, mode := range []string{"queue", "pass"} {
		load, _ := json.Marshal(map[string]any{
			"kind": "gateway", "listen": fmt.Sprintf("10.0.1.%d:8430", i+1),
			"pools": map[string]any{"llama": map[string]any{
				"mode": mode, "ceiling": 6, "stock": 5, "held": 6,
				"waiting": map[string]int{"critical": 1, "default": 40, "sheddable": 7},
				"dropped": map[string]int{"overloaded": 1200, "queue_timeout": 3, "client_closed": 0},
			}},
		})
		s.exec(`INSERT INTO penstock.node (id, name, application, threads, lease, kind, load)
		        VALUES ($1, $2, 'default', 0, '1 hour', 'gateway', $3::jsonb)`, 7100+i, fmt.Sprintf("gateway-%d", i+1), load)
	}
	s.exec(`INSERT INTO penstock.slot (instance_id, number, token, node_id)
	        SELECT id, n, n + 200, 7100 FROM penstock.instance, generate_series(4, 5) n WHERE server = 'gpu-1'`)
	if err := s.change.SetGatewayPolicy(ctx, "llama", []byte(`{"total": 500}`), tester); err != nil {
		s.Fatal(err)
	}
	if err := s.change.SetFlowCriticality(ctx, "red", "critical", tester); err != nil {
		s.Fatal(err)
	}
	policy := map[string]any{"policy": map[string]any{"slots": 4, "max": 6}}
	if err := s.change.SetDeployment(ctx, "llama-own", "llama", policy, tester); err != nil {
		s.Fatal(err)
	}
	s.exec(`UPDATE penstock.deployment SET on_demand = true WHERE name = 'llama-own'`)
	s.exec(`INSERT INTO penstock.scale_state (model, state, arrived, desired, base, raw, stabilised, ready, metric, why, decided_at)
	        SELECT 'llama', '{}', 0, 3, 2, 5, 4, 2, 11.5, 'the backlog needs 3: 41 wait', clock_timestamp()`)
	s.exec(`INSERT INTO penstock.model_minute (minute, model, arrived, online, calls, busy_seconds, refused, starts, cold_seconds,
	                waiting, running, base, raw, stabilised, desired, ready, starting)
	        SELECT date_trunc('minute', now()) - n * interval '1 min', 'llama', 150 + n % 40, 0, 150, 225, 0, 0, 0,
	               n % 9, 8, 2, 2 + n % 4, 3, 3, 2, 0 FROM generate_series(0, 59) n`)
	s.exec(`INSERT INTO penstock.scale_decision (at, model, before, desired, base, raw, stabilised, ready, applied, notes, why)
	        SELECT now() - n * interval '7 min', 'llama', 2 + n % 2, 3 - n % 2, 2, 3, 3, 2, true, '[]', '3 were needed lately: no fewer for another 240 s'
	          FROM generate_series(1, 6) n`)
}

func TestPagesOfThePlatform(t *testing.T) {
	s := newSite(t)
	s.fillFleet()
	s.fillPlatform()
	wanted := map[string][]string{
		"gateways": {
			"10 of 12", "80 waiting", "2 online, 3 durable, 1 in doubt", "2,400", "the pool is full", "gateway-2", "10.0.1.1:8430",
			"there are more requests than slots", "of 12 that the slots held now allow", "total", "kept for online", "critical", "waited as long as it may",
		},
		"autoscaler": {
			"llama-own", "on demand", "the backlog needs 3: 41 wait", "3 were needed lately: no fewer for another 240 s", "2 → <strong>3</strong>", "pic-lane", "What if",
		},
		"autoscaler?model=llama&over=6h&whatif=1&past=3h&max=2&slots=4": {
			"present policy", "other policy", "GPU hours", "there were 2 instance-hours",
		},
		"autoscaler?whatif=1&max=many": {"want 0 to 1400"},
		"nodes":                        {"2 gateways</a>"},
	}
	for _, r := range []role{viewer, administrator} {
		b := s.as(r)
		for path, texts := range wanted {
			got := b.get(path)
			for _, text := range texts {
				if !strings.Contains(got.text, text) {
					t.Errorf("%s as %s: %d has no %q: %s", path, r, got.status, text, got.text)
				}
			}
			if verbs := strings.Contains(got.text, "/ui/do/"); verbs == (r == viewer) {
				t.Errorf("%s as %s: offers changes is %t", path, r, verbs)
			}
		}
		points := b.get("autoscaler?live=points")
		var charts map[string]Chart
		if err := json.Unmarshal([]byte(points.text), &charts); err != nil || len(charts["scale"].Series) != 5 {
			t.Errorf("the chart has %+v, %v: want five lines", charts, err)
		}
	}
}

// Gateways that are not called hold no slots: the page says so, and does not read as if no call could be made.
func TestGatewaysThatAreNotCalledAreExplained(t *testing.T) {
	s := newSite(t)
	s.fillFleet()
	s.fillPlatform()
	s.exec(`UPDATE penstock.node SET load = $1::jsonb WHERE kind = 'gateway'`,
		`{"kind": "gateway", "pools": {"llama": {"mode": "pass", "ceiling": 0, "stock": 0, "held": 0}}}`)
	got := s.as(viewer).get("gateways").text
	for _, text := range []string{
		"gateways hold no slot: the next request leases one", "0; no slot is held until a request comes",
		"requests get a slot as they arrive",
	} {
		if !strings.Contains(got, text) {
			t.Errorf("the page has no %q", text)
		}
	}
	if strings.Contains(got, "at most 0") {
		t.Error("the page says that there may be no call")
	}
}

func TestVerbsOfThePlatformAreInTheAudit(t *testing.T) {
	s := newSite(t)
	s.fillFleet()
	s.fillPlatform()
	b := s.as(administrator)
	for _, c := range []struct {
		verb, audit string
		fields      []string
		status      int
	}{
		{"set_pool", "", []string{"model", "llama", "config", "[]"}, http.StatusUnprocessableEntity},
		{"set_pool", "set_gateway_policy", []string{"model", "llama", "config", `{"total": 7}`}, http.StatusOK},
		{"set_pool", "set_gateway_policy", []string{"model", "llama"}, http.StatusOK},
		{"set_flow_criticality", "set_flow_criticality", []string{"flow", "blue", "criticality", "sheddable"}, http.StatusOK},
		{"override_deployment", "", []string{"deployment", "llama-own", "instances", "4", "for", "soon"}, http.StatusUnprocessableEntity},
		{"override_deployment", "", []string{"deployment", "llama-own", "instances", "4", "for", ""}, http.StatusUnprocessableEntity},
		{"override_deployment", "set_scale_override", []string{"deployment", "llama-own", "instances", "4", "for", "1h"}, http.StatusOK},
		{"end_override", "set_scale_override", []string{"deployment", "llama-own"}, http.StatusOK},
		{"set_deployment", "", []string{"deployment", "llama-own", "policy", `{"mix": 1}`}, http.StatusUnprocessableEntity},
		{"set_deployment", "", []string{"deployment", "none", "mode", "manual"}, http.StatusNotFound},
		{"set_deployment", "set_deployment", []string{"deployment", "llama-own", "mode", "manual", "policy", `{"max": 3}`}, http.StatusOK},
		{"set_scaling", "", []string{"switch", "scale.off", "value", "perhaps"}, http.StatusUnprocessableEntity},
		{"set_scaling", "set_scale_setting", []string{"switch", "scale.off", "value", "true"}, http.StatusOK},
	} {
		form := url.Values{"reason": {"it is on fire"}, "next": {"gateways"}}
		for i := 0; i < len(c.fields); i += 2 {
			form.Set(c.fields[i], c.fields[i+1])
		}
		if got := b.post("do/"+c.verb, form); got.status != c.status {
			t.Errorf("%s %v: got %d, want %d: %s", c.verb, c.fields, got.status, c.status, got.text)
			continue
		}
		if c.audit == "" {
			continue
		}
		last, err := s.change.Audits(t.Context(), operator.AuditFilter{Limit: 1})
		if err != nil || len(last) != 1 || last[0].Verb != c.audit || last[0].Reason != "it is on fire" {
			t.Errorf("after %s the audit has %+v, %v", c.verb, last, err)
		}
	}
	for path, text := range map[string]string{
		"do/set_pool?model=llama":                     "kept for durable entries",
		"do/override_deployment?deployment=llama-own": "max 3",
		"autoscaler": "<strong>scale.off</strong> is true",
	} {
		if got := b.get(path); !strings.Contains(got.text, text) {
			t.Errorf("%s: %d has no %q: %s", path, got.status, text, got.text)
		}
	}
}

// hostilePlatform adds a text of an attacker to what the pages of gateways and of the autoscaler display.
func (s *site) hostilePlatform(i int, text string) {
	s.Helper()
	s.exec(`INSERT INTO penstock.node (id, name, application, threads, kind, lease, load)
	        VALUES ($1, $2, 'default', 0, 'gateway', '1 hour', jsonb_build_object('listen', $2::text, 'pools', jsonb_build_object(
	               $2::text, jsonb_build_object('mode', $2::text, 'waiting', jsonb_build_object($2::text, 3),
	                                            'dropped', jsonb_build_object($2::text, 3)))))`, 8500+i, text)
	s.exec(`INSERT INTO penstock.gateway_policy (model, config) VALUES ($1, jsonb_build_object($1::text, $1::text))`, text)
	s.exec(`INSERT INTO penstock.flow_criticality (flow, criticality) VALUES ($1, 'default')`, text)
	name := fmt.Sprintf("d%d", i)
	s.exec(`INSERT INTO penstock.deployment (name, model, override, override_until, override_by)
	        VALUES ($1, $2, 1, now() + interval '1 hour', $2)`, name, text)
	s.exec(`INSERT INTO penstock.scale_state (model, state, arrived, desired, base, raw, stabilised, ready, metric, why, decided_at)
	        VALUES ($1, '{}', 0, 3, 2, 5, 4, 2, 11.5, $1, now())`, text)
	s.exec(`INSERT INTO penstock.scale_decision (model, before, desired, base, raw, stabilised, ready, applied, notes, why)
	        VALUES ($1, 1, 2, 2, 3, 3, 2, true, '[]', $1)`, text)
	s.exec(`INSERT INTO penstock.setting (name, value, actor, reason) VALUES ($1, to_jsonb($2::text), $2, $2)`,
		fmt.Sprintf("scale.x%d", i), text)
}

// A check of the doctor that is renamed would be listed twice.
func TestTheOverviewLeavesOutChecksThatExist(t *testing.T) {
	found, err := doctor.Examine(t.Context(), newSite(t).pool, doctor.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range append([]string{"leader"}, listedByObject...) {
		if !slices.ContainsFunc(found, func(f doctor.Finding) bool { return f.Check == name }) {
			t.Errorf("the doctor has no check %q", name)
		}
	}
}

// The overview lists what the doctor found last and which instances are in quarantine, the critical first.
func TestTheOverviewListsFindingsAndQuarantines(t *testing.T) {
	s := newSite(t)
	s.fillFleet()
	s.exec(`INSERT INTO penstock.slot (instance_id, number, token, node_id)
	        SELECT id, 6, 106, 1 FROM penstock.instance WHERE server = 'gpu-1'`) // node 1 is no more
	examined := make(chan struct{})
	s.web.cfg.Examine = func(context.Context) ([]doctor.Finding, error) {
		defer close(examined)
		return []doctor.Finding{
			{Check: "settings", Severity: doctor.Fine, Summary: "all is well"},
			{Check: "wraparound", Severity: doctor.Critical, Summary: "the database is close to a <wraparound>"},
			{
				Check: "dead slots", Severity: doctor.Warning, Summary: "models with slots that dead nodes hold: 2",
				Details: []string{"2 of 2 slots of model a", "1 of 2 slots of model b"},
			},
			{Check: "standstills", Severity: doctor.Warning, Summary: "could not be checked: it took too long"},
		}, nil
	}
	b := s.as(viewer)
	b.get("")
	<-examined
	for _, _, going, _ := s.web.examined.last(nil); going; _, _, going, _ = s.web.examined.last(nil) {
		time.Sleep(time.Millisecond) // it has returned, and is being stored
	}
	s.web.reads.expire()
	got := b.get("").text
	for _, text := range []string{
		"the database is close to a &lt;wraparound&gt;", "/ui/database#doctor", "four device errors in a minute", "/ui/models?model=llama",
		"could not be checked: it took too long",
	} {
		if !strings.Contains(got, text) {
			t.Errorf("the overview has no %q: %s", text, got)
		}
	}
	if again := regexp.MustCompile(`model llama: [^<]* model llama`).FindString(got); again != "" {
		t.Errorf("a degradation names its model twice: %s", again)
	}
	if !strings.Contains(got, "slots of model llama are held by calls of dead nodes") {
		t.Errorf("the overview has no degradation of the model: %s", got)
	}
	if strings.Contains(got, "slots that dead nodes hold") {
		t.Errorf("the models with slots of dead nodes are listed and counted again: %s", got)
	}
	if strings.Contains(got, "all is well") || strings.Index(got, "wraparound") > strings.Index(got, "four device errors") {
		t.Errorf("fine findings are left out and critical ones come first: %s", got)
	}
}

// The doctor examines once a minute while the page is open: after a failover, and after hours, its findings are not of now.
func TestTheOverviewLeavesOutFindingsThatAreOver(t *testing.T) {
	s := newSite(t)
	s.exec(`INSERT INTO penstock.leader (name, holder, lease, renewed_at) VALUES ('leader', 'b', '1 hour', clock_timestamp())
	            ON CONFLICT (name) DO UPDATE SET holder = 'b', lease = '1 hour', renewed_at = clock_timestamp()`)
	s.web.examined.findings = []doctor.Finding{
		{Check: "leader", Severity: doctor.Critical, Summary: "no leader leads: a fell silent"},
		{Check: "wraparound", Severity: doctor.Critical, Summary: "close to a wraparound"},
	}
	b := s.as(viewer)
	for age, others := range map[time.Duration]bool{0: true, time.Hour: false} {
		s.web.examined.at = time.Now().Add(-age)
		s.web.reads.expire()
		got := b.get("").text
		if !strings.Contains(got, "leader b") || strings.Contains(got, "a fell silent") {
			t.Errorf("examined %s ago: b leads, and the list says: %s", age, got)
		}
		if strings.Contains(got, "close to a wraparound") != others {
			t.Errorf("examined %s ago: other findings are listed: %t, want %t", age, !others, others)
		}
	}
	// An examination that fails leaves the findings of the one before, and these are no younger by it.
	s.web.examined.at = time.Now().Add(-time.Hour)
	s.web.examined.examine(func(context.Context) ([]doctor.Finding, error) { return nil, context.DeadlineExceeded })
	s.web.reads.expire()
	if got := b.get("").text; strings.Contains(got, "close to a wraparound") {
		t.Errorf("findings of an hour ago are listed after an examination that failed: %s", got)
	}
}

// The page of an entry that has ended has the callback that reports it, and a link to its trace.
func TestAnEndedEntryHasItsCallbackAndTrace(t *testing.T) {
	s := newSite(t)
	s.fill()
	q, err := invalidation.Open(t.Context(), s.pool, "work")
	if err != nil {
		t.Fatal(err)
	}
	pushed, err := q.Push(t.Context(), invalidation.Push{
		Payload: json.RawMessage(`{}`), Callback: json.RawMessage(`{"url": "https://example.com/done"}`),
		Trace: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
	})
	if err != nil {
		t.Fatal(err)
	}
	id := int64(pushed[0].ID)
	s.web.cfg.TraceURL = "https://tempo.example/trace/{trace}"
	b := s.as(viewer)
	path := fmt.Sprintf("entries/%d", id)
	link := `href="https://tempo.example/trace/4bf92f3577b34da6a3ce929d0e0e4736"`
	if got := b.get(path).text; !strings.Contains(got, link) || strings.Contains(got, "<dt>callback</dt>") {
		t.Errorf("before its end: %s", got)
	}
	if _, err := s.change.CancelEntry(t.Context(), id, tester); err != nil {
		t.Fatal(err)
	}
	sent, err := s.change.Callbacks(t.Context(), id, 3)
	if err != nil || len(sent) != 1 {
		t.Fatalf("callbacks are %+v, %v", sent, err)
	}
	s.web.reads.expire()
	got := b.get(path).text
	for _, text := range []string{"<dt>callback</dt>", fmt.Sprintf(`/ui/entries/%d"`, sent[0].ID), "callback: "} {
		if !strings.Contains(got, text) {
			t.Errorf("after its end there is no %q: %s", text, got)
		}
	}
	if CheckTraceURL("javascript:{trace}") == nil || CheckTraceURL("https://tempo.example/") == nil {
		t.Error("an address that is none is accepted for traces")
	}
}
