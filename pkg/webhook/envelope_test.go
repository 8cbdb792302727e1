package webhook

import (
	"encoding/json"
	"testing"
	"time"
)

// A receiver that was written for a dispatcher reads job_id, status and result.
func TestJobBodyIsThatOfADispatcher(t *testing.T) {
	at := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct{ data, want string }{
		{
			`{"id": 9007199254740993, "queue": "sdxl", "outcome": "done", "result": {"image": "x"}, "context": {"n": 1}}`,
			`{"job_id":"9007199254740993","status":"completed","result":{"image":"x"},"context":{"n":1},"queue":"sdxl"`,
		},
		{`{"id": 7, "queue": "q", "outcome": "done"}`, `{"job_id":"7","status":"completed","result":null,"queue":"q"`},
		{
			`{"id": 7, "queue": "q", "outcome": "done", "result_omitted": true}`,
			`{"job_id":"7","status":"completed","result_omitted":true,"queue":"q"`,
		},
		{`{"id": 7, "queue": "q", "outcome": "failed", "error": "boom"}`, `{"job_id":"7","status":"failed","error":"boom","queue":"q"`},
		{`{"id": 7, "queue": "q", "outcome": "cancelled", "reason": "by ops"}`, `{"job_id":"7","status":"cancelled","error":"by ops","queue":"q"`},
		{`{"id": 7, "queue": "q", "outcome": "expired", "reason": "late"}`, `{"job_id":"7","status":"expired","error":"late","queue":"q"`},
	} {
		body, err := newJobBody(envelope{At: at, Issuer: "i", Audience: "https://a.example/", Data: json.RawMessage(c.data)})
		want := c.want + `,"timestamp":"2026-03-01T12:00:00Z","issuer":"i","audience":"https://a.example/"}`
		if err != nil || string(body) != want {
			t.Errorf("%s becomes\n%s, %v, want\n%s", c.data, body, err, want)
		}
	}
	for _, data := range []string{`{"id": 1, "outcome": "tired"}`, `[]`, `{"id": "x", "outcome": "done"}`} {
		if body, err := newJobBody(envelope{Data: json.RawMessage(data)}); err == nil {
			t.Errorf("%s becomes %s", data, body)
		}
	}
}

func TestBodyIsInTheFormatThatThePusherChose(t *testing.T) {
	c := callback{URL: "https://a.example/", Type: "entry.done", Data: json.RawMessage(`{"id": 1, "queue": "q", "outcome": "done", "result": 5}`)}
	for format, member := range map[Format]string{FormatStandard: "data", FormatJob: "job_id"} {
		c.Format = format
		body, err := c.body("i")
		var fields map[string]any
		if err != nil || json.Unmarshal(body, &fields) != nil || fields[member] == nil || fields["issuer"] != "i" {
			t.Errorf("format %q gives %s, %v", format, body, err)
		}
	}
	c.Format = "xml"
	if body, err := c.body("i"); err == nil {
		t.Errorf("format xml gives %s", body)
	}
}
