package gateway

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// A worker that tells the length of its answer has made it: a client that leaves then leaves no run behind.
func TestAnAnswerOfKnownLengthIsNoRunThatGoesOn(t *testing.T) {
	t.Parallel()
	for length, doubt := range map[string]bool{"1000000": false, "": true} {
		p := startTestbed(t, func(_ *Config, m *ModelState) { m.AbortStops = nil }, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			if length != "" {
				w.Header().Set("Content-Length", length)
			}
			_, _ = io.WriteString(w, strings.Repeat("a part ", 10_000))
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		})
		db, err := pgxpool.New(t.Context(), "host="+t.TempDir()+" user=none")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(db.Close)
		NewLeases(LeasesConfig{}, p.gateway, db, func() invalidation.NodeID { return 1 })
		ctx, leave := context.WithTimeout(t.Context(), 20*time.Second)
		answer, err := http.DefaultClient.Do(p.request(ctx, http.MethodPost, "/v1/images/generations", `{"model":"m"}`))
		if err != nil {
			t.Fatal(err)
		}
		leave()
		answer.Body.Close()
		workertest.WaitFor(t, func() bool { return p.state().InFlight == 0 })
		if s := p.state(); (s.Idle == 3) != doubt {
			t.Errorf("length %q: %d slots are idle, want one in doubt: %t", length, s.Idle, doubt)
		}
	}
}

// A client that leaves closes the connection of its call. Whether that ends the run is known by the protocol and the path,
// unless the model says so itself. Where it does not, the slot stays held, in doubt.
func TestThePathDecidesWhetherACloseEndsTheRun(t *testing.T) {
	t.Parallel()
	const call = "/models/m/call"
	yes, no := true, false
	for name, c := range map[string]struct {
		protocol worker.Protocol
		set      *bool // abort_stops
		path     string
		doubt    bool
	}{
		"a chat":                        {worker.ProtocolOpenAI, nil, chat, false},
		"images":                        {worker.ProtocolOpenAI, nil, "/v1/images/generations", true},
		"speech":                        {worker.ProtocolOpenAI, nil, "/v1/audio/speech", true},
		"embeddings":                    {worker.ProtocolOpenAI, nil, "/v1/embeddings", false},
		"messages":                      {worker.ProtocolOpenAI, nil, "/v1/messages", false},
		"images that the model stops":   {worker.ProtocolOpenAI, &yes, "/v1/images/generations", false},
		"a chat that the model goes on": {worker.ProtocolOpenAI, &no, chat, true},
		"cog":                           {worker.ProtocolCog, nil, call, false},
		"cog that goes on":              {worker.ProtocolCog, &no, call, true},
		"oip":                           {worker.ProtocolOIP, nil, call, true},
		"oip that the model stops":      {worker.ProtocolOIP, &yes, call, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			begun := make(chan struct{})
			p := startTestbed(t, func(_ *Config, m *ModelState) {
				m.Protocol, m.AbortStops = c.protocol, c.set
			}, func(_ http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				close(begun)
				<-r.Context().Done()
			})
			db, err := pgxpool.New(t.Context(), "host="+t.TempDir()+" user=none")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(db.Close)
			l := NewLeases(LeasesConfig{}, p.gateway, db, func() invalidation.NodeID { return 1 })
			ctx, leave := context.WithCancel(t.Context())
			request := p.request(ctx, http.MethodPost, c.path, `{"model":"m"}`)
			go func() {
				answer, err := http.DefaultClient.Do(request)
				if err == nil {
					answer.Body.Close()
				}
			}()
			<-begun
			leave()
			workertest.WaitFor(t, func() bool { return p.state().InFlight == 0 })
			l.mu.Lock()
			doubts := len(l.leaser("m").leaving.Doubts())
			l.mu.Unlock()
			if s := p.state(); (s.Idle == 3) != c.doubt || (doubts == 1) != c.doubt {
				t.Errorf("%d slots are idle and %d in doubt, want one in doubt: %v", s.Idle, doubts, c.doubt)
			}
		})
	}
}
