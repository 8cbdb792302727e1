package inference

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// recorded is a request as a worker saw it.
type recorded struct {
	Method, Path string
	Header       http.Header
	Body         string
}

// script is a worker that answers from a function and keeps what it was asked.
type script struct {
	*httptest.Server
	mu   sync.Mutex
	seen []recorded
}

// newScript starts a worker on a loopback port.
func newScript(t *testing.T, answer http.HandlerFunc) *script {
	t.Helper()
	s := &script{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		s.mu.Lock()
		s.seen = append(s.seen, recorded{r.Method, r.URL.EscapedPath(), r.Header.Clone(), string(body)})
		s.mu.Unlock()
		r.Body = io.NopCloser(strings.NewReader(string(body)))
		answer(w, r)
	}))
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

func (s *script) requests() []recorded {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]recorded(nil), s.seen...)
}

// says answers with a status and a body, the headers given as name, value.
func says(status int, body string, headers ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i+1 < len(headers); i += 2 {
			w.Header().Set(headers[i], headers[i+1])
		}
		if w.Header().Get("Content-Type") == "" {
			w.Header().Set("Content-Type", "application/json")
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

// hangs never answers; it returns when the client has gone.
func hangs(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

// resets drops the connection after the request was read.
func resets(w http.ResponseWriter, _ *http.Request) { hijack(w, "") }

// resetsMidBody promises more than it sends.
func resetsMidBody(w http.ResponseWriter, _ *http.Request) {
	hijack(w, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{\"status\":\"succ")
}

func hijack(w http.ResponseWriter, raw string) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(err)
	}
	_, _ = io.WriteString(conn, raw)
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
}

// sends streams a body far beyond any limit without a length.
func huge(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	chunk := []byte(strings.Repeat(" ", 32<<10))
	for range 64 {
		if _, err := w.Write(chunk); err != nil {
			return
		}
	}
}

func newAdapter(t *testing.T, model Model, endpoint string, slots int) Adapter {
	t.Helper()
	a, err := New(model, Instance{Endpoint: endpoint, Slots: slots}, Config{})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func testCall(payload string) Call {
	return Call{
		Run:         Run{Entry: "entry-17", Token: 42, Attempt: 3},
		Payload:     json.RawMessage(payload),
		TraceParent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
		TraceState:  "penstock=1",
		Callback:    "http://127.0.0.1:9/callback/unguessable",
	}
}

// want is the part of an outcome that a contract is about.
type want struct {
	kind       Kind
	class      Class
	running    bool
	retryAfter time.Duration
	result     string
	remote     string
	reattached bool
	starting   bool
}

func (w want) check(t *testing.T, got Outcome) {
	t.Helper()
	g := want{
		kind: got.Kind, class: got.Class, running: got.MaybeRunning, retryAfter: got.RetryAfter,
		result: string(got.Result), remote: got.Remote, reattached: got.Reattached, starting: got.Starting,
	}
	if g != w {
		t.Errorf("outcome\n got %+v (reason %q, err %v)\nwant %+v", g, got.Reason, got.Err, w)
	}
}

// submitAbandoned submits and ends the context once the worker has the request.
func submitAbandoned(t *testing.T, model Model, call Call) Outcome {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s := newScript(t, func(w http.ResponseWriter, r *http.Request) {
		cancel()
		hangs(w, r)
	})
	return newAdapter(t, model, s.URL, 1).Submit(ctx, call)
}

// nobody is an address on which nothing listens.
func nobody(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(http.NotFoundHandler())
	s.Close()
	return s.URL
}
