package client

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Config says where the API is. URL is needed, and Token unless the server is open.
type Config struct {
	URL   string // as in http://127.0.0.1:8420
	Token string
	// HTTP sends the requests. Default: a client without a time limit of its own; contexts bound requests.
	// Unless it has a CheckRedirect, redirects are not followed: a POST would arrive as a GET, and the token
	// at another address. A Timeout of it bounds no Follow, and Wait asks for half of it at a time.
	HTTP *http.Client
	// Tries is how often a request is sent that can be sent twice. Default 5; 1 for never again. A part of a stream
	// that got further has all of them anew.
	Tries int
	// WaitMax is the longest pause before it is sent again: where the server asks for more, its error is returned.
	// Default 30 s.
	WaitMax time.Duration
}

// Client is safe for many goroutines.
type Client struct {
	cfg    Config
	stream *http.Client // without a time limit
}

// New returns a client. It connects when first used.
func New(cfg Config) *Client {
	cfg.URL = strings.TrimSuffix(cfg.URL, "/")
	sender := http.Client{}
	if cfg.HTTP != nil {
		sender = *cfg.HTTP
	}
	if sender.CheckRedirect == nil {
		sender.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	}
	cfg.HTTP = &sender
	cfg.Tries = cmp.Or(cfg.Tries, 5)
	cfg.WaitMax = cmp.Or(max(cfg.WaitMax, 0), 30*time.Second)
	stream := sender
	stream.Timeout = 0
	return &Client{cfg: cfg, stream: &stream}
}

// Code is the kind of an error of the API. It is compared with errors.Is.
type Code string

// The codes that programs most often tell apart; docs/api.md has all of them.
const (
	QueueNotFound       Code = "queue_not_found"
	EntryNotFound       Code = "entry_not_found"
	QueueFull           Code = "queue_full"
	NoInstance          Code = "no_instance"
	Invalid             Code = "invalid"
	PayloadTooLarge     Code = "payload_too_large"
	IdempotencyConflict Code = "idempotency_conflict"
	StateConflict       Code = "state_conflict"
	Unauthorized        Code = "unauthorized"
	Forbidden           Code = "forbidden"
	Unavailable         Code = "unavailable"
)

func (c Code) Error() string { return string(c) }

// Error is an answer of the API that refuses a request.
type Error struct {
	Status int    `json:"status"`
	Code   Code   `json:"code"`
	Detail string `json:"detail"`
	// Errors name the invalid parts of the request.
	Errors []struct {
		Location string `json:"location"`
		Message  string `json:"message"`
	} `json:"errors"`
	// RetryAfter is when to come back, 0 if the server did not say.
	RetryAfter time.Duration `json:"-"`
	// Summary says how far a stream came.
	Summary *Summary `json:"summary"`
}

func (e *Error) Error() string { return fmt.Sprintf("%s (%d): %s", e.Code, e.Status, e.Detail) }

// Is compares the code.
func (e *Error) Is(target error) bool {
	code, ok := target.(Code)
	return ok && code == e.Code
}

// request is one call of the API. Again says that it can be sent twice.
type request struct {
	method, path string
	media        string // of body; application/json if empty
	body         []byte
	key          string // Idempotency-Key
	ifMatch      string
	after        string // Last-Event-ID
	again        bool
	stream       bool // its answer takes as long as there is something to come
}

// RawRequest is a call of the API for which there is no method of its own here; docs/openapi.yaml lists all addresses.
type RawRequest struct {
	Method, Path string // Path with its query, escaped
	In           any    // the body, as JSON; nil for none
	IfMatch      string // the ETag of the object to change, or *
	Key          string // Idempotency-Key, for a push
	Again        bool   // it can be sent twice: its entries have keys of their own
}

// Do makes a call and reads the answer into a pointer, nil for none; status 204 leaves it as it is. It sends requests
// again that can be sent twice: a GET, one with a Key, and one for which Again is set.
func (c *Client) Do(ctx context.Context, call RawRequest, into any) error {
	r := request{
		method: call.Method, path: call.Path, key: call.Key, ifMatch: call.IfMatch,
		again: call.Method == http.MethodGet || call.Key != "" || call.Again,
	}
	if call.In != nil {
		var err error
		if r.body, err = json.Marshal(call.In); err != nil {
			return wrap(r, fmt.Errorf("write body: %w", err))
		}
	}
	return c.do(ctx, r, into)
}

// do sends a request, again where that helps, and reads the answer into a pointer, nil for none. A refusal behind a try
// whose answer is not known comes with the error of that try: what it asked for may be done.
func (c *Client) do(ctx context.Context, r request, into any) error {
	furthest := int64(0)
	var unknown error
	for try := 1; ; try++ {
		err := c.once(ctx, r, into)
		var answered *Error
		if errors.As(err, &answered) && answered.Summary != nil && answered.Summary.Lines > furthest {
			furthest, try = answered.Summary.Lines, 1
		}
		wait, retry := c.pause(err, try)
		if answered == nil || answered.Status >= http.StatusInternalServerError {
			unknown = err
		} else if unknown != nil && r.method != http.MethodGet {
			err = fmt.Errorf("%w (an earlier try, which may have been accepted: %w)", err, unknown)
		}
		if err == nil || !retry || !r.again || try >= c.cfg.Tries || ctx.Err() != nil {
			return wrap(r, err)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return wrap(r, errors.Join(context.Cause(ctx), err))
		}
	}
}

func wrap(r request, err error) error {
	if err == nil {
		return nil
	}
	path, _, _ := strings.Cut(r.path, "?")
	return fmt.Errorf("%s %s: %w", r.method, path, err)
}

// backoffMin is the pause after a first try where the server did not say; it doubles.
const backoffMin = 100 * time.Millisecond

// pause says how long to wait after an error, and whether sending again can help at all. What the server asked for is
// kept, and up to a fifth more, so that those it refused together do not come back together.
func (c *Client) pause(err error, try int) (time.Duration, bool) {
	var answered *Error
	if !errors.As(err, &answered) {
		return rand.N(min(backoffMin<<min(try, 16), c.cfg.WaitMax)), true // no answer
	}
	switch answered.Status {
	case http.StatusRequestTimeout, http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable,
		http.StatusGatewayTimeout:
	default:
		if answered.Code != "idempotency_key_in_use" {
			return 0, false
		}
	}
	if answered.RetryAfter > 0 {
		return answered.RetryAfter + rand.N(answered.RetryAfter/5+1), answered.RetryAfter <= c.cfg.WaitMax
	}
	return backoffMin + rand.N(min(backoffMin<<min(try, 16), c.cfg.WaitMax)), true
}

func (c *Client) once(ctx context.Context, r request, into any) error {
	answer, err := c.send(ctx, r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if into == nil || answer.StatusCode == http.StatusNoContent {
		_, err = io.Copy(io.Discard, answer.Body)
		return err
	}
	if err := json.NewDecoder(answer.Body).Decode(into); err != nil {
		return fmt.Errorf("read answer: %w", err)
	}
	return nil
}

// send sends a request once. What is not a success is an error.
func (c *Client) send(ctx context.Context, r request) (*http.Response, error) {
	var body io.Reader
	if r.body != nil {
		body = bytes.NewReader(r.body)
	}
	sent, err := http.NewRequestWithContext(ctx, r.method, c.cfg.URL+r.path, body)
	if err != nil {
		return nil, err
	}
	if r.body != nil {
		sent.Header.Set("Content-Type", cmp.Or(r.media, "application/json"))
	}
	for name, value := range map[string]string{"If-Match": r.ifMatch, "Last-Event-ID": r.after} {
		if value != "" {
			sent.Header.Set(name, value)
		}
	}
	if c.cfg.Token != "" {
		sent.Header.Set("Authorization", "Bearer "+c.cfg.Token)
	}
	if r.key != "" {
		sent.Header.Set("Idempotency-Key", strconv.Quote(r.key))
	}
	sender := c.cfg.HTTP
	if r.stream {
		sender = c.stream
	}
	answer, err := sender.Do(sent)
	if err != nil {
		return nil, err
	}
	if answer.StatusCode >= 300 {
		defer answer.Body.Close()
		return nil, readError(answer)
	}
	return answer, nil
}

// readError reads a problem document. Something between us and the server may have answered instead, in its own words.
func readError(answer *http.Response) error {
	e := &Error{}
	text, err := io.ReadAll(io.LimitReader(answer.Body, 1<<20))
	if err != nil || json.Unmarshal(text, e) != nil || e.Code == "" {
		e = &Error{Code: "unknown", Detail: strings.ToValidUTF8(string(text[:min(len(text), 200)]), "?")}
		if to := answer.Header.Get("Location"); to != "" && answer.StatusCode < http.StatusBadRequest {
			e.Detail = "a redirect, which is not followed, to " + to
		}
	}
	e.Status = answer.StatusCode
	after := answer.Header.Get("Retry-After")
	if seconds, err := strconv.ParseUint(after, 10, 31); err == nil {
		e.RetryAfter = time.Duration(seconds) * time.Second
	} else if at, err := http.ParseTime(after); err == nil {
		e.RetryAfter = max(time.Until(at), 0)
	}
	return e
}
