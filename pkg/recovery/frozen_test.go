package recovery

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// frozen is a database whose connections swallow everything without an error, until statements are
// cancelled.
type frozen struct {
	postgres.DB
	asked atomic.Int64
}

func (f *frozen) QueryRow(ctx context.Context, _ string, _ ...any) pgx.Row {
	f.asked.Add(1)
	return hanging{ctx}
}

type hanging struct{ ctx context.Context }

func (h hanging) Scan(...any) error {
	<-h.ctx.Done()
	return h.ctx.Err()
}

func (f *frozen) Query(ctx context.Context, _ string, _ ...any) (pgx.Rows, error) {
	f.asked.Add(1)
	<-ctx.Done()
	return nil, ctx.Err()
}

// The connection by which a leader keeps its term may work while the one of recovery is frozen: recovery must not wait
// for TCP, which gives up after a quarter of an hour.
func TestAFrozenConnectionHoldsRecoveryUpForSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := &frozen{}
		ctx, cancel := context.WithTimeout(t.Context(), 25*time.Second)
		defer cancel()
		if err := NewLocks(db, nil, Config{}).Run(ctx); err != nil {
			t.Fatal(err)
		}
		if n := db.asked.Load(); n < 3 {
			t.Errorf("%d statements in 25 s: the first connection that froze held up the others", n)
		}
	})
}
