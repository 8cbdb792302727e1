package worker

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestModelReadsTheFieldsOfADispatcher(t *testing.T) {
	var m Model
	if err := json.Unmarshal([]byte(`{"name":"flux","protocol":"dispatcher","model_type":"async",
		"poll_endpoint_template":"/status/{id}","id_field":"data.task","poll_interval":3.5,"max_poll_time":"20m"}`), &m); err != nil {
		t.Fatal(err)
	}
	m = m.WithDefaults()
	if err := m.Validate(); err != nil {
		t.Fatal(err)
	}
	if m.PollInterval.Duration() != 3500*time.Millisecond || m.MaxPollTime.Duration() != 20*time.Minute || *m.MaxRetries != 50 {
		t.Errorf("got %v, %v, %d", m.PollInterval.Duration(), m.MaxPollTime.Duration(), *m.MaxRetries)
	}
	text, err := json.Marshal(m)
	if err != nil || !strings.Contains(string(text), `"poll_interval":3.5`) {
		t.Errorf("written as %s, %v", text, err)
	}
}

func TestDefaultsOfAModel(t *testing.T) {
	m := Model{Name: "m", Protocol: ProtocolGeneric}.WithDefaults()
	if m.Type != TypeSync || m.PollInterval.Duration() != 2*time.Second || m.MaxPollTime.Duration() != 600*time.Second ||
		*m.MaxRetries != 50 || m.CloseEndsRun() || m.RemoteName != "m" {
		t.Errorf("got %+v", m)
	}
	if !(Model{Name: "m", Protocol: ProtocolOpenAI}).WithDefaults().CloseEndsRun() {
		t.Error("closing the connection of an OpenAI call stops it")
	}
}

func TestOverrideFallsBackWhenDeleted(t *testing.T) {
	base := Model{Name: "m", Protocol: ProtocolGeneric, Headers: map[string]string{"X-Tier": "gold"}, PollInterval: Seconds(time.Second)}
	over, err := base.With(json.RawMessage(`{"poll_interval":5,"max_retries":0,"headers":{"X-Tier":"tin"},"timeouts":{"run":7}}`))
	if err != nil {
		t.Fatal(err)
	}
	if over.PollInterval.Duration() != 5*time.Second || *over.MaxRetries != 0 || over.Headers["X-Tier"] != "tin" || over.Timeouts.Run.Duration() != 7*time.Second {
		t.Errorf("override gave %+v", over)
	}
	if base.Headers["X-Tier"] != "gold" {
		t.Error("the override changed the model beneath it")
	}
	back, err := base.With(nil)
	if err != nil || back.PollInterval.Duration() != time.Second || *back.WithDefaults().MaxRetries != 50 {
		t.Errorf("without override %+v, %v", back, err)
	}
	if _, err := base.With(json.RawMessage(`{"pol_interval":5}`)); err == nil || !strings.Contains(err.Error(), "pol_interval") {
		t.Errorf("misspelt field: %v", err)
	}
}

func TestValidationNamesTheField(t *testing.T) {
	for _, c := range []struct{ json, field string }{
		{`{}`, "name"},
		{`{"name":"m","protocol":"grpc"}`, "protocol"},
		{`{"name":"m","protocol":"oip","model_type":"async"}`, "model_type"},
		{`{"name":"m","protocol":"cog","model_type":"batch"}`, "model_type"},
		{`{"name":"m","protocol":"dispatcher","model_type":"async"}`, "poll_endpoint_template"},
		{`{"name":"m","protocol":"dispatcher","poll_endpoint_template":"status"}`, "poll_endpoint_template"},
		{`{"name":"m","protocol":"dispatcher","poll_endpoint_template":"//evil/{id}"}`, "poll_endpoint_template"},
		{`{"name":"m","protocol":"dispatcher","poll_endpoint_template":"/status"}`, "poll_endpoint_template"},
		{`{"name":"m","protocol":"dispatcher","cancel_endpoint_template":"http://x/{id}"}`, "cancel_endpoint_template"},
		{`{"name":"m","protocol":"dispatcher","health_path":"health"}`, "health_path"},
		{`{"name":"m","protocol":"openai","load_path":"http://x/metrics"}`, "load_path"},
		{`{"name":"m","protocol":"openai","load_port":70000}`, "load_port"},
		{`{"name":"m","protocol":"openai","operation":"audio"}`, "operation"},
		{`{"name":"m","protocol":"cog","stream":true}`, "stream"},
		{`{"name":"m","protocol":"cog","poll_interval":-1}`, "poll_interval"},
		{`{"name":"m","protocol":"cog","timeouts":{"run":-1}}`, "timeouts.run"},
		{`{"name":"m","protocol":"cog","timeouts":{"no_progress":-1}}`, "timeouts.no_progress"},
		{`{"name":"m","protocol":"cog","max_retries":-1}`, "max_retries"},
		{`{"name":"m","protocol":"cog","max_response_bytes":-1}`, "max_response_bytes"},
		{`{"name":"m","protocol":"cog","batch":{"tokens":-1}}`, "batch.tokens"},
		{`{"name":"m","protocol":"cog","body":[1]}`, "body"},
		{`{"name":"m","protocol":"cog","body":{"input":["$payloud"]}}`, "body"},
		{`{"name":"m","protocol":"cog","headers":{"Authorization":"Bearer hunter2"}}`, "headers.Authorization"},
		{`{"name":"m","protocol":"cog","headers":{"X-Api-Key":"hunter2"}}`, "headers.X-Api-Key"},
		{`{"name":"m","protocol":"cog","headers":{"penstock-token":"9"}}`, "headers.penstock-token"},
		{`{"name":"m","protocol":"cog","headers":{"idempotency-key":"9"}}`, "headers.idempotency-key"},
		{`{"name":"m","protocol":"cog","headers":{"X-A":"1\r\nX-B: 2"}}`, "headers.X-A"},
		{`{"name":"m","protocol":"cog","headers":{"X A":"1"}}`, "headers.X A"},
	} {
		var m Model
		if err := json.Unmarshal([]byte(c.json), &m); err != nil {
			t.Errorf("%s: %v", c.json, err)
			continue
		}
		var field *FieldError
		err := m.WithDefaults().Validate()
		if !errors.As(err, &field) || field.Field != c.field {
			t.Errorf("%s: %v, want it to name %s", c.json, err, c.field)
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("error repeats the secret: %v", err)
		}
	}
}

func TestEndpointsThatCannotBeUsed(t *testing.T) {
	for _, endpoint := range []string{"", "worker:8000", "ftp://w", "http://", "http://user:pass@w", "http://w?x=1", "http://w/#a", "http://[::1"} {
		_, err := New(Model{Name: "m", Protocol: ProtocolCog}, Instance{Endpoint: endpoint}, Config{})
		if err == nil {
			t.Errorf("%q was accepted", endpoint)
		}
		if err != nil && strings.Contains(err.Error(), "pass@") {
			t.Errorf("error repeats the password: %v", err)
		}
	}
}

func TestSecretsComeByReference(t *testing.T) {
	t.Setenv("PENSTOCK_SECRET_TEST", "from-env")
	t.Setenv("PGPASSWORD", "not for models")
	dir := t.TempDir()
	store := SecretStore{Dir: dir}
	path, outside := filepath.Join(dir, "key"), filepath.Join(t.TempDir(), "key")
	for _, link := range []struct{ from, to string }{{"inside", "key"}, {"outside", outside}} {
		if err := os.Symlink(link.to, filepath.Join(dir, link.from)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(outside, []byte("of another program"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("from-file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for value, want := range map[string]string{
		"env:PENSTOCK_SECRET_TEST": "from-env",
		"file:" + path:             "from-file",
		"file:" + dir + "/inside":  "from-file",
		"Basic ${env:PENSTOCK_SECRET_TEST}/${file:" + path + "}": "Basic from-env/from-file",
		"plain $ {text}": "plain $ {text}",
	} {
		if got, err := resolveSecrets(value, store.Read); err != nil || got != want {
			t.Errorf("%s gave %q, %v", value, got, err)
		}
	}
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, value := range []string{
		"env:PENSTOCK_SECRET_ABSENT", "a ${env:PENSTOCK_SECRET_ABSENT} b", "file:" + dir + "/absent", "file:" + empty,
		"env:PGPASSWORD", "${env:PGPASSWORD}", "env:PENSTOCK_SECRET_", "file:" + outside, "file:" + dir + "/outside",
		"file:" + dir + "/../" + filepath.Base(filepath.Dir(outside)) + "/key", "file:/proc/self/environ", "file:key",
	} {
		if got, err := resolveSecrets(value, store.Read); err == nil {
			t.Errorf("%s gave %q without an error", value, got)
		}
	}
	for _, value := range []string{"env:PGPASSWORD", "Bearer ${env:PENSTOCK_DATABASE_URL}", "file:/etc/../etc/shadow"} {
		m := Model{Name: "m", Protocol: ProtocolGeneric, Headers: map[string]string{"Authorization": value}}
		if err := checkHeaders(m); err == nil || !strings.Contains(err.Error(), "headers.Authorization") {
			t.Errorf("a model with %q in a header was taken: %v", value, err)
		}
	}
}

func TestPayloadCannotBreakOutOfTheTemplate(t *testing.T) {
	got, err := expand(json.RawMessage(`{"input":{"p":"$payload.p"},"safe":true}`), map[string]json.RawMessage{
		"payload": json.RawMessage(`{"p":"\"},\"safe\":false,\"x\":{\"y\":\"$entry"}`),
	})
	if want := `{"input":{"p":"\"},\"safe\":false,\"x\":{\"y\":\"$entry"},"safe":true}`; err != nil || string(got) != want {
		t.Errorf("got %s, %v", got, err)
	}
}
