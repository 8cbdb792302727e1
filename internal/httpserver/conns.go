package httpserver

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"
)

// bounded lets in so many connections at once, and so many from one address. One more is told 503 and closed,
// which a client or a load balancer can act upon; one that waits to be accepted could not be told from a
// server that hangs.
type bounded struct {
	net.Listener
	places          chan struct{}
	conns, requests tally // a connection of HTTP/2 carries many requests: there may be as many as connections

	// refusals bounds those that are being told; beyond it connections are closed without a word.
	refusals chan struct{}
	silent   bool // under TLS, where the client has not said hello
}

func bound(listener net.Listener, conns, perAddress int, silent bool) net.Listener {
	return &bounded{
		Listener: listener, places: make(chan struct{}, conns), conns: tally{most: perAddress},
		requests: tally{most: perAddress},
		refusals: make(chan struct{}, 64), silent: silent,
	}
}

// tally counts what each address has, up to the most that one may have.
type tally struct {
	most int
	mu   sync.Mutex
	of   map[netip.Prefix]int
}

func (t *tally) enter(from netip.Prefix) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of[from] >= t.most {
		return false
	}
	if t.of == nil {
		t.of = map[netip.Prefix]int{}
	}
	t.of[from]++
	return true
}

func (t *tally) leave(from netip.Prefix) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of[from]--; t.of[from] == 0 {
		delete(t.of, from)
	}
}

// enter gives a connection a place, if there is one for it.
func (b *bounded) enter(conn net.Conn) (*counted, bool) {
	c := &counted{Conn: conn, from: origin(conn.RemoteAddr()), listener: b}
	if !b.conns.enter(c.from) {
		return nil, false
	}
	select {
	case b.places <- struct{}{}:
		return c, true
	default:
		b.conns.leave(c.from)
		return nil, false
	}
}

// origin is whose connection it is: an IPv4 address, or the IPv6 network that one customer is given.
func origin(remote net.Addr) netip.Prefix {
	tcp, ok := remote.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	address := tcp.AddrPort().Addr().Unmap().WithZone("")
	bits := 32
	if address.Is6() {
		bits = 64
	}
	from, _ := address.Prefix(bits) // so many bits each of them has
	return from
}

func (b *bounded) Accept() (net.Conn, error) {
	for {
		conn, err := b.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if c, ok := b.enter(conn); ok {
			return c, nil
		}
		select {
		case b.refusals <- struct{}{}:
			go b.refuse(conn)
		default:
			conn.Close() //nolint:gosec // nothing was written
		}
	}
}

// refusal is the answer to a connection beyond the bounds, tooManyRequests the body of that to a request: problem
// documents, as those of pkg/api.
const (
	refusal = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/problem+json\r\nRetry-After: " +
		"1\r\nConnection: close\r\n\r\n" +
		`{"type":"urn:penstock:problem:busy","title":"Service Unavailable","status":503,` +
		`"detail":"too many connections; try again","code":"busy"}` + "\n"
	tooManyRequests = `{"type":"urn:penstock:problem:too_many_requests","title":"Too Many Requests","status":429,` +
		`"detail":"too many requests from this address are under way; try again","code":"too_many_requests"}` + "\n"
)

// refuse says why, and waits a moment for the client to have read it: a connection closed over unread bytes
// is reset, and the answer lost.
func (b *bounded) refuse(conn net.Conn) {
	defer func() { <-b.refusals }()
	defer conn.Close()
	if b.silent {
		return
	}
	if conn.SetDeadline(time.Now().Add(time.Second)) != nil {
		return
	}
	if _, err := io.WriteString(conn, refusal); err != nil {
		return
	}
	if half, ok := conn.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		_, _ = io.CopyN(io.Discard, conn, 64<<10)
	}
}

// counted is a connection that has a place.
type counted struct {
	net.Conn
	from     netip.Prefix
	listener *bounded
	closed   sync.Once
}

// drainMax is how much is read of a request that was refused before its end.
const drainMax = 4 << 20

// CloseWrite ends the answer, and reads a part of the bytes that the client still sends: a
// connection closed over unread bytes is reset, and an answer such as 431 lost. The server closes
// the connection afterwards.
func (c *counted) CloseWrite() error {
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok {
		return nil
	}
	err := half.CloseWrite()
	if err == nil && c.SetReadDeadline(time.Now().Add(time.Second)) == nil {
		_, _ = io.CopyN(io.Discard, c.Conn, drainMax)
	}
	return err
}

func (c *counted) Close() error {
	defer c.closed.Do(func() {
		c.listener.conns.leave(c.from)
		<-c.listener.places
	})
	return c.Conn.Close()
}

// carrier is the key of a request's *counted.
type carrier struct{}

func withCarrier(ctx context.Context, conn net.Conn) context.Context {
	if secure, ok := conn.(*tls.Conn); ok {
		conn = secure.NetConn()
	}
	return context.WithValue(ctx, carrier{}, conn)
}

// BoundRequests makes a server refuse requests beyond those that one address may have under way, where its listener is
// of Listen: one connection of HTTP/2 carries many.
func BoundRequests(server *http.Server) {
	server.Handler, server.ConnContext = perAddress(server.Handler), withCarrier
}

// perAddress refuses requests beyond those that one address may have under way.
func perAddress(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c, ok := r.Context().Value(carrier{}).(*counted); ok {
			if !c.listener.requests.enter(c.from) {
				w.Header().Set("Content-Type", "application/problem+json")
				w.Header().Set("Retry-After", "1")
				w.WriteHeader(http.StatusTooManyRequests)
				_, _ = io.WriteString(w, tooManyRequests)
				return
			}
			defer c.listener.requests.leave(c.from)
		}
		next.ServeHTTP(w, r)
	})
}
