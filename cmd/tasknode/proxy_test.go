package main

import (
	"bytes"
	"context"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// proxy is a TCP proxy before a database. It can freeze connections: from then on it acknowledges what
// they send and passes nothing on, in either direction, as a firewall does that lost its state.
type proxy struct {
	dsn   string // of the database, through the proxy
	mu    sync.Mutex
	conns []*proxied
}

type proxied struct {
	client, server net.Conn
	frozen         atomic.Bool
	mu             sync.Mutex
	sent           bytes.Buffer // by the client
}

func newProxy(t testing.TB, dsn string) *proxy {
	t.Helper()
	pc, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	c := pc.ConnConfig
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := url.URL{
		Scheme: "postgres", User: url.UserPassword(c.User, c.Password), Host: listener.Addr().String(),
		Path: "/" + c.Database, RawQuery: "sslmode=disable",
	}
	p := &proxy{dsn: address.String()}
	network, target := pgconn.NetworkAddress(c.Host, c.Port)
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := (&net.Dialer{}).DialContext(context.Background(), network, target)
			if err != nil {
				client.Close()
				continue
			}
			conn := &proxied{client: client, server: server}
			p.mu.Lock()
			p.conns = append(p.conns, conn)
			p.mu.Unlock()
			go conn.pass(server, client, conn.note)
			go conn.pass(client, server, func([]byte) {})
		}
	}()
	t.Cleanup(func() {
		listener.Close()
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, conn := range p.conns {
			conn.client.Close()
			conn.server.Close()
		}
	})
	return p
}

func (c *proxied) pass(to, from net.Conn, note func([]byte)) {
	defer to.Close()
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		note(buffer[:n])
		if c.frozen.Load() {
			continue
		}
		if _, err := to.Write(buffer[:n]); err != nil {
			return
		}
	}
}

func (c *proxied) note(b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sent.Len() < 1<<20 {
		c.sent.Write(b)
	}
}

// freeze freezes the connections open now over which a statement with this text went, and says how many.
func (p *proxy) freeze(text string) (frozen int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		c.mu.Lock()
		if bytes.Contains(c.sent.Bytes(), []byte(text)) {
			c.frozen.Store(true)
			frozen++
		}
		c.mu.Unlock()
	}
	return frozen
}
