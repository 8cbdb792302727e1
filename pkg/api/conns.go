package api

import (
	"io"
	"net"
	"sync"
	"time"
)

// bounded lets in so many connections at once. One more is told 503 and closed, which a client or a load balancer can
// act upon; one that waits to be accepted could not be told from a server that hangs.
type bounded struct {
	net.Listener
	places chan struct{}
	// refusals bounds those that are being told; beyond it connections are closed without a word.
	refusals chan struct{}
	silent   bool // under TLS, where the client has not said hello
}

func bound(listener net.Listener, conns int, silent bool) net.Listener {
	return &bounded{Listener: listener, places: make(chan struct{}, conns), refusals: make(chan struct{}, 64), silent: silent}
}

func (b *bounded) Accept() (net.Conn, error) {
	for {
		conn, err := b.Listener.Accept()
		if err != nil {
			return nil, err
		}
		select {
		case b.places <- struct{}{}:
			return &counted{Conn: conn, leave: sync.OnceFunc(func() { <-b.places })}, nil
		default:
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
