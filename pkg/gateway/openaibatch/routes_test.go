package openaibatch

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/penstock/penstock/pkg/gateway"
)

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
		{"there", t.Context(), errors.New("connection refused"), http.StatusServiceUnavailable, true},
	} {
		var log bytes.Buffer
		s := &Batches{log: slog.New(slog.NewTextHandler(&log, nil))}
		said := s.said(httptest.NewRequestWithContext(c.ctx, "GET", "/v1/files", nil), c.err)
		if status, _ := gateway.ErrorOf(said); status != c.status || (log.Len() > 0) != c.logged {
			t.Errorf("%s: got %d, want %d; in the log: %q", c.name, status, c.status, &log)
		}
	}
}
