package api

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// looks counts what the watch asks of the database.
type looks struct {
	postgres.DB
	n atomic.Int64
}

func (l *looks) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	l.n.Add(1)
	return l.DB.Query(ctx, sql, args...)
}

// claimOne pushes an entry and takes it as a node would.
func (s *served) claimOne() (*invalidation.Queue, *invalidation.Lock) {
	s.t.Helper()
	ctx := s.t.Context()
	q, err := invalidation.Open(ctx, s.pool, "work")
	if err != nil {
		s.t.Fatal(err)
	}
	if _, err := q.Push(ctx, invalidation.Push{Payload: json.RawMessage("1")}); err != nil {
		s.t.Fatal(err)
	}
	if err := invalidation.Register(ctx, s.pool, invalidation.Node{ID: 7, Name: "n", Application: "default", Lease: time.Minute}); err != nil {
		s.t.Fatal(err)
	}
	c, err := q.Claim(ctx, invalidation.ClaimRequest{Node: 7, ClaimID: 1, Lane: invalidation.Lane{Priority: 1}, Limit: 1})
	if err != nil || len(c.Locks) != 1 {
		s.t.Fatalf("claim: %v (%v)", c, err)
	}
	return q, c.Locks[0]
}

func (s *served) finish(q *invalidation.Queue, l *invalidation.Lock) {
	s.t.Helper()
	done := invalidation.Done(l, l.Entries[0].ID, json.RawMessage(`{"answer": 42}`), time.Second)
	done.Last = true
	if _, err := q.Settle(s.t.Context(), 7, []invalidation.Ending{done}); err != nil {
		s.t.Fatal(err)
	}
}

func TestHundredsWhoWaitShareOneLook(t *testing.T) {
	s := serve(t, Config{WaitersMax: 300}, invalidation.Config{})
	q, lock := s.claimOne()
	counted := &looks{DB: s.pool}
	s.api.watch = invalidation.NewEntryWatch(counted, 300, slog.New(slog.DiscardHandler))
	id := lock.Entries[0].ID
	ended := make(chan error, 300)
	start := time.Now()
	for range 300 {
		go func() { ended <- s.api.await(t.Context(), id, time.Minute) }()
	}
	for deadline := time.Now().Add(time.Minute); s.api.watch.Waiting() < 300; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d of 300 wait", s.api.watch.Waiting())
		}
	}
	r, _ := http.NewRequestWithContext(t.Context(), "GET", fmt.Sprintf("%s/v1/entries/%d?wait=5s", s.URL, id), nil)
	if answer, err := s.Client().Do(r); err != nil || answer.StatusCode != 503 {
		t.Errorf("one more than may: %v (%v)", answer, err)
	} else {
		answer.Body.Close()
	}
	s.finish(q, lock)
	for range 300 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	const pauseMin = 25 * time.Millisecond // between two polls
	if most := int64(time.Since(start)/pauseMin) + 2; counted.n.Load() > most {
		t.Errorf("%d looks in %s, want at most %d", counted.n.Load(), time.Since(start), most)
	}
	t.Logf("300 clients, %d looks in %s", counted.n.Load(), time.Since(start).Round(time.Millisecond))
}

// sse reads events until one of that name, and returns its id and data.
func sse(t *testing.T, in *bufio.Scanner, name string) (id, data string) {
	t.Helper()
	event := ""
	for in.Scan() {
		field, value, _ := strings.Cut(in.Text(), ": ")
		switch field {
		case "id":
			id = value
		case "event":
			event = value
		case "data":
			if event == name {
				return id, value
			}
			if (event == "progress" || event == "output") && name == "ended" {
				t.Errorf("%s was sent again: %s", event, value)
			}
		}
	}
	t.Fatalf("no event %s: %v", name, in.Err())
	return "", ""
}

func TestEventsGoOnWhereTheClientWasCutOff(t *testing.T) {
	s := serve(t, Config{}, invalidation.Config{})
	q, lock := s.claimOne()
	path := fmt.Sprintf("/v1/entries/%d/events", lock.Entries[0].ID)
	follow := func(ctx context.Context, last string) (int, *bufio.Scanner) {
		r, _ := http.NewRequestWithContext(ctx, "GET", s.URL+path, nil)
		if last != "" {
			r.Header.Set("Last-Event-ID", last)
		}
		answer, err := s.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { answer.Body.Close() })
		return answer.StatusCode, bufio.NewScanner(answer.Body)
	}
	first, cut := context.WithCancel(t.Context())
	_, in := follow(first, "")
	if _, data := sse(t, in, "state"); !strings.Contains(data, `"computing"`) {
		t.Errorf("state: %s", data)
	}
	run := &invalidation.Run{Queue: q, Lock: lock, Entry: lock.Entries[0], Node: 7}
	if err := run.Progress(t.Context(), 0.5, "half"); err != nil {
		t.Fatal(err)
	}
	_, data := sse(t, in, "progress")
	if !strings.Contains(data, `"done":0.5`) || !strings.Contains(data, `"half"`) {
		t.Errorf("progress: %s", data)
	}
	if err := run.AppendOutput(t.Context(), 1, []byte("data: one\n\n")); err != nil {
		t.Fatal(err)
	}
	id, data := sse(t, in, "output")
	if !strings.Contains(data, `"data":"data: one\n\n"`) || !strings.Contains(data, `"seq":1`) {
		t.Errorf("output: %s", data)
	}
	cut()
	_, in = follow(t.Context(), id)
	var wg sync.WaitGroup
	wg.Go(func() { s.finish(q, lock) })
	id, data = sse(t, in, "ended")
	wg.Wait()
	if !strings.Contains(data, `"state":"done"`) || !strings.Contains(data, `{"answer":42}`) {
		t.Errorf("ended: %s", data)
	}
	if status, _ := follow(t.Context(), id); status != http.StatusNoContent {
		t.Errorf("after the end: %d, want 204", status)
	}
}

// before runs a function before the first statement that contains a text.
type before struct {
	postgres.DB
	text string
	do   func()
}

func (b *before) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if do := b.do; do != nil && strings.Contains(sql, b.text) {
		b.do = nil
		do()
	}
	return b.DB.QueryRow(ctx, sql, args...)
}

// Between two statements that read an entry it may end, and one that has failed may be retried.
func TestAnAnswerIsOfTheEndOrOfALivingEntry(t *testing.T) {
	s := serve(t, Config{}, invalidation.Config{})
	get := func(path string) string {
		t.Helper()
		r, _ := http.NewRequestWithContext(t.Context(), "GET", s.URL+path, nil)
		answer, err := s.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		if err != nil || answer.StatusCode != http.StatusOK {
			t.Fatalf("%s: %d %s (%v)", path, answer.StatusCode, text, err)
		}
		return string(text)
	}
	q, lock := s.claimOne()
	id := lock.Entries[0].ID
	s.api.operator = operator.New(&before{s.pool, "explain_entry", func() { s.finish(q, lock) }})
	text := get(fmt.Sprintf("/v1/entries/%d", id))
	if !strings.Contains(text, `"state":"done"`) || !strings.Contains(text, `{"answer":42}`) || !strings.Contains(text, "ended_at") {
		t.Errorf("an entry that ended while it was read: %s", text)
	}
	pushed, err := q.Push(t.Context(), invalidation.Push{Payload: json.RawMessage("2")})
	if err != nil {
		t.Fatal(err)
	}
	exec := func(sql string) {
		t.Helper()
		if _, err := s.pool.Exec(t.Context(), sql, pushed[0].ID); err != nil {
			t.Fatal(err)
		}
	}
	exec(`SELECT penstock.fail_entry(penstock.take_entry(e.queue_id, e.id), 'app', 'broken') FROM penstock.entry e WHERE e.id = $1`)
	s.api.db = &before{s.pool, "outcome_of", func() { exec(`SELECT penstock.retry_failure($1)`) }}
	path := fmt.Sprintf("/v1/entries/%d/events", pushed[0].ID)
	if text := get(path); strings.Contains(text, "event:") {
		t.Errorf("events of a failure that was retried meanwhile: %s", text)
	}
	exec(`SELECT penstock.fail_entry(penstock.take_entry(e.queue_id, e.id), 'app', 'broken') FROM penstock.entry e WHERE e.id = $1`)
	if text := get(path); !strings.Contains(text, "event: ended") || !strings.Contains(text, `"state":"failed"`) {
		t.Errorf("events when it has failed again: %s", text)
	}
}

func TestEventsOfAQueueThatWasMadeAnewHaveItsOutput(t *testing.T) {
	s := serve(t, Config{}, invalidation.Config{})
	if _, err := s.api.queues.Get(t.Context(), "work"); err != nil { // as it was
		t.Fatal(err)
	}
	for _, sql := range []string{`SELECT penstock.drop_queue('work', true)`, `SELECT penstock.create_queue('work')`} {
		if _, err := s.pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	q, lock := s.claimOne()
	run := &invalidation.Run{Queue: q, Lock: lock, Entry: lock.Entries[0], Node: 7}
	if err := run.AppendOutput(t.Context(), 1, []byte("one")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	r, _ := http.NewRequestWithContext(ctx, "GET", fmt.Sprintf("%s/v1/entries/%d/events", s.URL, run.Entry.ID), nil)
	answer, err := s.Client().Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if _, data := sse(t, bufio.NewScanner(answer.Body), "output"); !strings.Contains(data, `"one"`) {
		t.Errorf("output: %s", data)
	}
}

func TestWaitingEndsWhenTheServerDoes(t *testing.T) {
	s := serve(t, Config{}, invalidation.Config{})
	_, lock := s.claimOne()
	ended := make(chan error, 1)
	go func() { ended <- s.api.await(t.Context(), lock.Entries[0].ID, time.Minute) }()
	s.api.Drain()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("it goes on")
	}
}

// Over HTTP/2 a deadline of writes that passes between two of them ends the stream. What is written as it comes may have
// pauses of any length.
func TestPausesEndNeitherABodyNorAnAnswerOverHTTP2(t *testing.T) {
	t.Parallel()
	const pause = 2 * max(eventsWrite, streamIdle)
	for want, serve := range map[string]http.HandlerFunc{
		": 1\n\n: 2\n\n": func(w http.ResponseWriter, r *http.Request) {
			out := newEventWriter(w, r)
			out.comment("1")
			time.Sleep(pause)
			out.comment("2")
		},
		"{\"line\":1,\"id\":7,\"verdict\":\"inserted\"}\n{\"line\":2,\"id\":7,\"verdict\":\"inserted\"}\n": func(w http.ResponseWriter, r *http.Request) {
			out := newAnswers(w, r, true)
			for n := range int64(2) {
				_ = out.add([]*streamLine{{number: n + 1, pushed: invalidation.Pushed{ID: 7, Verdict: invalidation.Inserted}}})
				time.Sleep(pause)
			}
		},
		"{\"summary\":{\"lines\":0,\"inserted\":0,\"replayed\":0,\"duplicates\":0,\"refused\":0}}\n": func(w http.ResponseWriter, r *http.Request) {
			out := newAnswers(w, r, false)
			time.Sleep(pause)
			_ = out.finish(nil)
		},
		"1\n2\n": func(w http.ResponseWriter, r *http.Request) {
			rc := http.NewResponseController(w)
			_ = rc.SetWriteDeadline(time.Time{}) // it is about reads
			body := &idleReader{body: r.Body, rc: rc, idle: streamIdle, multiplexed: r.ProtoMajor == 2}
			first := make([]byte, 2)
			if _, err := io.ReadFull(body, first); err != nil {
				t.Error(err)
			}
			time.Sleep(pause)
			rest, err := io.ReadAll(body)
			if err != nil {
				t.Errorf("the rest of the body: %v", err)
			}
			_, _ = w.Write(append(first, rest...))
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			near, far := net.Pipe()
			conns := make(chan net.Conn, 1)
			conns <- far
			server := &http.Server{Handler: serve, Protocols: new(http.Protocols), WriteTimeout: pause / 4} //nolint:gosec // on a pipe
			server.Protocols.SetUnencryptedHTTP2(true)
			go func() { _ = server.Serve(oneConn{conns}) }()
			defer server.Close()
			defer close(conns)
			transport := &http.Transport{Protocols: new(http.Protocols)}
			transport.DialContext = func(context.Context, string, string) (net.Conn, error) { return near, nil }
			transport.Protocols.SetUnencryptedHTTP2(true)
			defer transport.CloseIdleConnections()
			body, client := io.Pipe()
			go func() {
				_, _ = io.WriteString(client, "1\n")
				time.Sleep(pause / 4)
				_, _ = io.WriteString(client, "2\n")
				time.Sleep(pause / 2)
				_ = client.Close()
			}()
			request, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://server/", body)
			answer, err := (&http.Client{Transport: transport}).Do(request)
			if err != nil {
				t.Fatal(err)
			}
			defer answer.Body.Close()
			if text, err := io.ReadAll(answer.Body); string(text) != want || err != nil {
				t.Errorf("got %q: %v, want %q", text, err, want)
			}
		})
	}
}

// oneConn is a listener of one connection.
type oneConn struct{ conns chan net.Conn }

func (l oneConn) Accept() (net.Conn, error) {
	if c, open := <-l.conns; open {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (oneConn) Close() error   { return nil }
func (oneConn) Addr() net.Addr { return &net.TCPAddr{} }
