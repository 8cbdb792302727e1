package scale

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/oneline"
)

// What a backend answers to an order is written so:
//
//	no error, or ErrCarriedOut  appliedSQL
//	ErrNoRoom                   noRoomSQL, or waitSQL while another deployment of the model gives up room; as another
//	                            error, a few times, where one that is filled later may give up its room
//	another error               failedSQL if the order starts instances; else it is kept in memory (failedOrders)
//
// failedSQL, noRoomSQL and waitSQL set ordered and ordered_at back to what they were before the order: the starts that
// it was to begin do not count as under way. Its number is used up: what follows is another order, also where the
// backend has carried this one out.

// appliedSQL confirms an order. One that began starts ($4) ends the failures of orders before it, one that began
// none proves nothing. Starts that failed ($3 is their kind of error) are forgiven by an instance that is ready.
const appliedSQL = `
UPDATE penstock.deployment_state
   SET applied_id = $2, applied_at = clock_timestamp(),
       failures = CASE WHEN error_kind = $3 OR NOT $4 THEN failures ELSE 0 END,
       error = CASE WHEN error_kind = $3 OR NOT $4 THEN error END,
       error_kind = CASE WHEN error_kind = $3 OR NOT $4 THEN error_kind ELSE '' END
 WHERE name = $1`

// confirm notes that a backend carried an order out.
func (a *applier) confirm(ctx context.Context, s applied, o *Order) error {
	return a.exec(ctx, appliedSQL, s.Name, o.ID, startError, o.starts())
}

const failedSQL = `
UPDATE penstock.deployment_state
   SET failures = failures + 1, failed_at = clock_timestamp(), error = $2, error_kind = $3,
       retry_at = clock_timestamp() + $4::interval, ordered = $5, ordered_at = $6,
       order_id = order_id + 1
 WHERE name = $1`

// fail records that an order failed. It is given again after a pause.
func (a *applier) fail(ctx context.Context, s applied, cause error) error {
	var kind errorKind
	if errors.Is(cause, ErrNoRoom) {
		kind = noRoomError
	}
	return a.exec(ctx, failedSQL, s.Name, messageOf(cause), kind, pauseAfter(cause, s.Failures+1), s.Ordered,
		s.OrderedAt)
}

const noRoomSQL = `
UPDATE penstock.deployment_state
   SET no_room_at = clock_timestamp(), error = nullif($2, ''), error_kind = $3,
       retry_at = clock_timestamp() + $4::interval, ordered = $5, ordered_at = $6,
       order_id = order_id + 1
 WHERE name = $1`

const waitSQL = `
UPDATE penstock.deployment_state
   SET error = $2, error_kind = 'no room', retry_at = clock_timestamp() + $3::interval, ordered = $4, ordered_at = $5,
       order_id = order_id + 1
 WHERE name = $1`

// noRoom notes that a backend had no room for a start, and says whether that is all that follows. It is no failure:
// the deployment keeps the instances that it has, and those that are filled later are asked for the rest. But where
// these have the room, they give it up as long as the order has not failed too often.
func (a *applier) noRoom(ctx context.Context, s applied, todo steps, err error) (noted bool, failed error) {
	switch {
	case !errors.Is(err, ErrNoRoom):
		return false, nil
	case todo.rolls: // for one more than desired: the next round drains one first
		return true, a.exec(ctx, noRoomSQL, s.Name, s.Error, s.ErrorKind, time.Duration(0), s.Ordered,
			s.OrderedAt)
	case s.frees:
		return true, a.exec(ctx, waitSQL, s.Name, messageOf(err), freedRetry, s.Ordered, s.OrderedAt)
	case s.behind && !s.failing():
		return false, nil
	}
	return true, a.exec(ctx, noRoomSQL, s.Name, messageOf(err), noRoomError, noRoomRetry, s.Ordered, s.OrderedAt)
}

// backoff is the time until the next try after so many failures in a row.
func backoff(failures int) time.Duration {
	if failures < 1 {
		return 0
	}
	return min(time.Second<<min(failures-1, 10), backoffMax)
}

// pauseAfter is the time until the next try after so many failures in a row, the last of which was cause.
func pauseAfter(cause error, failures int) time.Duration {
	var told interface{ RetryAfter() time.Duration }
	if errors.As(cause, &told) {
		return min(max(backoff(failures), told.RetryAfter()), backoffMax)
	}
	return backoff(failures)
}

const noteSQL = `
INSERT INTO penstock.deployment_state AS s (name, error)
SELECT $1, $2 WHERE EXISTS (SELECT FROM penstock.deployment d WHERE d.name = $1)
ON CONFLICT (name) DO UPDATE SET error = excluded.error, error_kind = ''`

// note records why a backend does not answer: what it has is unknown, and not zero.
func (a *applier) note(ctx context.Context, s applied, cause error) error {
	if s.Error == messageOf(cause) {
		return nil
	}
	return a.exec(ctx, noteSQL, s.Name, messageOf(cause))
}

// lacks notes that the configuration of this leader has no such backend: the number of the deployment is decided, and
// nothing follows it.
func (a *applier) lacks(ctx context.Context, s applied) error {
	if s.Off || !s.Mode.applies() {
		return nil // nothing is to be started or stopped
	}
	a.count(func(st *OrderStatus) { st.Failed++ })
	return a.note(ctx, s,
		fmt.Errorf("the elected leader is not configured for backend %s: see leader.scale", s.Backend))
}

// exec runs one statement within the term, also where the time of a round is over.
func (a *applier) exec(ctx context.Context, sql string, args ...any) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	return a.fence.InTx(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, sql, args...)
		return err
	})
}

// messageMax bounds what is kept of an error of a backend, in characters.
const messageMax = 500

// messageOf is the message of an error as it is stored and shown.
func messageOf(err error) string { return oneline.Short(err.Error(), messageMax) }
