package doctor

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/postgres"
)

// TestRightsThatDifferFromADutyAreNamed takes a right from a role with a duty, gives it one too many, gives
// one to PUBLIC, gives it objects,
// and makes the role a member of the schema's owner.
func TestRightsThatDifferFromADutyAreNamed(t *testing.T) {
	pool := newPool(t)
	want(t, find(t, pool, "rights", Config{}), Fine, "no role has a duty")
	role := "clerk_" + strconv.FormatInt(time.Now().UnixNano(), 36)
	exec(t, pool, `CREATE ROLE `+role)
	t.Cleanup(func() {
		_, _ = pool.Exec(context.WithoutCancel(t.Context()), `DROP OWNED BY `+role+`; DROP ROLE `+role)
	})
	exec(t, pool, `SELECT penstock.grant_duty('read', '`+role+`')`)
	exec(t, pool, `GRANT pg_read_all_stats TO `+role)
	exec(t, pool, `CREATE VIEW penstock.by_hand AS SELECT 1; ALTER VIEW penstock.by_hand OWNER TO pg_monitor`)
	want(t, find(t, pool, "rights", Config{}), Fine, role+" (read)")
	for sql, says := range map[string][2]string{
		`REVOKE SELECT ON penstock.queue FROM ` + role: {
			role + " lacks SELECT on",
			`GRANT SELECT ON penstock.queue TO ` + role,
		},
		`GRANT DELETE ON penstock.queue TO ` + role: {
			role + " has DELETE on",
			`REVOKE DELETE ON penstock.queue FROM ` + role,
		},
		`GRANT SELECT ON penstock.api_token TO PUBLIC`: {
			"PUBLIC may SELECT",
			`REVOKE SELECT ON penstock.api_token FROM PUBLIC`,
		},
		`REVOKE pg_read_all_stats FROM ` + role: {
			role + ", with the duty read, sees nothing of other sessions: as a superuser, GRANT pg_read_all_stats TO " + role,
			`GRANT pg_read_all_stats TO ` + role,
		},
		`ALTER ROLE ` + role + ` SUPERUSER`: {"is a superuser", `ALTER ROLE ` + role + ` NOSUPERUSER`},
		`ALTER FUNCTION penstock.ago(interval) OWNER TO pg_monitor`: {
			"penstock.ago(interval) belongs to pg_monitor, not to the owner of the schema: ALTER FUNCTION penstock.ago(interval) OWNER TO",
			`ALTER FUNCTION penstock.ago(interval) OWNER TO CURRENT_USER`,
		},
		`ALTER TABLE penstock.result_default OWNER TO pg_monitor`: {"ALTER TABLE penstock.result_default OWNER TO", `ALTER TABLE penstock.result_default OWNER TO CURRENT_USER`},
		`ALTER TABLE penstock.queue OWNER TO pg_monitor`:          {"ALTER TABLE penstock.queue OWNER TO", `ALTER TABLE penstock.queue OWNER TO CURRENT_USER`},
		`UPDATE penstock.database_role SET role = 'nobody'`: {
			"nobody with the duty read is gone",
			`UPDATE penstock.database_role SET role = '` + role + `'`,
		},
	} {
		exec(t, pool, sql)
		want(t, find(t, pool, "rights", Config{}), Warning, says[0], "penstock grants")
		exec(t, pool, says[1])
		want(t, find(t, pool, "rights", Config{}), Fine)
	}
	setForDatabase(t, pool, "quote_all_identifiers = on") // names that the server prints are in quotes
	pool.Reset()
	want(t, find(t, pool, "rights", Config{}), Fine)
}

// Of a role without that membership pg_stat_activity hides what the checks of connections and the horizon read.
func TestASessionThatSeesNothingOfOthersSaysSo(t *testing.T) {
	pool := newPool(t)
	role := "blind_" + strconv.FormatInt(time.Now().UnixNano(), 36)
	exec(t, pool, `CREATE ROLE `+role)
	t.Cleanup(func() {
		_, _ = pool.Exec(context.WithoutCancel(t.Context()), `DROP OWNED BY `+role+`; DROP ROLE `+role)
	})
	exec(t, pool, `SELECT penstock.grant_duty('operator', '`+role+`')`)
	cfg := pool.Config().Copy()
	cfg.ConnConfig.RuntimeParams["role"] = role
	as, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(as.Close)
	const says = "sees nothing of other sessions: the checks connections and horizon"
	want(t, find(t, as, "rights", Config{}), Warning, "this session is "+role, says)
	exec(t, pool, `GRANT pg_read_all_stats TO `+role)
	if f := find(t, as, "rights", Config{}); f.Severity != Fine {
		t.Errorf("a member of pg_read_all_stats: %+v", f)
	}
}

// A role that may not use schema public cannot look up the names there either, and is told what it lacks.
func TestARoleWithoutTheUseOfSchemaPublicIsNamed(t *testing.T) {
	pool := newPool(t)
	role := "outside_" + strconv.FormatInt(time.Now().UnixNano(), 36)
	exec(t, pool, `CREATE ROLE `+role)
	t.Cleanup(func() {
		_, _ = pool.Exec(context.WithoutCancel(t.Context()), `DROP OWNED BY `+role+`; DROP ROLE `+role)
	})
	exec(t, pool, `SELECT penstock.grant_duty('operator', '`+role+`'); GRANT pg_read_all_stats TO `+role)
	exec(t, pool, `REVOKE ALL ON SCHEMA public FROM PUBLIC`)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	exec(t, conn, `SET ROLE `+role)
	defer exec(t, conn, `RESET ROLE`)
	want(t, find(t, conn, "rights", Config{}), Warning, role+" lacks USAGE on public, which operator needs")
}

// The advice names what the session lacks.
func TestAdviceForACheckThatIsDenied(t *testing.T) {
	for message, want := range map[string]string{
		"permission denied for schema public":          "GRANT USAGE ON SCHEMA public",
		"permission denied for schema penstock":        "duty operator",
		"permission denied for table queue":            "duty operator",
		"permission denied for function pg_ls_waldir":  "GRANT pg_monitor",
		"permission denied for view pg_file_settings":  "GRANT pg_monitor",
		"keine Berechtigung für Funktion pg_ls_waldir": "GRANT pg_monitor",
	} {
		err := fmt.Errorf("read: %w", &pgconn.PgError{Code: postgres.InsufficientPrivilege, Message: message})
		if got := cannot(err); !strings.Contains(got, want) {
			t.Errorf("%s: %s, want %q", message, got, want)
		}
	}
}
