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

// A limited announcer reaches neither the devices nor the worker of a model beyond its limits by an announcement.
func TestALimitedAnnouncerStaysAwayFromOtherModels(t *testing.T) {
	w := newWorld(t)
	w.api = New(w.pool, Config{})
	w.exec(`SELECT penstock.register_model(m, '{"protocol": "cog"}') FROM unnest(ARRAY['mine', 'own', 'far']) m`)
	w.exec(`SELECT penstock.register_instance('far', 'a', 'http://gpu-far', 4, '{"device_group": "card-far"}'),
	               penstock.register_instance('own', 'a', 'http://gpu-own:8000', 4, '{"device_group": "card-own"}')`)
	limited := newToken(t, w.pool, operator.Grant{Name: "limited", Scopes: []string{"announce"}, Queues: []string{"mine", "own"}})
	unlimited := newToken(t, w.pool, operator.Grant{Name: "unlimited", Scopes: []string{"announce"}})
	for _, c := range []struct {
		secret, endpoint, group string
		status                  int
	}{
		{limited, "http://gpu-1:8000", "card-far", 403},
		{limited, "http://gpu-far/other/path", "", 403},
		{limited, "HTTP://GPU-Far:80", "", 403},
		{limited, "https://gpu-far:443", "card-own", 403},
		{limited, "http://gpu-far:8000", "", 200},
		{limited, "http://gpu-own:8000", "card-own", 200}, // of another model that the token is for
		{unlimited, "http://gpu-far", "card-far", 200},
		{limited, "http://gpu-far", "card-far", 200}, // it is there, and only renews
		{limited, "http://gpu-1:8000", "card-new", 200},
	} {
		body := `{"endpoint": "` + c.endpoint + `", "slots": 100}`
		if c.group != "" {
			body = `{"endpoint": "` + c.endpoint + `", "slots": 100, "labels": {"device_group": "` + c.group + `"}}`
		}
		if status, answer := w.announced(c.secret, "mine", "x", body); status != c.status {
			t.Errorf("%s: %d %s, want %d", body, status, answer, c.status)
		}
	}
}

// The name of a model may be longer than that of a queue.
func TestAModelOfALongNameHasAQueue(t *testing.T) {
	w := newWorld(t)
	const long = "meta-llama%2FLlama-4-Maverick-17B-128E-Instruct-FP8"
	status, answer := w.send("PUT", "/v1/models/"+long, `{"config": {"protocol": "openai"}, `+reason+`}`)
	queue := written(answer["queue"])
	if status != http.StatusOK || len(queue) < 40 {
		t.Fatalf("register: %d %v", status, answer)
	}
	if status, answer = w.send("POST", "/v1/queues/"+queue+"/entries", `{"payload": 1}`); status != http.StatusCreated {
		t.Errorf("push to %s: %d %v", queue, status, answer)
	}
	if status, answer = w.send("PUT", "/v1/instances/"+long+"/gpu-1", `{"endpoint": "http://gpu-1:8000", "slots": 1, `+reason+`}`); status != http.StatusOK && status != http.StatusNoContent {
		t.Errorf("register an instance: %d %v", status, answer)
	}
}
