package duty

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

func TestLimitFollowsTheTimeOfARow(t *testing.T) {
	l := Limit{First: 400, Max: 10_000, Aim: 200 * time.Millisecond}
	const deadline = 2 * time.Second
	work := func(row time.Duration, rows int) (done int) { // transactions until so many rows are done
		for n := 0; n < rows; done++ {
			took := time.Duration(l.Rows()) * row
			if took > deadline {
				l.Done(deadline, fmt.Errorf("delete: %w", &pgconn.PgError{Code: "57014"}))
				continue
			}
			n += l.Rows()
			l.Done(took, nil)
		}
		return done
	}
	if done := work(time.Millisecond, 10_000); done > 110 {
		t.Errorf("rows of 1 ms took %d transactions for 10,000", done)
	}
	if done := work(500*time.Millisecond, 20); done > 30 || l.Rows() > 5 {
		t.Errorf("rows of 500 ms took %d transactions for 20, and the limit is %d", done, l.Rows())
	}
	if done := work(10*time.Microsecond, 100_000); done > 40 || l.Rows() != 10_000 {
		t.Errorf("rows that are quick again took %d transactions for 100,000, and the limit is %d", done, l.Rows())
	}
}

// Round trips and a commit take the same time for any number of rows, and longer than Aim where the database is distant
// or its disk slow. To change fewer rows would save nothing.
func TestLimitFollowsNoTimeThatAllTransactionsTake(t *testing.T) {
	for _, fixed := range []time.Duration{150 * time.Millisecond, 300 * time.Millisecond, 5 * time.Second} {
		l := Limit{First: 400, Max: 10_000, Aim: 200 * time.Millisecond}
		for range 100 {
			l.Done(fixed+time.Duration(l.Rows())*10*time.Microsecond, nil)
		}
		if l.Rows() < 40 {
			t.Errorf("transactions of %s each: the limit falls to %d rows", fixed, l.Rows())
		}
	}
	l := Limit{First: 400, Max: 10_000, Aim: 200 * time.Millisecond}
	for range 20 {
		l.Done(time.Second, &pgconn.PgError{Code: "57014"})
	}
	if l.Rows() != 1 {
		t.Errorf("after deadlines alone: %d rows, want 1", l.Rows())
	}
	quick := l
	for range 10 {
		quick.Done(150*time.Millisecond, nil)
	}
	if quick.Rows() < 40 {
		t.Errorf("after transactions of 150 ms each: the limit is %d rows still", quick.Rows())
	}
	for range 40 {
		l.Done(250*time.Millisecond, nil)
	}
	if l.Rows() < 40 {
		t.Errorf("after transactions of 250 ms each: the limit is %d rows still", l.Rows())
	}
}

func TestLimitIsHalvedByDeadlinesAlone(t *testing.T) {
	for _, one := range []struct {
		err  error
		want int
	}{
		{errors.New("connection reset"), 400},
		{context.Canceled, 400},
		{&pgconn.PgError{Code: "40001"}, 400},
		{&pgconn.PgError{Code: "57014"}, 200},
		{fmt.Errorf("commit: %w", context.DeadlineExceeded), 200},
	} {
		l := Limit{First: 400, Max: 10_000, Aim: time.Second}
		if l.Done(time.Millisecond, one.err); l.Rows() != one.want {
			t.Errorf("after %v: %d rows, want %d", one.err, l.Rows(), one.want)
		}
	}
}
