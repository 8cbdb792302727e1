package gateway

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/penstock/penstock/internal/postgres"
)

// setPolicy sets a policy, and returns the error of the database.
func (x *exchange) setPolicy(config string) error {
	_, err := x.pool.Exec(x.Context(), `SELECT penstock.set_gateway_policy('m', $1::text::jsonb, 'test')`, config)
	return err
}

// A policy that gateways would not take is refused where it is set, by the name of the field: all nodes lease by it.
func TestAPolicyThatIsNotValidIsRefused(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	for config, field := range map[string]string{
		`{"reserved": "20%"}`:                      "reserved",
		`{"reserved": 5}`:                          "reserved",
		`{"reserved": -3}`:                         "reserved",
		`{"batch_reserved": 0.9}`:                  "reserved + batch_reserved",
		`{"reserved": 0.6, "batch_reserved": 0.5}`: "reserved + batch_reserved",
		`{"total": 1.5}`:                           "total",
		`{"queue_ttl": 0}`:                         "queue_ttl",
		`{"queue_ttl": "0s"}`:                      "queue_ttl",
		`{"queue_ttl": "1 minute"}`:                "queue_ttl",
		`{"preempt_after": "-1s"}`:                 "preempt_after",
		`{"holdback": 1}`:                          "holdback",
		`{"holdback": {"default": 2}}`:             "holdback.default",
		`{"deviation": 1}`:                         "deviation",
		`{"fair_scope": "none"}`:                   "fair_scope",
		`{"refuse_status": 500}`:                   "refuse_status",
		`{"refuse_status": "429"}`:                 "refuse_status",
		`{"total": 5, "on_full": true}`:            "on_full",
		`{"total": 5.0}`:                           "total",
		`{"refuse_status": 429.0}`:                 "refuse_status",
		`{"cold_ttl": "999999h"}`:                  "cold_ttl",
		`{"cold_ttl": "277777h46m41s"}`:            "cold_ttl",
		`{"cold_ttl": 1000000001}`:                 "cold_ttl",
		`{"queue_ttl": "0.0000000001s"}`:           "queue_ttl",
		`{"queue_ttl": "0.6ns0.6ns"}`:              "queue_ttl",
	} {
		err := x.setPolicy(config)
		if postgres.Code(err) != "PS002" || !strings.Contains(err.Error(), "ERROR: "+field+" is ") {
			t.Errorf("%s: got %v", config, err)
		}
		if _, bad := ReadPolicy([]byte(config)); bad == nil {
			t.Errorf("%s: a gateway takes it", config)
		}
	}
	for _, config := range []string{
		`{}`, `{"reserved": null, "may_start": null}`, `{"reserved": 0.5, "batch_reserved": 0.5}`,
		`{"queue_ttl": "1m30.5s", "cold_ttl": 0, "tpot_max": "80ms"}`, `{"queue_ttl": "1ns", "cold_ttl": "277777h46m40s", "tpot_max": "5.us"}`, `{"holdback": {"default": 0}, "floors": {}}`, `{"on_full": "push", "refuse_status": 503}`,
	} {
		if err := x.setPolicy(config); err != nil {
			t.Errorf("%s: %v", config, err)
		}
		if _, err := ReadPolicy([]byte(config)); err != nil {
			t.Errorf("%s: a gateway does not take it: %v", config, err)
		}
	}
	for config, field := range map[string]string{
		`{"queue_tll": 5}`: "queue_tll", `{"total": 5, "x": null}`: "x", `{"floors": {"Default": 0.1}}`: `"floors.Default"`,
	} {
		err := x.setPolicy(config)
		if postgres.Code(err) != "PS002" || !strings.Contains(err.Error(), "ERROR: a policy has no field "+field+":") {
			t.Errorf("%s: got %v", config, err)
		}
	}
	defaults, err := json.Marshal(DefaultPolicy())
	if err != nil {
		t.Fatal(err)
	}
	if err := x.setPolicy(string(defaults)); err != nil {
		t.Errorf("the defaults: %v", err)
	}
}

// The check of the database knows every field that gateways read. Those without a key are not of the policy.
func TestEachFieldOfAPolicyIsChecked(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	for field := range reflect.TypeFor[PoolPolicy]().Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		if name == "-" {
			continue
		}
		if err := x.setPolicy(fmt.Sprintf(`{%q: []}`, name)); postgres.Code(err) != "PS002" || !strings.Contains(err.Error(), name+" is []") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

// A policy that was set before it was checked breaks no lease: nodes and gateways take the defaults.
func TestLeasesGoOnUnderAPolicyThatIsNotValid(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	x.join(1)
	x.exec(`INSERT INTO penstock.node (id, name, application, lease, threads, queue_ids) VALUES (7, 'node', 'default', interval '1 hour', 4, '{}')`)
	for _, config := range []string{`{"reserved": "20%"}`, `{"reserved": 5}`, `{"reserved": -3}`} {
		x.exec(`INSERT INTO penstock.gateway_policy (model, config) VALUES ('m', $1::text::jsonb) ON CONFLICT (model) DO UPDATE SET config = excluded.config`, config)
		if n := x.count(`SELECT count(*) FROM penstock.lease_slots('m', 7, 20)`); n != 8 {
			t.Errorf("%s: a task node gets %d of 10 slots, want the 8 that are not reserved", config, n)
		}
		x.exec(`DELETE FROM penstock.slot`)
	}
}
