package postgres

// SQLSTATEs of Postgres that callers compare Code with. Those that functions of the schema raise begin with PS, and are
// in package invalidation.
const (
	UniqueViolation       = "23505"
	SerializationFailure  = "40001"
	DeadlockDetected      = "40P01"
	InsufficientPrivilege = "42501"
	UndefinedTable        = "42P01"
	LockNotAvailable      = "55P03"
	QueryCanceled         = "57014" // by statement_timeout as well
)
