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
)

// closingSoon returns dial with connections that wait for at most closeTimeout when they are closed.
func closingSoon(dial pgconn.DialFunc) pgconn.DialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
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
