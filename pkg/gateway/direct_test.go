package gateway

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// scripted is a worker on a bare connection. serve has each connection in turn, numbered from 1.
func scripted(t *testing.T, serve func(n int64, conn net.Conn)) (address string, conns *atomic.Int64) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // for the test
	if err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	t.Cleanup(group.Wait)
	t.Cleanup(func() { _ = listener.Close() })
	conns = &atomic.Int64{}
	group.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			group.Go(func() {
				defer conn.Close()
				serve(conns.Add(1), conn)
			})
		}
	})
	return listener.Addr().String(), conns
}

// got reads a request with its body, nil at the end of the connection.
func got(in *bufio.Reader) (*http.Request, []byte) {
	r, err := http.ReadRequest(in)
	if err != nil {
		return nil, nil
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, nil
	}
	return r, body
}

func heldOf(body string) *heldBody {
	h := &heldBody{budget: &bodyBudget{}, buf: bytes.NewBufferString(body)}
	h.users.Store(1)
	return h
}

// outgoing is a request as the gateway makes it.
func outgoing(ctx context.Context, address, body string) (*http.Request, *partsReader) {
	parts := &partsReader{parts: [][]byte{[]byte(body)}, begun: &atomic.Bool{}}
	return (&http.Request{
		Method: http.MethodPost, Host: address,
		URL:    &url.URL{Scheme: "http", Host: address, Path: "/v1/x y", RawQuery: "a=b"},
		Header: http.Header{"X-One": {"1", "2"}, "Content-Type": {"application/json"}}, ContentLength: int64(len(body)),
		Body: parts,
	}).WithContext(ctx), parts
}

func newTestDirect(t *testing.T) *direct {
	t.Helper()
	d := newTransport()
	d.idleMax = time.Minute // connections outlast a machine that stalls
	t.Cleanup(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, list := range d.idle {
			for _, l := range list {
				_ = l.Close()
			}
		}
	})
	return d
}

// ask makes one exchange and reads its answer.
func ask(t *testing.T, d *direct, address, body string) (status int, text string, err error) {
	t.Helper()
	r, _ := outgoing(t.Context(), address, body)
	answer, err := d.RoundTrip(r)
	if err != nil {
		return 0, "", err
	}
	defer answer.Body.Close()
	all, err := io.ReadAll(answer.Body)
	return answer.StatusCode, string(all), err
}

// A worker gets the same from the gateway as from an http.Transport, but for the name of a user agent that no client
// has sent.
func TestWorkersGetWhatATransportSends(t *testing.T) {
	t.Parallel()
	var seen []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		r.Header.Del("User-Agent")
		seen = append(seen, fmt.Sprint(r.Method, r.Host, r.RequestURI, r.Header, r.ContentLength, r.TransferEncoding,
			len(body), string(body)))
		_, _ = w.Write([]byte("ok"))
	}))
	defer server.Close()
	d := newTestDirect(t)
	address := strings.TrimPrefix(server.URL, "http://")
	for _, n := range []int{1, 1000, inlineMax, inlineMax + 1, 300_000} {
		seen = nil
		for _, way := range []http.RoundTripper{d, d.other} {
			r, _ := outgoing(t.Context(), address, strings.Repeat("x", n))
			answer, err := way.RoundTrip(r)
			if err != nil {
				t.Fatal(err)
			}
			if text, err := io.ReadAll(answer.Body); err != nil || string(text) != "ok" {
				t.Errorf("%d bytes: got %q, %v", n, text, err)
			}
			_ = answer.Body.Close()
		}
		if len(seen) != 2 || seen[0] != seen[1] {
			t.Errorf("%d bytes: the worker got\n%.300s\n%.300s", n, seen[0], seen[len(seen)-1])
		}
	}
}

// The address of a worker becomes a name to dial, and the header Host, as http.Transport makes them.
func TestAddressesAreThoseOfATransport(t *testing.T) {
	t.Parallel()
	hosts := make(chan string, 1)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { hosts <- r.Host }))
	defer server.Close()
	for _, host := range []string{
		"worker", "Worker.example:8000", "a_b", "127.0.0.1:81", "bücher.example", "BÜCHER.example:8000", "[::1]",
		"[::1]:8000", "[fe80::1%eth0]", "[fe80::1%eth0]:8000",
	} {
		var dialled string
		dial := func(ctx context.Context, network, address string) (net.Conn, error) {
			dialled = address
			return new(net.Dialer).DialContext(ctx, network, strings.TrimPrefix(server.URL, "http://"))
		}
		d := newTestDirect(t)
		d.dial = dial
		transport := &http.Transport{DialContext: dial, DisableKeepAlives: true}
		var seen [2]string
		for i, way := range []http.RoundTripper{d, transport} {
			r, _ := outgoing(t.Context(), host, "body")
			answer, err := way.RoundTrip(r)
			if err != nil {
				t.Fatalf("%s: %v", host, err)
			}
			_ = answer.Body.Close()
			seen[i] = dialled + ", Host: " + <-hosts
		}
		if seen[0] != seen[1] {
			t.Errorf("%s becomes %s, want %s", host, seen[0], seen[1])
		}
	}
}

// What ends an answer decides whether its connection has another.
func TestConnectionsAreKeptAsTheirAnswersAllow(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer, text string
		status       int
		kept         bool
	}{
		"length":     {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "ok", 200, true},
		"chunks":     {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", "ok", 200, true},
		"empty":      {"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "", 200, true},
		"no content": {"HTTP/1.1 204 No Content\r\n\r\n", "", 204, true},
		"interim":    {"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "ok", 200, true},
		"close":      {"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", "ok", 200, false},
		"old":        {"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", "ok", 200, false},
		"more":       {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokok", "ok", 200, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address, conns := scripted(t, func(_ int64, conn net.Conn) {
				in := bufio.NewReader(conn)
				for r, _ := got(in); r != nil; r, _ = got(in) {
					_, _ = io.WriteString(conn, c.answer)
				}
			})
			d := newTestDirect(t)
			for range 3 {
				status, text, err := ask(t, d, address, "body")
				if err != nil || status != c.status || text != c.text {
					t.Fatalf("got %d %q, %v", status, text, err)
				}
			}
			want := int64(3)
			if c.kept {
				want = 1
			}
			if n := conns.Load(); n != want {
				t.Errorf("three exchanges took %d connections, want %d", n, want)
			}
		})
	}
}

// An answer that is not one is an error, however the worker breaks it.
func TestAnswersThatAreNoneAreErrors(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]string{
		"nothing":         "",
		"no HTTP":         "hello\r\n\r\n",
		"short":           "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok",
		"short chunk":     "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nok",
		"long head":       "HTTP/1.1 200 OK\r\n" + strings.Repeat("X-A: "+strings.Repeat("y", 1000)+"\r\n", 1100) + "\r\n",
		"interim only":    strings.Repeat("HTTP/1.1 102 Processing\r\n\r\n", interimMax+1),
		"other protocol":  "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
		"two lengths":     "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
		"length negative": "HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address, _ := scripted(t, func(_ int64, conn net.Conn) {
				if r, _ := got(bufio.NewReader(conn)); r != nil {
					_, _ = io.WriteString(conn, answer)
				}
			})
			d := newTestDirect(t)
			if status, text, err := ask(t, d, address, "body"); err == nil {
				t.Errorf("got %d %q", status, text)
			}
			if d.pop(address) != nil {
				t.Error("the connection was kept")
			}
		})
	}
}

// A connection that its worker has closed, or has written to, is not used: the request runs once, on a new one.
func TestIdleConnectionThatHasEndedIsNotUsed(t *testing.T) {
	t.Parallel()
	for name, farewell := range map[string]string{"closed": "", "written": "HTTP/1.1 408 Request Timeout\r\n\r\n"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var ran atomic.Int64
			left := make(chan struct{})
			address, conns := scripted(t, func(n int64, conn net.Conn) {
				if r, _ := got(bufio.NewReader(conn)); r == nil {
					return
				}
				ran.Add(1)
				_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
				if n > 1 {
					return
				}
				_, _ = io.WriteString(conn, farewell)
				if farewell == "" {
					_ = conn.Close()
				}
				close(left)
				_, _ = conn.Read(make([]byte, 1)) // until the other side closes it
			})
			d := newTestDirect(t)
			if _, _, err := ask(t, d, address, "body"); err != nil && farewell == "" {
				t.Fatal(err)
			}
			<-left
			workertest.WaitFor(t, func() bool {
				l := d.pop(address)
				if l == nil {
					return true
				}
				quiet := l.probe.quiet()
				d.push(l)
				return !quiet
			})
			if status, _, err := ask(t, d, address, "body"); err != nil || status != 200 {
				t.Errorf("got %d, %v", status, err)
			}
			if ran.Load() != 2 || conns.Load() != 2 {
				t.Errorf("%d ran on %d connections, want 2 on 2", ran.Load(), conns.Load())
			}
		})
	}
}

// deafConn is a connection on which nothing can be written.
type deafConn struct{ net.Conn }

func (deafConn) Write([]byte) (int, error) { return 0, errors.New("broken pipe") }

// A request of which nothing was written to a connection of before goes on a new one. Of one that was not written to a
// new one either, nothing can have run.
func TestRequestThatWasNotWrittenIsSentAgain(t *testing.T) {
	t.Parallel()
	address, conns := scripted(t, func(_ int64, conn net.Conn) {
		in := bufio.NewReader(conn)
		for r, body := got(in); r != nil; r, body = got(in) {
			fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		}
	})
	d := newTestDirect(t)
	if _, _, err := ask(t, d, address, "body"); err != nil {
		t.Fatal(err)
	}
	l := d.pop(address)
	if l == nil {
		t.Fatal("the connection was not kept")
	}
	l.Conn = deafConn{l.Conn}
	d.push(l)
	if _, text, err := ask(t, d, address, "again"); err != nil || text != "again" {
		t.Errorf("got %q, %v", text, err)
	}
	if n := conns.Load(); n != 2 {
		t.Errorf("%d connections, want 2", n)
	}
	dial := d.dial
	d.dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		return deafConn{conn}, err
	}
	if l := d.pop(address); l != nil {
		_ = l.Close()
	}
	r, parts := outgoing(t.Context(), address, "never")
	if _, err := d.RoundTrip(r); err == nil || parts.begun.Load() { //nolint:bodyclose // there is none
		t.Errorf("got %v, sent: %v", err, parts.begun.Load())
	}
}

// A worker may answer before it has read a long body. The client has that answer, the body is let go, and the
// connection has no other.
func TestAnswerBeforeTheEndOfALongBody(t *testing.T) {
	t.Parallel()
	finished := make(chan struct{})
	address, _ := scripted(t, func(_ int64, conn net.Conn) {
		_, _ = conn.Read(make([]byte, 1000))
		_, _ = io.WriteString(conn, "HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\n\r\nno")
		<-finished // to close the connection with bytes unread would reset it, and take the answer with it
	})
	end := sync.OnceFunc(func() { close(finished) })
	defer end()
	d := newTestDirect(t)
	held := heldOf(strings.Repeat("x", 30<<20))
	r, parts := outgoing(t.Context(), address, "")
	parts.held, parts.parts, r.ContentLength = held, [][]byte{held.bytes()}, int64(len(held.bytes()))
	answer, err := d.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusRequestEntityTooLarge || string(text) != "no" {
		t.Errorf("got %d %q, %v", answer.StatusCode, text, err)
	}
	_ = answer.Body.Close()
	if d.pop(address) != nil {
		t.Error("the connection was kept")
	}
	end()
	held.letGo()
	workertest.WaitFor(t, func() bool { return held.users.Load() == 0 })
}

// The end of the context ends an exchange in each of its parts, and closes its connection.
func TestAnExchangeEndsWithItsContext(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		size   int
		answer string
	}{
		"the request is written":   {30 << 20, ""},
		"the head is awaited":      {10, ""},
		"the answer is on its way": {10, "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithCancel(t.Context())
			closed := make(chan struct{})
			address, _ := scripted(t, func(_ int64, conn net.Conn) {
				defer close(closed)
				in := bufio.NewReader(conn)
				if c.size > inlineMax {
					_, _ = in.Peek(1)
					cancel()
				} else {
					got(in)
					_, _ = io.WriteString(conn, c.answer)
				}
				if c.answer == "" {
					cancel()
				}
				_, _ = io.Copy(io.Discard, in)
			})
			d := newTestDirect(t)
			r, _ := outgoing(ctx, address, strings.Repeat("x", c.size))
			answer, err := d.RoundTrip(r)
			if err == nil {
				piece := make([]byte, 2)
				if _, err := io.ReadFull(answer.Body, piece); err != nil {
					t.Error(err)
				}
				cancel()
				if _, err := answer.Body.Read(piece); err == nil {
					t.Error("there was more of the answer")
				}
				_ = answer.Body.Close()
			}
			if (err == nil) != (c.answer != "") {
				t.Errorf("the exchange ended with %v", err)
			}
			<-closed
			if d.pop(address) != nil {
				t.Error("the connection was kept")
			}
		})
	}
}

// lateConn is a connection on which the writes of long bodies return late, as where the goroutine that writes is not
// scheduled at once.
type lateConn struct {
	net.Conn
	by time.Duration
}

func (c lateConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if len(p) > inlineMax {
		time.Sleep(c.by)
	}
	return n, err
}

// The connection of a long body is kept where the goroutine that wrote it ends within a moment of the answer.
func TestConnectionOfALongBodyWaitsForItsWriter(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		by    time.Duration
		dials int
	}{{writtenMax / 2, 1}, {2 * writtenMax, 3}} {
		synctest.Test(t, func(t *testing.T) {
			d := newDirect(nil)
			dials := 0
			d.dial = func(context.Context, string, string) (net.Conn, error) {
				near, far := net.Pipe()
				dials++
				go func() {
					in := bufio.NewReader(far)
					for r, _ := got(in); r != nil; r, _ = got(in) {
						_, _ = io.WriteString(far, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
					}
				}()
				return lateConn{near, c.by}, nil
			}
			for range 3 {
				began := time.Now()
				if _, text, err := ask(t, d, "a", strings.Repeat("x", inlineMax+1)); err != nil || text != "ok" {
					t.Fatalf("got %q, %v", text, err)
				}
				if took := time.Since(began); took != min(c.by, writtenMax) {
					t.Errorf("the answer took %s of the clock, late by %s", took, c.by)
				}
			}
			if dials != c.dials {
				t.Errorf("late by %s: three exchanges took %d connections, want %d", c.by, dials, c.dials)
			}
			time.Sleep(2 * idleMax) // the connections are closed
		})
	}
}

// Connections that are not used are closed, each after its time.
func TestIdleConnectionsAreClosed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDirect(nil)
		var open atomic.Int64
		d.dial = func(context.Context, string, string) (net.Conn, error) {
			near, far := net.Pipe()
			open.Add(1)
			go func() {
				defer open.Add(-1)
				in := bufio.NewReader(far)
				for r, _ := got(in); r != nil; r, _ = got(in) {
					_, _ = io.WriteString(far, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
				}
			}()
			return near, nil
		}
		for _, address := range []string{"a", "b"} {
			if _, _, err := ask(t, d, address, "body"); err != nil {
				t.Fatal(err)
			}
			time.Sleep(idleMax / 2)
		}
		synctest.Wait()
		if n := open.Load(); n != 1 {
			t.Errorf("%d connections are open, want the younger one", n)
		}
		time.Sleep(idleMax)
		synctest.Wait()
		if n := open.Load(); n != 0 || d.sweep != nil {
			t.Errorf("%d connections are open", n)
		}
	})
}

// A reader that a transport has asked for and neither reads nor closes, as that of HTTP/2 does where a connection goes
// away before a second attempt, keeps no body. What is gone is not read.
func TestReaderThatIsNotReadKeepsNoBody(t *testing.T) {
	t.Parallel()
	held := heldOf("body")
	held.taken = 4
	held.budget.taken.Store(4)
	c := &call{held: held, body: [][]byte{held.bytes()}}
	read, left := c.reader(), c.reader()
	if text, err := io.ReadAll(read); err != nil || string(text) != "body" {
		t.Errorf("got %q, %v", text, err)
	}
	held.letGo()
	if n := held.budget.taken.Load(); n != 4 {
		t.Errorf("%d bytes are counted while a transport may read them", n)
	}
	_ = read.Close()
	_ = read.Close()
	if n := held.budget.taken.Load(); n != 0 || held.buf != nil {
		t.Errorf("%d bytes are counted behind the last use", n)
	}
	if text, err := io.ReadAll(left); err == nil {
		t.Errorf("read %q of a body that is gone", text)
	}
}

// Streams keep no bodies: once they have begun, the memory of their bodies is free, and so is its part of the budget.
func TestStreamsKeepNoBodies(t *testing.T) { //nolint:paralleltest // it measures the heap of the process
	const streams, length = 8, 8 << 20
	const event = "data: {}\n\n"
	end := make(chan struct{})
	p := startTestbed(t, func(_ *Config, m *ModelState) { m.Instances[0].Slots = streams },
		func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, event)
			_ = http.NewResponseController(w).Flush()
			<-end
		})
	defer close(end)
	body := `{"model":"m","stream":true,"prompt":"` + strings.Repeat("x", length) + `"}`
	before := heapInUse()
	for range streams {
		answer, err := http.DefaultClient.Do(p.request(t.Context(), http.MethodPost, chat, body))
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		if _, err := io.ReadFull(answer.Body, make([]byte, len(event))); err != nil {
			t.Fatal(err)
		}
	}
	workertest.WaitFor(t, func() bool { return p.gateway.bodies.taken.Load() == 0 })
	if grown := heapInUse() - before; grown > 20<<20 {
		t.Errorf("%d streams with bodies of %d MiB hold %d MiB", streams, length>>20, grown>>20)
	}
	runtime.KeepAlive(body)
}

// heapInUse returns the bytes of the heap that are reachable. Two collections empty each sync.Pool.
func heapInUse() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc) //nolint:gosec // far below 2^63
}

// A name may be of any address: the address that it has is refused where task nodes would refuse it.
func TestLinkLocalAddressesAreNotCalled(t *testing.T) {
	for name, transport := range map[string]http.RoundTripper{
		"direct": newTransport(), "the other": newTransport().other,
	} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "http://169.254.169.254/latest", nil)
		r.RequestURI = ""
		response, err := transport.RoundTrip(r)
		if err == nil {
			response.Body.Close()
		}
		if !errors.Is(err, worker.ErrForbiddenAddress) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
