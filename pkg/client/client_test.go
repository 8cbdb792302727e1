package client_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/pkg/client"
)

// transport answers instead of a server.
type transport func(*http.Request) (*http.Response, error)

func (t transport) RoundTrip(r *http.Request) (*http.Response, error) { return t(r) }

func reply(status int, body string, header ...string) *http.Response {
	r := &http.Response{StatusCode: status, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(body))}
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return r
}

func TestPushIsSentAgainUnderTheSameKeyNoSoonerThanTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var keys []string
		var at []time.Duration
		start := time.Now()
		c := client.New(client.Config{URL: "http://x", HTTP: &http.Client{Transport: transport(func(r *http.Request) (*http.Response, error) {
			keys, at = append(keys, r.Header.Get("Idempotency-Key")), append(at, time.Since(start))
			switch len(keys) {
			case 1:
				return nil, errors.New("connection lost")
			case 2:
				return reply(429, `{"code": "queue_full", "detail": "full"}`, "Retry-After", "7"), nil
			default:
				return reply(201, `{"id": 5, "verdict": "inserted"}`), nil
			}
		})}})
		pushed, err := c.Push(t.Context(), "q", client.Push{Payload: 1})
		if err != nil || pushed.ID != 5 || len(keys) != 3 || keys[0] != keys[1] || keys[1] != keys[2] || len(keys[0]) < 20 {
			t.Fatalf("%+v (%v) under %v", pushed, err, keys)
		}
		if waited := at[2] - at[1]; waited < 7*time.Second || waited > 8500*time.Millisecond {
			t.Errorf("came back after %s, was told 7 s", waited)
		}
	})
}

func TestOnlyWhatCanBeSentTwiceIsSentAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		answer := reply
		c := client.New(client.Config{URL: "http://x", HTTP: &http.Client{Transport: transport(func(*http.Request) (*http.Response, error) {
			n++
			return answer(503, `{"code": "unavailable", "detail": "away"}`, "Retry-After", "1"), nil
		})}})
		for _, call := range []struct {
			name string
			do   func() error
			want int
		}{
			{"retry of a failure", func() error { return c.Retry(t.Context(), 1, "r") }, 1},
			{"pause", func() error { return c.Pause(t.Context(), "q", "r", time.Time{}) }, 1},
			{"entry", func() error { _, err := c.Entry(t.Context(), 1); return err }, 5},
			{"push", func() error { _, err := c.Push(t.Context(), "q", client.Push{}); return err }, 5},
		} {
			n = 0
			if err := call.do(); !errors.Is(err, client.Unavailable) || n != call.want {
				t.Errorf("%s: sent %d times, want %d (%v)", call.name, n, call.want, err)
			}
		}
		answer = func(int, string, ...string) *http.Response {
			return reply(429, `{"code":"queue_full"}`, "Retry-After", "3600")
		}
		n = 0
		var e *client.Error
		if _, err := c.Push(t.Context(), "q", client.Push{}); n != 1 || !errors.As(err, &e) || e.RetryAfter != time.Hour {
			t.Errorf("told to come back in an hour: sent %d times (%v)", n, err)
		}
		answer = func(int, string, ...string) *http.Response { return reply(502, `<html>bad gateway`) }
		if _, err := c.Entry(t.Context(), 1); !errors.As(err, &e) || e.Status != 502 || e.Code != "unknown" {
			t.Errorf("answer of something in between: %v", err)
		}
	})
}

// A refusal behind a try without an answer does not say that nothing was accepted.
func TestARefusalComesWithTheTryWhoseAnswerIsNotKnown(t *testing.T) {
	lost := errors.New("connection lost")
	synctest.Test(t, func(t *testing.T) {
		tries, after := 0, "3600"
		c := client.New(client.Config{URL: "http://x", HTTP: &http.Client{Transport: transport(func(*http.Request) (*http.Response, error) {
			if tries++; tries == 1 {
				return nil, lost
			}
			return reply(429, `{"code": "rate_exceeded", "detail": "too fast"}`, "Retry-After", after), nil
		})}})
		_, err := c.PushMany(t.Context(), "q", []client.Push{{Payload: 1}})
		if !errors.Is(err, client.Code("rate_exceeded")) || !errors.Is(err, lost) || tries != 2 {
			t.Errorf("%v after %d tries, want both errors", err, tries)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		tries, after = 0, "20"
		_, err = c.PushMany(ctx, "q", []client.Push{{Payload: 1}})
		if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, client.Code("rate_exceeded")) || !errors.Is(err, lost) || tries != 2 {
			t.Errorf("its time ends in the pause: %v after %d tries, want all three errors", err, tries)
		}
	})
}

func TestStreamGoesOutInPartsThatKeepTheirLines(t *testing.T) {
	var parts, lines atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := int64(0)
		for d := json.NewDecoder(r.Body); d.More(); n++ {
			var e map[string]any
			if err := d.Decode(&e); err != nil {
				t.Error(err)
			}
		}
		if lines.Add(n); parts.Add(1) == 2 && r.Header.Get("Idempotency-Key") == "" {
			t.Error("no key")
		}
		fmt.Fprintf(w, `{"summary": {"lines": %d, "inserted": %d, "refused": 1, "errors": [{"line": 3, "code": "invalid"}]}}`, n, n-1)
	}))
	defer server.Close()
	c := client.New(client.Config{URL: server.URL})
	sum, err := c.PushStream(t.Context(), "q", func(yield func(client.Push) bool) {
		for i := range 25_000 {
			if !yield(client.Push{Payload: i}) {
				return
			}
		}
	})
	if err != nil || parts.Load() != 3 || lines.Load() != 25_000 || sum.Lines != 25_000 || sum.Refused != 3 || sum.Errors[2].Line != 20_003 {
		t.Errorf("%d parts, %d lines, %+v (%v)", parts.Load(), lines.Load(), sum, err)
	}
}

// A transport may read the body of a request that it has answered until it closes it.
func TestAPartOfAStreamStaysAsItWasSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var refused io.Reader
		var sent, late []byte
		c := client.New(client.Config{URL: "http://x", HTTP: &http.Client{Transport: transport(func(r *http.Request) (*http.Response, error) {
			switch {
			case refused == nil:
				refused = r.Body
				return reply(503, `{"code": "unavailable"}`), nil
			case sent == nil:
				sent, _ = io.ReadAll(r.Body)
			default:
				late, _ = io.ReadAll(refused)
			}
			return reply(200, `{"summary": {"lines": 1}}`), nil
		})}})
		_, err := c.PushStream(t.Context(), "q", func(yield func(client.Push) bool) {
			_ = yield(client.Push{Payload: strings.Repeat("a", 5<<20)}) && yield(client.Push{Payload: "b"})
		})
		if err != nil || len(late) < 5<<20 || !bytes.Equal(sent, late) {
			t.Errorf("%v: the body of the first try begins with %.40q, that of the second with %.40q", err, late, sent)
		}
	})
}

// A part that gets further each time is no failure, however often it is sent: the rate of a token refuses the rest.
func TestAStreamIsSentAgainForAsLongAsItGetsFurther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, c := range map[string]struct{ burst, end, times int }{
			"to its end": {4, 40, 10}, "to where it stays": {4, 20, 9},
		} {
			times := 0
			api := client.New(client.Config{URL: "http://x", HTTP: &http.Client{Transport: transport(func(*http.Request) (*http.Response, error) {
				times++
				if n := min(times*c.burst, c.end); n < 40 {
					return reply(429, fmt.Sprintf(`{"code": "rate_exceeded", "summary": {"lines": %d}}`, n), "Retry-After", "1"), nil
				}
				return reply(200, `{"summary": {"lines": 40, "inserted": 4, "replayed": 36}}`), nil
			})}})
			sum, err := api.PushStream(t.Context(), "q", slices.Values(make([]client.Push, 40)))
			if times != c.times || (err == nil) != (c.end == 40) || err == nil && sum.Lines != 40 {
				t.Errorf("%s: sent %d times, %+v (%v)", name, times, sum, err)
			}
		}
	})
}

func TestWaitAsksUntilTheEntryHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		c := client.New(client.Config{URL: "http://x", Token: "secret", HTTP: &http.Client{Transport: transport(func(r *http.Request) (*http.Response, error) {
			if r.URL.RequestURI() != "/v1/entries/7?wait=30s" || r.Header.Get("Authorization") != "Bearer secret" {
				t.Errorf("asked for %s with %s", r.URL, r.Header)
			}
			if n++; n < 3 {
				return reply(200, `{"id": 7, "state": "computing"}`), nil
			}
			return reply(200, `{"id": 7, "state": "done", "result": {"n": 1}}`), nil
		})}})
		s, err := c.Wait(t.Context(), 7)
		if err != nil || n != 3 || string(s.Result) != `{"n": 1}` {
			t.Errorf("%+v after %d (%v)", s, n, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		n = -1 << 30
		if _, err := c.Wait(ctx, 7); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("without end: %v", err)
		}
	})
}

func TestCallsAreSentAgainOnlyIfTheyCanBeSentTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			call  client.RawRequest
			times int
		}{
			{client.RawRequest{Method: "GET", Path: "/v1/nodes"}, 3},
			{client.RawRequest{Method: "PATCH", Path: "/v1/queues/q", In: map[string]any{"reason": "test"}, IfMatch: "*"}, 1},
			{client.RawRequest{Method: "POST", Path: "/v1/queues/q/entries", In: []int{1}, Key: "k"}, 3},
		} {
			times := 0
			api := client.New(client.Config{URL: "http://x", Tries: 3, HTTP: &http.Client{Transport: transport(func(r *http.Request) (*http.Response, error) {
				times++
				if r.Method != c.call.Method || r.URL.Path != c.call.Path || r.Header.Get("If-Match") != c.call.IfMatch {
					t.Errorf("%s %s with If-Match %q", r.Method, r.URL, r.Header.Get("If-Match"))
				}
				return reply(503, `{"code": "unavailable", "detail": "away"}`), nil
			})}})
			if err := api.Do(t.Context(), c.call, nil); !errors.Is(err, client.Unavailable) || times != c.times {
				t.Errorf("%s was sent %d times, want %d (%v)", c.call.Method, times, c.times, err)
			}
		}
	})
}

// TestARedirectIsNotFollowed keeps a push from arriving as a GET that succeeds, and the token from going elsewhere.
func TestARedirectIsNotFollowed(t *testing.T) {
	reached := false
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		reached = true
		_, _ = io.WriteString(w, `{"id": 1, "verdict": "inserted"}`)
	}))
	defer other.Close()
	server := httptest.NewServer(http.RedirectHandler(other.URL, http.StatusFound))
	defer server.Close()
	_, err := client.New(client.Config{URL: server.URL, Token: "t", HTTP: &http.Client{}}).Push(t.Context(), "q", client.Push{Payload: 1})
	if err == nil || reached {
		t.Errorf("the redirect was followed: %v", err)
	}
}

// A client may come with a time limit, which is meant for single answers.
func TestATimeLimitOfTheHTTPClientBoundsNeitherWaitNorFollow(t *testing.T) {
	end := time.Now().Add(2 * time.Second)
	var asked, followed atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/events") {
			followed.Add(1)
			fmt.Fprint(w, "id: 1\nevent: state\ndata: {}\n\n")
			if err := http.NewResponseController(w).Flush(); err != nil {
				t.Error(err)
			}
			time.Sleep(1500 * time.Millisecond)
			fmt.Fprint(w, "id: 2\nevent: ended\ndata: {}\n\n")
			return
		}
		asked.Add(1)
		wait, err := time.ParseDuration(r.URL.Query().Get("wait"))
		if err != nil {
			t.Error(err)
		}
		select {
		case <-r.Context().Done():
			return
		case <-time.After(min(wait, time.Until(end))):
		}
		state := "computing"
		if !time.Now().Before(end) {
			state = "done"
		}
		fmt.Fprintf(w, `{"id": 7, "state": %q}`, state)
	}))
	defer server.Close()
	c := client.New(client.Config{URL: server.URL, HTTP: &http.Client{Timeout: time.Second}, Tries: 2})
	if s, err := c.Wait(t.Context(), 7); err != nil || s.State != "done" {
		t.Errorf("waited after %d requests: %+v (%v)", asked.Load(), s, err)
	}
	for _, err := range c.Follow(t.Context(), 7, "") {
		if err != nil {
			t.Error(err)
		}
	}
	if n := followed.Load(); n != 1 {
		t.Errorf("followed over %d connections, want one", n)
	}
}

func TestANegativeLongestPauseIsTheDefault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tries := 0
		c := client.New(client.Config{WaitMax: -1, HTTP: &http.Client{Transport: transport(func(*http.Request) (*http.Response, error) {
			tries++
			return nil, errors.New("connection lost")
		})}})
		if _, err := c.Entry(t.Context(), 1); err == nil || tries != 5 {
			t.Errorf("%d tries (%v), want 5", tries, err)
		}
	})
}

func TestToPushNoEntriesSendsNothing(t *testing.T) {
	c := client.New(client.Config{HTTP: &http.Client{Transport: transport(func(r *http.Request) (*http.Response, error) {
		t.Errorf("sent %s %s", r.Method, r.URL)
		return reply(422, `{"code": "invalid"}`), nil
	})}})
	if pushed, err := c.PushMany(t.Context(), "q", nil); err != nil || len(pushed) != 0 {
		t.Errorf("pushed %v (%v)", pushed, err)
	}
}
