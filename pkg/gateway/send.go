package gateway

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
)

// partsReader is a body on its way to a worker: parts that are sent one behind the other, without copying them
// together. A transport may close it while it reads: nothing of the parts is read behind that. It uses the body from
// its first read to Close: net/http does not close all that it has from GetBody and has not read.
type partsReader struct {
	held  *heldBody    // that the parts are of; nil: of none
	begun *atomic.Bool // set when it is read; may be nil

	mu     sync.Mutex
	parts  [][]byte
	at     int
	using  bool // it is a user of held
	closed bool
}

// use begins the use of the body, unless it has begun. It is false where the body is gone.
func (r *partsReader) use() bool {
	if !r.using && r.held != nil {
		r.using = r.held.use()
		return r.using
	}
	return true
}

// Read implements io.Reader.
func (r *partsReader) Read(p []byte) (n int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || !r.use() {
		return 0, http.ErrBodyReadAfterClose
	}
	r.reached()
	for len(r.parts) > 0 {
		m := copy(p[n:], r.parts[0][r.at:])
		n, r.at = n+m, r.at+m
		if r.at == len(r.parts[0]) {
			r.parts, r.at = r.parts[1:], 0
		}
		if n == len(p) {
			return n, nil
		}
	}
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

// take returns all parts, for a transport that writes them itself. They are valid until Close. The request must not
// have ended its use.
func (r *partsReader) take() [][]byte {
	r.use()
	r.reached()
	return r.parts
}

// reached notes that the worker may have got something of the body.
func (r *partsReader) reached() {
	if r.begun != nil {
		r.begun.Store(true)
	}
}

// unreached takes that back: no byte was written.
func (r *partsReader) unreached() {
	if r.begun != nil {
		r.begun.Store(false)
	}
}

// Close implements io.Closer.
func (r *partsReader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.using {
		r.held.drop()
	}
	r.closed, r.using, r.parts, r.held = true, false, nil, nil
	return nil
}

// send writes the request: a short one at once, a long one in a goroutine of its own, since the worker may answer
// before it has read all of it.
func (x *roundTrip) send(head *bytes.Buffer, body *partsReader) error {
	parts := body.take()
	if size(parts) <= inlineMax {
		length := head.Len()
		for _, p := range parts {
			head.Write(p)
		}
		n, err := x.link.Write(head.Bytes())
		if err == nil {
			_ = body.Close() // never fails
			heads.Put(head)
			return nil
		}
		head.Truncate(length) // it may be sent again
		x.unsent = n == 0
		return err
	}
	n, err := x.link.Write(head.Bytes())
	if err != nil {
		x.unsent = n == 0
		return err
	}
	heads.Put(head)
	x.sent = make(chan bool, 1)
	go func() {
		rest := net.Buffers(parts)
		_, err := rest.WriteTo(x.link.Conn)
		_ = body.Close() // never fails
		x.sent <- err == nil
	}()
	return nil
}
