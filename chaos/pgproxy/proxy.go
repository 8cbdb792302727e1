// Package pgproxy is a TCP proxy before Postgres that reads the protocol, and brings about faults
// at chosen messages.
//
// Each process of a test connects through a Link of its own, so that a fault meets one process or
// all of them. A link can refuse connections, delay them, or swallow what goes one way or both (a
// black hole). Beyond that a Policy is asked about every group of messages up to a Sync: it sees
// the kind of the transaction and may let the group pass, drop the connection before the server has
// seen it, answer with an SQLSTATE, hold up the commit after the rows were sent, keep it from happening, or
// lose the answer after the commit.
package pgproxy

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Fault is the fate of one group of messages.
type Fault int

const (
	Pass       Fault = iota
	CutBefore        // the connection is closed before the server has seen the group
	Refuse           // the group is answered with Decision.SQLSTATE, and the server does not see it
	Unsent           // the rows are sent, then the connection is closed before the commit
	Swallow          // the group is committed, then the connection is closed without the answer
	Mute             // the group is committed; the answer never comes, and the connection stays open for 8 s
	Late             // the group is committed; the answer comes after Decision.Delay
	Slow             // the statements are run at once, and committed after Decision.Delay
	KillBefore       // as CutBefore, and Decision.Kill is called
	KillAfter        // as Swallow, and Decision.Kill is called
)

var names = [...]string{
	"pass", "cut before", "sqlstate", "cut between rows and commit", "answer swallowed",
	"answer never sent", "answer late", "commit late",
	"kill -9 before commit", "kill -9 after commit",
}

// String returns the name of the fault in reports.
func (f Fault) String() string { return names[f] }

// AfterCommit says that the fault loses or delays the answer to something that was committed.
func (f Fault) AfterCommit() bool {
	return f == Swallow || f == Mute || f == Late || f == KillAfter
}

// Decision is what a Policy answers.
type Decision struct {
	Fault    Fault
	SQLSTATE string
	Delay    time.Duration
	Kill     func()
}

// Group is what a Policy knows of the messages up to a Sync.
type Group struct {
	Kind    Kind
	Site    string // the beginning of its first statement and a hash of the whole: the call site
	Commits bool   // it ends a transaction
}

// Policy decides about groups of messages, and is told what became of those that it chose.
type Policy interface {
	// Decide is asked before a group is sent to the server.
	Decide(link *Link, group Group) Decision
	// Happened reports a fault that took effect, as soon as it did: the process waits for it since a time, until the
	// function that is returned is called with the end of the wait. That is the same time where it does not wait. A
	// process that ends the connection waits no longer.
	Happened(link *Link, group Group, fault Fault, from time.Time) (over func(to time.Time))
	// Committed reports each transaction whose commit the server has confirmed, faulty or not.
	Committed(link *Link, kind Kind, at time.Time)
}

// Proxy listens for processes and connects them to one server, which may change.
type Proxy struct {
	policy   Policy
	upstream atomic.Pointer[address]
}

type address struct{ network, name string }

// New returns a proxy before the server at a network address, as in net.Dial.
func New(network, name string, policy Policy) *Proxy {
	p := &Proxy{policy: policy}
	p.Point(network, name)
	return p
}

// Point sends connections that are opened from now on to another server.
func (p *Proxy) Point(network, name string) { p.upstream.Store(&address{network, name}) }

// Link is one process's way to the server.
type Link struct {
	Name string

	proxy    *Proxy
	listener net.Listener
	refusing atomic.Bool
	toMute   atomic.Bool // what the process sends is swallowed
	fromMute atomic.Bool // what the server sends is swallowed
	delay    atomic.Int64
	deaf     atomic.Bool  // notifications are dropped
	dropped  atomic.Int64 // notifications

	mu    sync.Mutex
	conns map[*session]struct{}
}

// Open returns a new link that listens on a free port of the loopback interface.
func (p *Proxy) Open(ctx context.Context, name string) (*Link, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	l := &Link{Name: name, proxy: p, listener: listener, conns: map[*session]struct{}{}}
	go l.accept()
	return l, nil
}

// Address is where the process connects.
func (l *Link) Address() string { return l.listener.Addr().String() }

// Close ends the link and its connections.
func (l *Link) Close() {
	l.listener.Close()
	l.Cut()
}

// Refuse closes new connections at once while on.
func (l *Link) Refuse(on bool) { l.refusing.Store(on) }

// Blackhole swallows what goes to the server, from it, or both.
func (l *Link) Blackhole(to, from bool) {
	l.toMute.Store(to)
	l.fromMute.Store(from)
}

// Deaf drops the notifications that the server sends, and nothing else, while on.
func (l *Link) Deaf(on bool) { l.deaf.Store(on) }

// Dropped returns how many notifications were dropped.
func (l *Link) Dropped() int64 { return l.dropped.Load() }

// Delay holds up each group of messages to the server for d.
func (l *Link) Delay(d time.Duration) { l.delay.Store(int64(d)) }

// Cut closes all connections of the link.
func (l *Link) Cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for s := range l.conns {
		s.close()
	}
}

func (l *Link) accept() {
	for {
		client, err := l.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		if l.refusing.Load() {
			client.Close()
			continue
		}
		go l.serve(client)
	}
}

func (l *Link) serve(client net.Conn) {
	to := l.proxy.upstream.Load()
	dialer := net.Dialer{Timeout: 5 * time.Second}
	server, err := dialer.DialContext(context.Background(), to.network, to.name)
	if err != nil {
		client.Close()
		return
	}
	s := newSession(l, client, server)
	l.mu.Lock()
	l.conns[s] = struct{}{}
	l.mu.Unlock()
	s.run()
	l.mu.Lock()
	delete(l.conns, s)
	l.mu.Unlock()
}
