package worker

import (
	"bytes"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
)

// readCounter is a listener that counts the reads that brought more than one byte of a request. (While a handler runs
// its server reads one byte ahead, to learn that the client has gone.)
type readCounter struct {
	net.Listener
	reads atomic.Int64
}

type countedConn struct {
	net.Conn
	counter *readCounter
}

func (l *readCounter) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	return countedConn{conn, l}, err
}

func (c countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 1 {
		c.counter.reads.Add(1)
	}
	return n, err
}

// A worker that waits for the second packet of a call starts later by a round through its event loop.
func TestACallWithAShortBodyIsOneWrite(t *testing.T) {
	counter := &readCounter{}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body bytes.Buffer
		if _, err := body.ReadFrom(r.Body); err != nil {
			t.Error(err)
		}
		_, _ = w.Write([]byte(`{"status":"success","result":` + body.String() + `}`))
	}))
	counter.Listener = server.Listener
	server.Listener = counter
	server.Start()
	defer server.Close()
	a, err := New(Model{Name: "m", Protocol: ProtocolGeneric}, Instance{Endpoint: server.URL, Slots: 1}, Config{})
	if err != nil {
		t.Fatal(err)
	}
	payload := []byte(`{"a":"` + strings.Repeat("x", shortBody-100) + `"}`)
	for i := range 20 {
		o := a.Submit(t.Context(), Call{RunRef: RunRef{Entry: "entry", Token: int64(i), Attempt: 1}, Payload: payload})
		if o.Kind != Done {
			t.Fatalf("call ended as %s: %s", o.Kind, o.Reason)
		}
	}
	if got := counter.reads.Load(); got > 20 {
		t.Errorf("20 calls took %d reads of the worker, want one each", got)
	}
}
