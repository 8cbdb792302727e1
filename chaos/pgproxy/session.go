package pgproxy

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"
)

// session is one connection of a process with its connection to the server.
type session struct {
	link           *Link
	client, server net.Conn
	once           sync.Once
	gone           chan struct{} // closed with the connections

	mu         sync.Mutex // guards the fields below, and writes to the client
	pending    []*group   // sent to the server and not answered
	open       bool       // a transaction block is open
	block      Kind       // of the open transaction block
	blockDone  effect
	statements map[string]statement // by the names that the process gave them
}

// statement is what is known of a statement: the purpose, the place in the product's code, and whether its rows tell of
// locks.
type statement struct {
	kind  Kind
	site  string
	tells bool
}

func statementOf(sql string) statement {
	return statement{kindOf(sql), siteOf(sql), telling.MatchString(sql)}
}

// group is the messages up to a Sync, or one simple query.
type group struct {
	kind     Kind
	own      Kind // of its statements, without those of the transaction block before it
	site     string
	commits  bool
	decision Decision
	waiting  int    // with Unsent: statements whose answer is still to come; the server has no Sync yet
	tells    []bool // of each statement that it executes and that has not been answered
	done     effect
	failed   bool
	held     []byte    // the answer, where it is held back
	from, to time.Time // the time for which the commit is held, where it is
}

func (g *group) group() Group { return Group{g.kind, g.site, g.commits} }

func newSession(l *Link, client, server net.Conn) *session {
	return &session{
		link: l, client: client, server: server, gone: make(chan struct{}),
		statements: map[string]statement{}, block: Other,
	}
}

func (s *session) close() {
	s.once.Do(func() {
		// A reset instead of an orderly end, as after the death of a machine.
		if tcp, ok := s.client.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0)
		}
		s.client.Close()
		s.server.Close()
		close(s.gone)
	})
}

func (s *session) run() {
	defer s.close()
	if err := s.startup(); err != nil {
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer s.close()
		_ = s.answers(bufio.NewReaderSize(s.server, 64<<10))
	}()
	_ = s.requests(bufio.NewReaderSize(s.client, 64<<10))
	s.close()
	<-done
}

// MuteMax is how long an answer may be missing on a connection that stays open. Then the connection
// ends, as keepalives end one whose other side is gone.
const MuteMax = 8 * time.Second

// requests collects messages of the process up to the end of a group and sends them on.
func (s *session) requests(r *bufio.Reader) error {
	var collected []byte
	kind, site, ends := Other, "", false
	var bound statement
	var tells []bool // of the statements that are executed
	for {
		frame, err := readFrame(r)
		if err != nil {
			return err
		}
		collected = append(collected, frame...)
		body := frame[5:]
		switch frame[0] {
		case 'P':
			var m pgproto3.Parse
			if m.Decode(body) == nil {
				one := statementOf(m.Query)
				s.mu.Lock()
				s.statements[m.Name] = one
				s.mu.Unlock()
				kind, ends = noted(kind, ends, one.kind, m.Query)
				site = cmp.Or(site, one.site)
				if m.Name != "" && !hasExecute(r) {
					kind = Other // prepared for later: nothing is run by this group
				}
			}
			continue
		case 'B':
			var m pgproto3.Bind
			if m.Decode(body) == nil {
				s.mu.Lock()
				bound = s.statements[m.PreparedStatement]
				kind, site = stronger(kind, bound.kind), cmp.Or(site, bound.site)
				s.mu.Unlock()
			}
			continue
		case 'E':
			tells = append(tells, bound.tells)
			continue
		case 'Q':
			var m pgproto3.Query
			if m.Decode(body) == nil {
				one := statementOf(m.String)
				kind, ends = noted(kind, ends, one.kind, m.String)
				site, tells = cmp.Or(site, one.site), append(tells, one.tells)
			}
		case 'S', 'H', 'X', 'd', 'c', 'f', 'p':
		default:
			continue
		}
		err = s.forward(frame[0], collected, Group{kind, site, ends}, tells)
		if frame[0] != 'H' { // what is flushed is a part of the group
			tells = nil
		}
		collected, kind, site, ends = nil, Other, "", false
		if err != nil {
			return err
		}
		if frame[0] == 'X' {
			return io.EOF // the process waits for nothing
		}
	}
}

// hasExecute says that an Execute or a Bind follows before the next Sync, as far as it was read
// already. A driver writes a group at once, and a group that only prepares is small.
func hasExecute(r *bufio.Reader) bool {
	waiting, _ := r.Peek(r.Buffered())
	for len(waiting) >= 5 && waiting[0] != 'S' {
		if waiting[0] == 'B' || waiting[0] == 'E' {
			return true
		}
		length := int(binary.BigEndian.Uint32(waiting[1:])) + 1
		if length > len(waiting) {
			return true
		}
		waiting = waiting[length:]
	}
	return false
}

func noted(kind Kind, ends bool, k Kind, sql string) (Kind, bool) {
	word, _, _ := strings.Cut(strings.ToLower(strings.TrimSpace(sql)), " ")
	return stronger(kind, k), ends || word == "commit" || word == "commit;"
}

var errFault = errors.New("fault")

// forward sends a group to the server, unless the policy decides otherwise.
func (s *session) forward(last byte, frames []byte, sent Group, tells []bool) error {
	if d := s.link.delay.Load(); d > 0 {
		time.Sleep(time.Duration(d))
	}
	if s.link.toMute.Load() {
		return nil // swallowed; the process waits
	}
	if last != 'S' && last != 'Q' {
		_, err := s.server.Write(frames)
		return err
	}
	s.mu.Lock()
	g := &group{kind: sent.Kind, own: sent.Kind, site: sent.Site, commits: sent.Commits || !s.open, tells: tells}
	if s.open {
		s.block = stronger(s.block, sent.Kind)
		g.kind = s.block
	}
	g.done.tells = slices.Contains(tells, true)
	s.mu.Unlock()
	policy := s.link.proxy.policy
	g.decision = policy.Decide(s.link, Group{g.kind, sent.Site, g.commits})
	switch g.decision.Fault {
	case CutBefore, KillBefore:
		if g.decision.Kill != nil {
			g.decision.Kill()
		}
		s.happened(g)
		return errFault
	case Refuse:
		s.happened(g)
		return s.refuse(g.decision.SQLSTATE)
	case Unsent:
		// Of an implicit transaction, which its Sync would commit.
		if last == 'S' && g.commits && !sent.Commits && len(tells) > 0 {
			frames[len(frames)-5], g.waiting = 'H', len(tells)
		} else {
			g.decision.Fault = Pass
		}
	}
	s.mu.Lock()
	s.pending = append(s.pending, g)
	s.mu.Unlock()
	if g.decision.Fault == Slow && g.commits {
		return s.holdCommit(last, frames, sent.Commits, g)
	}
	_, err := s.server.Write(frames)
	return err
}

// holdCommit sends a group whose end commits a transaction: the statements at once, and what commits them after the
// delay of its decision. That is the Sync of an implicit transaction, and the whole of a simple query or of a group
// with a COMMIT.
func (s *session) holdCommit(last byte, frames []byte, explicit bool, g *group) error {
	if last == 'S' && !explicit {
		sync := bytes.Clone(frames[len(frames)-5:])
		frames[len(frames)-5] = 'H'
		if _, err := s.server.Write(frames); err != nil {
			return err
		}
		frames = sync
	}
	from := time.Now()
	s.wait(g.decision.Delay)
	s.mu.Lock()
	g.from, g.to = from, time.Now()
	s.mu.Unlock()
	_, err := s.server.Write(frames)
	return err
}

// wait returns after d, or when the connection has ended.
func (s *session) wait(d time.Duration) {
	select {
	case <-time.After(d):
	case <-s.gone:
	}
}

// happened reports the fault of a group for which the process does not wait, or waits no longer.
func (s *session) happened(g *group) {
	if g.from.IsZero() {
		g.from = time.Now()
		g.to = g.from
	}
	s.link.proxy.policy.Happened(s.link, g.group(), g.decision.Fault, g.from)(g.to)
}

// began reports the fault of a group for which the process waits from now on, until the function is called.
func (s *session) began(g *group) (over func(to time.Time)) {
	return s.link.proxy.policy.Happened(s.link, g.group(), g.decision.Fault, time.Now())
}

// fatal are the classes after whose errors a server closes the connection.
func fatal(code string) bool { return strings.HasPrefix(code, "57P") || strings.HasPrefix(code, "08") }

// refuse answers a group in the server's place.
func (s *session) refuse(code string) error {
	severity := "ERROR"
	if fatal(code) {
		severity = "FATAL"
	}
	answer, err := (&pgproto3.ErrorResponse{
		Severity: severity, SeverityUnlocalized: severity, Code: code, Message: "injected by the fault harness",
	}).Encode(nil)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !fatal(code) {
		status := byte('I')
		if s.open {
			status = 'E'
		}
		if answer, err = (&pgproto3.ReadyForQuery{TxStatus: status}).Encode(answer); err != nil {
			return err
		}
	}
	if _, err := s.client.Write(answer); err != nil {
		return err
	}
	if fatal(code) {
		return errFault
	}
	return nil
}

// answers passes on what the server sends, and applies the faults after a commit.
func (s *session) answers(r *bufio.Reader) error {
	for {
		frame, err := readFrame(r)
		if err != nil {
			return err
		}
		if s.link.fromMute.Load() {
			continue
		}
		if frame[0] == 'A' && s.link.deaf.Load() {
			s.link.dropped.Add(1)
			continue
		}
		s.mu.Lock()
		err = s.answer(frame)
		s.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

func (s *session) answer(frame []byte) error {
	if len(s.pending) == 0 {
		return s.send(frame)
	}
	g := s.pending[0]
	switch frame[0] {
	case 'D':
		g.done.rows++
		if len(g.tells) > 0 && g.tells[0] {
			g.done.locks++
		}
		if g.kind == Elect && electedRow(frame[5:]) || g.own.counts() && countRow(frame[5:]) {
			g.done.updated++
		}
	case 'C':
		if strings.HasPrefix(string(frame[5:]), "ROLLBACK") {
			g.failed = true // also the answer to the COMMIT of a transaction that had failed
		}
		if n := tagRows(frame[5:]); n > 0 && !strings.HasPrefix(string(frame[5:]), "SELECT") {
			g.done.updated += n
		}
		if g.decision.Fault == Unsent && g.kind.changes(g.done) {
			if err := s.send(frame); err != nil {
				return err
			}
			s.happened(g)
			return errFault
		}
		if err := s.answered(g, 1); err != nil {
			return err
		}
	case 'I', 's': // a statement that is empty, or has more rows
		if err := s.answered(g, 1); err != nil {
			return err
		}
	case 'E':
		g.failed = true
		if err := s.answered(g, g.waiting); err != nil { // the server skips what follows
			return err
		}
	case 'Z':
		return s.complete(g, frame)
	}
	if g.decision.Fault.AfterCommit() {
		g.held = append(g.held, frame...)
		return nil
	}
	return s.send(frame)
}

// answered notes that the server has answered n statements of a group. If its Sync was kept from the server, and the
// group has failed or changed nothing, it gets the Sync, and passes: there is nothing to lose, and the server says no
// more without it.
func (s *session) answered(g *group, n int) error {
	g.tells = g.tells[min(n, len(g.tells)):]
	if g.waiting == 0 {
		return nil
	}
	if g.waiting -= n; g.waiting > 0 {
		return nil
	}
	g.decision.Fault = Pass
	sync, err := (&pgproto3.Sync{}).Encode(nil)
	if err == nil {
		_, err = s.server.Write(sync)
	}
	return err
}

// complete ends a group whose transaction, if it ended one, the server has confirmed.
func (s *session) complete(g *group, frame []byte) error {
	s.pending = s.pending[1:]
	s.open = len(frame) > 5 && frame[5] != 'I'
	if s.open {
		s.blockDone.add(g.done)
	} else if g.commits {
		g.done.add(s.blockDone)
	}
	committed := g.commits && !g.failed && !s.open
	if !s.open {
		s.block, s.blockDone = Other, effect{}
	}
	effective := committed && g.kind.changes(g.done)
	if effective {
		s.link.proxy.policy.Committed(s.link, g.kind, time.Now())
	}
	answer := append(g.held, frame...)
	fault := g.decision.Fault
	if !effective || fault != Slow && !fault.AfterCommit() {
		return s.send(answer)
	}
	select {
	case <-s.gone: // the process does not wait for the answer: none is lost
		return errFault
	default:
	}
	switch fault {
	case Slow:
		s.happened(g)
		return s.send(answer)
	case Late:
		over := s.began(g)
		s.mu.Unlock()
		s.wait(g.decision.Delay)
		s.mu.Lock()
		over(time.Now())
		return s.send(answer)
	case Mute:
		over := s.began(g)
		go func() {
			s.wait(MuteMax)
			s.close()
			over(time.Now())
		}()
		return nil
	case KillAfter:
		s.happened(g)
		if g.decision.Kill != nil {
			g.decision.Kill()
		}
		return errFault
	default:
		s.happened(g)
		return errFault
	}
}

func (s *session) send(frame []byte) error {
	_, err := s.client.Write(frame)
	return err
}
