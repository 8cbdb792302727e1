package api

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/penstock/penstock/pkg/operator"
)

// announced sends an announcement of an instance and returns the status and the body of the answer.
func (w *world) announced(secret, model, server, body string) (int, string) {
	w.t.Helper()
	answer := w.ask(secret, "POST", "/v1/instances/"+model+"/"+server+"/announce", body)
	return answer.Code, answer.Body.String()
}

// An endpoint gets prompts and secret headers: the audit has each one that an instance had.
func TestTheAuditHasEachChangeOfAnAnnouncement(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.register_model('flux', '{"protocol": "cog"}')`)
	for _, body := range []string{
		`{"endpoint": "http://gpu-1:8000", "slots": 2, "labels": {"zone": "a"}}`,
		`{"endpoint": "http://gpu-1:8000", "slots": 2, "labels": {"zone": "a"}}`,
		`{"endpoint": "https://evil.example", "slots": 2, "labels": {"zone": "a"}}`,
		`{"endpoint": "https://evil.example", "slots": 3, "labels": {"zone": "a"}}`,
		`{"endpoint": "https://evil.example", "slots": 3, "labels": {"zone": "b"}}`,
		`{"endpoint": "https://evil.example", "slots": 3, "labels": {"zone": "b"}}`,
	} {
		if status, answer := w.announced("", "flux", "gpu-1", body); status != http.StatusOK {
			t.Fatalf("%s: %d %s", body, status, answer)
		}
	}
	audits, err := operator.New(w.pool).Audits(t.Context(), operator.AuditFilter{Verb: "announce_instance"})
	if err != nil {
		t.Fatal(err)
	}
	type settings struct {
		Endpoint string
		Slots    int
		Labels   map[string]string
	}
	want := []string{"https://evil.example 3 b", "https://evil.example 3 a", "https://evil.example 2 a", "http://gpu-1:8000 2 a"}
	if len(audits) != len(want) {
		t.Fatalf("the audit has %d announcements, want %d: %+v", len(audits), len(want), audits)
	}
	said := func(s settings) string { return s.Endpoint + " " + written(s.Slots) + " " + s.Labels["zone"] }
	for i, a := range audits {
		var detail struct {
			settings
			Before settings
		}
		if err := json.Unmarshal(a.Detail, &detail); err != nil {
			t.Fatal(err)
		}
		if got := said(detail.settings); got != want[i] || a.Actor != "anybody" {
			t.Errorf("line %d of the audit: %s by %s, want %s", i, got, a.Actor, want[i])
		}
		if i+1 < len(want) && said(detail.Before) != want[i+1] {
			t.Errorf("line %d of the audit: before %s, want %s", i, said(detail.Before), want[i+1])
		}
	}
}
