package gateway

import (
	"encoding/json"
	"reflect"
	"testing"
)

// FuzzReadPolicy reads the settings of a pool, which operators write. Settings that are accepted say the same when they
// are written and read again.
func FuzzReadPolicy(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{"total": 10, "queue_ttl": "5s"}`, `{"queue_ttl": 1.001, "cold_ttl": 0.3}`,
		`{"on_full": "push", "refuse_status": 503}`,
		`{"holdback": {"critical": 1, "default": 0.9}}`, `{"queue_ttl": "2000000h"}`, `{"deviation": 1}`, `null`, ``,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := ReadPolicy(text)
		if err != nil {
			return
		}
		written, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ReadPolicy(written)
		if err != nil || !reflect.DeepEqual(again, p) {
			t.Errorf("%s became %s, which is read as %+v (%v)", text, written, again, err)
		}
	})
}
