package invalidation

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
)

// Errors that a caller can tell apart with errors.Is. The message of the wrapping error names the field.
var (
	ErrQueueNotFound       = errors.New("queue not found")
	ErrEntryNotFound       = errors.New("entry not found")
	ErrNotFound            = errors.New("not found") // anything else that is named: a node, a token, a batch
	ErrInvalid             = errors.New("invalid argument")
	ErrPayloadTooLarge     = errors.New("payload too large")
	ErrIdempotencyConflict = errors.New("idempotency key used with another body")
	ErrQueueFull           = errors.New("queue is full")
	// ErrNoInstance is returned for a push to a queue with OnNoInstanceFail while no instance of its model takes calls.
	ErrNoInstance = errors.New("no instance of the model takes calls")
	ErrState      = errors.New("state does not allow it")
	// ErrLockLost is returned if the lock record no longer carries the token: the entry was given
	// to another run, and writes of this one are refused.
	ErrLockLost = errors.New("lock lost")
	// ErrConflict is returned if the entry was changed concurrently while it was finished inside a
	// transaction of the caller. The transaction must be rolled back; a handler that returns this
	// error is run again and spends no attempt.
	ErrConflict = errors.New("entry changed while it was finished")
	// ErrNodeGone is returned if the node's row was removed, and with it every lock it held.
	ErrNodeGone = errors.New("node is not registered any more")
	// ErrDefinitionConflict is returned if the queue in the database differs from the program's
	// definition.
	ErrDefinitionConflict = errors.New("queue definition conflicts with the registry")
)

// FullError has the depth of a full queue, or of a full flow in it, and the time after which to push again. It
// matches ErrQueueFull.
type FullError struct {
	Flow       *string `json:"flow"`       // that is full; nil: the queue is
	Depth      int64   `json:"depth"`      // entries
	Capacity   int64   `json:"capacity"`   // entries
	DrainRate  float64 `json:"drain_rate"` // entries a second, as last measured; 0 if unknown
	RetryAfter time.Duration
	message    string
}

func (e *FullError) Error() string        { return e.message }
func (e *FullError) Is(target error) bool { return target == ErrQueueFull }

// sentinels are the SQLSTATEs that the functions of the schema raise.
var sentinels = map[string]error{
	"PS001": ErrQueueNotFound,
	"PS002": ErrInvalid,
	"PS003": ErrPayloadTooLarge,
	"PS004": ErrIdempotencyConflict,
	"PS005": ErrQueueFull,
	"PS006": ErrState,
	"PS007": ErrEntryNotFound,
	"PS008": ErrNotFound,
	"PS010": ErrNotFound,
	"PS012": ErrNotFound,
	"PS013": ErrNoInstance,
}

// Sentinel returns the error of this package that an SQLSTATE of the schema's functions stands for, nil for others.
func Sentinel(sqlstate string) error { return sentinels[sqlstate] }

// missingObject is the SQLSTATEs of statements that name a schema, table, column or function that does not exist.
var missingObject = []string{"3F000", "42P01", "42703", "42883"}

// Translate turns an error of the schema's functions into one that is Sentinel of its SQLSTATE, with the message and
// the hint of the function; a full queue is a FullError. Others pass through.
func Translate(err error) error {
	var pg *pgconn.PgError
	if errors.As(err, &pg) && errors.Is(sentinels[pg.Code], ErrQueueFull) {
		return fullError(pg)
	}
	return postgres.Named(err, sentinels)
}

func fullError(pg *pgconn.PgError) *FullError {
	full := &FullError{message: pg.Message}
	var detail struct {
		FullError
		RetryAfterMS int64 `json:"retry_after_ms"`
	}
	if json.Unmarshal([]byte(pg.Detail), &detail) == nil {
		*full = detail.FullError
		full.message = pg.Message
		full.RetryAfter = time.Duration(detail.RetryAfterMS) * time.Millisecond
	}
	return full
}

// RefusesPush reports whether a push was refused for what is in one of its entries, and would be refused again for
// good: a field is not valid, the payload is too large, its idempotency key was used with another body, or Postgres
// cannot hold a value. A full queue, a queue that does not exist and a model without an instance may take it later. err
// is that of Push, or of a function of the schema.
func RefusesPush(err error) bool {
	err = Translate(err)
	return errors.Is(err, ErrInvalid) || errors.Is(err, ErrPayloadTooLarge) || errors.Is(err, ErrIdempotencyConflict) ||
		postgres.RefusesValues(err)
}

// hiddenFunction is the SQLSTATEs of calls of a function or an operator that Postgres does not have for these
// arguments, or has more than once. The call may be one of a user's trigger.
var hiddenFunction = []string{"42883", "42725"}

// withDuty is Translate for callers that are programs of users: an error about missing rights says which role has them,
// and one about missing objects where they come from: those of the schema are named with it, those of Postgres are not.
func withDuty(err error) error {
	switch code := postgres.Code(err); {
	case slices.Contains(hiddenFunction, code) && !strings.Contains(err.Error(), "penstock."):
		return fmt.Errorf("%w. Unless a trigger calls what does not exist, a schema before pg_catalog in the "+
			"search_path of this session may hide functions of Postgres from those of Penstock, or the server is too "+
			"old: penstock doctor names the role or database that has such a search_path", err)
	// The table of a queue is missing where it was dropped.
	case slices.Contains(missingObject, code) && !strings.Contains(err.Error(), "penstock.entry_"):
		return fmt.Errorf("%w. The schema penstock is not in this database, or is older than this program: "+
			"penstock migrate up", err)
	case code == postgres.InsufficientPrivilege && rightIsMissing(err):
		return fmt.Errorf("%w. This database role does not have the rights for it: penstock grants lists those of "+
			"each duty. One with the duty push alone pushes by penstock.push or penstock.push_json, as PushSQLTx does",
			err)
	}
	return Translate(err)
}

// rightIsMissing tells the error of a role that lacks a right on an object from others of its SQLSTATE, whatever the
// language of the server's messages. Drivers other than pgx give the text alone.
func rightIsMissing(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && strings.HasPrefix(pg.Routine, "aclcheck_error") ||
		strings.Contains(err.Error(), "permission denied")
}
