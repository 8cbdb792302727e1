package scale

import (
	"encoding/json"
	"reflect"
	"testing"
)

// FuzzPolicy reads the policy of a deployment, which operators write. One that passes the check passes it with its
// defaults as well, and says the same when it is written and read again.
func FuzzPolicy(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{"min": 1, "max": 4, "slots": 8}`, `{"slo_seconds": "90s"}`, `{"slo_seconds": 0.5, "drain_seconds": 1.001}`,
		`{"algorithm": "hpa", "scale_to_zero": false}`, `{"slo_seconds": "2000000h"}`, `{"nonsense": 1}`, `null`,
		`{"floors": [{"cron": "0 8 * * 1-5", "zone": "Europe/Berlin", "lasts_seconds": 3600, "min": 2}]}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var p Policy
		if json.Unmarshal(text, &p) != nil || p.Check() != nil {
			return
		}
		if p = p.WithDefaults(); len(p.Floors) == 0 {
			p.Floors = nil // none are written
		}
		if err := p.Check(); err != nil {
			t.Fatalf("%s is refused once it has its defaults: %v", text, err)
		}
		written, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		var again Policy
		if err := json.Unmarshal(written, &again); err != nil {
			t.Fatalf("%s became %s, which cannot be read: %v", text, written, err)
		}
		if again = again.WithDefaults(); !reflect.DeepEqual(again, p) {
			t.Errorf("%s became %s", text, written)
		}
	})
}
