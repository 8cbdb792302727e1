package invalidation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// Ended is the outcome of an entry, with its result or reason.
type Ended struct {
	Queue    string
	Outcome  string // done, failed, expired, cancelled
	At       time.Time
	Accepted time.Time
	Attempt  int           // attempts that ended in an error; for a failure that of its end as well
	Node     NodeID        // that ran it last, 0 if unknown
	Token    Token         // under which it ended, 0 if it did not run
	Ran      time.Duration // 0 if unknown
	Reason   string        // the error of a failure
	Class    string        // of a failure
	Result   json.RawMessage
}

// Outcome returns the outcome of an entry, for as long as its queue keeps outcomes. It returns
// ErrState if the entry has not ended yet, ErrEntryNotFound if there is no such entry.
//
// The id alone does not tell the queue: it is looked up in each day of each queue. OutcomeIn asks one.
func Outcome(ctx context.Context, db postgres.DB, id EntryID) (Ended, error) {
	return readOutcome(ctx, db, id, outcomeSQL, id)
}

// OutcomeIn is Outcome for an entry of the queue of that name. One that ended in another queue is ErrEntryNotFound.
func OutcomeIn(ctx context.Context, db postgres.DB, queue string, id EntryID) (Ended, error) {
	return readOutcome(ctx, db, id, outcomeInSQL, id, queue)
}

const outcomeSQL = `
SELECT queue, outcome::text, ended_at, created_at, attempt, coalesce(node_id, 0), coalesce(token, 0),
       coalesce(run_ms, 0),
       coalesce(reason, ''), coalesce(class, ''), result
  FROM penstock.outcome_of($1)`

// outcomeInSQL relies on Postgres to inline the function, as a test holds: one queue is read.
const outcomeInSQL = outcomeSQL + ` WHERE queue = $2`

func readOutcome(ctx context.Context, db postgres.DB, id EntryID, sql string, args ...any) (Ended, error) {
	for again := false; ; {
		var e Ended
		var ms int64
		err := db.QueryRow(ctx, sql, args...).Scan(&e.Queue, &e.Outcome, &e.At, &e.Accepted, &e.Attempt, &e.Node,
			&e.Token, &ms,
			&e.Reason, &e.Class, &e.Result)
		e.Ran = time.Duration(ms) * time.Millisecond
		if !errors.Is(err, pgx.ErrNoRows) {
			return e, outcomeErrorf(id, err)
		}
		_, err = db.Exec(ctx, `SELECT penstock.living_entry($1)`, id)
		if err == nil {
			return Ended{}, fmt.Errorf("read outcome of entry %d: it has not ended: %w", id, ErrState)
		}
		if err = outcomeErrorf(id, err); !errors.Is(err, ErrState) {
			return Ended{}, err
		}
		if again { // it has ended, but in another queue, or longer ago than outcomes are kept
			return Ended{}, fmt.Errorf("read outcome of entry %d: %w", id, ErrEntryNotFound)
		}
		again = true // it may have ended between the two statements
	}
}

func outcomeErrorf(id EntryID, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("read outcome of entry %d: %w", id, withDuty(err))
}
