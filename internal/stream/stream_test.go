package stream

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"
)

func TestAnEventHasOneFieldForEachLineOfItsData(t *testing.T) {
	w := httptest.NewRecorder()
	e := NewEvents(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil), time.Second)
	for _, err := range []error{e.Event("7", "part", "a\nb\r\nc\rid: 8\n"), e.Event("", "alive", ""), e.Comment("here")} {
		if err != nil {
			t.Fatal(err)
		}
	}
	const want = "id: 7\nevent: part\ndata: a\ndata: b\ndata: c\ndata: id: 8\ndata: \n\n" +
		"event: alive\ndata: \n\n: here\n\n"
	if got := w.Body.String(); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// Over HTTP/2 a deadline of writes that passes between two of them ends the stream.
func TestPausesEndNoAnswerOverHTTP2(t *testing.T) {
	const most = 10 * time.Second
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		conns := make(chan net.Conn, 1)
		conns <- far
		server := &http.Server{
			ReadHeaderTimeout: most, WriteTimeout: most, Protocols: new(http.Protocols),
			Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				e := NewEvents(w, r, most)
				for _, text := range []string{"1", "2"} {
					if err := e.Comment(text); err != nil {
						t.Error(err)
					}
					time.Sleep(2 * most)
				}
			}),
		}
		server.Protocols.SetUnencryptedHTTP2(true)
		go func() { _ = server.Serve(oneConn{conns}) }()
		defer server.Close()
		defer close(conns)
		transport := &http.Transport{Protocols: new(http.Protocols)}
		transport.DialContext = func(context.Context, string, string) (net.Conn, error) { return near, nil }
		transport.Protocols.SetUnencryptedHTTP2(true)
		defer transport.CloseIdleConnections()
		request, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://server/", nil)
		answer, err := (&http.Client{Transport: transport}).Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		if text, err := io.ReadAll(answer.Body); string(text) != ": 1\n\n: 2\n\n" || err != nil {
			t.Errorf("%q (%v)", text, err)
		}
	})
}

// oneConn is a listener of one connection.
type oneConn struct{ conns chan net.Conn }

func (l oneConn) Accept() (net.Conn, error) {
	if c, open := <-l.conns; open {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (oneConn) Close() error   { return nil }
func (oneConn) Addr() net.Addr { return &net.TCPAddr{} }
