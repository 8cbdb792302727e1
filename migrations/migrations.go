// Package migrations holds the schema and applies it.
//
// Tables are made and changed by numbered migrations (00001_baseline.sql and what follows), each
// applied once. Functions, views and triggers are defined once each in functions/*.sql and are all
// applied again whenever one of these files has changed. Both are forward-only and, but for what
// the changelog names, short-locking: programs of the version before keep working. A numbered
// migration is one transaction: where it takes long, it waits for no lock on a second table.
package migrations

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

//go:embed [0-9]*.sql functions/*.sql
var files embed.FS

// Table is where goose records numbered migrations. It lives outside the schema penstock, which the first one creates.
const Table = "public.penstock_migration"

// A statement that waits for a table makes every later statement on that table wait behind it. So a migration gives up
// after lockWait, lets the others pass for lockPause, and tries again for lockPatience. So does a grant of rights.
const (
	lockWait     = 2 * time.Second
	lockPause    = 3 * time.Second
	lockPatience = 2 * time.Minute
)

// SQLSTATEs after which a migration tries again.
const (
	lockNotAvailable = "55P03"
	deadlockDetected = "40P01"
)

// Result is what a call of Up did.
type Result struct {
	Applied int      `json:"applied"`         // migrations, and the functions counting as one
	Notes   []string `json:"notes,omitempty"` // sentences about what was left alone or recorded anew
}

func (r *Result) note(format string, args ...any) {
	r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
}

// Up applies every migration that is missing on the database behind cfg, and the functions unless they, or those of a
// newer release, were applied. The result is valid with an error too.
// Two calls at once are safe: the second waits for the first, at most a minute. Where another session holds a table for
// two minutes, or until ctx ends, the error names that session.
// A superuser or a member of the owner of the schema acts as that owner, unless objects belong to other roles already.
func Up(ctx context.Context, cfg *pgx.ConnConfig) (Result, error) {
	set, err := readFunctions(files)
	if err != nil {
		return Result{}, err
	}
	return up(ctx, cfg, set)
}

func up(ctx context.Context, cfg *pgx.ConnConfig, set functionSet) (Result, error) {
	m, err := open(cfg, setUpAsOwner)
	if err != nil {
		return Result{}, err
	}
	defer m.db.Close()
	var all Result
	err = m.untilFree(ctx, m.holder, func() error {
		done, err := m.apply(ctx, set)
		all.Applied += done.Applied
		all.Notes = done.Notes
		return err
	})
	if err != nil {
		return all, fmt.Errorf("apply migrations: %w", err)
	}
	return all, nil
}

// migrator applies migrations and functions over connections of its own.
type migrator struct {
	db     *sql.DB
	goose  *goose.Provider
	locker lock.SessionLocker
	before *before // nil until a try has read it
}

// before is how the schema differs from its record before the first try: a later try would take what the first one
// migrated for changes by hand.
type before struct {
	byHand changes
	other  *OtherServerError // definitions were not compared
}

func open(cfg *pgx.ConnConfig, prepare func(context.Context, *pgx.Conn) error) (*migrator, error) {
	db := stdlib.OpenDB(*cfg, stdlib.OptionAfterConnect(prepare))
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(1, 60))
	if err != nil {
		db.Close()
		return nil, fmt.Errorf("prepare migration lock: %w", err)
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files, goose.WithTableName(Table))
	if err != nil {
		db.Close()
		return nil, fmt.Errorf("read migrations: %w", err)
	}
	return &migrator{db: db, goose: provider, locker: locker}, nil
}

// apply tries once, and returns what it did even if it failed then.
func (m *migrator) apply(ctx context.Context, set functionSet) (done Result, err error) {
	err = m.locked(ctx, func(conn *sql.Conn) (err error) {
		done, err = m.applyOn(ctx, conn, set)
		return err
	})
	return done, err
}

// locked calls f with a session that has the migration lock.
func (m *migrator) locked(ctx context.Context, f func(*sql.Conn) error) error {
	conn, err := m.db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := m.locker.SessionLock(ctx, conn); err != nil {
		return fmt.Errorf("take migration lock: %w", err)
	}
	// The session ends with the connection, so that a failed unlock keeps nothing.
	defer func() { _ = m.locker.SessionUnlock(context.WithoutCancel(ctx), conn) }()
	return f(conn)
}

func (m *migrator) applyOn(ctx context.Context, conn *sql.Conn, set functionSet) (Result, error) {
	if m.before == nil {
		var read before
		err := m.with(conn, func(c *pgx.Conn) (err error) {
			if err := checkEncoding(ctx, c); err != nil {
				return err
			}
			read.byHand, err = changedByHand(ctx, c)
			return err
		})
		if err != nil && !errors.As(err, &read.other) {
			return Result{}, err
		}
		m.before = &read
	}
	results, err := m.goose.Up(ctx)
	var partial *goose.PartialError
	if errors.As(err, &partial) {
		results = partial.Applied
	}
	done := Result{Applied: len(results)}
	if err != nil {
		return done, err
	}
	if other := m.before.other; other != nil {
		done.note("%v: it was recorded anew; of earlier changes by hand only added views and functions are found",
			other)
	}
	err = m.with(conn, func(c *pgx.Conn) error {
		return set.apply(ctx, c, m.before.byHand, m.before.other != nil, &done)
	})
	return done, err
}

// obstacle describes after so long a wait the transaction that holds the lock. found is false if none is known.
type obstacle func(ctx context.Context, waited time.Duration) (text string, found bool)

// untilFree repeats try while another transaction holds a lock that it needs, for lockPatience or until ctx ends.
func (m *migrator) untilFree(ctx context.Context, holder obstacle, try func() error) error {
	for began := time.Now(); ; {
		err := try()
		if err == nil {
			return nil
		}
		var pg *pgconn.PgError
		blocked := errors.As(err, &pg) && (pg.Code == lockNotAvailable || pg.Code == deadlockDetected)
		if !blocked && ctx.Err() == nil {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(lockPause):
			if time.Since(began) < lockPatience {
				continue
			}
		}
		text, found := holder(ctx, time.Since(began).Round(time.Second))
		if !blocked && !found { // ctx ended in a try that had no lock to wait for
			return err
		}
		return fmt.Errorf("%s: %w", text, err)
	}
}

// with calls f with the connection of pgx that is behind conn.
func (m *migrator) with(conn *sql.Conn, f func(*pgx.Conn) error) error {
	return conn.Raw(func(driver any) error {
		c, ok := driver.(*stdlib.Conn)
		if !ok {
			return fmt.Errorf("a connection of %T, not of pgx", driver)
		}
		return f(c.Conn())
	})
}

// holderSQL names the oldest transaction that has held tables of ours for longer than a migration waits.
const holderSQL = `
SELECT format('process %s (user %s, program "%s", %s since %s), which has %s; ' ||
              'end it with SELECT pg_terminate_backend(%s), or wait for it, and start again',
              a.pid, a.usename, a.application_name, a.state, a.xact_start,
              string_agg(DISTINCT c.oid::regclass::text, ', '), a.pid)
  FROM pg_stat_activity a
  JOIN pg_locks l ON l.pid = a.pid AND l.granted
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  JOIN pg_class c ON c.oid = l.relation AND c.relkind IN ('r', 'p', 'v')
 WHERE a.pid <> pg_backend_pid() AND a.xact_start < clock_timestamp() - $1 * interval '1 millisecond'
   AND (c.relnamespace = to_regnamespace('penstock') OR c.oid = to_regclass($2))
 GROUP BY a.pid, a.usename, a.application_name, a.state, a.xact_start ORDER BY a.xact_start LIMIT 1`

// holder describes the session that has a table of ours; one that has just ended is not found.
func (m *migrator) holder(ctx context.Context, waited time.Duration) (text string, found bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lockWait)
	defer cancel()
	session := "transactions that have ended; start again"
	found = m.asItself(ctx, func(tx *sql.Tx) error {
		return tx.QueryRowContext(ctx, holderSQL, lockWait.Milliseconds(), Table).Scan(&session)
	}) == nil
	return fmt.Sprintf("a table was held for %v by %s", waited, session), found
}

// asItself calls f in a transaction with the role that logged in, which may see more of other sessions than the owner
// of the schema.
func (m *migrator) asItself(ctx context.Context, f func(*sql.Tx) error) error {
	tx, err := m.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // it only reads
	if _, err := tx.ExecContext(ctx, `SET LOCAL ROLE NONE`); err != nil {
		return err
	}
	return f(tx)
}
