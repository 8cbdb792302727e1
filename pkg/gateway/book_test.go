package gateway

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// answering is a database that answers every statement with one error, or none.
type answering struct {
	postgres.DB
	err   error
	calls int
}

func (a *answering) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	a.calls++
	return pgconn.CommandTag{}, a.err
}

// Use that the database refuses keeps no later use back; use without an answer is sent again under its number.
func TestRefusedUseKeepsNoLaterUseBack(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		kept bool
	}{
		"refused":   {&pgconn.PgError{Code: "22021", Message: "invalid byte sequence"}, false},
		"no answer": {errors.New("connection reset"), true},
	} {
		t.Run(name, func(t *testing.T) {
			db := &answering{err: c.err}
			node := func() invalidation.NodeID { return 1 }
			b := NewUsageBook(db, node, 0, slog.New(slog.DiscardHandler))
			b.Charge(Charge{Model: "m", Queue: "m", Flow: "f", Took: time.Second})
			if err := b.Fold(t.Context()); (err != nil) != c.kept {
				t.Errorf("fold: %v", err)
			}
			if (b.sending != nil) != c.kept {
				t.Errorf("the fold is kept: %t, want %t", b.sending != nil, c.kept)
			}
			db.err = nil
			b.Charge(Charge{Model: "m", Queue: "m", Flow: "f", Took: time.Second})
			if err := b.Fold(t.Context()); err != nil || b.sending != nil || len(b.rows) != 0 {
				t.Errorf("the next fold: %v", err)
			}
		})
	}
}
