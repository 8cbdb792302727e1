package postgres

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// SQLSTATEs of Postgres that callers compare Code with. Those that functions of the schema raise begin with PS, and are
// in package invalidation.
const (
	UniqueViolation       = "23505"
	CheckViolation        = "23514"
	SerializationFailure  = "40001"
	DeadlockDetected      = "40P01"
	InsufficientPrivilege = "42501"
	UndefinedTable        = "42P01"
	LockNotAvailable      = "55P03"
	QueryCanceled         = "57014" // by statement_timeout as well
)

// ErrPooler is what ends a program where ForPooler finds that its settings are those for Postgres itself.
var ErrPooler = errors.New("a pooler in between takes no settings of sessions: set database.pooled, and " +
	"database.direct_url to the address of Postgres itself")

// ForPooler makes err an ErrPooler where a pooler let no session begin for the settings in its request. PgBouncer knows
// only those that it keeps for each client, and its SQLSTATE 08P01 is that of all its errors. It returns others as they
// are.
func ForPooler(err error) error {
	var sent *pgconn.PgError
	if errors.As(err, &sent) && strings.HasPrefix(sent.Message, "unsupported startup parameter") {
		return fmt.Errorf("%w: %w", ErrPooler, err)
	}
	return err
}

// outOfIDs reports whether the server assigns no transaction id or multixact id until a database is vacuumed
// (wraparound). The SQLSTATE is that of other limits.
func outOfIDs(err error) bool {
	var sent *pgconn.PgError
	return errors.As(err, &sent) && (sent.Routine == "GetNewTransactionId" || sent.Routine == "GetNewMultiXactId")
}

// RefusesValues says whether the server refused a statement for the values in it, as it would again: data exceptions
// (class 22), and values beyond what it can hold or follow, as JSON that is too deep for its stack (class 54). One that
// is short of memory or locks (class 53) says nothing of the values, nor does a commit that finds the queue of
// notifications full, or a statement that gets no transaction id, which are of class 54 as well.
func RefusesValues(err error) bool {
	var sent *pgconn.PgError
	if errors.As(err, &sent) && sent.Routine == "PreCommit_Notify" || outOfIDs(err) {
		return false
	}
	code := Code(err)
	return strings.HasPrefix(code, "22") || strings.HasPrefix(code, "54")
}

// RefusesRow is RefusesValues, or says that a row violates a constraint (class 23).
func RefusesRow(err error) bool { return RefusesValues(err) || strings.HasPrefix(Code(err), "23") }
