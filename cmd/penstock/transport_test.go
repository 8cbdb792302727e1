package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/client"
	"github.com/penstock/penstock/pkg/invalidation"
)

func send(t *testing.T, ctx context.Context, handler http.HandlerFunc, body io.Reader) (*http.Response, error) { //nolint:revive // t first, as in helpers
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, localURL+"/x?y=1", body)
	if err != nil {
		t.Fatal(err)
	}
	return (&http.Client{Transport: handlerTransport{handler}}).Do(r)
}

// TestALineIsAnsweredBeforeTheNextIsSent shows that bodies pass in both directions at once, as for a push of lines.
func TestALineIsAnsweredBeforeTheNextIsSent(t *testing.T) {
	source, lines := io.Pipe()
	answer, err := send(t, t.Context(), func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		w.WriteHeader(http.StatusAccepted)
		for in := bufio.NewScanner(r.Body); in.Scan(); {
			fmt.Fprintf(w, "got %s\n", in.Text())
			_ = http.NewResponseController(w).Flush()
		}
	}, source)
	if err != nil || answer.StatusCode != http.StatusAccepted {
		t.Fatal(answer, err)
	}
	defer answer.Body.Close()
	replies := bufio.NewReader(answer.Body)
	for i := range 3 {
		fmt.Fprintf(lines, "line %d\n", i)
		if reply, err := replies.ReadString('\n'); err != nil || reply != fmt.Sprintf("got line %d\n", i) {
			t.Fatalf("line %d was answered with %q (%v)", i, reply, err)
		}
	}
	lines.Close()
	if rest, err := io.ReadAll(replies); err != nil || len(rest) != 0 {
		t.Errorf("the end is %q (%v)", rest, err)
	}
}

func TestCancellationEndsTheHandlerInThisProcess(t *testing.T) {
	for name, blocks := range map[string]func(http.ResponseWriter, *http.Request){
		"before the answer": func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
		"in a read":         func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) },
		"in a write": func(w http.ResponseWriter, _ *http.Request) {
			for _, err := w.Write([]byte("x")); err == nil; {
				_, err = w.Write([]byte("x"))
			}
		},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		entered, left := make(chan struct{}), make(chan struct{})
		source, _ := io.Pipe()
		go func() {
			answer, err := send(t, ctx, func(w http.ResponseWriter, r *http.Request) {
				close(entered)
				blocks(w, r)
				close(left)
			}, source)
			if err == nil {
				answer.Body.Close()
			}
		}()
		<-entered
		cancel()
		select {
		case <-left:
		case <-time.After(time.Minute):
			t.Errorf("a handler that blocks %s goes on after the request was cancelled", name)
		}
	}
}

func TestAHandlerThatPanicsAbortsItsAnswer(t *testing.T) {
	answer, err := send(t, t.Context(), func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "half")
		panic(http.ErrAbortHandler)
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if text, err := io.ReadAll(answer.Body); err == nil || string(text) != "half" {
		t.Errorf("read %q without an error", text)
	}
}

// TestTheClientWorksOnTheDatabase runs what streams and waits through the handler in this process.
func TestTheClientWorksOnTheDatabase(t *testing.T) {
	s := newSession(t)
	s.penstock("queue create mails --reason test")
	a := newApp(nil, io.Discard, io.Discard, func(string) string { return "" })
	a.databaseURL, a.timeout, a.actor = s.dsn, 30*time.Second, "ada@ops"
	t.Cleanup(a.close)
	c, err := a.connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	sum, err := c.api.PushStream(t.Context(), "mails", func(yield func(client.Push) bool) {
		for i := range 2500 {
			if !yield(client.Push{Payload: i}) {
				return
			}
		}
	})
	if err != nil || sum.Inserted != 2500 {
		t.Fatalf("streamed %+v (%v)", sum, err)
	}
	ended := make(chan client.EntryState, 1)
	go func() {
		state, err := c.api.Wait(t.Context(), 7)
		if err != nil {
			t.Error(err)
		}
		ended <- state
	}()
	var kinds []string
	for e, err := range c.api.Follow(t.Context(), 7, "") {
		if err != nil {
			t.Fatal(err)
		}
		if kinds = append(kinds, e.Kind); len(kinds) == 1 {
			if _, err := c.api.Cancel(t.Context(), 7, "test"); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := strings.Join(kinds, " "); got != "state ended" {
		t.Errorf("events are %s", got)
	}
	if state := <-ended; state.State != "cancelled" {
		t.Errorf("the wait ended with %+v", state)
	}
	if _, err := get[any](t.Context(), c, "/v1/entries/4711"); !errors.Is(err, invalidation.ErrEntryNotFound) {
		t.Errorf("an entry that does not exist: %v", err)
	}
}

// A server resolves the segments . and .. of a path, so that a name of dots has to be escaped: else a job of that name
// can be neither shown nor removed.
func TestANameOfDotsIsASegmentOfItsAddress(t *testing.T) {
	var got string
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/cron/{job}", func(_ http.ResponseWriter, r *http.Request) { got = r.PathValue("job") })
	for _, name := range []string{".", "..", "...", "a/../b", "50% off", "a b", "x?y#z"} {
		got = ""
		mux.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), "GET", at("/v1/cron/%s", name), nil))
		if got != name {
			t.Errorf("%q arrives as %q", name, got)
		}
	}
}
