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
	each  int64 // of them, the requests of one holder
	taken atomic.Int64
}

// byteBudget bounds the bodies of all requests that wait in a gateway.
type byteBudget struct {
	most int64
	each int64 // of them, the requests of one holder
	used atomic.Int64
}

// heldBytes are the bytes that the requests of one holder, which is the name of a token, take of the budgets. They are
// half of a budget at most, so that one client leaves room for the others.
type heldBytes struct{ bodies, waiting atomic.Int64 }

// eachOf is the share of one holder in a budget: half of it, and always one body.
func eachOf(most, body int64) int64 { return max(most/2, body) }

func (b *byteBudget) add(by *heldBytes, n int) {
	if b != nil {
		b.used.Add(int64(n))
		if by != nil {
			by.waiting.Add(int64(n))
		}
	}
}

// allows says whether n more bytes are within the share of their holder; nil: there is none.
func (b *byteBudget) allows(by *heldBytes, n int) bool {
	return b == nil || by == nil || by.waiting.Load()+int64(n) <= b.each
}

// short is how many bytes are missing for n more; 0 or less: none.
func (b *byteBudget) short(n int) int64 {
	if b == nil {
		return 0
	}
	return b.used.Load() + int64(n) - b.most
}

func (b *byteBudget) fits(n int) bool {
	return b.short(n) <= 0
}

// heldBody is the body of a request in memory, and the part of the budget that it takes. It has one user, the request,
// and one for each reader that has begun to send it.
type heldBody struct {
	from   io.Reader
	budget *bodyBudget
	by     *heldBytes // nil: no holder is known
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

// errShareFull does where the holder of the requests has its share.
var errShareFull = &Rejection{
	Reason: DropOverloaded, RetryAfter: time.Second,
	Detail: "the bodies of the token's requests have as many bytes as those of one token may",
}

// Read implements io.Reader for the arriving body. Bytes are counted as they come: a client that
// announces many and sends few takes little.
func (h *heldBody) Read(p []byte) (int, error) {
	n, err := h.from.Read(p)
	h.taken += int64(n)
	full := h.budget.taken.Add(int64(n)) > h.budget.most
	switch {
	case h.by != nil && h.by.bodies.Add(int64(n)) > h.budget.each:
		return n, errShareFull
	case full:
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
	if h.by != nil {
		h.by.bodies.Add(-h.taken)
	}
}

func tooLarge(most int64) error {
	return bad(http.StatusRequestEntityTooLarge, "request_too_large", "", "the body is larger than %d bytes", most)
}

// readBody reads the whole body of a request of a holder, of up to most bytes. letGo must be called on what it returns,
// unless that is nil.
func (g *Gateway) readBody(r *http.Request, by *heldBytes, most int64) (*heldBody, error) {
	switch {
	case r.ContentLength > most:
		return nil, tooLarge(most)
	case r.ContentLength > g.bodies.most-g.bodies.taken.Load():
		return nil, errBodiesFull
	case by != nil && r.ContentLength > g.bodies.each-by.bodies.Load():
		return nil, errShareFull
	}
	h := &heldBody{from: r.Body, budget: &g.bodies, by: by}
	h.users.Store(1)
	h.buf = bodyBuffers.Get().(*bytes.Buffer) //nolint:errcheck,forcetypeassert // nothing else is in it
	h.buf.Reset()
	if r.ContentLength > 0 {
		h.buf.Grow(int(min(r.ContentLength, bodyTrusted)) + bytes.MinRead)
	}
	n, err := h.buf.ReadFrom(io.LimitReader(h, most+1))
	switch {
	case errors.Is(err, errBodiesFull), errors.Is(err, errShareFull):
	case err != nil:
		err = bad(http.StatusBadRequest, "unreadable_body", "", "the body broke off or took longer than %s", uploadMax)
	case n > most:
		err = tooLarge(most)
	}
	h.from = nil
	return h, err
}
