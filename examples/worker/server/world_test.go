package server

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/penstock/penstock/examples/worker/model"
)

// gate is a model whose runs end when the test lets them: payload "a" waits for open("a").
// Payload "stubborn" does so even when it is told to stop, and "panic" panics.
type gate struct {
	mu      sync.Mutex
	started []string
	doors   map[string]chan error
}

func newGate() *gate { return &gate{doors: map[string]chan error{}} }

func (g *gate) Name() string { return "gate" }

func (g *gate) Prepare(payload json.RawMessage) (model.Work, error) {
	var id string
	if err := model.Decode(payload, &id); err != nil {
		return nil, err
	}
	return func(ctx context.Context) (any, error) {
		g.mu.Lock()
		g.started = append(g.started, id)
		g.mu.Unlock()
		if id == "panic" {
			panic("gate broke")
		}
		if id == "stubborn" {
			ctx = context.WithoutCancel(ctx)
		}
		select {
		case err := <-g.door(id):
			return map[string]string{"id": id}, err
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}, nil
}

func (g *gate) door(id string) chan error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.doors[id] == nil {
		g.doors[id] = make(chan error, 1)
	}
	return g.doors[id]
}

// runs lists the payloads in the order in which they got a slot.
func (g *gate) runs() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.started)
}

// world is a server with an echo and a gate, inside a synctest bubble.
type world struct {
	*testing.T
	s    *Server
	gate *gate
	h    http.Handler
}

// inWorld runs a story under a virtual clock.
func inWorld(t *testing.T, cfg Config, story func(w *world)) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, cfg)
		story(w)
		synctest.Wait()
		w.s.stopAll()
		synctest.Wait()
		if got := w.health(); got.Active != 0 || got.Queued != 0 {
			t.Errorf("at the end %d slots are held and %d calls wait", got.Active, got.Queued)
		}
	})
}

func newWorld(t *testing.T, cfg Config) *world {
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{T: t, s: s, gate: newGate(), h: s.Handler()}
	s.SetModels([]model.Model{model.Echo{}, w.gate})
	return w
}

// pending is a request that may still be under way.
type pending struct {
	w      *world
	rec    *httptest.ResponseRecorder
	hangUp context.CancelFunc
	done   chan struct{}
	abort  bool // the server broke the connection
}

// send starts a request; headers are "Name: value". It returns when nothing more happens by itself.
func (w *world) send(method, path, body string, headers ...string) *pending {
	synctest.Wait() // what went before has settled
	ctx, hangUp := context.WithCancel(w.Context())
	r := httptest.NewRequestWithContext(ctx, method, path, strings.NewReader(body))
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		r.Header.Add(name, value)
	}
	p := &pending{w: w, rec: httptest.NewRecorder(), hangUp: hangUp, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		defer func() {
			broken := recover()
			if err, ok := broken.(error); ok && errors.Is(err, http.ErrAbortHandler) {
				p.abort = true
			} else if broken != nil {
				panic(broken)
			}
		}()
		w.h.ServeHTTP(p.rec, r)
	}()
	synctest.Wait()
	return p
}

func (p *pending) waits() bool {
	synctest.Wait()
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// answer is what any route answers.
type answer struct {
	Code     int
	Status   string
	JobID    string `json:"job_id"`
	Result   json.RawMessage
	Error    string
	Detail   string
	Field    string
	Position int
}

// answer waits for the answer, in virtual time.
func (p *pending) answer() answer {
	p.w.Helper()
	<-p.done
	defer p.hangUp()
	raw, _ := io.ReadAll(p.rec.Body)
	a := answer{Code: p.rec.Code}
	if err := json.Unmarshal(raw, &a); err != nil {
		p.w.Fatalf("answer %d %q: %v", p.rec.Code, raw, err)
	}
	return a
}

func (w *world) post(path, body string, headers ...string) answer {
	w.Helper()
	return w.send("POST", path, body, headers...).answer()
}

func (w *world) get(path string, headers ...string) answer {
	w.Helper()
	return w.send("GET", path, "", headers...).answer()
}

func (w *world) health() health {
	w.Helper()
	p := w.send("GET", "/health", "")
	<-p.done
	var h health
	if err := json.Unmarshal(p.rec.Body.Bytes(), &h); err != nil {
		w.Fatal(err)
	}
	return h
}

func (w *world) open(id string) {
	w.gate.door(id) <- nil
	synctest.Wait()
}

func (w *world) expect(got answer, code int, word string) {
	w.Helper()
	all := got.Status + "|" + got.Error + "|" + got.Detail
	if got.Code != code || !strings.Contains(all, word) {
		w.Errorf("answer %+v, want %d with %q", got, code, word)
	}
}

const fromDispatcher = "X-Source: dispatcher"
