package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// answering is a database that answers every statement with one error, or none.
type answering struct {
	postgres.DB
	err   error
	calls int
	rows  []int // of each statement
}

func (a *answering) QueryRow(_ context.Context, _ string, args ...any) pgx.Row {
	a.calls++
	a.rows = append(a.rows, len(args[2].([]time.Time))) //nolint:errcheck,forcetypeassert // the hours
	return answer{a.err}
}

// answer is one row whose columns are left as they are, or an error.
type answer struct{ err error }

func (a answer) Scan(...any) error { return a.err }

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
			b := NewUsageBook(db, node, slog.New(slog.DiscardHandler))
			b.Charge(Charge{Model: "m", Queue: "m", Flow: "f", Took: time.Second})
			if err := b.Fold(t.Context()); (err != nil) != c.kept {
				t.Errorf("fold: %v", err)
			}
			if (len(b.sending) > 0) != c.kept {
				t.Errorf("the fold is kept: %t, want %t", len(b.sending) > 0, c.kept)
			}
			db.err = nil
			b.Charge(Charge{Model: "m", Queue: "m", Flow: "f", Took: time.Second})
			if err := b.Fold(t.Context()); err != nil || len(b.sending) > 0 || len(b.rows) != 0 {
				t.Errorf("the next fold: %v", err)
			}
		})
	}
}

// Use that the database refuses takes no use of other flows with it.
func TestRefusedUseTakesNoOtherUseWithIt(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	b, queue := x.book()
	for range 2 {
		b.Charge(Charge{Model: "m", Queue: queue, Flow: "evil", Took: time.Second, TokensIn: math.MaxInt64})
		for i := range 9 {
			b.Charge(Charge{Model: "m", Queue: queue, Flow: fmt.Sprint("honest", i), Took: time.Second, TokensIn: 5})
		}
		b.Refuse("m")
		if err := b.Fold(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := x.count(`SELECT sum(calls)::int FROM penstock.usage_hour WHERE flow LIKE 'honest%'`); n != 18 {
		t.Errorf("%d calls of other flows are counted, want 18", n)
	}
	if n := x.count(`SELECT refused::int FROM penstock.model_online WHERE model = 'm'`); n != 2 {
		t.Errorf("%d refusals are counted, want 2", n)
	}
}

// Budgets are read by the database's clock: use is booked to its hour, whatever the clock of this machine says.
func TestUseIsBookedToTheHourOfTheDatabase(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	b, queue := x.book()
	booked := func(flow string) (hoursAhead float64) {
		t.Helper()
		b.Charge(Charge{Model: "m", Queue: queue, Flow: flow, Took: time.Second})
		if err := b.Fold(t.Context()); err != nil {
			t.Fatal(err)
		}
		err := x.pool.QueryRow(t.Context(), `SELECT extract(epoch FROM hour - clock_timestamp())::float8 / 3600
			FROM penstock.usage_hour WHERE flow = $1`, flow).Scan(&hoursAhead)
		if err != nil {
			t.Fatal(err)
		}
		return hoursAhead
	}
	b.clock.Set(time.Now().Add(100 * time.Hour))
	if h := booked("ahead"); h < 98 {
		t.Errorf("booked to an hour that began %.1f hours from now, want the hour of the last reading", h)
	}
	if h := booked("right"); h < -2 || h > 0 {
		t.Errorf("booked to an hour that began %.1f hours from now, though the answer to the last fold had the time", h)
	}
}

// A bill by application has the use of queues that were dropped since.
func TestUseKeepsTheApplicationOfADroppedQueue(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	b, queue := x.book()
	b.Charge(Charge{Model: "m", Queue: queue, Flow: "f", Took: time.Second})
	if err := b.Fold(t.Context()); err != nil {
		t.Fatal(err)
	}
	x.exec(`SELECT penstock.drop_queue(name, true) FROM penstock.queue WHERE model = 'm'`)
	if n := x.count(`SELECT count(*) FROM penstock.usage_hours WHERE application = 'default'`); n != 1 {
		t.Errorf("the application has %d rows of use, want 1", n)
	}
}

// What has come in a long outage goes in folds that end in time.
func TestAFoldIsBounded(t *testing.T) {
	t.Parallel()
	db := &answering{}
	b := NewUsageBook(db, func() invalidation.NodeID { return 1 }, slog.New(slog.DiscardHandler))
	for i := range 2*foldMost + 1 {
		b.Charge(Charge{Model: "m", Queue: "m", Flow: fmt.Sprint(i), Took: time.Second})
	}
	if err := b.Fold(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(db.rows, []int{foldMost, foldMost, 1}) {
		t.Errorf("statements have %v rows", db.rows)
	}
}

// charging is a database during whose answers calls end, as they do under load.
type charging struct {
	answering
	book *UsageBook
}

func (c *charging) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if c.calls < 100 {
		c.book.Charge(Charge{Model: "m", Queue: "m", Flow: "f", Took: time.Second})
	}
	return c.answering.QueryRow(ctx, sql, args...)
}

// What comes during a fold waits for the next one: under load folds would have no pause.
func TestAFoldLeavesWhatComesDuringItToTheNext(t *testing.T) {
	t.Parallel()
	db := &charging{}
	db.book = NewUsageBook(db, func() invalidation.NodeID { return 1 }, slog.New(slog.DiscardHandler))
	db.book.Charge(Charge{Model: "m", Queue: "m", Flow: "f", Took: time.Second})
	if err := db.book.Fold(t.Context()); err != nil {
		t.Fatal(err)
	}
	if db.calls != 1 {
		t.Errorf("%d statements in one fold of one row, want 1", db.calls)
	}
}

// Calls of less than a millisecond, as those for an embedding, come to their time, however often it is folded.
func TestTimesBelowAMillisecondAddUp(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	b, queue := x.book()
	const half = 500 * time.Microsecond
	for range 8 {
		b.Charge(Charge{Model: "m", Queue: queue, Flow: "f", Took: half, GPU: 3 * half, Wasted: true})
		if err := b.Fold(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	// A call that ends as an hour begins leaves a part of a millisecond to the one before.
	if n := x.count(`SELECT count(*) FROM (SELECT sum(calls) AS calls, sum(gpu_ms) AS gpu, sum(extra_ms) AS extra,
		sum(wasted_ms) AS wasted FROM penstock.usage_hour) u
		WHERE calls = 8 AND gpu BETWEEN 11 AND 12 AND extra BETWEEN 7 AND 8 AND wasted BETWEEN 11 AND 12`); n != 1 {
		t.Errorf("8 calls of 1.5 ms are %d ms, want 12", x.count(`SELECT sum(gpu_ms)::int FROM penstock.usage_hour`))
	}
}
