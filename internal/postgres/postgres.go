// Package postgres is the access to Postgres: pools, transactions and SQLSTATEs. It knows no schema.
package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// DB runs statements: a pool, a connection or a transaction.
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	// The rows carry Query's error as well: pgx.CollectRows returns it.
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
	Begin(ctx context.Context) (pgx.Tx, error)
}

// Config names the database and bounds the connections. Only DSN is needed.
type Config struct {
	DSN      string
	MaxConns int32 // 4 if zero
	// Pooled is for a pooler in transaction mode before Postgres: no named statements, no session
	// settings.
	Pooled bool
	// StatementTimeout bounds every statement of the pool; if zero, the address alone may have a bound. An answer that
	// has not come 5 seconds after it ends the connection.
	StatementTimeout time.Duration
	// LateAnswers says that transactions of the pool set a statement_timeout beyond StatementTimeout.
	LateAnswers bool
	// LockTimeout bounds how long a statement waits for another transaction; if zero, the address alone may.
	LockTimeout time.Duration
	// ReadOnly makes every transaction of the pool read only, but not behind a pooler.
	ReadOnly bool
	// Warm, if set, is called with each new connection before it is used, but not behind a pooler, and all MaxConns
	// connections are kept open: no statement then waits for a connection or its first plan.
	// An error of it is left to the first use, for the schema may be about to come, unless it ended the connection.
	Warm func(ctx context.Context, conn *pgx.Conn) error
}

// idleInTransaction is how long the server waits for a client within a transaction: the rows that a program has locked
// stay locked when its machine is lost, until then.
const idleInTransaction = "60s"

// session holds the settings of every connection of Penstock. The hot statements are keyed lookups.
// A plan made while a table was empty (as penstock.lock is while no entry runs) must not become a
// scan or nested loops when it is full, and planning anew would cost more than running. So there is
// one generic plan, and the statements leave the planner no choice under any statistics: a table is
// read only by LATERAL (... OFFSET 0) lookups through an index, or by the ctids that such a lookup
// found; sets are combined by hashed IN (...), never by joins. A scan that is priced out makes plans with
// parallel workers look cheap, and starting two processes takes longer than any of these statements.
var session = map[string]string{
	"application_name":                    "penstock",
	"plan_cache_mode":                     "force_generic_plan",
	"enable_seqscan":                      "off",
	"enable_hashjoin":                     "off",
	"enable_mergejoin":                    "off",
	"jit":                                 "off",
	"max_parallel_workers_per_gather":     "0",
	"idle_in_transaction_session_timeout": idleInTransaction,
	// A session that listens is idle for as long as nothing is told, and hints that come while it connects again are
	// lost.
	"idle_session_timeout": "0",
	// Unqualified names in statements are Postgres's own, even if public has objects of the same
	// names.
	"search_path": "pg_catalog, pg_temp",
	// Statements are written for string literals of the standard.
	"standard_conforming_strings": "on",
	// Names that the server prints are compared with those that functions write.
	"quote_all_identifiers": "off",
	// Settling reads rows committed meanwhile in a new statement; under an older snapshot they
	// would be invisible.
	"default_transaction_isolation": "read committed",
}

// Open returns a pool on the database of cfg. It connects when first used.
func Open(ctx context.Context, cfg Config) (*pgxpool.Pool, error) {
	pc, err := pgxpool.ParseConfig(cfg.DSN)
	if err != nil {
		return nil, fmt.Errorf("read database address: %w", err)
	}
	pc.MaxConns = cfg.MaxConns
	pc.MaxConns = cmp.Or(pc.MaxConns, 4)
	pc.MaxConnLifetimeJitter = 5 * time.Minute
	cfg.prepare(pc.ConnConfig)
	pc.BeforeConnect = reread
	if cfg.Warm != nil && !cfg.Pooled {
		pc.MinConns = pc.MaxConns
		pc.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			if err := cfg.Warm(ctx, conn); conn.IsClosed() {
				return fmt.Errorf("warm a connection: %w", err)
			}
			return nil
		}
	}
	pool, err := pgxpool.NewWithConfig(ctx, pc)
	if err != nil {
		return nil, fmt.Errorf("open pool: %w", err)
	}
	return pool, nil
}

// ConnConfig returns the configuration of one connection of its own, outside any pool: for LISTEN, which lasts as long
// as its session. Connect opens it.
func ConnConfig(cfg Config) (*pgx.ConnConfig, error) {
	cc, err := pgx.ParseConfig(cfg.DSN)
	if err != nil {
		return nil, fmt.Errorf("read database address: %w", err)
	}
	cfg.prepare(cc)
	return cc, nil
}

// prepare sets the timeouts of a connection, and the session settings on which the statements rely.
func (c Config) prepare(cc *pgx.ConnConfig) {
	cc.ConnectTimeout = cmp.Or(cc.ConnectTimeout, connectTimeout)
	var answer time.Duration
	if c.StatementTimeout > 0 && !c.LateAnswers {
		answer = c.StatementTimeout + answerGrace
	}
	cc.DialFunc = closingSoon(cc.DialFunc, answer)
	failpoints(cc)
	// A connection to a server that shuts down or has become a standby is closed: the next one may
	// reach the new primary.
	cc.OnPgError = func(_ *pgconn.PgConn, err *pgconn.PgError) bool {
		fatal := err.SeverityUnlocalized == "FATAL" || err.Severity == "FATAL" // some poolers send the second alone
		return !fatal && !Unavailable(err)
	}
	// Go's texts are UTF-8. Poolers know this setting of a session, which every driver sends.
	cc.RuntimeParams["client_encoding"] = "UTF8"
	if c.Pooled {
		// Statements are described once, by a server process that may be another one than runs them; each run names
		// no prepared statement and carries its types. (QueryExecModeExec would not know the types of arguments.)
		cc.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
		return
	}
	for name, value := range session {
		cc.RuntimeParams[name] = value
	}
	if c.ReadOnly {
		cc.RuntimeParams["default_transaction_read_only"] = "on"
	}
	options := strings.ToLower(strings.ReplaceAll(cc.RuntimeParams["options"], "-", "_"))
	for name, limit := range map[string]time.Duration{
		"statement_timeout": c.StatementTimeout,
		"lock_timeout":      c.LockTimeout,
	} {
		// 0, no bound, is sent as well: the role or the database may have one of its own. One in the address is meant
		// for Penstock, and holds.
		_, given := cc.RuntimeParams[name]
		if limit > 0 || !given && !strings.Contains(options, name) {
			cc.RuntimeParams[name] = fmt.Sprint(limit.Milliseconds())
		}
	}
}

// ErrIsolation is returned if transactions are not read committed by default, which the queue
// needs: settling reads rows that were committed meanwhile in a new statement.
var ErrIsolation = errors.New("transactions must be read committed by default")

const checkSQL = `
SELECT current_setting('default_transaction_isolation'),
       format('ALTER ROLE %I IN DATABASE %I SET ', current_user, current_database()),
       ARRAY(SELECT s.name || ' = ' || s.value
               FROM unnest($1::text[], $2::text[]) s(name, value)
              WHERE current_setting(s.name) <> s.value
              UNION ALL
             SELECT format('idle_in_transaction_session_timeout = %L', $3::text)
              WHERE current_setting('idle_in_transaction_session_timeout') = '0'
              ORDER BY 1)`

// Check compares the settings of sessions with the needed ones. For settings that only make
// statements slow, or leave rows locked by a machine that was lost, it returns the ALTER statements that correct them:
// sessions of a pooler in transaction mode have the settings of the role, not those of this package. It returns
// ErrIsolation for an isolation level that would make results wrong.
func Check(ctx context.Context, db DB) (advice []string, err error) {
	var isolation, alter string
	names := []string{"enable_seqscan", "enable_hashjoin", "enable_mergejoin", "jit", "max_parallel_workers_per_gather"}
	values := make([]string, len(names))
	for i, name := range names {
		values[i] = session[name]
	}
	err = db.QueryRow(ctx, checkSQL, names, values, idleInTransaction).Scan(&isolation, &alter, &advice)
	if err != nil {
		return nil, fmt.Errorf("read the session's settings: %w", err)
	}
	for i := range advice {
		advice[i] = alter + advice[i]
	}
	if want := session["default_transaction_isolation"]; isolation != want {
		return nil, fmt.Errorf("%w, and are %s; %sdefault_transaction_isolation = '%s'", ErrIsolation, isolation, alter,
			want)
	}
	return advice, nil
}

// Query runs a query for pgx.CollectRows, pgx.ForEachRow and the like, which return its error.
func Query(ctx context.Context, db DB, sql string, args ...any) pgx.Rows {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return failed{err: err}
	}
	return rows
}

// One returns the only row, by the positions of its columns, and the error none if there is no row. verb says what is
// done, for other errors.
func One[T any](rows pgx.Rows, verb string, none error) (T, error) {
	row, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[T])
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return row, none
	case err != nil:
		return row, fmt.Errorf("%s: %w", verb, err)
	}
	return row, nil
}

// failed is the rows of a query that failed before it ran.
type failed struct {
	pgx.Rows
	err error
}

func (f failed) Close()     {}
func (f failed) Err() error { return f.err }
func (f failed) Next() bool { return false }

// ErrNotBegun is wrapped by InTx if fn was not called: the database is unavailable, or has no
// connection left.
var ErrNotBegun = errors.New("begin")

// commitWithin bounds the wait for the answer to COMMIT. It may never come on a connection that stays open, and a
// transaction has done its work by then, whatever that took.
const commitWithin = 30 * time.Second

// InTx runs fn in a transaction of db: commit if it returns nil, else roll back. BEGIN and COMMIT have 30 seconds each.
// An error of COMMIT leaves open whether the transaction was committed.
// The transaction is READ COMMITTED, also where the role or database has another default, which sessions of a pooler do
// not override. If db is a transaction itself, fn runs in a subtransaction of it.
func InTx(ctx context.Context, db DB, fn func(pgx.Tx) error) error {
	tx, err := begin(ctx, db)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotBegun, err)
	}
	defer rollBack(context.WithoutCancel(ctx), tx)
	if err := fn(tx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, commitWithin)
	defer cancel()
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

func begin(ctx context.Context, db DB) (pgx.Tx, error) {
	ctx, cancel := Bounded(ctx)
	defer cancel()
	outermost, ok := db.(interface {
		BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	})
	if !ok {
		return db.Begin(ctx)
	}
	return outermost.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
}

// rollBack does nothing after a commit. Its answer is waited for as long as that to COMMIT.
func rollBack(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(ctx, commitWithin)
	defer cancel()
	_ = tx.Rollback(ctx) // a connection that does not answer is closed
}

// Code returns the SQLSTATE of err, empty if the server sent none. The error may be that of another driver than pgx.
func Code(err error) string {
	var sent interface{ SQLState() string }
	if errors.As(err, &sent) {
		return sent.SQLState()
	}
	return ""
}

// Unavailable reports whether the database could not be reached, let no session begin, ended one that was idle or in a
// transaction for longer than its settings permit, or refused work for a temporary reason: shutting down, starting up,
// read-only after a failover, out of connections, memory, disk, open files or transaction ids. A session may be refused
// for a reason that only an operator ends, such as a password that was changed while programs run; but the statement
// was not sent, and says nothing about what it was to write.
func Unavailable(err error) bool {
	var unconnected *pgconn.ConnectError
	return err != nil && (temporary(Code(err)) || outOfIDs(err) || errors.As(err, &unconnected))
}

// temporary reports whether a SQLSTATE is of a state of the server that ends by itself. None is that of a connection
// that failed.
func temporary(code string) bool {
	switch code {
	case "", "25006", "25P03", "25P04", "57P01", "57P02", "57P03", "57P05", "53000", "53100", "53200", "53300":
		return true
	default:
		return strings.HasPrefix(code, "08")
	}
}

// refused reports whether the server, or a pooler before it, let no session begin for a reason that does not end by
// itself: the password, the role, the database, the client's address.
func refused(err error) bool {
	var unconnected *pgconn.ConnectError
	return errors.As(err, &unconnected) && !temporary(Code(err))
}

// Disconnected reports whether err is a connection that could not be made or was lost, or an answer that did
// not come in time, and not an error of the server.
func Disconnected(err error) bool {
	if Code(err) != "" {
		return false
	}
	var connect *pgconn.ConnectError
	var network net.Error
	return errors.As(err, &connect) || errors.As(err, &network) || errors.Is(err, pgconn.ErrConnClosed) ||
		errors.Is(err, ErrSilent) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || errors.Is(err, context.DeadlineExceeded)
}

// BadText reports whether a text of the statement cannot be one of the database: it is not UTF-8, or has NUL.
func BadText(err error) bool {
	code := Code(err)
	return code == "22021" || code == "22P05" // character_not_in_repertoire, untranslatable_character
}

// Passes reports whether the same statement may succeed a moment later: the database is unavailable,
// other transactions were in the way (class 40, lock_not_available), or the statement took too long
// (query_canceled).
func Passes(err error) bool {
	code := Code(err)
	return Unavailable(err) || strings.HasPrefix(code, "40") || code == LockNotAvailable || code == QueryCanceled
}

// Named turns an error that a function of the schema raised into the sentinel of its SQLSTATE, with the function's own
// message and hint. Others pass through. An error of another driver than pgx keeps its own text.
func Named(err error, sentinels map[string]error) error {
	sentinel := sentinels[Code(err)]
	if sentinel == nil {
		return err
	}
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return fmt.Errorf("%w: %w", err, sentinel)
	}
	if pg.Hint != "" {
		return fmt.Errorf("%s. %s: %w", pg.Message, pg.Hint, sentinel)
	}
	return fmt.Errorf("%s: %w", pg.Message, sentinel)
}

// Given returns nil, NULL in SQL, for a zero value.
func Given[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}
