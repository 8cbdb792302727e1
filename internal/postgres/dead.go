package postgres

import (
	"context"
	"net"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// A connection may freeze without an error: a firewall loses its state, or the server's host
// vanishes. What follows bounds how long such a connection, or the attempt to open one, counts
// against a pool's maximum.
const (
	// connectTimeout holds where the address names no connect_timeout; pgxpool's own default is 2 minutes.
	connectTimeout = 10 * time.Second
	// closeTimeout is for the goodbye to a server whose answer was cancelled; pgconn's own is 15 s.
	closeTimeout = time.Second
	// silentTimeout is for how long the other end may acknowledge nothing, neither what was sent nor probes. A server
	// that works on a statement acknowledges. pgconn's own is 5 minutes and more, and a quarter of an hour after a send.
	silentTimeout = 15 * time.Second
)

// keepAlive probes a connection on which an answer is waited for.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: silentTimeout / 3, Interval: silentTimeout / 6, Count: 4}

// closingSoon returns dial with connections that wait for at most closeTimeout when they are closed.
func closingSoon(dial pgconn.DialFunc) pgconn.DialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		if tcp, ok := conn.(*net.TCPConn); ok {
			// Where the system knows no such option, the connection is as good as before.
			_ = tcp.SetKeepAliveConfig(keepAlive)
			_ = endUnacknowledged(tcp)
		}
		return closesSoon{conn}, nil
	}
}

// closesSoon caps deadlines in the future. pgconn sets none but the one of a close after a cancelled statement: the
// deadline of a statement is a context of its own, at whose end pgconn sets a deadline that has passed.
type closesSoon struct{ net.Conn }

// SetDeadline implements net.Conn.
func (c closesSoon) SetDeadline(t time.Time) error {
	if latest := time.Now().Add(closeTimeout); t.After(latest) {
		t = latest
	}
	return c.Conn.SetDeadline(t)
}
