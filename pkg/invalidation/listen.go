package invalidation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
)

// ListenConfig has the connection and the callbacks of a listener. Conn is required; callbacks that are nil are not
// called, and none must block.
type ListenConfig struct {
	// Conn is for a connection of the listener's own. A pooler in transaction mode cannot carry one: then the
	// self-test fails, the status says so, and nodes go by their polls. Its password and certificates are read from
	// the files of its address at each connection.
	Conn *pgx.ConnConfig
	// Wake is called with the id of each queue hinted at, and the lane where the hint names one.
	Wake func(queue int32, lane *Lane)
	// Cancelled is called with the id of a node of which an entry is to be cancelled; without it nodes learn that with
	// their next heartbeat.
	Cancelled func(node NodeID)
	// Slots is called with the name of a model of which a gateway misses slots or an instance became ready,
	// Starting with that of a model of which an instance was announced, Granted with the id of the gateway that
	// slots were handed over to.
	Slots    func(model string)
	Starting func(model string)
	Granted  func(node NodeID)
	Log      *slog.Logger // slog.Default if nil

	SelfTest   time.Duration // between round trips that show that hints arrive: 10 s
	EchoWithin time.Duration // within which a round trip must come back: 5 s
	RetryMax   time.Duration // longest pause between attempts to connect: 10 s
}

// Listener hears hints and wakes scheduling threads. Hints that come while the connection is down are lost, and so
// is nothing else: nodes poll.
type Listener struct {
	cfg   ListenConfig
	kinds map[string]func(rest string) bool // by the first word of a payload; false: it does not parse

	failing duty.Failing

	mu     sync.Mutex
	status ListenStatus
}

// ListenStatus is the state of a listener.
type ListenStatus struct {
	Connected  bool          `json:"connected"`  // and the last self-test came back
	Since      time.Time     `json:"since"`      // of the last change of Connected
	RoundTrip  time.Duration `json:"round_trip"` // of the last self-test
	TestedAt   time.Time     `json:"tested_at"`
	Heard      int64         `json:"heard"`      // hints, of whatever kind
	Reconnects int64         `json:"reconnects"` // connections lost
	Error      string        `json:"error,omitempty"`
}

func (c ListenConfig) withDefaults() ListenConfig {
	if c.Wake == nil {
		c.Wake = func(int32, *Lane) {}
	}
	for _, told := range []*func(NodeID){&c.Cancelled, &c.Granted} {
		if *told == nil {
			*told = func(NodeID) {}
		}
	}
	for _, told := range []*func(string){&c.Slots, &c.Starting} {
		if *told == nil {
			*told = func(string) {}
		}
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	c.SelfTest = cmp.Or(c.SelfTest, 10*time.Second)
	c.EchoWithin = cmp.Or(c.EchoWithin, 5*time.Second)
	c.RetryMax = cmp.Or(c.RetryMax, 10*time.Second)
	return c
}

// NewListener returns a listener. Nothing happens before Run.
func NewListener(cfg ListenConfig) *Listener {
	l := &Listener{cfg: cfg.withDefaults()}
	l.kinds = map[string]func(rest string) bool{
		"cancel":   toNode(l.cfg.Cancelled),
		"granted":  toNode(l.cfg.Granted),
		"slots":    toModel(l.cfg.Slots),
		"starting": toModel(l.cfg.Starting),
	}
	return l
}

// toNode calls back with the node of a payload; it is false where the rest of the payload is none.
func toNode(call func(NodeID)) func(rest string) bool {
	return func(rest string) bool {
		node, err := strconv.ParseInt(rest, 10, 64)
		if err == nil {
			call(NodeID(node))
		}
		return err == nil
	}
}

// toModel calls back with the model of a payload.
func toModel(call func(string)) func(rest string) bool {
	return func(rest string) bool {
		call(rest)
		return true
	}
}

// Status returns the state of the listener.
func (l *Listener) Status() ListenStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status
}

func (l *Listener) update(change func(*ListenStatus)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.status.Connected
	change(&l.status)
	if l.status.Connected != was || l.status.Since.IsZero() {
		l.status.Since = time.Now()
	}
}

// Run listens, and connects again whenever the connection is lost, until ctx ends. Without ListenConfig.Conn it returns
// an error.
func (l *Listener) Run(ctx context.Context) error {
	if l.cfg.Conn == nil {
		return errors.New("listen for hints: ListenConfig.Conn is nil: give it where to connect, as in DB.Listen of " +
			"package penstock")
	}
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, l.cfg.RetryMax) {
		worked, err := l.listen(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if worked {
			pause = 100 * time.Millisecond
		}
		l.failing.Note(ctx, l.cfg.Log, slog.LevelWarn, hearStep, err)
		l.update(func(s *ListenStatus) { s.Connected, s.Error = false, err.Error(); s.Reconnects++ })
		select {
		case <-ctx.Done():
			return nil
		// After a failover all listeners connect again, to Postgres itself.
		case <-time.After(pause/2 + rand.N(pause)):
		}
	}
}

// hearStep is the name in the log of what Run does.
const hearStep = "hear hints"

// listen serves one connection until it fails. worked reports that at least one self-test came back.
func (l *Listener) listen(ctx context.Context) (worked bool, err error) {
	conn, err := postgres.Connect(ctx, l.cfg.Conn)
	if err != nil {
		return false, fmt.Errorf("connect: %w", postgres.ForPooler(err))
	}
	defer conn.Close(context.WithoutCancel(ctx))
	listenCtx, cancel := context.WithTimeout(ctx, l.cfg.EchoWithin)
	defer cancel()
	if _, err := conn.Exec(listenCtx, `LISTEN `+hintChannel); err != nil {
		return false, fmt.Errorf("listen: %w", err)
	}
	for n := 1; ; n++ {
		if err := l.selfTest(ctx, conn, n); err != nil {
			return worked, err
		}
		worked = true
		if err := l.hear(ctx, conn, l.cfg.SelfTest, ""); !errors.Is(err, errQuiet) {
			return worked, err
		}
	}
}

// selfTest sends a hint to itself and waits until it comes back.
func (l *Listener) selfTest(ctx context.Context, conn *pgx.Conn, n int) error {
	start := time.Now()
	echo := fmt.Sprintf("echo %d %d", conn.PgConn().PID(), n)
	sendCtx, cancel := context.WithTimeout(ctx, l.cfg.EchoWithin)
	defer cancel()
	if _, err := conn.Exec(sendCtx, `SELECT pg_notify($1, $2)`, hintChannel, echo); err != nil {
		return fmt.Errorf("send self-test: %w", err)
	}
	switch err := l.hear(ctx, conn, l.cfg.EchoWithin, echo); {
	case errors.Is(err, errQuiet):
		return fmt.Errorf("self-test did not come back within %s: is there a pooler in transaction mode?",
			l.cfg.EchoWithin)
	case err != nil:
		return err
	}
	l.update(func(s *ListenStatus) {
		s.Connected, s.RoundTrip, s.TestedAt, s.Error = true, time.Since(start), time.Now(), ""
	})
	l.failing.Note(ctx, l.cfg.Log, slog.LevelWarn, hearStep, nil)
	return nil
}

// errQuiet is returned when the time to listen is over.
var errQuiet = errors.New("nothing heard")

// hear passes hints on for a while, or until it hears the text that it waits for.
func (l *Listener) hear(ctx context.Context, conn *pgx.Conn, d time.Duration, until string) error {
	quiet, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	for {
		n, err := conn.WaitForNotification(quiet)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && quiet.Err() != nil && !conn.IsClosed():
			return errQuiet
		case err != nil:
			return fmt.Errorf("wait for hints: %w", err)
		case until != "" && n.Payload == until:
			return nil
		case strings.HasPrefix(n.Payload, "echo "):
		default:
			l.pass(n.Payload)
		}
	}
}

// pass passes a payload on to the callback of its kind. What does not parse is not from us.
func (l *Listener) pass(payload string) {
	kind, rest, _ := strings.Cut(payload, " ")
	heard := false
	if call, known := l.kinds[kind]; known {
		heard = call(rest)
	} else if queue, lane, ok := parseHint(payload); ok {
		l.cfg.Wake(queue, lane)
		heard = true
	}
	if heard {
		l.update(func(s *ListenStatus) { s.Heard++ })
	}
}
