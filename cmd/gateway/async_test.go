package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/penstock/penstock/pkg/api"
)

// asyncAnswer is what a client that prefers respond-async is answered.
type asyncAnswer struct {
	status int
	header http.Header
	text   string
}

func (f *front) prefer(t *testing.T, prefer, body string) asyncAnswer {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Prefer", prefer)
	status, header, text := send(t, request)
	return asyncAnswer{status, header, string(text)}
}

// With on_full: push a request that finds no room becomes an entry. A client that waits gets its result, one whose wait
// is over the address of the entry, and one that did not agree is refused.
func TestRequestWithoutRoomBecomesAnEntryAndGetsItsResult(t *testing.T) {
	t.Parallel()
	s := newSite(t, 2)
	s.exec(`SELECT penstock.set_gateway_policy('m', '{"total": 0, "on_full": "push"}', 'test')`)
	leader := httptest.NewServer(api.New(s.pool, api.Config{Open: true}))
	t.Cleanup(leader.Close)
	f := s.startGateway(func(c *Config) { c.Gateway.APIURL = leader.URL })
	s.startNode(4)

	if a := f.prefer(t, "respond-async, wait=60", quick); a.status != http.StatusOK || !strings.Contains(a.text, `"content": "x"`) ||
		a.header.Get("Content-Location") == "" {
		t.Errorf("a client that waits: got %+v", a)
	}
	if a := f.prefer(t, "respond-async, wait=60", `{"model":"m","messages":[],"fail":true}`); a.status != http.StatusBadGateway ||
		!strings.Contains(a.text, "the prompt is not allowed") {
		t.Errorf("an entry that fails: got %+v", a)
	}
	if a := f.prefer(t, "wait=60", quick); a.status != http.StatusTooManyRequests {
		t.Errorf("a client that did not agree: got %+v", a)
	}
	a := f.prefer(t, "respond-async, wait=1", hold)
	location := a.header.Get("Location")
	if a.status != http.StatusAccepted || !strings.HasPrefix(location, leader.URL+"/v1/entries/") {
		t.Fatalf("a client whose wait is over: got %+v", a)
	}
	close(s.gpu.release)
	s.eventually("the result is at the address", func() bool {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, location, nil)
		if err != nil {
			t.Fatal(err)
		}
		var text string
		return f.do(t, request, &text) == http.StatusOK && strings.Contains(text, `"content"`)
	})
}
