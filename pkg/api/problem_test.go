package api

import (
	"context"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

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
