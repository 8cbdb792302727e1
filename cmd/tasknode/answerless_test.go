package main

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// declare makes a queue whose entries run a statement, and pushes one.
func (x *behindProxy) declare(queue, statement string) {
	x.Helper()
	q, err := invalidation.Create(x.Context(), x.pool, queue, invalidation.Config{})
	if err != nil {
		x.Fatal(err)
	}
	by := invalidation.By{Actor: "ada", Reason: "test"}
	statements := map[string]string{"run": statement}
	if err := invalidation.SetStatements(x.Context(), x.pool, queue, statements, by); err != nil {
		x.Fatal(err)
	}
	if _, err := q.Push(x.Context(), invalidation.Push{Payload: json.RawMessage(`{}`)}); err != nil {
		x.Fatal(err)
	}
}

func nothing(context.Context, *invalidation.Run) (json.RawMessage, error) { return nil, nil }

// The connection of a statement freezes while the server works on it. The queue has no run_timeout; the statement is
// run again all the same, without an attempt spent, and its locks do not outlive it.
func TestAStatementWhoseAnswerIsLostRunsAgain(t *testing.T) {
	x := startBehindProxy(t, nothing, longLease)
	if _, err := x.pool.Exec(t.Context(), `CREATE TABLE public.effect (id int PRIMARY KEY, n int);
INSERT INTO public.effect VALUES (1, 0)`); err != nil {
		t.Fatal(err)
	}
	held, err := x.pool.Begin(t.Context()) // the statement runs until its connection is frozen
	if err != nil {
		t.Fatal(err)
	}
	defer held.Rollback(context.Background())
	if _, err := held.Exec(t.Context(), `SELECT pg_advisory_xact_lock(17)`); err != nil {
		t.Fatal(err)
	}
	x.declare("declared", `WITH one AS (UPDATE public.effect SET n = n + 1 WHERE id = 1 RETURNING n)
SELECT n FROM one CROSS JOIN LATERAL pg_advisory_xact_lock_shared(17)`)
	x.eventually(time.Minute, "the statement runs", `
SELECT EXISTS (SELECT FROM pg_stat_activity
                WHERE datname = current_database() AND wait_event = 'advisory' AND query LIKE '%public.effect%')`)
	if x.proxy.freeze("public.effect") == 0 {
		t.Fatal("no connection carried the statement")
	}
	if err := held.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	x.eventually(2*time.Minute, "it is done", `SELECT count(*) = 1 FROM penstock.result`)
	var effects, attempts int
	err = x.pool.QueryRow(t.Context(), `
SELECT (SELECT n FROM public.effect), (SELECT max(attempt) FROM penstock.result)`).Scan(&effects, &attempts)
	if err != nil || effects != 1 || attempts != 0 {
		t.Errorf("%d effects and %d attempts, want one effect and none: %v", effects, attempts, err)
	}
}

// A statement on which the server works is left alone, although nothing comes over its connection.
func TestALongStatementIsLeftAlone(t *testing.T) {
	x := startBehindProxy(t, nothing, longLease)
	if _, err := x.pool.Exec(t.Context(), `CREATE SEQUENCE public.begun`); err != nil {
		t.Fatal(err)
	}
	x.declare("declared", `SELECT b FROM nextval('public.begun') b CROSS JOIN LATERAL pg_sleep(9) s`)
	x.eventually(time.Minute, "it is done", `SELECT count(*) = 1 FROM penstock.result`)
	var begun int
	if err := x.pool.QueryRow(t.Context(), `SELECT last_value FROM public.begun`).Scan(&begun); err != nil || begun != 1 {
		t.Errorf("it ran %d times: %v", begun, err)
	}
}

// The answer to a statement without a deadline of its own is lost on a connection that stays open: the pool's
// statement_timeout bounds the wait, as for the duties of leaders.
func TestAPoolGivesUpAnAnswerThatCannotCome(t *testing.T) {
	proxy := newProxy(t, pgtest.DSN(t))
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: proxy.dsn, MaxConns: 1, StatementTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	const sql = `SELECT 'an answer'`
	answered := func() { // a busy machine may take longer than the timeout
		t.Helper()
		for end := time.Now().Add(time.Minute); ; {
			_, err := pool.Exec(t.Context(), sql)
			if err == nil {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("no answer within a minute: %v", err)
			}
		}
	}
	answered()
	if proxy.freeze("an answer") == 0 {
		t.Fatal("no connection carried the statement")
	}
	if _, err := pool.Exec(t.Context(), sql); err == nil || !postgres.Passes(err) {
		t.Errorf("the frozen connection answered %v", err)
	}
	answered()
}

// A server that shuts down its connections costs statements no attempt; one that ends with each run of an entry does.
func TestInterruptionsOfTheDatabaseAreFreeWithinABound(t *testing.T) {
	x := startBehindProxy(t, nothing)
	if _, err := x.pool.Exec(t.Context(), `CREATE SEQUENCE public.begun`); err != nil {
		t.Fatal(err)
	}
	x.declare("declared", `SELECT CASE WHEN nextval('public.begun') <= 2 THEN pg_terminate_backend(pg_backend_pid()) END`)
	x.eventually(time.Minute, "it is done", `SELECT count(*) = 1 FROM penstock.result WHERE attempt = 0`)
	x.declare("deadly", `SELECT pg_terminate_backend(pg_backend_pid())`)
	x.eventually(time.Minute, "an attempt is spent", `
SELECT EXISTS (SELECT FROM penstock.entry e JOIN penstock.queue q ON q.id = e.queue_id WHERE q.name = 'deadly' AND e.attempt > 0)`)
}
