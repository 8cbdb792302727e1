package maintenance

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

// The connection by which a leader keeps its term may work while the one of a duty is frozen: the duty
// must not wait for TCP, which gives up after a quarter of an hour.
func TestAFrozenConnectionHoldsADutyUpForSeconds(t *testing.T) {
	for name, run := range map[string]func(db postgres.DB) func(context.Context) error{
		"deadlines": func(db postgres.DB) func(context.Context) error { return NewDeadlines(db, nil, Config{}).Run },
		"brake": func(db postgres.DB) func(context.Context) error {
			return NewBrake(db, nil, Config{}, func() Sampling { return Sampling{} }).Run
		},
	} {
		t.Run(name, func(t *testing.T) { askedWithin(t, 3, 25*time.Second, run) })
	}
}

// A sampling may read for long.
func TestAFrozenConnectionHoldsSamplesUpForMinutes(t *testing.T) {
	askedWithin(t, 3, 10*time.Minute, func(db postgres.DB) func(context.Context) error {
		s := NewSamples(db, nil, Config{})
		s.prepared = true
		return s.Run
	})
}

// Entries that are due wait for one frozen connection less than half of the usual lease, as locks of dead nodes do.
func TestAFrozenConnectionDelaysDueEntriesLittle(t *testing.T) {
	askedWithin(t, 2, usualLease/2, func(db postgres.DB) func(context.Context) error {
		return NewDeadlines(db, nil, Config{}).Run
	})
}

// askedWithin runs a duty whose connections freeze: it must send so many statements in that time.
func askedWithin(t *testing.T, want int64, span time.Duration, run func(db postgres.DB) func(context.Context) error) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		db := &frozen{}
		ctx, cancel := context.WithTimeout(t.Context(), span)
		defer cancel()
		if err := run(db)(ctx); err != nil {
			t.Fatal(err)
		}
		if n := db.asked.Load(); n < want {
			t.Errorf("%d statements in %v: the first connection that froze held up the others", n, span)
		}
	})
}
