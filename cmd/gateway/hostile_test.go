package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/worker"
)

// staticFront is a gateway on fixed slots of one worker, with the server that clients meet.
type staticFront struct {
	*server
	t       *testing.T
	address string
	running atomic.Int32 // calls at the worker
	calls   atomic.Int32
}

func startStaticFront(t *testing.T, slots int, work http.HandlerFunc, settings ...func(*server)) *staticFront {
	t.Helper()
	f := &staticFront{t: t}
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.calls.Add(1)
		f.running.Add(1)
		defer f.running.Add(-1)
		work(w, r)
	}))
	t.Cleanup(backend.Close)
	f.server = &server{cfg: defaults(), log: (&site{T: t}).log(), gateway: gateway.New(gateway.Config{Open: true})}
	for _, set := range settings {
		set(f.server)
	}
	f.gateway.SetModels([]gateway.ModelState{{
		Name: "m", Remote: "m", Protocol: worker.ProtocolOpenAI, Policy: gateway.DefaultPolicy(), RunMax: time.Minute, AbortStops: new(true),
		Instances: []gateway.InstanceState{{ID: 1, Address: backend.URL, Slots: slots, Usable: true}},
	}})
	f.gateway.Fixed()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f.address = listener.Addr().String()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.serveClients(ctx, context.Background(), listener) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return f
}

func (f *staticFront) dial() net.Conn {
	f.t.Helper()
	conn, err := new(net.Dialer).DialContext(f.t.Context(), "tcp", f.address)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// until waits for a state, with no bound that a busy machine could miss.
func (f *staticFront) until(what string, condition func() bool) {
	f.t.Helper()
	(&site{T: f.t}).eventually(what, condition)
}

// isIdle says whether no slot is busy, no request waits, and no goroutine serves one.
func (f *staticFront) isIdle() bool {
	s := f.gateway.States()[0]
	waiting := 0
	for _, n := range s.Waiting {
		waiting += n
	}
	return s.InFlight == 0 && waiting == 0 && s.Idle == s.Held && f.running.Load() == 0 && serving() == 0
}

// serving counts the goroutines that serve a request or exchange one with a worker.
func serving() int {
	stacks := make([]byte, 4<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	n := 0
	for _, stack := range strings.Split(string(stacks), "\n\n") {
		if strings.Contains(stack, "gateway.(*Gateway).ServeHTTP") || strings.Contains(stack, "gateway.(*roundTrip)") {
			n++
		}
	}
	return n
}

const callHead = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

// What could be read as two requests, or as another one, is refused; what passes reaches the worker as one request with
// its body and none of the words of the connection.
func TestHostileRequestsAreOneRequestOrNone(t *testing.T) { //nolint:paralleltest // it counts goroutines of the process
	seen := make(chan *http.Request, 1)
	bodies := make(chan string, 1)
	f := startStaticFront(t, 2, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		seen <- r
		bodies <- string(body)
		_, _ = io.WriteString(w, "{}")
	})
	const body = `{"model":"m"}`
	long := strings.Repeat("x", 70<<10)
	for _, c := range []struct {
		name, request string
		status        int // 200: it reaches the worker
	}{
		{"two lengths", callHead + "Content-Length: 13\r\nContent-Length: 14\r\n\r\n" + body, 400},
		{"a length with a sign", callHead + "Content-Length: +13\r\n\r\n" + body, 400},
		{"chunks and a length", callHead + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\nd\r\n" + body + "\r\n0\r\n\r\n", 200},
		{"chunks twice", callHead + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\nd\r\n" + body + "\r\n0\r\n\r\n", 501},
		{"another encoding", callHead + "Transfer-Encoding: xchunked\r\n\r\nd\r\n" + body + "\r\n0\r\n\r\n", 501},
		{"a space before the colon", callHead + "Content-Length : 13\r\n\r\n" + body, 400},
		{"a header without a name", callHead + ": x\r\nContent-Length: 13\r\n\r\n" + body, 400},
		{"a null in a header", callHead + "X-A: \x00\r\nContent-Length: 13\r\n\r\n" + body, 400},
		{"two hosts", callHead + "Host: y\r\nContent-Length: 13\r\n\r\n" + body, 400},
		{"no host", "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 13\r\n\r\n" + body, 400},
		{"no request", "\x16\x03\x01\x02\x00" + strings.Repeat("x", 32) + "\r\n\r\n", 400},
		{"a head of 70 KiB", callHead + "X-A: " + long + "\r\nContent-Length: 13\r\n\r\n" + body, 431},
		{"a chunk without a size", callHead + "Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body + "\r\n0\r\n\r\n", 400},
		{"a chunk that is longer than its size", callHead + "Transfer-Encoding: chunked\r\n\r\n5\r\n" + body + "\r\n0\r\n\r\n", 400},
		{"an upgrade", callHead + "Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 13\r\n\r\n" + body, 200},
		{"an upgrade to HTTP/2", callHead + "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n" +
			"Content-Length: 13\r\n\r\n" + body, 200},
		{"trailers", callHead + "TE: trailers\r\nTrailer: X-Penstock-Criticality\r\nTransfer-Encoding: chunked\r\n\r\nd\r\n" + body +
			"\r\n0\r\nX-Penstock-Criticality: critical\r\n\r\n", 200},
		{"a tunnel", "CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: x\r\n\r\n", 404},
		{"another host's address", "POST http://169.254.169.254/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 13\r\n\r\n" + body, 200},
	} {
		conn := f.dial()
		before := f.calls.Load()
		if _, err := io.WriteString(conn, c.request); err != nil && c.status == 200 {
			t.Fatal(err)
		}
		answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Errorf("%s: %s", c.name, err)
			continue
		}
		_, _ = io.Copy(io.Discard, answer.Body)
		_ = answer.Body.Close()
		_ = conn.Close()
		if answer.StatusCode != c.status {
			t.Errorf("%s: answered with %d, want %d", c.name, answer.StatusCode, c.status)
		}
		calls := f.calls.Load() - before
		if calls != 0 && c.status != 200 || calls != 1 && c.status == 200 {
			t.Errorf("%s: the worker got %d requests", c.name, calls)
		}
		if calls == 0 {
			continue
		}
		r, got := <-seen, <-bodies
		if got != body || r.ContentLength != int64(len(body)) || r.URL.Path != "/v1/chat/completions" {
			t.Errorf("%s: the worker got %s with %q of %d bytes", c.name, r.URL, got, r.ContentLength)
		}
		for _, name := range []string{"Connection", "Upgrade", "Te", "Trailer", "Http2-Settings", "X-Penstock-Criticality"} {
			if values := r.Header[name]; values != nil {
				t.Errorf("%s: the worker got the header %s: %q", c.name, name, values)
			}
		}
		if len(r.Trailer) > 0 {
			t.Errorf("%s: the worker got the trailers %v", c.name, r.Trailer)
		}
	}
	f.until("nothing is left of them", f.isIdle)
}

// A client may leave, or close its half of the connection, at any point: its call ends, and nothing is left of it.
func TestClientsThatLeaveAtAnyPointLeaveNothing(t *testing.T) { //nolint:paralleltest // it counts goroutines of the process
	const each = 12
	whole := callHead + "Content-Length: 13\r\n\r\n" + `{"model":"m"}`
	stream := callHead + "Content-Length: 27\r\n\r\n" + `{"model":"m","stream":true}`
	for _, c := range []struct {
		name, sent string
		half       bool // it closes its half alone
		begun      bool // its call is at the worker
	}{
		{"within the head", callHead[:40], false, false},
		{"behind the head", callHead + "Content-Length: 13\r\n\r\n", false, false},
		{"within the body", callHead + "Content-Length: 13\r\n\r\n" + `{"model`, false, false},
		{"within a chunk", callHead + "Transfer-Encoding: chunked\r\n\r\nd\r\n" + `{"model`, false, false},
		{"before 100 Continue", callHead + "Expect: 100-continue\r\nContent-Length: 13\r\n\r\n", false, false},
		{"while it waits for an answer", whole, false, true},
		{"with the half that it sends on", whole, true, true},
		{"in a stream", stream, false, true},
		{"in a stream, with the half that it sends on", stream, true, true},
	} {
		t.Run(c.name, func(t *testing.T) { //nolint:paralleltest // as above
			f := startStaticFront(t, 4, func(w http.ResponseWriter, r *http.Request) {
				text, _ := io.ReadAll(r.Body)
				if strings.Contains(string(text), "stream") {
					w.Header().Set("Content-Type", "text/event-stream")
					_, _ = io.WriteString(w, "data: {\"choices\":[]}\n\n")
					_ = http.NewResponseController(w).Flush()
				}
				<-r.Context().Done()
			})
			var conns []net.Conn
			for range each {
				conn := f.dial()
				if _, err := io.WriteString(conn, c.sent); err != nil {
					t.Fatal(err)
				}
				conns = append(conns, conn)
			}
			if c.begun { // the others wait for a slot
				f.until("the slots are busy", func() bool {
					s := f.gateway.States()[0]
					return f.running.Load() == 4 && s.Waiting["default"] == each-4
				})
			}
			for _, conn := range conns {
				if half, is := conn.(*net.TCPConn); is && c.half {
					_ = half.CloseWrite()
				} else {
					_ = conn.Close()
				}
			}
			f.until("nothing is left of them", f.isIdle)
			if n := f.calls.Load(); c.begun != (n > 0) {
				t.Errorf("the worker got %d calls", n)
			}
		})
	}
}

// A head that comes slowly, or not at all, keeps its connection for a bounded time: 10 s, here a second.
func TestHeadThatDoesNotComeIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	f := startStaticFront(t, 1, func(http.ResponseWriter, *http.Request) {}, func(s *server) { s.headWait = time.Second })
	for _, sent := range []string{"", "PRI * HTTP/2.0\r\n", callHead} {
		conn := f.dial()
		if _, err := io.WriteString(conn, sent); err != nil {
			t.Fatal(err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(2 * time.Minute))
		if _, err := io.Copy(io.Discard, conn); err != nil {
			t.Errorf("behind %q: %s", sent, err)
		}
	}
}

// A client of HTTP/2 may put a space into its query, which would divide the first line of the call.
func TestQueryOfAClientStaysOneWord(t *testing.T) {
	t.Parallel()
	seen := make(chan string, 1)
	f := startStaticFront(t, 1, func(w http.ResponseWriter, r *http.Request) {
		seen <- r.RequestURI
		_, _ = io.WriteString(w, "{}")
	})
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	client := &http.Client{Transport: &http.Transport{Protocols: &protocols}}
	t.Cleanup(client.CloseIdleConnections)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, fmt.Sprintf("http://%s/v1/chat/completions", f.address),
		strings.NewReader(`{"model":"m"}`))
	if err != nil {
		t.Fatal(err)
	}
	request.URL.RawQuery = "a=b HTTP/1.1"
	answer, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	_ = answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		t.Fatalf("got %s", answer.Status)
	}
	if got := <-seen; got != "/v1/chat/completions?a=b%20HTTP/1.1" {
		t.Errorf("the worker got %q", got)
	}
}

// A page in a browser on this machine does not reach a gateway that asks for no token: not from another origin, and not
// under a name that was made to point here.
func TestAPageOfAnotherSiteDoesNotReachAnOpenGateway(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*Gateway)
		closed bool
	}{
		"open":                  {func(g *Gateway) { g.Open = true }, true},
		"without a database":    {func(g *Gateway) { g.Static = []string{"m=http://gpu"} }, true},
		"with tokens":           {func(*Gateway) {}, false},
		"static, for a network": {func(g *Gateway) { g.Static, g.Listen = []string{"m=http://gpu"}, "0.0.0.0:8430" }, false},
	} {
		cfg := defaults()
		c.change(&cfg.Gateway)
		s := &server{cfg: cfg, gateway: gateway.New(gateway.Config{Open: true})}
		for _, from := range []struct {
			host, origin string
			local        bool
		}{
			{"127.0.0.1:8430", "", true},
			{"localhost:8430", "http://localhost:8430", true},
			{"[::1]:8430", "", true},
			{"127.0.0.1:8430", "https://example.com", false},
			{"rebound.example.com:8430", "http://rebound.example.com:8430", false},
		} {
			r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"model":"m"}`))
			r.Host = from.host
			if from.origin != "" {
				r.Header.Set("Origin", from.origin)
			}
			w := httptest.NewRecorder()
			s.handler().ServeHTTP(w, r)
			// The gateway knows no model.
			if reached := w.Code == http.StatusNotFound; reached != (from.local || !c.closed) {
				t.Errorf("%s: %s from %q got %d", name, from.host, from.origin, w.Code)
			}
		}
	}
}
