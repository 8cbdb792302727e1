package api

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
)

// endless is a database whose statements end with their context alone.
type endless struct{ postgres.DB }

func (endless) Query(ctx context.Context, _ string, _ ...any) (pgx.Rows, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// An impatient client is neither an outage of the database nor an error of the server.
func TestARequestWhoseClientHasGoneIsNoErrorOfTheServer(t *testing.T) {
	observed, failed := 0, 0
	a := New(endless{}, Config{
		Open:    true,
		Observe: func(_ string, status int, _ time.Duration) { observed = status },
		OnError: func(context.Context, error) { failed++ },
	})
	a.ready.failed = map[string]error{}
	ctx, leave := context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, leave)
	answered := httptest.NewRecorder()
	a.ServeHTTP(answered, httptest.NewRequestWithContext(ctx, "GET", "http://localhost/v1/queues", nil))
	if observed != 499 || failed != 0 || a.ready.failed == nil {
		t.Errorf("observed as %d with %d errors, and what is known of the database is forgotten: %t", observed, failed, a.ready.failed == nil)
	}
	ctx, leave = context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer leave()
	a.ServeHTTP(answered, httptest.NewRequestWithContext(ctx, "GET", "http://localhost/v1/queues", nil))
	if observed != 503 || failed != 1 {
		t.Errorf("a request that took too long is observed as %d with %d errors", observed, failed)
	}
}

// A wait lasts as long as its client wants: it says nothing of the time that the server takes.
func TestTheTimeOfAWaitIsNotObserved(t *testing.T) {
	times := map[bool]time.Duration{}
	a := New(endless{}, Config{Open: true, Observe: func(_ string, _ int, took time.Duration) { times[len(times) > 0] = took }})
	for _, path := range []string{"/v1/queues?wait=1s", "/v1/queues"} {
		ctx, leave := context.WithTimeout(t.Context(), 10*time.Millisecond)
		a.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, "GET", "http://localhost"+path, nil))
		leave()
	}
	if len(times) != 2 || times[false] != 0 || times[true] == 0 {
		t.Errorf("observed %v", times)
	}
}

// failing is a database whose reads all end with one error.
type failing struct {
	postgres.DB
	err error
}

func (f failing) Query(context.Context, string, ...any) (pgx.Rows, error) { return nil, f.err }

// Clients repeat a request that is answered 503: it must be able to succeed a moment later.
func TestOnlyWhatAnotherTryCanMendIsAnsweredAsUnavailable(t *testing.T) {
	for name, c := range map[string]struct {
		err    error
		status int
		code   string
	}{
		"a row that cannot be read":     {fmt.Errorf("read queues: %w", errors.New("cannot scan NULL into *int")), 500, "internal"},
		"a text that is not JSON":       {fmt.Errorf("read queues: %w", errors.New("invalid character 'x'")), 500, "internal"},
		"two rows for one":              {pgx.ErrTooManyRows, 500, "internal"},
		"an error of the statement":     {&pgconn.PgError{Code: "42703", Message: "column does not exist"}, 500, "internal"},
		"a refused connection":          {fmt.Errorf("connect: %w", &net.OpError{Op: "dial", Err: errors.New("connection refused")}), 503, "unavailable"},
		"a connection without TLS":      {fmt.Errorf("connect: %w", &pgconn.ConnectError{Config: &pgconn.Config{}}), 503, "unavailable"},
		"a connection that was cut":     {fmt.Errorf("read: %w", io.ErrUnexpectedEOF), 503, "unavailable"},
		"a connection closed meanwhile": {fmt.Errorf("read: %w", pgconn.ErrConnClosed), 503, "unavailable"},
		"an answer that did not come":   {fmt.Errorf("read: %w", context.DeadlineExceeded), 503, "unavailable"},
		"work that was given up":        {fmt.Errorf("read: %w", context.Canceled), 503, "unavailable"},
		"a lost answer":                 {fmt.Errorf("read: %w", postgres.ErrSilent), 503, "unavailable"},
		"a server that shuts down":      {&pgconn.PgError{Code: "57P01", Message: "terminating"}, 503, "unavailable"},
	} {
		t.Run(name, func(t *testing.T) {
			var log bytes.Buffer
			a := New(failing{err: c.err}, Config{Open: true, Log: slog.New(slog.NewTextHandler(&log, nil))})
			answered := httptest.NewRecorder()
			a.ServeHTTP(answered, httptest.NewRequestWithContext(t.Context(), "GET", "http://localhost/v1/queues", nil))
			body := answered.Body.String()
			if answered.Code != c.status || !strings.Contains(body, `"code":"`+c.code+`"`) {
				t.Errorf("answered %d %s, want %d %s", answered.Code, body, c.status, c.code)
			}
			if retried := answered.Header().Get("Retry-After") != ""; retried != (c.status == 503) {
				t.Errorf("answered %d with Retry-After: %t", answered.Code, retried)
			}
			if !strings.Contains(log.String(), c.err.Error()[:8]) {
				t.Errorf("the log does not name the cause: %s", log.String())
			}
		})
	}
}

// A value that the server cannot hold or follow is a mistake of the request.
func TestValuesBeyondTheLimitsOfTheServerAreOfTheRequest(t *testing.T) {
	for _, state := range []string{"22P05", "54001"} {
		err := fmt.Errorf("push: %w", &pgconn.PgError{Code: state, Message: "stack depth limit exceeded"})
		if p := problem(classify(t.Context(), err)); p.Status != 422 || p.Code != "invalid" {
			t.Errorf("%s is answered as %d %s, want 422 invalid", state, p.Status, p.Code)
		}
	}
}
