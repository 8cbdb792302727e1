package postgres

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// AnswerMax bounds the wait for the answer to a short statement that is bounded by nothing else, the wait for a free
// connection of a pool included.
const AnswerMax = commitWithin

// Bounded returns ctx with a deadline AnswerMax from now.
func Bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, AnswerMax)
}

// ErrSilent says that a connection was given up on which an answer was waited for that could not come any more: the
// server had ended the statement, or had no process of this connection.
var ErrSilent = errors.New("the answer of the server was lost on a connection that stayed open")

// A statement of a user may take any time, so that no deadline tells a long one from one whose answer is lost. The
// server can: its process is active while it works. The first probe of the process is after attendFirst, the time
// between probes doubles up to attendMax, and two in a row that find the process waiting for its client, without a
// change between them, show that the answer is lost.
const (
	attendFirst = 2 * time.Second
	attendMax   = 10 * time.Second
)

// UnboundedSQL is the expressions of a SELECT that prepares a transaction for a statement which may take any time,
// and is ended by its node alone. The first one is the server's process, the other four are texts. The timeout of
// statements would be that of the role where sessions are without our settings, and managed servers set one for all
// roles; so may they one of transactions, which Postgres has from 17 on. A node that is gone should not keep rows
// locked, for which the next run would wait: the server looks for its client while it works (Windows cannot), and
// ends a transaction that waits for it.
const UnboundedSQL = `pg_catalog.pg_backend_pid(), pg_catalog.set_config('statement_timeout', '0', true),
       CASE WHEN pg_catalog.current_setting('transaction_timeout', true) <> '0'
            THEN pg_catalog.set_config('transaction_timeout', '0', true) END,
       pg_catalog.set_config('idle_in_transaction_session_timeout', '` + idleInTransaction + `', true),
       CASE WHEN pg_catalog.current_setting('dynamic_shared_memory_type') <> 'windows'
            THEN pg_catalog.set_config('client_connection_check_interval', '10s', true) END`

// Backend prepares tx for a statement that may take any time, and returns the process of the server that serves it.
func Backend(ctx context.Context, tx pgx.Tx) (pid int32, err error) {
	ctx, cancel := Bounded(ctx)
	defer cancel()
	if err := tx.QueryRow(ctx, `SELECT `+UnboundedSQL).Scan(&pid, nil, nil, nil, nil); err != nil {
		return 0, fmt.Errorf("ask for the server's process: %w", err)
	}
	return pid, nil
}

// Attend runs fn, whose one statement goes over the connection of tx, and ends fn's context when the answer to the
// statement cannot come any more; the error wraps ErrSilent then. pid is pg_backend_pid() in tx, which behind a pooler
// is known only there. A statement on which the server works is left alone, however long it takes.
func Attend(ctx context.Context, tx pgx.Tx, pid int32, fn func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	a := attendant{config: tx.Conn().Config(), pid: pid}
	over := make(chan struct{})
	go func() {
		defer close(over)
		if a.watch(ctx) {
			cancel(ErrSilent)
		}
	}()
	err := fn(ctx)
	lost := errors.Is(context.Cause(ctx), ErrSilent)
	cancel(nil)
	<-over
	if err != nil && lost {
		return fmt.Errorf("%w: %w", ErrSilent, err)
	}
	return err
}

// attendant watches the server's process of a connection over connections of its own: one that was kept could freeze
// with the one that it watches.
type attendant struct {
	config *pgx.ConnConfig
	pid    int32
}

// watch returns true when the process waits for its client or is gone, and false when ctx ends. A probe that
// fails says nothing: the database may be away for all.
func (a attendant) watch(ctx context.Context) bool {
	var seen *activity
	for wait := attendFirst; ; wait = min(2*wait, attendMax) {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(wait):
		}
		found, err := a.probe(ctx, seen)
		switch {
		case err != nil || found.works:
			seen = nil
		case seen != nil && found.since.Equal(seen.since):
			return true
		default:
			seen = &found
			wait = attendFirst / 2 // doubled above: the second probe follows soon
		}
	}
}

// activity is the state of a server process at a probe.
type activity struct {
	works bool
	since time.Time // of the last change; zero: there is no such process
}

// activitySQL reads the process $1. A state that this role may not see counts as work.
const activitySQL = `
SELECT coalesce(a.state NOT LIKE 'idle%', true), coalesce(a.state_change, 'epoch')
  FROM pg_catalog.pg_stat_activity a WHERE a.pid = $1`

// endSQL ends the process $1 if it has waited for its client since $2: the locks of its transaction would hold up
// those who run the entry next.
const endSQL = `
SELECT pg_catalog.pg_terminate_backend(a.pid)
  FROM pg_catalog.pg_stat_activity a WHERE a.pid = $1 AND a.state LIKE 'idle%' AND a.state_change = $2`

// probe reads the activity. If it is the one that was seen before, the process is ended.
func (a attendant) probe(ctx context.Context, seen *activity) (found activity, err error) {
	conn, err := Connect(ctx, a.config)
	if err != nil {
		return found, fmt.Errorf("probe server process %d: %w", a.pid, err)
	}
	ctx, cancel := context.WithTimeout(ctx, attendMax)
	defer cancel()
	defer conn.Close(ctx)
	err = conn.QueryRow(ctx, activitySQL, a.pid).Scan(&found.works, &found.since)
	if errors.Is(err, pgx.ErrNoRows) {
		return activity{}, nil
	}
	if err == nil && seen != nil && !found.works && found.since.Equal(seen.since) {
		_, err = conn.Exec(ctx, endSQL, a.pid, found.since)
	}
	if err != nil {
		return found, fmt.Errorf("probe server process %d: %w", a.pid, err)
	}
	return found, nil
}
