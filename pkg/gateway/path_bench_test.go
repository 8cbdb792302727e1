package gateway

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// instant is a transport that answers at once.
type instant struct {
	kind string
	body []byte
}

func (a *instant) RoundTrip(r *http.Request) (*http.Response, error) {
	_, _ = io.Copy(io.Discard, r.Body)
	_ = r.Body.Close()
	return &http.Response{
		StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {a.kind}}, ContentLength: int64(len(a.body)),
		Body: io.NopCloser(bytes.NewReader(a.body)),
	}, nil
}

// discard is a client that reads everything at once.
type discard struct{ header http.Header }

func (d *discard) Header() http.Header         { return d.header }
func (d *discard) Write(p []byte) (int, error) { return len(p), nil }
func (d *discard) WriteHeader(int)             {}
func (d *discard) Flush()                      {}

func (d *discard) SetReadDeadline(time.Time) error  { return nil }
func (d *discard) SetWriteDeadline(time.Time) error { return nil }

// BenchmarkPath is a request of 1 KiB from its head to the end of its answer, without the connections: the CPU and the
// allocations that the gateway adds to those of a proxy.
func BenchmarkPath(b *testing.B) {
	body := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("z", 1<<10) + `"}]}`
	for _, c := range []struct{ name, kind, answer string }{
		{"whole", "application/json", `{"usage":{"prompt_tokens":9,"completion_tokens":9}}` + strings.Repeat(" ", 900)},
		{"stream", "text/event-stream", plainStream},
	} {
		b.Run(c.name, func(b *testing.B) {
			g := New(Config{Open: true})
			g.transport = &instant{c.kind, []byte(c.answer)}
			g.SetModels([]ModelState{{
				Name: "m", Remote: "m", Protocol: worker.ProtocolOpenAI, AbortStops: new(true), Policy: DefaultPolicy(),
				Instances: []InstanceState{{ID: 1, Address: "http://worker", Slots: 100, Usable: true}},
			}})
			g.Fixed()
			b.ReportAllocs()
			for b.Loop() {
				r, err := http.NewRequestWithContext(b.Context(), http.MethodPost, chat, strings.NewReader(body))
				if err != nil {
					b.Fatal(err)
				}
				g.ServeHTTP(&discard{http.Header{}}, r)
			}
		})
	}
}
