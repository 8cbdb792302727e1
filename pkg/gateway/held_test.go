package gateway

import (
	"crypto/sha256"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// The requests of one token leave half of the memory for bodies to others, whether they say how long they are or not.
func TestBodiesOfOneTokenLeaveRoomForOthers(t *testing.T) {
	t.Parallel()
	g := New(Config{BodyMax: 1000, BodiesMax: 4000})
	g.SetTokens([]TokenState{
		{Hash: sha256.Sum256([]byte("one")), Name: "evil"},
		{Hash: sha256.Sum256([]byte("two")), Name: "evil"},
		{Hash: sha256.Sum256([]byte("other")), Name: "shop"},
	})
	read := func(token string, length int64) (*heldBody, error) {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", strings.NewReader(strings.Repeat("x", 1000)))
		r.ContentLength = length
		by := g.tokens.find(token, time.Now())
		if by == nil {
			return g.readBody(r, nil, 1000)
		}
		return g.readBody(r, by.held(), 1000)
	}
	var kept []*heldBody
	for _, token := range []string{"one", "two"} {
		h, err := read(token, 1000)
		if err != nil {
			t.Fatal(err)
		}
		kept = append(kept, h)
	}
	for _, length := range []int64{1000, -1} {
		h, err := read("two", length)
		if !errors.Is(err, errShareFull) {
			t.Errorf("length %d: got %v, want that the share is full", length, err)
		}
		if h != nil {
			h.letGo()
		}
	}
	for _, token := range []string{"other", "none"} {
		h, err := read(token, -1)
		if err != nil {
			t.Errorf("%s: %v", token, err)
		}
		defer h.letGo()
	}
	kept[0].letGo()
	h, err := read("two", -1)
	if err != nil {
		t.Errorf("what ended is not given back: %v", err)
	}
	h.letGo()
	kept[1].letGo()
	if n := g.tokens.find("one", time.Now()).held().bodies.Load(); n != 0 {
		t.Errorf("%d bytes are counted behind the last use", n)
	}
}

// The same of the bodies of requests that wait, over all pools.
func TestWaitingBodiesOfOneTokenLeaveRoomForOthers(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	budget := &byteBudget{most: 1000, each: 500}
	var evil, shop heldBytes
	send := func(p *Pool, by *heldBytes, n int) (*Request, *Rejection) {
		r := &Request{Flow: "f", Criticality: Default, Bytes: n, Held: by}
		_, refused := p.Arrive(now, r)
		return r, refused
	}
	first, second := NewPool(DefaultPolicy(), budget), NewPool(DefaultPolicy(), budget)
	for _, p := range []*Pool{first, second} {
		p.SetInstances(now, []InstanceState{{ID: 1, Slots: 1, Usable: true}})
	}
	r, refused := send(first, &evil, 400)
	if refused != nil {
		t.Fatal(refused)
	}
	if _, refused := send(second, &evil, 101); refused == nil || refused.Reason != DropOverloaded {
		t.Errorf("got %v, want that the share is full", refused)
	}
	if _, refused := send(second, &shop, 500); refused != nil {
		t.Errorf("another token: %v", refused)
	}
	first.Cancel(now, r, DropCancelled)
	if _, refused := send(second, &evil, 101); refused != nil || evil.waiting.Load() != 101 {
		t.Errorf("what went is not given back: %v, %d bytes are counted", refused, evil.waiting.Load())
	}
}
