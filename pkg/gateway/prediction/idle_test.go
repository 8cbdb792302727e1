package prediction

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// quietDB answers that no webhook is owed and that entry 1 lives, and counts statements.
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
	return &living{}, nil
}

// living are the rows of a poll that finds entry 1 alive.
type living struct {
	pgx.Rows
	read bool
}

func (l *living) Next() bool {
	first := !l.read
	l.read = true
	return first
}

func (l *living) Scan(to ...any) error {
	*to[0].(*invalidation.EntryID) = 1 //nolint:errcheck,forcetypeassert // the first column of the statement
	return nil
}

func (*living) Close()                        {}
func (*living) Err() error                    { return nil }
func (*living) CommandTag() pgconn.CommandTag { return pgconn.CommandTag{} }

// A gateway without predictions asks the database next to nothing. A request that waits is served every 25 ms all the
// same, and a new prediction with a webhook is noticed at once.
func TestPredictionsThatNobodyWaitsForCostNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := &quietDB{}
		log := slog.New(slog.DiscardHandler)
		s := &Predictions{db: db, log: log, watch: invalidation.NewEntryWatch(db, 0, log)}
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
		if n := db.statements.Swap(0); n < 39 || n > 42 {
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

// owingDB is a quietDB that answers that a webhook is owed, and that no prediction has ended.
type owingDB struct{ quietDB }

type yes struct{}

func (yes) Scan(to ...any) error {
	*to[0].(*bool) = true //nolint:errcheck,forcetypeassert // the one column of the statement
	return nil
}

func (d *owingDB) QueryRow(context.Context, string, ...any) pgx.Row {
	d.statements.Add(1)
	return yes{}
}

func (d *owingDB) Query(context.Context, string, ...any) (pgx.Rows, error) {
	d.statements.Add(1)
	return &living{read: true}, nil
}

// New predictions do not make a gateway look for ends more often than it does anyway.
func TestNewPredictionsHurryNoLookForEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := &owingDB{}
		s := &Predictions{db: db, log: slog.New(slog.DiscardHandler)}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go s.notices(ctx)
		for range 1000 {
			s.owed.ring()
			time.Sleep(10 * time.Millisecond)
		}
		if n := db.statements.Load(); n > 42 {
			t.Errorf("%d statements in 10 s in which a webhook is owed", n)
		}
	})
}
