package web

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// max_concurrent bounds locks: a lock that covers ten entries of a key is one of them.
func TestALimitIsComparedWithLocksAndNotWithEntries(t *testing.T) {
	s := newSite(t)
	q, err := invalidation.Create(t.Context(), s.pool, "keyed", invalidation.Config{MaxConcurrent: 4})
	if err != nil {
		t.Fatal(err)
	}
	pushes := make([]invalidation.Push, 10)
	for i := range pushes {
		pushes[i] = invalidation.Push{Payload: json.RawMessage(`{}`), LockKey: "user-1"}
	}
	if _, err := q.Push(t.Context(), pushes...); err != nil {
		t.Fatal(err)
	}
	node := invalidation.Node{ID: 7001, Name: "node-1", Application: "default", Lease: time.Hour, Queues: []int32{q.ID}}
	if err := invalidation.Register(t.Context(), s.pool, node); err != nil {
		t.Fatal(err)
	}
	claimed, err := q.Claim(t.Context(), invalidation.ClaimRequest{Node: 7001, Lane: invalidation.Lane{Priority: 1}, Limit: 10})
	if err != nil || len(claimed.Locks) != 1 || len(claimed.Locks[0].Entries) < 2 {
		t.Fatalf("claimed %+v, %v", claimed, err)
	}
	b := s.as(viewer)
	if page := b.get("queues/keyed").text; !strings.Contains(page, "1 of 4 locks at once") {
		t.Errorf("the page of the queue: %s", page)
	}
	if page := b.get("queues").text; !regexp.MustCompile(`<td class="n">10<td class="n">25 %`).MatchString(page) {
		t.Errorf("the list of queues: %s", page)
	}
}
