package duty

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// Limit is how many rows one transaction of a duty may change: as many as it can in Aim. Rows differ in their cost by
// orders of magnitude, and a statement that is longer than its deadline has changed nothing. A part of a transaction's
// time is the same for any number of rows, its round trips and its commit: fewer than a tenth of First are for rows of
// which more met a deadline.
type Limit struct {
	First int           // rows of the first transaction
	Max   int           // rows of any
	Aim   time.Duration // for one transaction

	rows int
}

// Rows is how many the next transaction may change, one at least.
func (l *Limit) Rows() int {
	if l.rows == 0 {
		l.rows = max(1, l.First)
	}
	return l.rows
}

// Done takes note of a transaction: the limit is halved by one that took longer than Aim, down to a tenth of First, and
// by one that was ended by its deadline. It is doubled by one that took less than half of Aim, below a tenth of First
// less than Aim, and grows by one row there if it took longer. Other errors say nothing about the number of rows.
func (l *Limit) Done(took time.Duration, err error) {
	rows, least := l.Rows(), max(1, l.First/10)
	switch {
	case err != nil && !Late(err):
	case err != nil:
		l.rows = max(1, rows/2)
	case took > l.Aim && rows < least:
		l.rows = rows + 1
	case took > l.Aim:
		l.rows = max(least, rows/2)
	case took < l.Aim/2 || rows < least:
		l.rows = max(1, min(2*rows, l.Max))
	}
}

// Late reports whether a statement or its transaction was ended by a deadline: its own, or statement_timeout.
func Late(err error) bool {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code == "57014" // query_canceled
	}
	return errors.Is(err, context.DeadlineExceeded)
}
