package pgtest_test

import (
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
)

func TestEachTestHasItsOwnMigratedDatabase(t *testing.T) {
	a, b := pgtest.New(t), pgtest.New(t)
	if _, err := a.Exec(t.Context(), "CREATE TABLE penstock.only_in_a (id int)"); err != nil {
		t.Fatal(err)
	}
	var found bool
	err := b.QueryRow(t.Context(), "SELECT to_regclass('penstock.only_in_a') IS NOT NULL").Scan(&found)
	if err != nil {
		t.Fatal(err)
	}
	if found {
		t.Error("a table made in one test's database is seen in another's")
	}
}

func TestConnectionStillOpenDoesNotKeepDatabase(t *testing.T) {
	var dsn string
	t.Run("a test that leaves a connection open", func(t *testing.T) {
		dsn = pgtest.DSN(t)
		if _, err := pgx.Connect(t.Context(), dsn); err != nil {
			t.Fatal(err)
		}
	})
	if conn, err := pgx.Connect(t.Context(), dsn); err == nil {
		conn.Close(t.Context())
		t.Error("the database outlived its test")
	}
}

func TestEmptyDatabaseHasNoSchema(t *testing.T) {
	conn, err := pgx.Connect(t.Context(), pgtest.Empty(t))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	var migrated bool
	if err := conn.QueryRow(t.Context(), "SELECT to_regnamespace('penstock') IS NOT NULL").Scan(&migrated); err != nil || migrated {
		t.Errorf("the schema exists: %v, %v", migrated, err)
	}
}

// The race detector's tests run on the newest version that can be had; make asks this test first whether it can.
func TestServerIsOfTheVersionAskedFor(t *testing.T) {
	want := os.Getenv("PENSTOCK_TEST_POSTGRES")
	if want == "" {
		t.Skip("PENSTOCK_TEST_POSTGRES names no version")
	}
	var got string
	if err := pgtest.Server(t).Pool().QueryRow(t.Context(), "SHOW server_version").Scan(&got); err != nil {
		t.Fatal(err)
	}
	if major, _, _ := strings.Cut(got, "."); major != want {
		t.Errorf("the server is version %s, want %s", got, want)
	}
}
