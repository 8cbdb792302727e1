package gateway

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// bodyKept is the largest buffer that is used again.
const bodyKept = 1 << 20

// bodyTrusted is how much memory a body gets for its Content-Length alone, in bytes; beyond, it grows with
// what arrives.
const bodyTrusted = 256 << 10

// bodyBudget bounds the bytes of the bodies of all requests, from their first byte until their last use has ended.
type bodyBudget struct {
	most  int64
	taken atomic.Int64
}

// heldBody is the body of a request in memory, and the part of the budget that it takes. It has one user, the request,
// and one for each reader that has begun to send it.
type heldBody struct {
	from   io.Reader
	budget *bodyBudget
	taken  int64
	buf    *bytes.Buffer // nil behind the last use
	users  atomic.Int32
	over   bool // the request does not use it any more
}

var bodyBuffers = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// errBodiesFull ends the reading of a body that has no room beside those of other requests.
var errBodiesFull = &Rejection{
	Reason: DropOverloaded, RetryAfter: time.Second,
	Detail: "the bodies of all requests have as many bytes as they may",
}

// Read implements io.Reader for the arriving body. Bytes are counted as they come: a client that
// announces many and sends few takes little.
func (h *heldBody) Read(p []byte) (int, error) {
	n, err := h.from.Read(p)
	h.taken += int64(n)
	if h.budget.taken.Add(int64(n)) > h.budget.most {
		return n, errBodiesFull
	}
	return n, err
}

// bytes is the body. It is valid until the request and all transports have ended its use.
func (h *heldBody) bytes() []byte { return h.buf.Bytes() }

// letGo ends the use by the request, which calls it from one goroutine; a second call changes nothing.
func (h *heldBody) letGo() {
	if !h.over {
		h.over = true
		h.drop()
	}
}

// use begins a use beside others. It is false where the last has ended.
func (h *heldBody) use() bool {
	for {
		n := h.users.Load()
		if n == 0 {
			return false
		}
		if h.users.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// drop ends one use. The last gives the memory and its part of the budget back.
func (h *heldBody) drop() {
	if h.users.Add(-1) > 0 {
		return
	}
	if h.buf.Cap() <= bodyKept {
		bodyBuffers.Put(h.buf)
	}
	h.buf = nil
	h.budget.taken.Add(-h.taken)
}

func tooLarge(most int64) error {
	return bad(http.StatusRequestEntityTooLarge, "request_too_large", "", "the body is larger than %d bytes", most)
}

// readBody reads the whole body, of up to most bytes. letGo must be called on what it returns, unless that is nil.
func (g *Gateway) readBody(r *http.Request, most int64) (*heldBody, error) {
	switch {
	case r.ContentLength > most:
		return nil, tooLarge(most)
	case r.ContentLength > g.bodies.most-g.bodies.taken.Load():
		return nil, errBodiesFull
	}
	h := &heldBody{from: r.Body, budget: &g.bodies}
	h.users.Store(1)
	h.buf = bodyBuffers.Get().(*bytes.Buffer) //nolint:errcheck,forcetypeassert // nothing else is in it
	h.buf.Reset()
	if r.ContentLength > 0 {
		h.buf.Grow(int(min(r.ContentLength, bodyTrusted)) + bytes.MinRead)
	}
	n, err := h.buf.ReadFrom(io.LimitReader(h, most+1))
	switch {
	case errors.Is(err, errBodiesFull):
	case err != nil:
		err = bad(http.StatusBadRequest, "unreadable_body", "", "the body broke off or took longer than %s", uploadMax)
	case n > most:
		err = tooLarge(most)
	}
	h.from = nil
	return h, err
}

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
	r.begin(true)
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
	r.begin(true)
	return r.parts
}

// begin notes whether the worker may have got something of the body.
func (r *partsReader) begin(may bool) {
	if r.begun != nil {
		r.begun.Store(may)
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
