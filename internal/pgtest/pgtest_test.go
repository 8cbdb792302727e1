package pgtest_test

import (
	"testing"

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
