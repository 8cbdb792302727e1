package workertest

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// Recorded is a request as a worker saw it.
type Recorded struct {
	Method, Path string
	Header       http.Header
	Body         string
}

// Script is a worker that answers by a function and keeps the requests.
type Script struct {
	*httptest.Server
	mu   sync.Mutex
	seen []Recorded
}

// NewScript starts a worker on a loopback port.
func NewScript(t *testing.T, answer http.HandlerFunc) *Script {
	t.Helper()
	s := &Script{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		s.mu.Lock()
		s.seen = append(s.seen, Recorded{r.Method, r.URL.EscapedPath(), r.Header.Clone(), string(body)})
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

func (s *Script) Requests() []Recorded {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Recorded(nil), s.seen...)
}

// Says answers with a status and a body, the headers given as name, value.
func Says(status int, body string, headers ...string) http.HandlerFunc {
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

// Hangs never answers; it returns when the client has gone.
func Hangs(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

// Resets drops the connection after the request was read.
func Resets(w http.ResponseWriter, _ *http.Request) { Hijack(w, "") }

// ResetsMidBody promises more than it sends.
func ResetsMidBody(w http.ResponseWriter, _ *http.Request) {
	Hijack(w, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{\"status\":\"succ")
}

func Hijack(w http.ResponseWriter, raw string) {
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
