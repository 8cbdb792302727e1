package gateway

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/penstock/penstock/pkg/worker/workertest"
)

// A model is not called without one of its headers: they may be credentials, or name a tenant. The answer names the
// header, and neither its value nor the variable or file of its secret.
func TestModelWhoseHeadersCannotBeReadIsNotCalled(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ header, value string }{
		"control character": {"X-Tenant", "a\nb"},
		"no variable":       {"Authorization", "Bearer ${env:PENSTOCK_SECRET_OF_NO_ONE}"},
		"no file":           {"X-Key", "file:/nonexistent/key"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var log bytes.Buffer
			seen := make(chan http.Header, 4)
			p := startPlant(t, func(config *Config, m *ModelState) {
				config.Log = slog.New(slog.NewTextHandler(&log, nil))
				m.Headers = map[string]string{"X-Plain": "1", c.header: c.value}
			}, func(w http.ResponseWriter, r *http.Request) {
				seen <- r.Header.Clone()
				workertest.Says(200, "{}")(w, r)
			})
			for _, model := range []string{"m", "lora-1", "m"} {
				answer := p.post(chat, `{"model":"`+model+`"}`)
				refusedWith(t, answer, 503, "no_endpoints", "no_endpoints")
				var body envelope
				want := "no_endpoints: the header " + c.header + " that the model is called with cannot be read"
				if err := json.Unmarshal([]byte(answer.body), &body); err != nil || body.Error.Message != want {
					t.Errorf("the message is %q, want %q", body.Error.Message, want)
				}
				if answer.Header.Get("Retry-After") == "" {
					t.Error("the answer has no Retry-After")
				}
			}
			if len(seen) > 0 {
				t.Errorf("the worker was called with %v", <-seen)
			}
			if n := strings.Count(log.String(), "\n"); n != 1 || !strings.Contains(log.String(), c.header) {
				t.Errorf("the log has %d lines: %s", n, log.String())
			}
			model := p.model
			model.Headers = map[string]string{c.header: "readable"}
			p.gateway.SetModels([]ModelState{model})
			if answer := p.post(chat, `{"model":"m"}`); answer.StatusCode != 200 {
				t.Fatalf("got %d %s", answer.StatusCode, answer.body)
			}
			if got := <-seen; got.Get(c.header) != "readable" {
				t.Errorf("the worker got %v", got)
			}
		})
	}
}
