package main

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/worker"
)

// Metrics tell of each pool how long its queue is, how long requests wait, and why they are not served. Flows are names
// that clients choose, without a bound, and never labels.
func TestMetricsTellOfPoolsAndNotOfFlows(t *testing.T) {
	t.Parallel()
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("{}")) }))
	t.Cleanup(backend.Close)
	s := &server{cfg: defaults(), log: (&site{T: t}).log(), observer: newObserver()}
	s.gateway = gateway.New(gateway.Config{Open: true, Observer: s.observer})
	policy := gateway.DefaultPolicy()
	policy.FlowTotal = 0
	s.gateway.SetModels([]gateway.ModelState{{
		Name: "m", Protocol: worker.ProtocolOpenAI, Policy: policy, RunMax: time.Minute,
		Instances: []gateway.InstanceState{{ID: 1, Address: backend.URL, Slots: 4, Usable: true}},
	}, {Name: "none", Protocol: worker.ProtocolOpenAI, Policy: policy}})
	s.gateway.Fixed()
	for _, model := range []string{"m", "none"} {
		request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"model":"`+model+`"}`))
		request.Header.Set("X-Penstock-Flow", "tenant-of-a-name")
		s.gateway.ServeHTTP(httptest.NewRecorder(), request)
	}
	answer := httptest.NewRecorder()
	s.debug().ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost/metrics", nil))
	lines := strings.Split(answer.Body.String(), "\n")
	for _, want := range []string{
		`queue_length{criticality="critical",model="m"} 0`, `queue_latency_seconds_count{criticality="default",model="m",success="true"} 1`,
		`stock_level{model="m"} 0`, `bypass_total{criticality="default",model="m"} 1`, `requests_expired_total{model="m"} 0`,
		`requests_cancelled_total{model="m"} 0`, `upper_bound{model="m"} 4`, `active_flows{model="m"} 0`,
		`queue_push_errors_total{error_type="no_endpoints",model="none"} 1`, `requests_total{model="none",status="503"} 1`,
		`ceiling{model="m"} 4`, `mode{mode="pass",model="m"} 1`, `requests_evicted_total{criticality="sheddable",model="m"} 0`, `degraded 0`,
	} {
		if !slices.Contains(lines, "penstock_gateway_"+want) {
			t.Errorf("there is no %s", want)
		}
	}
	if strings.Contains(answer.Body.String(), "tenant-of-a-name") || strings.Contains(answer.Body.String(), "flow=") {
		t.Error("a flow is a label")
	}
	if !strings.Contains(answer.Body.String(), "penstock_gateway_lower_bound{") {
		t.Error("there is no lower bound")
	}
	if t.Failed() {
		t.Log(strings.Join(slices.DeleteFunc(lines, func(l string) bool { return !strings.HasPrefix(l, "penstock_gateway_") }), "\n"))
	}
}

// What the models beyond the bound of a label have counted stays in their sum when one of them is removed: Prometheus
// takes a counter that falls for one that began again, and all that is left of it for new.
func TestASumOfCountersDoesNotFallWithAModel(t *testing.T) {
	t.Parallel()
	s := &server{cfg: defaults(), log: (&site{T: t}).log(), observer: newObserver()}
	s.observer.models.Max = 1
	s.gateway = gateway.New(gateway.Config{Open: true, Observer: s.observer})
	set := func(names ...string) {
		var models []gateway.ModelState
		for _, name := range names {
			models = append(models, gateway.ModelState{Name: name, Protocol: worker.ProtocolOpenAI, Policy: gateway.DefaultPolicy()})
		}
		s.gateway.SetModels(models)
		s.gateway.Fixed()
	}
	set("a", "b", "c")
	for _, model := range []string{"a", "b", "c"} { // the first has a label of its own
		request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"model":"`+model+`"}`))
		s.gateway.ServeHTTP(httptest.NewRecorder(), request)
	}
	for _, names := range [][]string{{"a", "b", "c"}, {"a", "b"}, {"a", "b", "c"}} {
		set(names...)
		answer := httptest.NewRecorder()
		s.debug().ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost/metrics", nil))
		const want = `penstock_gateway_queue_push_errors_total{error_type="no_endpoints",model="other"} 2`
		if !strings.Contains(answer.Body.String(), want+"\n") {
			t.Errorf("with models %v there is no %s", names, want)
		}
	}
}
