package main

import (
	"encoding/json"
	"errors"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/api"
	"github.com/penstock/penstock/pkg/client"
	"github.com/penstock/penstock/pkg/invalidation"
)

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
	one, err := c.Push(ctx, "work", client.Entry{Payload: map[string]int{"n": 1}, Priority: &priority, StartBy: time.Now().Add(time.Hour), Callback: &client.Callback{URL: "https://example.com"}})
	if err != nil || one.Verdict != "inserted" {
		t.Fatalf("push: %+v (%v)", one, err)
	}
	many, err := c.PushMany(ctx, "work", []client.Entry{{Payload: 2}, {Payload: 3}})
	if err != nil || len(many) != 2 || many[1].ID <= many[0].ID {
		t.Errorf("push many: %+v (%v)", many, err)
	}
	sum, err := c.PushStream(ctx, "work", func(yield func(client.Entry) bool) {
		bad := 17
		_ = yield(client.Entry{Payload: 4}) && yield(client.Entry{Payload: 5, Priority: &bad}) && yield(client.Entry{Payload: 6})
	})
	if err != nil || sum.Inserted != 2 || sum.Refused != 1 || sum.Errors[0].Line != 2 || sum.Errors[0].Code != client.Invalid {
		t.Errorf("push stream: %+v (%v)", sum, err)
	}
	if _, err := c.Push(ctx, "nowhere", client.Entry{Payload: 1}); !errors.Is(err, client.QueueNotFound) {
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
	ended := make(chan client.State, 1)
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
