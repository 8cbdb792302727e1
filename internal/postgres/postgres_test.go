package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

func backend(t *testing.T, pool *pgxpool.Pool) (pid int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), `SELECT pg_backend_pid()`).Scan(&pid); err != nil {
		t.Fatal(err)
	}
	return pid
}

// After a fail-over the old server answers, too, as a standby. Who kept its connection would write in vain for ever.
func TestConnectionToAServerThatTakesNoWritesIsNotKept(t *testing.T) {
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: pgtest.DSN(t), MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	before := backend(t, pool)
	if _, err := pool.Exec(t.Context(), `SELECT 1 / 0`); err == nil || backend(t, pool) != before {
		t.Errorf("an ordinary error (%v) costs the connection", err)
	}
	if _, err := pool.Exec(t.Context(), `SET default_transaction_read_only = on`); err != nil {
		t.Fatal(err)
	}
	_, err = pool.Exec(t.Context(), `CREATE TABLE t ()`)
	if full := (&pgconn.PgError{Code: "53100"}); !postgres.Unavailable(full) {
		t.Error("a full disk is not said to pass")
	}
	if postgres.Code(err) != "25006" || !postgres.Unavailable(err) {
		t.Fatalf("write to a read-only server: %v", err)
	}
	if backend(t, pool) == before {
		t.Error("the connection to a read-only server is kept")
	}
}

// lc_messages translates the severity of an error as well.
func TestAFatalErrorEndsItsConnectionInEachLanguage(t *testing.T) {
	cc, err := postgres.ConnConfig(postgres.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for want, sent := range map[bool]*pgconn.PgError{
		true: {Severity: "ОШИБКА", SeverityUnlocalized: "ERROR"}, false: {Severity: "ВАЖНО", SeverityUnlocalized: "FATAL"},
	} {
		sent.Code = "XX000"
		if kept := cc.OnPgError(nil, sent); kept != want {
			t.Errorf("after %s (%s) the connection is kept: %t", sent.Severity, sent.SeverityUnlocalized, kept)
		}
	}
}

// refusal is the error of a statement for which the server let no session begin.
func refusal(t *testing.T) error {
	t.Helper()
	address, err := url.Parse(pgtest.DSN(t))
	if err != nil {
		t.Fatal(err)
	}
	address.User = url.UserPassword("no_such_role", "x")
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: address.String(), MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	_, err = pool.Exec(t.Context(), `SELECT 1`)
	if !strings.HasPrefix(postgres.Code(err), "28") { // 28000, or 28P01 where the server asks for passwords
		t.Fatalf("a role that does not exist: %v", err)
	}
	return fmt.Errorf("settle: %w", err)
}

// A password that is changed while programs run refuses their new connections. What they were to record is not refused.
func TestAStatementThatWasNotSentMaySucceedLater(t *testing.T) {
	if err := refusal(t); !postgres.Unavailable(err) || !postgres.Passes(err) {
		t.Errorf("%v: unavailable %t, passes %t", err, postgres.Unavailable(err), postgres.Passes(err))
	}
	same := &pgconn.PgError{Code: "28000"} // of SET ROLE, say
	if postgres.Unavailable(same) || postgres.Passes(same) {
		t.Error("the same SQLSTATE of a statement that was sent passes, too")
	}
}

// Whoever may create in public could offer a function that fits better than Postgres's own.
func TestNothingInPublicStandsInForWhatStatementsCall(t *testing.T) {
	dsn := pgtest.DSN(t)
	for want, cfg := range map[string]postgres.Config{"postgres": {DSN: dsn}, "public": {DSN: dsn, Pooled: true}} {
		pool, err := postgres.Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer pool.Close()
		const trap = `CREATE OR REPLACE FUNCTION public.concat(text, bigint) RETURNS text LANGUAGE sql AS $$ SELECT 'trapped' $$`
		if _, err := pool.Exec(t.Context(), trap); err != nil {
			t.Fatal(err)
		}
		var got string
		if err := pool.QueryRow(t.Context(), `SELECT concat('x'::text, 1::bigint)`).Scan(&got); err != nil || (got == "trapped") != (want == "public") {
			t.Errorf("with pooled %v concat is %q (%v)", cfg.Pooled, got, err)
		}
	}
}

// A database may be set up for another isolation, under which a finish would not see what was pushed meanwhile.
func TestConnectionsAreReadCommittedWhateverTheDatabaseSays(t *testing.T) {
	dsn := pgtest.DSN(t)
	setForDatabase(t, dsn, "default_transaction_isolation", "repeatable read")
	for name, cfg := range map[string]postgres.Config{"own session": {DSN: dsn}, "pooled": {DSN: dsn, Pooled: true}} {
		pool, err := postgres.Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer pool.Close()
		const show = `SHOW transaction_isolation`
		var level string
		err = postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error { return tx.QueryRow(t.Context(), show).Scan(&level) })
		if err != nil || level != "read committed" {
			t.Errorf("%s: transactions are %s (%v)", name, level, err)
		}
		if err := pool.QueryRow(t.Context(), show).Scan(&level); err != nil || level == "read committed" == cfg.Pooled {
			t.Errorf("%s: single statements are %s (%v)", name, level, err)
		}
	}
}

// A role or database may have another encoding for its clients, from which the server would convert.
func TestTextsArriveWhateverEncodingTheDatabaseSetsForClients(t *testing.T) {
	dsn := pgtest.DSN(t)
	setForDatabase(t, dsn, "client_encoding", "LATIN1")
	for name, cfg := range map[string]postgres.Config{"own session": {DSN: dsn}, "pooled": {DSN: dsn, Pooled: true}} {
		pool, err := postgres.Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer pool.Close()
		var stored bool
		if err := pool.QueryRow(t.Context(), `SELECT $1::text = chr(233)`, "\u00e9").Scan(&stored); err != nil || !stored {
			t.Errorf("%s: the text is another one (%v)", name, err)
		}
	}
}

// setForDatabase sets what this version of Postgres has.
func setForDatabase(t *testing.T, dsn, name, value string) {
	t.Helper()
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: dsn, MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	set := `DO $$ BEGIN IF current_setting('` + name + `', true) IS NOT NULL THEN
		EXECUTE format('ALTER DATABASE %I SET ` + name + ` = %L', current_database(), '` + value + `'); END IF; END $$`
	if _, err := pool.Exec(t.Context(), set); err != nil {
		t.Fatal(err)
	}
}

// The query of a batch takes any time, whatever the role or the database sets for all statements.
func TestAStatementThatIsAttendedHasNoTimeout(t *testing.T) {
	dsn := pgtest.DSN(t)
	setForDatabase(t, dsn, "statement_timeout", "1h")
	setForDatabase(t, dsn, "transaction_timeout", "1h")
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: dsn, Pooled: true, MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	var within, behind string
	err = postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
		if pid, err := postgres.Backend(t.Context(), tx); err != nil || pid == 0 {
			t.Errorf("process %d (%v)", pid, err)
		}
		return tx.QueryRow(t.Context(), `SELECT concat_ws(' ', current_setting('statement_timeout'),
			current_setting('idle_in_transaction_session_timeout'), current_setting('client_connection_check_interval'),
			nullif(current_setting('transaction_timeout', true), '0'))`).Scan(&within)
	})
	if err == nil {
		err = pool.QueryRow(t.Context(), `SHOW statement_timeout`).Scan(&behind)
	}
	if err != nil || within != "0 1min 10s" || behind != "1h" {
		t.Errorf("timeouts are %q within the transaction, %q behind it (%v)", within, behind, err)
	}
}

// Managed servers bound sessions by settings of roles and databases.
func TestBoundsOfTheDatabaseDoNotReachSessions(t *testing.T) {
	dsn := pgtest.DSN(t)
	names := []string{"idle_session_timeout", "lock_timeout", "statement_timeout"}
	for _, name := range names {
		setForDatabase(t, dsn, name, "30s")
	}
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: dsn, MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	for _, name := range names {
		var value string
		if err := pool.QueryRow(t.Context(), `SELECT current_setting($1)`, name).Scan(&value); err != nil || value != "0" {
			t.Errorf("%s is %s (%v)", name, value, err)
		}
	}
}

// A bound in the address is meant for Penstock.
func TestBoundsOfTheAddressHoldWhereTheProgramHasNone(t *testing.T) {
	for name, param := range map[string]url.Values{
		"parameters": {"lock_timeout": {"5s"}, "statement_timeout": {"7s"}},
		"options":    {"options": {"-c lock_timeout=5s --statement-timeout=7s"}},
	} {
		dsn := pgtest.DSN(t)
		setForDatabase(t, dsn, "statement_timeout", "30s")
		address, err := url.Parse(dsn)
		if err != nil {
			t.Fatal(err)
		}
		query := address.Query()
		for key := range param {
			query.Set(key, param.Get(key))
		}
		address.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20") // as libpq reads it
		for bound, want := range map[time.Duration]string{0: "5s 7s", 20 * time.Second: "5s 20s"} {
			pool, err := postgres.Open(t.Context(), postgres.Config{DSN: address.String(), MaxConns: 1, StatementTimeout: bound})
			if err != nil {
				t.Fatal(err)
			}
			defer pool.Close()
			const sql = `SELECT current_setting('lock_timeout') || ' ' || current_setting('statement_timeout')`
			var got string
			if err := pool.QueryRow(t.Context(), sql).Scan(&got); err != nil || got != want {
				t.Errorf("%s, beside a timeout of %v: %q (%v), want %q", name, bound, got, err, want)
			}
		}
	}
}

// The same statement succeeds in another session. As a permanent error it would have results of runs thrown away.
func TestASessionThatTheServerEndedForItsIdlenessIsUnavailable(t *testing.T) {
	dsn := pgtest.DSN(t)
	observer, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer observer.Close(context.WithoutCancel(t.Context()))
	for _, bounded := range []string{
		`SET idle_session_timeout = '10ms'`,
		`BEGIN; SET LOCAL idle_in_transaction_session_timeout = '10ms'`,
		`BEGIN; SELECT set_config(name, '10ms', true) FROM pg_settings WHERE name = 'transaction_timeout'`,
	} {
		conn, err := pgx.Connect(t.Context(), dsn)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(context.WithoutCancel(t.Context()))
		answer, err := conn.PgConn().Exec(t.Context(), bounded).ReadAll()
		if err == nil { // else the session ended before the answer
			if last := answer[len(answer)-1]; last.CommandTag.Select() && len(last.Rows) == 0 {
				continue // this version of Postgres has no such setting
			}
			for lives := true; lives; {
				const sql = `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)`
				if err := observer.QueryRow(t.Context(), sql, conn.PgConn().PID()).Scan(&lives); err != nil {
					t.Fatal(err)
				}
			}
			_, err = conn.Exec(t.Context(), `SELECT 1`)
		}
		if !postgres.Unavailable(err) {
			t.Errorf("%s: %v is not unavailable", bounded, err)
		}
	}
}

func TestSessionsOfAPoolerAreChecked(t *testing.T) {
	for _, pooled := range []bool{false, true} {
		pool, err := postgres.Open(t.Context(), postgres.Config{DSN: pgtest.DSN(t), MaxConns: 1, Pooled: pooled})
		if err != nil {
			t.Fatal(err)
		}
		defer pool.Close()
		advice, err := postgres.Check(t.Context(), pool)
		if err != nil || (len(advice) > 0) != pooled {
			t.Errorf("pooled %v: %q, %v", pooled, advice, err)
		}
		if pooled && !strings.Contains(strings.Join(advice, "\n"), "idle_in_transaction_session_timeout = '60s'") {
			t.Errorf("a session that may wait in a transaction for ever gets the advice %q", advice)
		}
		for _, statement := range advice {
			if _, err := pool.Exec(t.Context(), statement); err != nil {
				t.Errorf("%s: %v", statement, err)
			}
		}
		if !pooled {
			continue
		}
		pool.Reset()
		if advice, err = postgres.Check(t.Context(), pool); err != nil || len(advice) > 0 {
			t.Errorf("after the advice was followed: %q, %v", advice, err)
		}
		if _, err := pool.Exec(t.Context(), `SET default_transaction_isolation = 'repeatable read'`); err != nil {
			t.Fatal(err)
		}
		if _, err = postgres.Check(t.Context(), pool); !errors.Is(err, postgres.ErrIsolation) {
			t.Errorf("repeatable read by default: %v", err)
		}
	}
}
