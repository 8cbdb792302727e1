package changelog

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/pkg/invalidation"
)

// restore makes everything of the watch of account anew, in the order of pg_restore and by the texts that pg_dump writes:
// the domain, the functions, the table with its rows, the row of watch, and the triggers. OIDs are other ones afterwards.
func (b *bed) restore() {
	b.Helper()
	texts := func(sql string) []string {
		rows, _ := b.pool.Query(b.ctx, sql)
		list, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil || len(list) != 4 {
			b.Fatalf("%d definitions, want 4 (%v)", len(list), err)
		}
		return list
	}
	functions := texts(`SELECT pg_get_functiondef(t.tgfoid) FROM pg_trigger t WHERE t.tgrelid = 'account'::regclass AND NOT t.tgisinternal`)
	names := texts(`SELECT t.tgfoid::regprocedure FROM pg_trigger t WHERE t.tgrelid = 'account'::regclass AND NOT t.tgisinternal`)
	triggers := texts(`SELECT pg_get_triggerdef(t.oid) FROM pg_trigger t WHERE t.tgrelid = 'account'::regclass AND NOT t.tgisinternal`)
	before := b.count(`SELECT 'account'::regclass::oid::int`)
	b.exec(`CREATE TABLE kept AS SELECT id, balance::int FROM account`)
	b.exec(`DROP TABLE account`)
	for _, name := range names {
		b.exec(`DROP FUNCTION ` + name)
	}
	b.exec(`DROP DOMAIN amount`)
	b.exec(`CREATE DOMAIN amount AS int`)
	for _, function := range functions {
		b.exec(function)
		name, _, _ := strings.Cut(strings.TrimPrefix(function, "CREATE OR REPLACE FUNCTION "), "\n")
		b.exec(`REVOKE ALL ON FUNCTION ` + name + ` FROM PUBLIC`)
	}
	b.exec(`CREATE TABLE account (id int PRIMARY KEY, balance amount)`)
	b.exec(`INSERT INTO account SELECT id, balance FROM kept`)
	b.exec(`UPDATE penstock.watch SET watched = 'account'::regclass`)
	for _, trigger := range triggers {
		b.exec(trigger)
	}
	if b.count(`SELECT 'account'::regclass::oid::int`) == before {
		b.Fatal("the restored table has the OID that it had")
	}
}

// A watch that refused the restored table would refuse every write of the application.
func TestAWatchWorksInARestoredDatabase(t *testing.T) {
	b := newBed(t)
	b.exec(`DROP TABLE account`)
	b.exec(`CREATE DOMAIN amount AS int`)
	b.exec(`CREATE TABLE account (id int PRIMARY KEY, balance amount)`)
	b.watch("balance")
	b.exec(`INSERT INTO account VALUES (1, 10)`)
	b.wantChanges(`1.: null -> {"balance": 10}`)
	b.restore()
	b.exec(`UPDATE account SET balance = 11`)
	b.wantChanges(`1.balance: 10 -> 11`)
	b.exec(`ALTER TABLE account RENAME TO renamed`)
	b.exec(`UPDATE renamed SET balance = 12`)
	b.wantChanges(`1.balance: 11 -> 12`)
	b.exec(`ALTER TABLE renamed RENAME TO account`)

	// Another table beside it, and the watch made anew, in a database that has the functions of before.
	b.exec(`CREATE TABLE second (id int PRIMARY KEY, n int)`)
	if err := Watch(b.ctx, b.pool, "second", "changes", nil, nil, invalidation.By{}); err != nil {
		t.Fatal(err)
	}
	b.watch("balance")
	for _, table := range []string{"account", "second"} {
		if _, err := Unwatch(b.ctx, b.pool, table, invalidation.By{}); err != nil {
			t.Fatal(err)
		}
	}
	if n := b.count(`SELECT count(*) FROM pg_proc WHERE pronamespace = 'penstock'::regnamespace AND proname ~ '^watch_[0-9]'`); n != 0 {
		t.Errorf("%d functions are left of the watches", n)
	}
}

// A domain that was made anew over another type is not converted by a cast that may be a function of any role.
func TestAWatchRefusesADomainThatBecameAnotherOne(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE DOMAIN amount AS int`)
	b.exec(`ALTER TABLE account DROP balance, ADD balance amount`)
	b.watch("balance")
	b.exec(`INSERT INTO account (id, balance) VALUES (1, 10)`)
	b.exec(`CREATE TYPE mood AS ENUM ('1')`)
	b.exec(`ALTER TABLE account ALTER balance TYPE int`)
	b.exec(`DROP DOMAIN amount`)
	b.exec(`CREATE DOMAIN amount AS mood`)
	b.exec(`ALTER TABLE account ALTER balance TYPE amount USING NULL`)
	_, err := b.pool.Exec(b.ctx, `UPDATE account SET balance = '1'`)
	if err == nil || !strings.Contains(err.Error(), "PS006") {
		t.Errorf("the column became of another domain of the same name: %v", err)
	}
}
