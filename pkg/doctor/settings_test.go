package doctor

import (
	"context"
	"crypto/rand"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

// setForDatabase sets what sessions of the database begin with.
func setForDatabase(t *testing.T, db postgres.DB, setting string) {
	t.Helper()
	exec(t, db, `DO $do$ BEGIN EXECUTE format($$ALTER DATABASE %I SET `+setting+`$$, current_database()); END $do$`)
}

func TestEverySpellingOfAsynchronousCommitIsNamed(t *testing.T) {
	pool := newPool(t)
	for _, value := range []string{"off", "false", "NO", "0"} {
		setForDatabase(t, pool, "synchronous_commit = '"+value+"'")
		f := find(t, pool, "durability", Config{})
		if !strings.Contains(strings.Join(f.Details, " "), "synchronous_commit="+value+" of every role in database") {
			t.Errorf("%s is not named: %+v", value, f)
		}
	}
	setForDatabase(t, pool, "synchronous_commit = 'remote_apply'")
	if f := find(t, pool, "durability", Config{}); strings.Contains(strings.Join(f.Details, " "), "remote_apply") {
		t.Errorf("remote_apply is named: %+v", f)
	}
}

// A standby that is promoted would not have what was acknowledged under local.
func TestACommitThatWaitsForNoSynchronousStandbyIsAWarning(t *testing.T) {
	own := pgtest.ServerWith(t, map[string]string{"fsync": "on", "full_page_writes": "on"})
	pool := own.Pool()
	setForDatabase(t, pool, "synchronous_commit = 'local'")
	want(t, find(t, pool, "durability", Config{}), Fine)
	want(t, find(t, pool, "standby", Config{}), Fine)
	pool.Reset()
	own.Standbys("b")
	want(t, find(t, pool, "durability", Config{}), Warning, "synchronous_commit local, with a synchronous standby",
		"hands out fencing tokens twice", "synchronous_commit=local of every role in database")
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	exec(t, conn, `SET synchronous_commit = on`) // as a role of its own may have it
	want(t, find(t, conn, "durability", Config{}), Warning, "when the synchronous standby is promoted")
	// Every commit waits for it, and no error of a program says so.
	want(t, find(t, pool, "standby", Config{}), Critical, "synchronous standby (b)", "none is connected", "pg_cancel_backend")
	exec(t, conn, `SET track_activities = off`) // the server keeps no time of its statements
	ctx, giveUp := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := conn.Exec(ctx, `INSERT INTO penstock.audit (actor, verb, object) VALUES ('ada', 'look', 'audit')`)
		ended <- err
	}()
	waitUntil(t, pool, `SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'`)
	want(t, find(t, pool, "standby", Config{}), Critical, "none is connected", "1 session waits")
	giveUp()
	if err := <-ended; err == nil {
		t.Error("a commit that was given up has succeeded")
	}
}

// Sessions of Penstock override it; those behind a pooler, and those of others, do not.
func TestAnIsolationThatTheDatabaseSetsIsAWarning(t *testing.T) {
	pool := newPool(t)
	setForDatabase(t, pool, "default_transaction_isolation = 'repeatable read'")
	want(t, find(t, pool, "isolation", Config{}), Warning, "default_transaction_isolation=repeatable read of every role in database")
	setForDatabase(t, pool, "default_transaction_isolation = 'READ COMMITTED'")
	want(t, find(t, pool, "isolation", Config{}), Fine)
}

// A database whose limit is used up takes no connection, however many the server has.
func TestConnectionsAreJudgedByTheLimitOfTheDatabaseAsWell(t *testing.T) {
	pool := newPool(t)
	exec(t, pool, `DO $do$ BEGIN EXECUTE format($$ALTER DATABASE %I CONNECTION LIMIT 1$$, current_database()); END $do$`)
	want(t, find(t, pool, "connections", Config{}), Critical, " of 1 of database ", "ALTER DATABASE")
}

// Roles of monitoring and backups often have a small limit that is always used up.
func TestLimitsOfRolesThatPenstockDoesNotUseAreNotJudged(t *testing.T) {
	pool := newPool(t)
	here := pool.Config().ConnConfig.Database
	for role, c := range map[string]struct {
		database, application string
		duty, superuser       bool
		severity              Severity
	}{
		"role_of_another_database": {"postgres", "penstock", false, false, Fine},
		"role_of_another_program":  {here, "exporter", false, false, Fine},
		"role_of_a_program":        {here, "penstock", false, false, Critical},
		"role_with_a_duty":         {"postgres", "exporter", true, false, Critical}, // its next session may be of Penstock
		"role_of_a_superuser":      {here, "penstock", false, true, Fine},           // which no limit keeps out
	} {
		t.Run(role, func(t *testing.T) {
			exec(t, pool, `CREATE ROLE `+role+` LOGIN CONNECTION LIMIT 1 PASSWORD 'x'`)
			defer exec(t, pool, `DROP ROLE `+role)
			if c.duty {
				exec(t, pool, `INSERT INTO penstock.database_role (role, duty) VALUES ($1, 'node')`, role)
				defer exec(t, pool, `DELETE FROM penstock.database_role WHERE role = $1`, role)
			}
			cfg := pool.Config().ConnConfig.Copy()
			cfg.User, cfg.Password, cfg.Database = role, "x", c.database
			cfg.RuntimeParams = map[string]string{"application_name": c.application}
			conn, err := pgx.ConnectConfig(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close(t.Context())
			if c.superuser {
				exec(t, pool, `ALTER ROLE `+role+` SUPERUSER`)
			}
			var says []string
			if c.severity != Fine {
				says = append(says, "1 of 1 of role "+role, "ALTER ROLE")
			}
			want(t, find(t, pool, "connections", Config{}), c.severity, says...)
		})
	}
}

// Its own session tells the doctor nothing of the roles of programs. Readers may be kept from writing.
func TestAWriterThatIsReadOnlyByDefaultIsCritical(t *testing.T) {
	pool := newPool(t)
	for duty, severity := range map[string]Severity{"node": Critical, "operator": Warning, "read": Fine, "": Fine} {
		role := pgx.Identifier{"test_" + strings.ToLower(rand.Text()[:10])}.Sanitize()
		exec(t, pool, `CREATE ROLE `+role+`; ALTER ROLE `+role+` SET default_transaction_read_only = on`)
		if duty != "" {
			exec(t, pool, `INSERT INTO penstock.database_role (role, duty) VALUES ($1, $2)`, strings.Trim(role, `"`), duty)
		}
		f := find(t, pool, "isolation", Config{})
		exec(t, pool, `DROP ROLE `+role)
		if severity == Fine {
			want(t, f, Fine)
			continue
		}
		want(t, f, severity, "default_transaction_read_only=on of role "+strings.Trim(role, `"`), "Reset")
	}
}

// The doctor said to an operator, and to a reader, that no transaction can write, where theirs alone are kept from it.
func TestADoctorWhoseOwnRoleIsReadOnlyJudgesItByItsDuty(t *testing.T) {
	pool := newPool(t)
	for duty, severity := range map[string]Severity{"node": Critical, "operator": Warning, "read": Fine} {
		role := "test_" + strings.ToLower(rand.Text()[:10])
		exec(t, pool, `CREATE ROLE `+role+` LOGIN PASSWORD 'x'; ALTER ROLE `+role+` SET default_transaction_read_only = on`)
		exec(t, pool, `SELECT penstock.grant_duty('`+duty+`', '`+role+`')`)
		cfg := pool.Config().ConnConfig.Copy()
		cfg.User, cfg.Password = role, "x"
		conn, err := pgx.ConnectConfig(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		f := find(t, conn, "isolation", Config{})
		if err := conn.Close(t.Context()); err != nil {
			t.Error(err)
		}
		exec(t, pool, `DELETE FROM penstock.database_role; DROP OWNED BY `+role+`; DROP ROLE `+role)
		if severity == Fine {
			want(t, f, Fine)
			continue
		}
		want(t, f, severity, "default_transaction_read_only=on of role "+role)
	}
}

// Statements of Penstock call functions of Postgres by their names: in every session that pushes by SQL, and behind a
// pooler in those of Penstock.
func TestASearchPathBeforePostgresIsAWarning(t *testing.T) {
	pool := newPool(t)
	setForDatabase(t, pool, "search_path = compatible, pg_catalog")
	want(t, find(t, pool, "settings", Config{}), Warning, "1", `search_path=compatible, pg_catalog of every role in database`,
		"hides them")
	for _, path := range []string{`"$user", public`, `pg_catalog, compatible`, `pg_temp, pg_catalog`, `"public"`} {
		setForDatabase(t, pool, "search_path = "+path)
		want(t, find(t, pool, "settings", Config{}), Fine)
	}
}

// Postgres has this setting from 17 on, and sessions of Penstock cannot set it where older ones are served as well.
func TestATransactionTimeoutIsAWarning(t *testing.T) {
	pool := newPool(t)
	setForDatabase(t, pool, "lock_timeout = '1h'")
	for value, bad := range map[string]bool{
		"30s": true, "59999": true, "0.5 min": true, "900 ms": true, "60000": false, "1min": false, "2h": false, "1d": false, "0": false,
	} {
		exec(t, pool, `UPDATE pg_db_role_setting SET setconfig = ARRAY['transaction_timeout=' || $1]
			WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())`, value)
		f := find(t, pool, "settings", Config{})
		if !bad {
			want(t, f, Fine)
			continue
		}
		want(t, f, Warning, "transaction_timeout="+value+" of every role in database", "a minute at least")
	}
}
