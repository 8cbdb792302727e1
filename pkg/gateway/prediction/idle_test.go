package prediction

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// quietDB answers that no webhook is owed and that no entry has ended, and counts statements.
type quietDB struct {
	postgres.DB
	statements atomic.Int64
}

type no struct{}

func (no) Scan(to ...any) error {
	*to[0].(*bool) = false //nolint:errcheck,forcetypeassert // the one column of the statement
	return nil
}

func (d *quietDB) QueryRow(context.Context, string, ...any) pgx.Row {
	d.statements.Add(1)
	return no{}
}

func (d *quietDB) Query(context.Context, string, ...any) (pgx.Rows, error) {
	d.statements.Add(1)
	return noRows{}, nil
}

type noRows struct{ pgx.Rows }

func (noRows) Next() bool { return false }
func (noRows) Close()     {}
func (noRows) Err() error { return nil }

// A gateway without predictions asks the database next to nothing. A request that waits is served every 50 ms all the
// same, and a new prediction with a webhook is noticed at once.
func TestPredictionsThatNobodyWaitsForCostNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := &quietDB{}
		s := &Predictions{db: db, log: slog.New(slog.DiscardHandler)}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go func() { _ = s.Run(ctx) }()
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := db.statements.Swap(0); n > 13 {
			t.Errorf("%d statements in a minute without a prediction", n)
		}
		waits, leave := context.WithCancel(t.Context())
		go s.Await(waits, 1, 1)
		time.Sleep(time.Second)
		synctest.Wait()
		if n := db.statements.Swap(0); n < 19 || n > 22 {
			t.Errorf("%d statements in a second in which a request waits", n)
		}
		leave()
		time.Sleep(time.Second)
		db.statements.Store(0)
		s.owed.ring()
		synctest.Wait()
		if n := db.statements.Load(); n != 1 {
			t.Errorf("%d statements when a prediction with a webhook was made", n)
		}
	})
}
