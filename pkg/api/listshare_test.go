package api

import (
	"encoding/json"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/pkg/operator"
)

// A token that asks for more lists at once than its share is refused for its own ones, which is no error of ours; the
// next token has places, and what reads few rows needs none.
func TestOneTokenLeavesPlacesForTheListsOfOthers(t *testing.T) {
	db := newSlowFailures(t, listsMax+4)
	a := New(db, Config{Timeout: time.Minute})
	a.lists.wait = time.Millisecond
	const failures = "/v1/failures?queue=work"
	secrets := map[string]string{}
	for _, name := range []string{"shop", "other", "third", "fourth"} {
		secrets[name] = newToken(t, db.Pool, operator.Grant{Name: name, Scopes: []string{"read"}})
	}
	var lists sync.WaitGroup
	t.Cleanup(lists.Wait)
	t.Cleanup(sync.OnceFunc(func() { close(db.ended) }))
	begin := func(name string) {
		t.Helper()
		lists.Go(func() { call(a, "GET", failures, "", secrets[name]) })
		select {
		case <-db.begun:
		case <-time.After(time.Minute):
			t.Fatalf("a list of %s has not begun", name)
		}
	}
	refused := func(name string, status int, code string) {
		t.Helper()
		w := call(a, "GET", failures, "", secrets[name])
		var p Problem
		_ = json.Unmarshal(w.Body.Bytes(), &p) // one that is no JSON has no code
		if w.Code != status || p.Code != code || w.Header().Get("Retry-After") == "" {
			t.Errorf("one list more of %s: %d %s, want %d %s", name, w.Code, w.Body, status, code)
		}
	}
	for range listsEach {
		begin("shop")
	}
	refused("shop", http.StatusTooManyRequests, "too_many_requests")
	begin("other")
	refused("other", http.StatusTooManyRequests, "too_many_requests") // the last place is for those that have none
	begin("third")
	refused("shop", http.StatusTooManyRequests, "too_many_requests")
	refused("other", http.StatusServiceUnavailable, "busy")
	refused("fourth", http.StatusServiceUnavailable, "busy")
	if w := call(a, "GET", "/v1/nodes", "", secrets["fourth"]); w.Code != http.StatusOK {
		t.Errorf("nodes beside as many lists as may be: %d %s", w.Code, w.Body)
	}
	if n := len(a.lists.of); n != 3 {
		t.Errorf("shares of %d tokens are kept, of which three have lists", n)
	}
}

// A place that comes free is given to a token that has none before one that has, whoever waits for longer.
func TestAPlaceOfListsIsGivenToATokenWithoutOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newListPlaces()
		l.wait = time.Hour
		var leave []func()
		for _, holder := range []string{"a", "a", "b", "c"} {
			one, err := l.enter(t.Context(), holder)
			if err != nil {
				t.Fatal(err)
			}
			leave = append(leave, one)
		}
		placed := make(chan string, 4)
		for _, holder := range []string{"b", "c", "a", "d"} {
			go func() {
				if _, err := l.enter(t.Context(), holder); err == nil {
					placed <- holder
				}
			}()
			synctest.Wait()
		}
		for _, i := range []int{0, 3, 2} { // of a, c, b
			leave[i]()
			synctest.Wait()
		}
		close(placed)
		if got := slices.Collect(func(yield func(string) bool) {
			for holder := range placed {
				yield(holder)
			}
		}); !slices.Equal(got, []string{"d", "c", "b"}) {
			t.Errorf("places were given to %v in this order, want d, c, b", got)
		}
	})
}

func TestCostlyListsAreRoutes(t *testing.T) {
	a := New(nil, Config{Open: true})
	for _, id := range costlyLists {
		if !slices.ContainsFunc(a.routes, func(r route) bool { return r.id == id }) {
			t.Errorf("there is no route %s", id)
		}
	}
}
