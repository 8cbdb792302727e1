package gateway

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// Clients that send or read slowly, on a clock of the tests' own.

// pipes is a listener whose connections are pipes, for tests with a clock of their own.
type pipes struct {
	conns chan net.Conn
	done  chan struct{}
}

func listenPipes() *pipes { return &pipes{conns: make(chan net.Conn), done: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { close(p.done); return nil }
func (p *pipes) Addr() net.Addr { return &net.TCPAddr{} }

func (p *pipes) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	near, far := net.Pipe()
	select {
	case p.conns <- far:
		return near, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// slowPlant is a gateway with one slot before a worker, all on pipes.
func slowPlant(t *testing.T, work http.HandlerFunc) (clients *pipes, g *Gateway, end func()) {
	t.Helper()
	clients, workers := listenPipes(), listenPipes()
	g = New(Config{Open: true})
	transport := &http.Transport{DialContext: workers.dial, DisableKeepAlives: true}
	g.transport = transport
	g.SetModels([]ModelState{{
		Name: "m", Protocol: worker.ProtocolOpenAI, AbortStops: new(true), RunMax: time.Minute, Policy: DefaultPolicy(),
		Instances: []InstanceState{{ID: 1, Address: "http://worker", Slots: 1, Usable: true}},
	}})
	g.Fixed()
	front, back := &http.Server{Handler: g}, &http.Server{Handler: work} //nolint:gosec // on pipes
	front.Protocols = new(http.Protocols)
	front.Protocols.SetHTTP1(true)
	front.Protocols.SetUnencryptedHTTP2(true)
	var group sync.WaitGroup
	group.Go(func() { _ = front.Serve(clients) })
	group.Go(func() { _ = back.Serve(workers) })
	return clients, g, func() {
		_ = front.Close()
		_ = back.Close()
		group.Wait()
	}
}

// A client that sends its body at one byte a second has a minute for it, whatever its length, and holds no slot
// meanwhile. It gets its answer then.
func TestClientThatSendsOneByteASecondHoldsNoSlot(t *testing.T) {
	t.Parallel()
	for _, length := range []int{60_000, 100_000} {
		sendSlowly(t, chat, true, length, "unreadable_body", uploadMax)
	}
}

// A request that is refused before its body is read gets its answer at once, on every route: the server does not wait
// for the rest of the body.
func TestRefusalDoesNotWaitForTheBody(t *testing.T) {
	t.Parallel()
	for _, path := range []string{chat, "/mounted"} {
		sendSlowly(t, path, false, 100_000, "invalid_api_key", 0)
	}
	sendSlowly(t, "/mounted", true, 100_000, "unread", 0)
	sendSlowly(t, "/nothing", true, 100_000, "unknown_url", 0)
	sendSlowly(t, chat, true, 64<<20, "request_too_large", 0)
}

// mountUnread mounts a route that does not read the body of its requests.
func mountUnread(g *Gateway) {
	g.Mount("POST /mounted", func(w http.ResponseWriter, r *http.Request) {
		_, leave, err := g.Admit(r)
		defer leave()
		if err == nil {
			err = BadRequest(http.StatusConflict, "unread", "", "the body was not read")
		}
		AnswerError(w, err)
	})
}

// sendSlowly sends a body at one byte a second, and checks that the request is refused with a code after some time.
func sendSlowly(t *testing.T, path string, open bool, length int, code string, after time.Duration) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		clients, g, end := slowPlant(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "{}") })
		defer end()
		g.config.Open = open
		mountUnread(g)
		conn, err := clients.dial(t.Context(), "", "")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		began := time.Now()
		answer := make(chan string, 1)
		go func() {
			text, _ := io.ReadAll(conn)
			answer <- string(text)
		}()
		_, _ = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n", path, length)
		for range 300 {
			if _, err := conn.Write([]byte(" ")); err != nil {
				break
			}
			if s := g.States()[0]; s.InFlight != 0 || s.Waiting["default"] != 0 {
				t.Fatalf("%s: a slot is held: %+v", path, s)
			}
			time.Sleep(time.Second)
		}
		_ = conn.SetReadDeadline(time.Now()) // no answer has come
		if text := <-answer; !strings.HasPrefix(text, "HTTP/1.1 4") || !strings.Contains(text, code) {
			t.Errorf("%s: got %q, want %s", path, text, code)
		}
		if took := time.Since(began); took < after || took > after+5*time.Second {
			t.Errorf("%s, %d bytes: %s came after %s", path, length, code, took)
		}
	})
}

// A handler that leaves a body unread may answer for as long as it likes, and its connection serves the next request:
// the bound is on the body alone.
func TestUnreadBodyThatHasArrivedBoundsNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		clients, g, end := slowPlant(t, nil)
		defer end()
		g.Mount("POST /long", func(w http.ResponseWriter, r *http.Request) {
			_ = http.NewResponseController(w).Flush()
			select {
			case <-time.After(2 * uploadMax):
				_, _ = io.WriteString(w, "whole")
			case <-r.Context().Done():
				_, _ = io.WriteString(w, "cut")
			}
		})
		transport := &http.Transport{}
		defer transport.CloseIdleConnections()
		dials := 0
		transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
			dials++
			return clients.dial(ctx, network, address)
		}
		for range 2 {
			request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://g/long", strings.NewReader("body"))
			if err != nil {
				t.Fatal(err)
			}
			answer, err := (&http.Client{Transport: transport}).Do(request)
			if err != nil {
				t.Fatal(err)
			}
			if text, err := io.ReadAll(answer.Body); string(text) != "whole" || err != nil {
				t.Errorf("got %q, %v", text, err)
			}
			answer.Body.Close()
		}
		if dials != 1 {
			t.Errorf("%d connections for two requests", dials)
		}
	})
}

// A client that reads one byte a second keeps its slot while each write ends within client_stall, and loses it to the
// next request when one does not.
func TestClientThatReadsOneByteASecondIsCutWhenAWriteStalls(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		event int // bytes
		cut   bool
	}{{20, false}, {2000, true}} {
		synctest.Test(t, func(t *testing.T) {
			clients, g, end := slowPlant(t, func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				w.Header().Set("Content-Type", "text/event-stream")
				for range 5 {
					_, _ = io.WriteString(w, "data: "+strings.Repeat("x", c.event-8)+"\n\n")
					_ = http.NewResponseController(w).Flush()
				}
			})
			defer end()
			conn, err := clients.dial(t.Context(), "", "")
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			body := `{"model":"m","stream":true,"stream_options":{}}`
			_, _ = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n%s", chat, len(body), body)
			var got strings.Builder
			one := make([]byte, 1)
			for !strings.HasSuffix(got.String(), "0\r\n\r\n") {
				_, err := conn.Read(one)
				if err != nil {
					break
				}
				got.Write(one)
				if strings.Contains(got.String(), "\r\n\r\n") { // the head is read at once
					time.Sleep(time.Second)
				}
			}
			if whole := strings.HasSuffix(got.String(), "0\r\n\r\n"); whole == c.cut {
				t.Errorf("events of %d bytes: whole is %v, want %v", c.event, whole, !c.cut)
			}
			synctest.Wait()
			if s := g.States()[0]; s.InFlight != 0 || s.Idle != 1 {
				t.Errorf("events of %d bytes: the slot is not idle: %+v", c.event, s)
			}
		})
	}
}

// Over HTTP/2 a deadline of writes that passes between two of them ends the stream: client_stall bounds writes alone, and a
// worker may be silent for longer.
func TestSilenceOfAWorkerIsNoStallOfAClientOverHTTP2(t *testing.T) {
	t.Parallel()
	const pause = 2 * time.Minute
	for _, reads := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			const first, last = "data: 1\n\n", "data: [DONE]\n\n"
			clients, g, end := slowPlant(t, func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				w.Header().Set("Content-Type", "text/event-stream")
				for _, piece := range []string{first, last} {
					_, _ = io.WriteString(w, piece)
					_ = http.NewResponseController(w).Flush()
					if !reads {
						_, _ = w.Write(make([]byte, 32<<20)) // more than the client's window
					}
					select {
					case <-time.After(pause):
					case <-r.Context().Done():
					}
				}
			})
			defer end()
			transport := &http.Transport{DialContext: clients.dial, Protocols: new(http.Protocols)}
			transport.Protocols.SetUnencryptedHTTP2(true)
			defer transport.CloseIdleConnections()
			request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://g"+chat, strings.NewReader(`{"model":"m","stream":true}`))
			if err != nil {
				t.Fatal(err)
			}
			answer, err := (&http.Client{Transport: transport}).Do(request)
			if err != nil {
				t.Fatal(err)
			}
			defer answer.Body.Close()
			if !reads {
				time.Sleep(pause)
				if s := g.States()[0]; s.InFlight != 0 || s.Idle != 1 {
					t.Errorf("a client that does not read keeps its slot: %+v", s)
				}
				return
			}
			if text, err := io.ReadAll(answer.Body); string(text) != first+last || err != nil {
				t.Errorf("got %q: %v", text, err)
			}
		})
	}
}

// The silence of a worker is that between two reads from it: a client that takes a while for what came makes none.
func TestAClientThatPausesIsNoSilenceOfItsWorker(t *testing.T) {
	t.Parallel()
	const silence, pause = 5 * time.Second, 12 * time.Second
	synctest.Test(t, func(t *testing.T) {
		clients, g, end := slowPlant(t, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", "text/event-stream")
			for range 3 {
				_, _ = io.WriteString(w, "data: 1\n\n")
				_ = http.NewResponseController(w).Flush()
			}
		})
		defer end()
		m := *g.models.all()[0].model
		m.Policy.SilenceMax = worker.Seconds(silence)
		g.SetModels([]ModelState{m})
		conn, err := clients.dial(t.Context(), "", "")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		body := `{"model":"m","stream":true,"stream_options":{}}`
		_, _ = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n%s", chat, len(body), body)
		_, _ = conn.Read(make([]byte, 1))
		time.Sleep(pause)
		_ = conn.SetReadDeadline(time.Now().Add(pause))
		rest := make([]byte, 4<<10)
		n := 0
		for !strings.HasSuffix(string(rest[:n]), "0\r\n\r\n") {
			more, err := conn.Read(rest[n:])
			if n += more; err != nil {
				break
			}
		}
		if text := string(rest[:n]); strings.Contains(text, "silent") || strings.Count(text, "data: 1") != 3 {
			t.Errorf("the client got %q", text)
		}
	})
}
