package api

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
)

var (
	errEncoding = errors.New("the body's Content-Encoding must be gzip, or none")
	errEncoded  = errors.New("this address takes no Content-Encoding: send the body as it is")
	errBomb     = errors.New("the body expands too much")
	errBusy     = errors.New("too much is under way here; try again")
	errCut      = errors.New("the body ended early")
)

// A body that expands more than inflateRatio times is taken for a bomb once it is larger than inflateFree. Entries that
// differ in little more than a number shrink to a fortieth; 1032 is what the format can do.
const (
	inflateRatio = 200
	inflateFree  = 1 << 20 // bytes
)

// inflated returns the decompressed body of a request; the caller bounds how much of it is read.
func inflated(r *http.Request) (io.Reader, error) {
	switch strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Encoding"))) {
	case "", "identity":
		return r.Body, nil
	case "gzip", "x-gzip":
	default:
		return nil, errEncoding
	}
	packed := &counter{Reader: r.Body}
	z, err := gzip.NewReader(packed)
	if err != nil {
		return nil, fmt.Errorf("%w: the body is not gzip: %w", errMalformed, err)
	}
	return &inflating{z: z, packed: packed}, nil
}

type counter struct {
	io.Reader
	n int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n += int64(n)
	return n, err
}

// inflating stops at a body that expands more than bodies do.
type inflating struct {
	z      *gzip.Reader
	packed *counter
	n      int64
}

func (i *inflating) Read(p []byte) (int, error) {
	n, err := i.z.Read(p)
	i.n += int64(n)
	switch {
	case i.n > inflateFree && i.n > inflateRatio*i.packed.n:
		return 0, fmt.Errorf("%w: %d bytes of gzip have become %d already", errBomb, i.packed.n, i.n)
	case errors.Is(err, gzip.ErrChecksum), errors.Is(err, gzip.ErrHeader):
		return n, fmt.Errorf("%w: the body is not gzip: %w", errMalformed, err)
	}
	return n, err
}

// bodyMemory is how many bytes of bodies all requests together may hold. Without it, many clients that each send a
// large body slowly would take all memory, though none of them does anything forbidden.
type bodyMemory struct{ *sharedMemory }

func newBodyMemory(bytes int64) bodyMemory { return bodyMemory{newSharedMemory(bytes)} }

// readAll reads to the end, at most limit bytes, and takes them from the memory for the holder as they come. The caller
// gives back what was taken, error or not.
func (b bodyMemory) readAll(holder string, r io.Reader, limit int64) (body []byte, taken int64, err error) {
	for {
		if len(body) == cap(body) {
			size := max(16<<10, 2*taken)
			if err := b.take(holder, size-taken); err != nil {
				return nil, taken, err
			}
			taken = size
			body = append(make([]byte, 0, size), body...)
		}
		n, err := r.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		switch {
		case int64(len(body)) > limit:
			return nil, taken, &http.MaxBytesError{Limit: limit}
		case errors.Is(err, io.EOF):
			return body, taken, nil
		case err != nil:
			return nil, taken, err
		}
	}
}

// endedEarly says in our words why a body could not be read to its end, or an answer not be written.
func endedEarly(err error) error {
	var tooLarge *http.MaxBytesError
	switch {
	case err == nil, known(err), errors.As(err, &tooLarge):
		return err
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errSlow
	}
	return fmt.Errorf("%w: %w", errCut, err)
}

// idleReader reads a body without a bound on its whole time, as long as bytes come at least every idle.
type idleReader struct {
	body io.Reader
	rc   *http.ResponseController
	idle time.Duration

	// Over HTTP/2 a deadline that passes ends the body, whether it is being read or not.
	multiplexed bool

	mu    sync.Mutex
	ended error // by the body or by stop
}

func (p *idleReader) Read(into []byte) (int, error) {
	if err := p.extend(); err != nil {
		return 0, err
	}
	n, err := p.body.Read(into)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.ended = err
	} else if p.multiplexed && p.ended == nil {
		p.rc.SetReadDeadline(time.Time{}) //nolint:errcheck // as in extend
	}
	return n, err
}

func (p *idleReader) extend() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended == nil {
		p.rc.SetReadDeadline(time.Now().Add(p.idle)) //nolint:errcheck // where it cannot be set, the server's own holds
	}
	return p.ended
}

// stop makes the read that is under way return, and every later one. At the end of the body it leaves the connection
// alone: the next request comes on it.
func (p *idleReader) stop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended != nil {
		return
	}
	p.ended = errCut
	p.rc.SetReadDeadline(time.Now()) //nolint:errcheck // as above
}
