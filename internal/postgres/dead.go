package postgres

import (
	"context"
	"net"
	"sync"
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
	// that works on a statement acknowledges. pgconn's own is 5 minutes and more, and a quarter of an hour
	// after a send.
	silentTimeout = 15 * time.Second
	// answerGrace is how long after its statement_timeout an answer is waited for: the server has ended the statement
	// by then, so that the answer was lost on a connection that stays open, or is held up behind a pooler.
	answerGrace = 5 * time.Second
)

// keepAlive probes a connection on which an answer is waited for.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: silentTimeout / 3, Interval: silentTimeout / 6, Count: 4}

// closingSoon returns dial with connections that wait for at most closeTimeout when they are closed, and for an answer
// for at most as long as answer says, if that is not 0.
func closingSoon(dial pgconn.DialFunc, answer time.Duration) pgconn.DialFunc {
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
		return &closesSoon{Conn: conn, answer: answer}, nil
	}
}

// closesSoon bounds what pgconn waits for without a deadline: the close of a connection, and each read.
type closesSoon struct {
	net.Conn
	answer time.Duration // 0: reads are not bounded

	mu    sync.Mutex
	given bool // a deadline of pgconn holds
}

// Read implements net.Conn. Package pgx reads only while it waits for an answer.
func (c *closesSoon) Read(b []byte) (int, error) {
	if c.answer > 0 {
		if err := c.expect(); err != nil {
			return 0, err
		}
	}
	return c.Conn.Read(b)
}

// expect sets the deadline of a read, but where pgconn has set one: a context that has ended, say.
func (c *closesSoon) expect() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.given {
		return nil
	}
	return c.SetReadDeadline(time.Now().Add(c.answer))
}

// SetDeadline implements net.Conn. It caps deadlines in the future: pgconn sets none but the one of a close after a
// cancelled statement. The deadline of a statement is a context of its own, at whose end pgconn sets one in the past.
func (c *closesSoon) SetDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.given = !t.IsZero()
	if latest := time.Now().Add(closeTimeout); t.After(latest) {
		t = latest
	}
	return c.Conn.SetDeadline(t)
}
