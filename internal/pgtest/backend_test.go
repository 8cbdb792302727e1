package pgtest

import (
	"context"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
)

// A named server is shared: here by three test binaries at once, which start on an empty server.
func TestBinariesShareNamedServerAndItsTemplate(t *testing.T) {
	own := Server(t)
	server := own.engine.ConnString()
	dropAll(t, server)
	var wait sync.WaitGroup
	for range 3 {
		wait.Go(func() {
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestEachTestHasItsOwnMigratedDatabase$", "-test.v")
			cmd.Env = append(os.Environ(), "PENSTOCK_TEST_DATABASE_URL="+server)
			if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS") {
				t.Errorf("a test binary on the shared server: %v\n%s", err, out)
			}
		})
	}
	wait.Wait()
	names := databases(t, server)
	if len(names) != 1 || !strings.HasPrefix(names[0], "penstock_template_") {
		t.Errorf("left on the shared server: %v, want one template", names)
	}
}

func TestNextBinaryDropsWhatNobodyHolds(t *testing.T) {
	own := Server(t)
	server := own.engine.ConnString()
	b, err := newBackend(t.Context(), own.engine)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := b.createDatabase(t.Context(), template); err != nil {
		t.Fatal(err)
	}
	admin := connect(t, server)
	for _, name := range []string{"penstock_template_0123456789abcdef", "penstock_template_0123456789abcdef_unfinished", "precious"} {
		if _, err := admin.Exec(t.Context(), "CREATE DATABASE "+name); err != nil {
			t.Fatal(err)
		}
	}
	next, err := newBackend(t.Context(), own.engine)
	if err != nil {
		t.Fatal(err)
	}
	held := "penstock_test_" + b.run + "_1"
	want := []string{held, b.template, "precious"}
	slices.Sort(want)
	if got := databases(t, server); !slices.Equal(got, want) {
		t.Errorf("while the first binary lives there are %v, want %v", got, want)
	}
	gone := []uint32{b.presence.PgConn().PID(), next.presence.PgConn().PID()}
	b.close(t.Context())
	next.close(t.Context())
	for left := 1; left > 0; { // a server process goes on for a moment after its client
		err := admin.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE pid = ANY ($1)`, gone).Scan(&left)
		if err != nil {
			t.Fatal(err)
		}
	}

	last, err := newBackend(t.Context(), own.engine)
	if err != nil {
		t.Fatal(err)
	}
	defer last.close(t.Context())
	if got := databases(t, server); slices.Contains(got, held) || !slices.Contains(got, "precious") {
		t.Errorf("after the first binary there are %v", got)
	}
}

// What a binary killed in the middle of its migrations leaves is no template for the next one.
func TestHalfMadeTemplateIsMadeAnew(t *testing.T) {
	own := Server(t)
	server := own.engine.ConnString()
	names := databases(t, server)
	made := names[slices.IndexFunc(names, func(name string) bool { return strings.HasPrefix(name, "penstock_template_") })]
	admin := connect(t, server)
	for _, sql := range []string{
		"ALTER DATABASE " + quote(made) + " RENAME TO " + quote(made+"_unfinished"),
		"ALTER DATABASE " + quote(made+"_unfinished") + " ALLOW_CONNECTIONS true",
	} {
		if _, err := admin.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	half := connect(t, withDatabase(server, made+"_unfinished"))
	if _, err := half.Exec(t.Context(), "DROP SCHEMA penstock CASCADE; CREATE SCHEMA penstock"); err != nil {
		t.Fatal(err)
	}
	b, err := newBackend(t.Context(), own.engine)
	if err != nil {
		t.Fatal(err)
	}
	defer b.close(t.Context())
	dsn, _, err := b.createDatabase(t.Context(), template)
	if err != nil {
		t.Fatal(err)
	}
	var whole bool
	if err := connect(t, dsn).QueryRow(t.Context(), "SELECT to_regclass('penstock.queue') IS NOT NULL").Scan(&whole); err != nil || !whole {
		t.Errorf("the clone has the table penstock.queue: %v, %v", whole, err)
	}
}

// One connection to the template would make every clone of it fail.
func TestTemplateLetsNobodyIn(t *testing.T) {
	b, err := sharedBackend()
	if err != nil {
		t.Fatal(err)
	}
	if conn, err := pgx.Connect(t.Context(), b.dsn(b.template)); err == nil {
		conn.Close(t.Context())
		t.Error("the template let a connection in")
	}
}

func TestDatabaseOfDSNIsReplaced(t *testing.T) {
	for dsn, want := range map[string]string{
		"postgres://u:p@h:1/old?sslmode=disable": "postgres://u:p@h:1/new?sslmode=disable",
		"postgres://u@/old?host=%2Ftmp&port=1":   "postgres://u@/new?host=%2Ftmp&port=1",
		"host=/tmp user=u dbname=old":            "host=/tmp user=u dbname=old dbname=new",
	} {
		got := withDatabase(dsn, "new")
		if got != want {
			t.Errorf("%s became %s, want %s", dsn, got, want)
		}
		if config, err := pgx.ParseConfig(got); err != nil || config.Database != "new" {
			t.Errorf("%s leads to %v, %v", got, config, err)
		}
	}
}

func connect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

// databases lists those besides Postgres's own.
func databases(t *testing.T, dsn string) []string {
	t.Helper()
	rows, err := connect(t, dsn).Query(t.Context(), `SELECT datname::text FROM pg_database
		WHERE datname NOT IN ('postgres', 'template0', 'template1') ORDER BY datname COLLATE "C"`)
	if err != nil {
		t.Fatal(err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return names
}

func dropAll(t *testing.T, dsn string) {
	t.Helper()
	for _, name := range databases(t, dsn) {
		if _, err := connect(t, dsn).Exec(t.Context(), "DROP DATABASE "+quote(name)); err != nil {
			t.Fatal(err)
		}
	}
}
