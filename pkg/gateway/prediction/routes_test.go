package prediction

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/invalidation"
)

// brokenDB fails all queries with one error.
type brokenDB struct {
	postgres.DB
	err error
}

func (d brokenDB) Query(context.Context, string, ...any) (pgx.Rows, error) { return nil, d.err }

// hungDB keeps each statement until its context ends.
type hungDB struct{ postgres.DB }

func (hungDB) Query(ctx context.Context, _ string, _ ...any) (pgx.Rows, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func (hungDB) Exec(ctx context.Context, _ string, _ ...any) (pgconn.CommandTag, error) {
	<-ctx.Done()
	return pgconn.CommandTag{}, ctx.Err()
}

func (d hungDB) Begin(context.Context) (pgx.Tx, error) { return hungTx{hung: d}, nil }

// hungTx keeps each statement until its context ends; it has begun.
type hungTx struct {
	pgx.Tx
	hung hungDB
}

func (t hungTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return t.hung.Query(ctx, sql, args...)
}

func (hungTx) Rollback(context.Context) error { return nil }

// A client is answered while the database keeps all statements.
func TestStatementsOfRequestsEnd(t *testing.T) {
	t.Parallel()
	for name, ask := range map[string]func(ctx context.Context, db postgres.DB) error{
		"get":    func(ctx context.Context, db postgres.DB) error { _, err := find(ctx, db, "acme", "p"); return err },
		"stream": func(ctx context.Context, db postgres.DB) error { _, err := findStream(ctx, db, "p", "k"); return err },
		"create": func(ctx context.Context, db postgres.DB) error { _, _, err := insert(ctx, db, order{}); return err },
		"cancel": func(ctx context.Context, db postgres.DB) error { return cancel(ctx, db, row{}) },
		"list": func(ctx context.Context, db postgres.DB) error {
			_, _, err := page(ctx, db, "acme", cursor{}, 1)
			return err
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, stop := context.WithTimeout(t.Context(), time.Hour)
			defer stop()
			began := time.Now()
			if err := ask(ctx, hungDB{}); err == nil || time.Since(began) > postgres.AnswerMax {
				t.Errorf("%s ends after %s: %v", name, time.Since(began), err)
			}
		})
	}
}

// The key of a stream lets whoever has it read the output: it is in no line of the log.
func TestKeyOfAStreamIsNotInTheLog(t *testing.T) {
	t.Parallel()
	for want, err := range map[int]error{
		http.StatusServiceUnavailable:  errors.New("connection refused"),
		http.StatusInternalServerError: &pgconn.PgError{Code: "42501", Message: "permission denied"},
	} {
		var log bytes.Buffer
		g := gateway.New(gateway.Config{Open: true})
		New(Config{Log: slog.New(slog.NewTextHandler(&log, nil))}, g, brokenDB{err: err}).Mount()
		request := httptest.NewRequestWithContext(t.Context(), "GET", "/v1/predictions/p17/stream/planted-key", nil)
		answer := httptest.NewRecorder()
		g.ServeHTTP(answer, request)
		text := log.String()
		if answer.Code != want || !strings.Contains(text, err.Error()) || !strings.Contains(text, "p17") {
			t.Errorf("%v: got %d, want %d, with the error and the prediction in the log: %s", err, answer.Code, want, text)
		}
		if strings.Contains(text, "planted-key") {
			t.Errorf("%v: the key is in the log: %s", err, text)
		}
	}
}

// Clients are told of refusals by the queue of a model, and the log is not: any of them may repeat its request.
func TestRefusalsOfTheQueueAreForTheClientAlone(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err    error
		status int
		detail string
	}{
		{invalidation.ErrNoInstance, http.StatusServiceUnavailable, "no instance of the model takes calls"},
		{invalidation.ErrQueueNotFound, http.StatusNotFound, "the queue of the model does not exist"},
		{invalidation.ErrQueueFull, http.StatusTooManyRequests, "the queue of the model takes no more entries"},
		{invalidation.ErrPayloadTooLarge, http.StatusUnprocessableEntity, "too large"},
	} {
		var log bytes.Buffer
		s := &Predictions{log: slog.New(slog.NewTextHandler(&log, nil))}
		answer := httptest.NewRecorder()
		request := httptest.NewRequestWithContext(t.Context(), "POST", "/v1/predictions", nil)
		s.refuse(answer, request, fmt.Errorf("push entry: %w", c.err))
		if answer.Code != c.status || !strings.Contains(answer.Body.String(), c.detail) {
			t.Errorf("%v: got %d %s, want %d with %q", c.err, answer.Code, answer.Body, c.status, c.detail)
		}
		again := answer.Header().Get("Retry-After") != ""
		if c.status == http.StatusServiceUnavailable && !again {
			t.Errorf("%v: no Retry-After", c.err)
		}
		if log.Len() > 0 {
			t.Errorf("%v: it is in the log: %s", c.err, &log)
		}
	}
}

// A client that went away ends the statements of its request: that is no failure of the database.
func TestClientThatWentAwayIsNotInTheLog(t *testing.T) {
	t.Parallel()
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		name   string
		ctx    context.Context
		err    error
		status int
		logged bool
	}{
		{"gone", gone, context.Canceled, 499, false},
		{"gone, in the middle of a statement", gone, &pgconn.PgError{Code: "57014", Message: "canceling statement"}, 499, false},
		{"there", t.Context(), errors.New("connection refused"), http.StatusServiceUnavailable, true},
		{"gone behind its answer", gone, errNone, http.StatusNotFound, false},
	} {
		var log bytes.Buffer
		s := &Predictions{log: slog.New(slog.NewTextHandler(&log, nil))}
		answer := httptest.NewRecorder()
		s.refuse(answer, httptest.NewRequestWithContext(c.ctx, "GET", "/v1/predictions/p17", nil), fmt.Errorf("read: %w", c.err))
		if answer.Code != c.status || (log.Len() > 0) != c.logged {
			t.Errorf("%s: got %d, want %d; in the log: %q", c.name, answer.Code, c.status, &log)
		}
	}
}
