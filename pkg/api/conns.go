package api

import (
	"io"
	"net"
	"net/netip"
	"sync"
	"time"
)

// bounded lets in so many connections at once, and so many from one address. One more is told 503 and closed, which a client or a load balancer can
// act upon; one that waits to be accepted could not be told from a server that hangs.
type bounded struct {
	net.Listener
	places chan struct{}

	perAddress int
	mu         sync.Mutex
	from       map[netip.Prefix]int

	// refusals bounds those that are being told; beyond it connections are closed without a word.
	refusals chan struct{}
	silent   bool // under TLS, where the client has not said hello
}

func bound(listener net.Listener, conns, perAddress int, silent bool) net.Listener {
	return &bounded{
		Listener: listener, places: make(chan struct{}, conns), perAddress: perAddress, from: map[netip.Prefix]int{},
		refusals: make(chan struct{}, 64), silent: silent,
	}
}

// enter gives a connection a place, if there is one for it.
func (b *bounded) enter(conn net.Conn) (leave func(), ok bool) {
	from := origin(conn.RemoteAddr())
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.from[from] >= b.perAddress {
		return nil, false
	}
	select {
	case b.places <- struct{}{}:
	default:
		return nil, false
	}
	b.from[from]++
	return sync.OnceFunc(func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.from[from]--; b.from[from] == 0 {
			delete(b.from, from)
		}
		<-b.places
	}), true
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
		if leave, ok := b.enter(conn); ok {
			return &counted{Conn: conn, leave: leave}, nil
		}
		select {
		case b.refusals <- struct{}{}:
			go b.refuse(conn)
		default:
			conn.Close() //nolint:gosec // nothing was written
		}
	}
}

const refusal = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/problem+json\r\nRetry-After: 1\r\nConnection: close\r\n\r\n" +
	`{"type":"urn:penstock:problem:busy","title":"Service Unavailable","status":503,"detail":"too many connections; try again","code":"busy"}` + "\n"

// refuse says why, and waits a moment for the client to have read it: a connection closed over unread bytes is reset, and
// the answer lost.
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
	leave func()
}

func (c *counted) Close() error {
	defer c.leave()
	return c.Conn.Close()
}
