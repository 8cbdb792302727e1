package gateway

import (
	"testing"

	"github.com/penstock/penstock/pkg/worker/workertest"
)

// A request that cannot become an entry, since its operation has none or the gateway no queue, keeps the refusal for want
// of room: its client may come again.
func TestRequestsThatCannotBecomeEntriesKeepTheirRefusal(t *testing.T) {
	t.Parallel()
	const kind = "multipart/form-data; boundary=b"
	const form = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b--\r\n"
	for name, c := range map[string]struct {
		queue      Pusher
		path, body string
		kind       string
	}{
		"a form":           {&pushes{}, "/v1/audio/transcriptions", form, kind},
		"no such entries":  {&pushes{}, "/v1/audio/speech", `{"model":"m"}`, "application/json"},
		"without a queue":  {nil, chat, `{"model":"m"}`, "application/json"},
		"a form, no queue": {nil, "/v1/images/edits", form, kind},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := startPlant(t, func(config *Config, m *ModelState) {
				config.Push, m.Policy.OnFull, m.Instances[0].Usable = c.queue, OnFullPush, false
			}, workertest.Says(200, "{}"))
			answer := p.post(c.path, c.body, "Content-Type", c.kind, "Prefer", "respond-async, wait=5")
			refusedWith(t, answer, 503, "no_endpoints", "no_endpoints")
			if answer.Header.Get("Retry-After") == "" {
				t.Error("no Retry-After")
			}
		})
	}
}
