package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/api"
	"github.com/penstock/penstock/pkg/client"
	"github.com/penstock/penstock/pkg/invalidation"
)

// A program that was restarted pushes again under its own keys, alone, in a list and in a stream.
func TestAPushUnderACallersKeyIsRepeated(t *testing.T) {
	ctx, pool := t.Context(), pgtest.New(t)
	if _, err := invalidation.Create(ctx, pool, "work", invalidation.Config{}); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(api.New(pool, api.Config{Open: true}))
	defer server.Close()
	c := client.New(client.Config{URL: server.URL})

	entry := func(key string, payload int) client.Push {
		return client.Push{Payload: payload, IdempotencyKey: key}
	}
	first, err := c.Push(ctx, "work", entry("order 1", 1))
	if err != nil || first.Verdict != "inserted" || first.Key != "order 1" {
		t.Fatalf("push: %+v (%v)", first, err)
	}
	again, err := c.Push(ctx, "work", entry("order 1", 1))
	if err != nil || again.ID != first.ID || again.Verdict != "replayed" {
		t.Errorf("push again: %+v (%v)", again, err)
	}
	if _, err := c.Push(ctx, "work", entry("order 1", 2)); !errors.Is(err, client.IdempotencyConflict) {
		t.Errorf("push another payload: %v", err)
	}
	if other, err := c.Push(ctx, "work", entry("", 1)); err != nil || other.Verdict != "inserted" {
		t.Errorf("push without a key: %+v (%v)", other, err)
	}
	many, err := c.PushMany(ctx, "work", []client.Push{entry("", 1), entry("order 1", 1), entry("order 2", 2)})
	if err != nil || many[0].Verdict != "inserted" || many[1].ID != first.ID || many[2].Verdict != "inserted" || many[2].Key != "order 2" {
		t.Errorf("push many: %+v (%v)", many, err)
	}
	sum, err := c.PushStream(ctx, "work", slices.Values([]client.Push{entry("", 1), entry("order 2", 2), entry("", 1), entry("order 3", 3)}))
	if err != nil || sum.Lines != 4 || sum.Inserted != 3 || sum.Replayed != 1 {
		t.Errorf("push stream: %+v (%v)", sum, err)
	}
}

func TestClientAndServerUnderstandEachOther(t *testing.T) {
	ctx, pool := t.Context(), pgtest.New(t)
	q, err := invalidation.Create(ctx, pool, "work", invalidation.Config{})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(api.New(pool, api.Config{Open: true}))
	defer server.Close()
	c := client.New(client.Config{URL: server.URL})

	priority := 5
	one, err := c.Push(ctx, "work", client.Push{Payload: map[string]int{"n": 1}, Priority: &priority, StartBy: time.Now().Add(time.Hour), Callback: &client.Callback{URL: "https://example.com"}})
	if err != nil || one.Verdict != "inserted" {
		t.Fatalf("push: %+v (%v)", one, err)
	}
	many, err := c.PushMany(ctx, "work", []client.Push{{Payload: 2}, {Payload: 3}})
	if err != nil || len(many) != 2 || many[1].ID <= many[0].ID {
		t.Errorf("push many: %+v (%v)", many, err)
	}
	sum, err := c.PushStream(ctx, "work", func(yield func(client.Push) bool) {
		bad := 17
		_ = yield(client.Push{Payload: 4}) && yield(client.Push{Payload: 5, Priority: &bad}) && yield(client.Push{Payload: 6})
	})
	if err != nil || sum.Inserted != 2 || sum.Refused != 1 || sum.Errors[0].Line != 2 || sum.Errors[0].Code != client.Invalid {
		t.Errorf("push stream: %+v (%v)", sum, err)
	}
	if _, err := c.Push(ctx, "nowhere", client.Push{Payload: 1}); !errors.Is(err, client.QueueNotFound) {
		t.Errorf("push to no queue: %v", err)
	}
	if verdict, err := c.Cancel(ctx, many[1].ID, "a test"); err != nil || verdict != "cancelled" {
		t.Errorf("cancel: %s (%v)", verdict, err)
	}
	if err := errors.Join(c.Pause(ctx, "work", "a test", time.Now().Add(time.Hour)), c.Resume(ctx, "work", "a test")); err != nil {
		t.Error(err)
	}
	queues, err := c.Queues(ctx)
	if err != nil || len(queues) != 2 || queues[1].Name != "work" || !json.Valid(queues[1].Raw) {
		t.Errorf("queues: %+v (%v)", queues, err)
	}

	const node = invalidation.NodeID(7)
	if err := invalidation.Register(ctx, pool, invalidation.Node{ID: node, Name: "n", Application: "default", Lease: time.Minute}); err != nil {
		t.Fatal(err)
	}
	claimed, err := q.Claim(ctx, invalidation.ClaimRequest{Node: node, ClaimID: 1, Lane: invalidation.Lane{Priority: 5}, Limit: 1})
	if err != nil || len(claimed.Locks) != 1 {
		t.Fatalf("claim: %+v (%v)", claimed, err)
	}
	ended := make(chan client.EntryState, 1)
	go func() {
		s, err := c.Wait(ctx, one.ID)
		if err != nil {
			t.Errorf("wait: %v", err)
		}
		ended <- s
	}()
	lock := claimed.Locks[0]
	failed := invalidation.Fail(lock, lock.Entries[0].ID, invalidation.Failure{Class: "input", Error: "bad input"}, time.Second)
	failed.Last = true
	if _, err := q.Settle(ctx, node, []invalidation.Ending{failed}); err != nil {
		t.Fatal(err)
	}
	if s := <-ended; s.State != "failed" || s.Error != "bad input" || s.Class != "input" {
		t.Errorf("waited for %+v", s)
	}
	failures, err := c.Failures(ctx, "work")
	if err != nil || len(failures) != 1 || failures[0].ID != one.ID {
		t.Fatalf("failures: %+v (%v)", failures, err)
	}
	if err := c.Retry(ctx, one.ID, "a test"); err != nil {
		t.Error(err)
	}
	if s, err := c.Entry(ctx, one.ID); err != nil || s.State != "pending" {
		t.Errorf("after its retry: %+v (%v)", s, err)
	}
	if err := c.Discard(ctx, one.ID, "a test"); !errors.Is(err, client.EntryNotFound) && !errors.Is(err, client.StateConflict) {
		t.Errorf("discard of what is no failure any more: %v", err)
	}
}

// unreliable breaks the connection after so many bytes of an answer.
type unreliable struct {
	http.ResponseWriter
	left int
}

func (u *unreliable) Unwrap() http.ResponseWriter { return u.ResponseWriter }

func (u *unreliable) Write(text []byte) (int, error) {
	if u.left -= len(text); u.left < 0 {
		panic(http.ErrAbortHandler)
	}
	return u.ResponseWriter.Write(text)
}

// The Go client reads along: every piece of output once and in order, although its connection is cut again and again, and
// those of a new run after those of the one before.
func TestOutputIsFollowedAcrossBrokenConnections(t *testing.T) {
	pool := pgtest.New(t)
	q, err := invalidation.Create(t.Context(), pool, "work", invalidation.Config{})
	if err != nil {
		t.Fatal(err)
	}
	const node = invalidation.NodeID(7)
	if err := invalidation.Register(t.Context(), pool, invalidation.Node{ID: node, Name: "n", Application: "default", Lease: time.Minute}); err != nil {
		t.Fatal(err)
	}
	if _, err := q.Push(t.Context(), invalidation.Push{Payload: json.RawMessage(`1`)}); err != nil {
		t.Fatal(err)
	}
	claimed, err := q.Claim(t.Context(), invalidation.ClaimRequest{Node: node, ClaimID: 1, Lane: invalidation.Lane{Priority: 1}, Limit: 1})
	if err != nil || len(claimed.Locks) != 1 {
		t.Fatalf("claim: %+v (%v)", claimed, err)
	}
	lock, own := claimed.Locks[0], api.New(pool, api.Config{Open: true})
	run := &invalidation.Run{Queue: q, Lock: lock, Entry: lock.Entries[0], Node: node}
	const pieces = 250 // more than are read at once
	var connections atomic.Int32
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		connections.Add(1)
		own.ServeHTTP(&unreliable{w, 4000}, r)
	}))
	t.Cleanup(front.Close)
	var wg sync.WaitGroup
	wg.Go(func() {
		for seq := 1; seq <= pieces; seq++ {
			data := fmt.Appendf(nil, "data: {\"word\": %d}\n\n", seq)
			if seq == 3 {
				data = []byte{0xff, 0xfe}
			}
			if err := run.AppendOutput(t.Context(), seq, data); err != nil {
				t.Error(err)
				return
			}
		}
		done := invalidation.Done(lock, lock.Entries[0].ID, json.RawMessage(`{"answer": 42}`), time.Second)
		done.Last = true
		if _, err := q.Settle(t.Context(), node, []invalidation.Ending{done}); err != nil {
			t.Error(err)
		}
	})
	c := client.New(client.Config{URL: front.URL})
	next, kinds, last := 1, map[string]int{}, client.Event{}
	for e, err := range c.Follow(t.Context(), int64(lock.Entries[0].ID), "") {
		if err != nil {
			t.Fatal(err)
		}
		kinds[e.Kind]++
		last = e
		if e.Kind != "output" {
			continue
		}
		want := fmt.Sprintf("data: {\"word\": %d}\n\n", next)
		if next == 3 {
			want = "\xff\xfe"
		}
		if e.Seq != next || e.Token != int64(lock.Token) || e.Attempt != 1 || string(e.Output) != want {
			t.Fatalf("piece %d of token %d: %q, want piece %d of %d", e.Seq, e.Token, e.Output, next, lock.Token)
		}
		next++
	}
	wg.Wait()
	if kinds["output"] != pieces || kinds["ended"] != 1 || last.State.State != "done" || string(last.State.Result) != `{"answer":42}` || connections.Load() < 5 {
		t.Errorf("over %d connections: %v, at last %+v", connections.Load(), kinds, last)
	}
	// Who comes after the end is told everything, and from where it likes.
	for after, want := range map[string]int{"": pieces, fmt.Sprintf("0.%s.%s", strconv.FormatInt(int64(lock.Token), 36), strconv.FormatInt(pieces-7, 36)): 7, "-": 0, "nonsense": pieces} {
		got := 0
		for e, err := range c.Follow(t.Context(), int64(lock.Entries[0].ID), after) {
			if err != nil {
				t.Fatal(err)
			}
			if e.Kind == "output" {
				got++
			}
		}
		if got != want {
			t.Errorf("after %q: %d pieces, want %d", after, got, want)
		}
	}
	for _, err := range c.Follow(t.Context(), 987654, "") {
		if !errors.Is(err, client.EntryNotFound) {
			t.Errorf("an entry that is not there: %v", err)
		}
	}
}
