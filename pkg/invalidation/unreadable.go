package invalidation

import (
	"context"
	"errors"

	"github.com/penstock/penstock/internal/postgres"
)

// unreadable reports that the server could not write a value of some row as text. Such a row fails every claim that
// meets it.
func unreadable(err error) bool { return postgres.RefusesValues(err) }

// failUnreadableSQL moves the entries that no claim can read to the failures: those of the first $5 ready
// rows of a lane, and returns how many there were. See penstock.fail_unreadable.
const failUnreadableSQL = `SELECT penstock.fail_unreadable($1, $2, $3, $4, $5)`

// failUnreadable ends the entries that kept a claim from these lanes, so that one bad row does not stop a
// queue. It returns the error of the claim where there was none. The next claim gets the others.
func (q *Queue) failUnreadable(ctx context.Context, lanes []ClaimLane, limit int, claim error) error {
	failed := 0
	for _, l := range lanes {
		var n int
		err := q.db.QueryRow(ctx, failUnreadableSQL, q.ID, l.Priority, l.Flow, l.From, limit).Scan(&n)
		if err != nil {
			return errors.Join(q.errorf("claim from", claim), q.errorf("fail unreadable entries of", err))
		}
		failed += n
	}
	if failed == 0 {
		return q.errorf("claim from", claim)
	}
	return nil
}
