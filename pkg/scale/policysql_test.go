package scale

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/penstock/penstock/internal/postgres"
)

// A policy that this package does not take is refused where it is set, by the name of the field.
func TestAPolicyThatIsNotValidIsRefusedWhereItIsSet(t *testing.T) {
	db := fleet(t)
	set := func(policy string) error {
		_, err := db.Exec(t.Context(), `SELECT penstock.set_deployment('llama-own', 'llama', jsonb_build_object('policy', $1::text::jsonb))`, policy)
		return err
	}
	for policy, field := range map[string]string{
		`{"max": 10.0}`:                           "max",
		`{"max": 2.5}`:                            "max",
		`{"max": 4000000000}`:                     "max",
		`{"max": "unlimited"}`:                    "max",
		`{"min": -1}`:                             "min",
		`{"stuck_min_seconds": 600000000000}`:     "stuck_min_seconds",
		`{"stuck_min_seconds": "ten minutes"}`:    "stuck_min_seconds",
		`{"hold_seconds": "300000h"}`:             "hold_seconds",
		`{"rho": 1.5}`:                            "rho",
		`{"beta": true}`:                          "beta",
		`{"scale_to_zero": 1}`:                    "scale_to_zero",
		`{"algorithm": "hpaa"}`:                   "algorithm",
		`{"algorithm": 1}`:                        "algorithm",
		`{"floors": {}}`:                          "floors",
		`{"hpa": 5}`:                              "hpa",
		`{"hpa": {"target": -1}}`:                 "hpa.target",
		`{"replicate": {"out_count": 1e20}}`:      "replicate.out_count",
		`{"utilization": {"period_seconds": []}}`: "utilization.period_seconds",
	} {
		if err := set(policy); postgres.Code(err) != "PS002" || !strings.Contains(err.Error(), "ERROR: "+field+" of a policy is ") {
			t.Errorf("%s: got %v", policy, err)
		}
		if _, err := ParsePolicy([]byte(policy)); err == nil {
			t.Errorf("%s: this package takes it", policy)
		}
	}
	for policy, field := range map[string]string{`{"Max": 5}`: `"Max"`, `{"hpa": {"goal": 1}}`: `"hpa.goal"`, `{"most": null}`: "most"} {
		if err := set(policy); postgres.Code(err) != "PS002" || !strings.Contains(err.Error(), "ERROR: a policy has no field "+field+":") {
			t.Errorf("%s: got %v", policy, err)
		}
	}
	for _, policy := range []string{
		`{}`, `{"max": 1e3, "min": null, "stuck_min_seconds": "1m30.5s", "rho": 0.5, "floors": [], "hpa": {}, "cold_price": 0}`,
		`{"hold_seconds": 1000000000, "idle_min_seconds": "277777h", "utilization": {"variant": "band", "use_forecast": true}}`,
		`{"algorithm": ""}`, `{"algorithm": "penstock"}`, `{"algorithm": "replicate-v2"}`, `{"algorithm": "hpa"}`, `{"algorithm": "utilization"}`,
	} {
		if err := set(policy); err != nil {
			t.Errorf("%s: %v", policy, err)
		}
		if _, err := ParsePolicy([]byte(strings.Replace(policy, "1e3", "1000", 1))); err != nil { // as jsonb writes it
			t.Errorf("%s: this package does not take it: %v", policy, err)
		}
	}
	each(reflect.TypeFor[Policy](), "", func(field, policy string) {
		if err := set(policy); err != nil && strings.Contains(err.Error(), "has no field") {
			t.Errorf("field %s is not known: %v", field, err)
		}
	})
}

// each calls f with each field of a policy, and with a policy that has it.
func each(of reflect.Type, within string, f func(field, policy string)) {
	for field := range of.Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		switch {
		case name == "-":
		case within != "":
			f(within+"."+name, fmt.Sprintf(`{%q: {%q: null}}`, within, name))
		case field.Type.Kind() == reflect.Struct:
			each(field.Type, name, f)
		default:
			f(name, fmt.Sprintf(`{%q: null}`, name))
		}
	}
}
