package gateway

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/idna"

	"github.com/penstock/penstock/pkg/worker"
)

// direct exchanges requests with workers over HTTP/1.1 without TLS, in the goroutine of the request and with the
// parser of net/http. An http.Transport keeps two more goroutines and a second buffer for each connection: as much
// memory as the rest of a stream takes, and two switches of goroutines for each request. It has all other exchanges.
type direct struct {
	other   http.RoundTripper // for https, and bodies of other types than partsReader
	dial    func(ctx context.Context, network, address string) (net.Conn, error)
	idleMax time.Duration

	mu    sync.Mutex
	idle  map[string][]*link // by address, the one that was used last at the end
	sweep *time.Timer        // closes those that were not used for idleMax; nil: there are none
}

// Bounds of connections to workers.
const (
	// idleMax is how long one is kept without a call. Servers on uvicorn close theirs after 5 s: a call that is sent in
	// that moment fails, and may not be sent again.
	idleMax    = 4 * time.Second
	idleLinks  = 1024 // to one worker
	dialMax    = 5 * time.Second
	keepAlive  = 15 * time.Second
	headMax    = 1 << 20 // bytes of the head of an answer
	interimMax = 5       // answers 1xx before it
	inlineMax  = 8 << 10 // bytes of a body that is sent in one write with its head
	// writtenMax is how long the end of an answer waits for the goroutine that writes its request, so that the
	// connection can be kept. It is that of http.Transport.
	writtenMax = 50 * time.Millisecond
)

// newDialer connects to workers, at the addresses that task nodes would call as well.
func newDialer() *net.Dialer {
	return &net.Dialer{Timeout: dialMax, KeepAlive: keepAlive, Control: worker.CheckDial}
}

func newDirect(other http.RoundTripper) *direct {
	return &direct{other: other, dial: newDialer().DialContext, idleMax: idleMax, idle: map[string][]*link{}}
}

// RoundTrip implements http.RoundTripper. It closes the body of the request once nothing of it is read any more, which
// may be after it has returned. A request is sent again only where nothing of it was written to a connection that had
// been used before.
func (d *direct) RoundTrip(r *http.Request) (*http.Response, error) {
	body, is := r.Body.(*partsReader)
	if r.URL.Scheme != "http" || !is {
		return d.other.RoundTrip(r)
	}
	head := heads.Get().(*bytes.Buffer) //nolint:errcheck,forcetypeassert // nothing else is in it
	head.Reset()
	if err := writeHead(head, r); err != nil {
		_ = body.Close() // never fails
		return nil, err
	}
	address := addressOf(r.URL)
	for {
		l, err := d.link(r.Context(), address)
		if err != nil {
			_ = body.Close()
			return nil, err
		}
		x := &roundTrip{link: l, ways: d, keep: true}
		answer, err := x.begin(r.Context(), head, body)
		if err == nil {
			return answer, nil
		}
		if x.unsent {
			body.unreached()
		}
		if !x.unsent || !l.used || r.Context().Err() != nil {
			_ = body.Close()
			return nil, err
		}
	}
}

// addressOf returns what is dialled for an http address: the name in ASCII, as resolvers know it, and the port.
func addressOf(u *url.URL) string {
	host, port := u.Hostname(), cmp.Or(u.Port(), "80")
	if strings.ContainsFunc(host, func(c rune) bool { return c >= utf8.RuneSelf }) {
		if ascii, err := idna.Lookup.ToASCII(host); err == nil {
			host = ascii
		}
	}
	return net.JoinHostPort(host, port)
}

// heads are buffers for what is sent in one write: the head of a request, as long as the headers of its client and its
// model, and a body of up to inlineMax.
var heads = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// hopHeaders are written by writeHead itself, whatever a model's headers say.
var hopHeaders = map[string]bool{"Host": true, "Content-Length": true, "Transfer-Encoding": true, "Trailer": true}

// writeHead writes the head of a request. Names of headers must be valid.
func writeHead(b *bytes.Buffer, r *http.Request) error {
	uri := r.URL.RequestURI()
	if strings.ContainsFunc(uri, func(c rune) bool { return c < ' ' || c == 0x7f }) {
		return errors.New("the address of the worker has a control character")
	}
	host, err := httpguts.PunycodeHostPort(r.Host)
	if err != nil || !httpguts.ValidHostHeader(host) {
		return fmt.Errorf("%q is not the name of a host", r.Host)
	}
	b.WriteString(r.Method)
	b.WriteByte(' ')
	b.WriteString(uri)
	b.WriteString(" HTTP/1.1\r\nHost: ")
	b.WriteString(withoutZone(host))
	fmt.Fprintf(b, "\r\nContent-Length: %d\r\n", r.ContentLength)
	_ = r.Header.WriteSubset(b, hopHeaders) // a buffer takes all
	b.WriteString("\r\n")
	return nil
}

// withoutZone removes the zone of an IPv6 address: it is a name of this machine (RFC 6874, section 4).
func withoutZone(host string) string {
	bracket := strings.LastIndexByte(host, ']')
	if bracket < 0 {
		return host
	}
	address, _, _ := strings.Cut(host[:bracket], "%")
	return address + host[bracket:]
}

// link is a connection to a worker.
type link struct {
	net.Conn
	address string
	probe   *probe // of what has arrived while it was idle; nil: it cannot be asked
	used    bool   // it has had an answer
	since   time.Time
	in      *bufio.Reader // during an exchange
	limit   int           // of the bytes that Read may still take; negative: none
}

var errHeadTooLong = fmt.Errorf("the head of the answer has more than %d bytes", headMax)

// Read implements io.Reader within the limit.
func (l *link) Read(p []byte) (int, error) {
	if l.limit < 0 {
		return l.Conn.Read(p)
	}
	if l.limit == 0 {
		return 0, errHeadTooLong
	}
	n, err := l.Conn.Read(p[:min(len(p), l.limit)])
	l.limit -= n
	return n, err
}

// link returns an idle connection, else a new one.
func (d *direct) link(ctx context.Context, address string) (*link, error) {
	for {
		l := d.pop(address)
		if l == nil {
			break
		}
		if time.Since(l.since) < d.idleMax && l.probe.quiet() {
			return l, nil
		}
		_ = l.Close()
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var conn net.Conn
	var err error
	aside(func() { conn, err = d.dial(ctx, "tcp", address) })
	if err != nil {
		return nil, err
	}
	return &link{Conn: conn, address: address, probe: newProbe(conn)}, nil
}

func (d *direct) pop(address string) *link {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := d.idle[address]
	if len(list) == 0 {
		return nil
	}
	last := len(list) - 1
	l := list[last]
	list[last] = nil
	d.idle[address] = list[:last]
	return l
}

// push keeps a connection for the next exchange.
func (d *direct) push(l *link) {
	l.used, l.since = true, time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	list := d.idle[l.address]
	if len(list) >= idleLinks {
		_ = l.Close()
		return
	}
	d.idle[l.address] = append(list, l)
	if d.sweep == nil {
		d.sweep = time.AfterFunc(d.idleMax, d.closeIdle)
	}
}

// closeIdle closes connections that were not used for idleMax, and comes again while there are others.
func (d *direct) closeIdle() {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	var next time.Duration
	for address, list := range d.idle {
		over := 0
		for over < len(list) && now.Sub(list[over].since) >= d.idleMax {
			_ = list[over].Close()
			over++
		}
		if over == len(list) {
			delete(d.idle, address)
			continue
		}
		d.idle[address] = append(list[:0], list[over:]...)
		clear(list[len(list)-over:])
		if left := d.idleMax - now.Sub(list[0].since); next == 0 || left < next {
			next = left
		}
	}
	d.sweep = nil
	if next > 0 {
		d.sweep = time.AfterFunc(next, d.closeIdle)
	}
}

// roundTrip is one request and its answer. It is the body of the answer.
type roundTrip struct {
	link   *link
	ways   *direct
	stop   func() bool // ends the watch over the context; false: the connection was closed by it
	body   io.Reader   // of the answer
	sent   chan bool   // says once whether the whole request was written; nil: it was before the answer
	keep   bool        // the connection may have another exchange
	unsent bool        // nothing of the request was written
	ended  error       // what Read returns from now on; nil: the answer has not ended
}

var readers = sync.Pool{New: func() any { return bufio.NewReader(nil) }}

// begin sends a request and reads the head of its answer.
func (x *roundTrip) begin(ctx context.Context, head *bytes.Buffer, body *partsReader) (*http.Response, error) {
	l := x.link
	x.stop = context.AfterFunc(ctx, func() { _ = l.Close() }) // ends reads and writes
	l.in = readers.Get().(*bufio.Reader)                      //nolint:errcheck,forcetypeassert // nothing else is in it
	l.in.Reset(l)
	if err := x.send(head, body); err != nil {
		x.end(err)
		return nil, err
	}
	answer, err := x.head()
	if err != nil {
		x.end(err)
		if x.sent != nil {
			<-x.sent // the connection is closed: the goroutine that writes has ended, or ends now
		}
		return nil, err
	}
	x.keep = !answer.Close
	x.body, answer.Body = answer.Body, x
	if answer.ContentLength == 0 {
		x.end(io.EOF)
	}
	return answer, nil
}

// head reads the head of the answer, behind those that only say that it will come.
func (x *roundTrip) head() (*http.Response, error) {
	for range interimMax + 1 {
		x.link.limit = headMax
		answer, err := http.ReadResponse(x.link.in, nil)
		x.link.limit = -1
		switch {
		case err != nil:
			return nil, err
		case answer.StatusCode == http.StatusSwitchingProtocols:
			return nil, errors.New("the worker changes the protocol, which it was not asked for")
		case answer.StatusCode >= http.StatusOK:
			return answer, nil
		}
	}
	return nil, errors.New("the worker sends answers 1xx and no other")
}

// Read implements io.Reader.
func (x *roundTrip) Read(p []byte) (int, error) {
	if x.ended != nil {
		return 0, x.ended
	}
	n, err := x.body.Read(p)
	if err != nil {
		x.end(err)
	}
	return n, err
}

// Close implements io.Closer. A connection whose answer was not read to its end is closed, which
// stops the call.
func (x *roundTrip) Close() error {
	x.end(http.ErrBodyReadAfterClose)
	return nil
}

// end gives the connection back where the answer was read to its end, and closes it else.
func (x *roundTrip) end(err error) {
	if x.ended != nil {
		return
	}
	x.ended = err
	l := x.link
	kept := x.stop() && errors.Is(err, io.EOF) && x.keep && l.in.Buffered() == 0 && x.written() // which may wait
	l.in.Reset(nil)
	readers.Put(l.in)
	l.in = nil
	if !kept {
		_ = l.Close() // nothing is to be sent
		return
	}
	x.ways.push(l)
}

// written says whether the whole request was sent. A worker may have answered before the goroutine that wrote the last
// bytes of it is scheduled again.
func (x *roundTrip) written() bool {
	if x.sent == nil {
		return true
	}
	select {
	case whole := <-x.sent:
		return whole
	case <-time.After(writtenMax):
		return false
	}
}
