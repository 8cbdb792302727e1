package batch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/pkg/invalidation"
)

// restarting is a database that shuts down under the first statement with a text. With lost set, the second
// one is committed, and its answer is lost.
type restarting struct {
	*pgxpool.Pool
	text string
	lost bool
	seen int
}

var shutdown = &pgconn.PgError{Severity: "FATAL", Code: "57P01", Message: "terminating connection"}

func (d *restarting) fails(sql string) (shut, lost bool) {
	if !strings.Contains(sql, d.text) {
		return false, false
	}
	d.seen++
	return d.seen == 1, d.lost && d.seen == 2
}

func (d *restarting) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	shut, lost := d.fails(sql)
	if shut {
		return failedRow{nil, shutdown}
	}
	row := d.Pool.QueryRow(ctx, sql, args...)
	if lost {
		return failedRow{row, io.ErrUnexpectedEOF}
	}
	return row
}

func (d *restarting) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if shut, _ := d.fails(sql); shut {
		return nil, shutdown
	}
	return d.Pool.Query(ctx, sql, args...)
}

func (d *restarting) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	tx, err := d.Pool.BeginTx(ctx, options)
	return &restartingTx{tx, d}, err
}

type restartingTx struct {
	pgx.Tx
	db *restarting
}

func (t *restartingTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if shut, _ := t.db.fails(sql); shut {
		return failedRow{nil, shutdown}
	}
	return t.Tx.QueryRow(ctx, sql, args...)
}

func (t *restartingTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if shut, _ := t.db.fails(sql); shut {
		return pgconn.CommandTag{}, shutdown
	}
	return t.Tx.Exec(ctx, sql, args...)
}

type failedRow struct {
	pgx.Row
	err error
}

func (r failedRow) Scan(into ...any) error {
	if r.Row != nil {
		if err := r.Row.Scan(into...); err != nil {
			return err
		}
	}
	return r.err
}

// A queue whose entries have one attempt: an error would end the batch.
func TestLongARestartOfTheDatabaseCostsPartsNoAttemptAndNoSecondRun(t *testing.T) {
	texts := []string{
		"batch_part p\n", "finish_batch_part", "split_entry_id = $3", "split_batch", "UPDATE penstock.batch SET result", "no > $2",
	}
	for _, text := range texts {
		for _, lost := range []bool{false, true} {
			t.Run(text, func(t *testing.T) {
				b := newBed(t)
				db := &restarting{Pool: b.pool, text: text, lost: lost}
				b.db = db
				id := b.create(Batch{Query: "SELECT generate_series(1, 4) AS n", PartSize: 2, CompletionQueue: "parts"})
				b.drain()
				if s := b.status(id); s.State != "done" || s.Done != 2 || string(s.Result) != "10" || len(b.mapped) != 2 {
					t.Errorf("ended as %+v after runs of Map with %q, want 10 after two", s, b.mapped)
				}
				if db.seen < 2 {
					t.Error("no statement failed")
				}
			})
		}
	}
}

// A page that is too large for the time of a statement would be read for ever; the result of a run is recorded as soon
// as the database answers.
func TestOnlyPagesThatAreAlwaysOverdueAreGivenUp(t *testing.T) {
	overdue := fmt.Errorf("no answer: %w", context.DeadlineExceeded)
	for name, c := range map[string]struct {
		most int
		err  error
		want int // tries
	}{
		"page, overdue":   {overdueMax, overdue, overdueMax},
		"page, away":      {overdueMax, shutdown, 20},
		"result, overdue": {unbounded, overdue, 20},
	} {
		synctest.Test(t, func(t *testing.T) {
			tries := 0
			err := untilAnswered(t.Context(), c.most, func() error {
				if tries++; tries == 20 {
					return nil
				}
				return c.err
			})
			if tries != c.want || (err == nil) != (c.want == 20) {
				t.Errorf("%s: %d tries, then %v", name, tries, err)
			}
		})
	}
}

// silent is a database that answers nothing within the time of a statement.
type silent struct{ *pgxpool.Pool }

func (silent) QueryRow(ctx context.Context, _ string, _ ...any) pgx.Row {
	<-ctx.Done()
	return failedRow{nil, ctx.Err()}
}

func TestAStepWhoseReadIsOverdueIsHandedBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &handler{db: silent{}}
		run := &invalidation.Run{Queue: &invalidation.Queue{}}
		err := h.owns(t.Context(), task{Batch: 1, Step: "end"}, run)
		ending := invalidation.Judge(run, nil, err, 0, 0)
		want := invalidation.Judge(run, nil, invalidation.ThrottleQueue(time.Second, errors.Unwrap(err)), 0, 0)
		if !reflect.DeepEqual(ending, want) {
			t.Errorf("the step ends with %+v, want %+v", ending, want)
		}
	})
}

// The node counts the interruptions of steps that are declared, and the context of a run goes before the database.
func TestAStepThatCannotReadItsBatchIsHandedBackOnlyWhereNobodyElseCounts(t *testing.T) {
	over, end := context.WithCancel(t.Context())
	end()
	for name, c := range map[string]struct {
		ctx        context.Context //nolint:containedctx // a parameter
		declared   bool
		handedBack bool
	}{
		"a Go handler's step": {ctx: t.Context(), handedBack: true},
		"a run that is over":  {ctx: over},
		"a declared step":     {ctx: t.Context(), declared: true},
	} {
		err := (&handler{declared: c.declared}).unread(c.ctx, shutdown)
		if same := err == error(shutdown); same == c.handedBack { //nolint:errorlint // the error itself, or one around it
			t.Errorf("%s answers %v: handed back %t, want %t", name, err, !same, c.handedBack)
		}
	}
}
