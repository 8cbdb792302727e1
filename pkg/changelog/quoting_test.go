package changelog

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/migrations"
)

// newQuotedBed has a table with columns of domains, one over a type whose name servers from 17 on quote.
func newQuotedBed(t *testing.T) *bed {
	b := newBed(t)
	b.exec(`CREATE DOMAIN amount AS int; CREATE DOMAIN notes AS json;
		ALTER TABLE account ALTER balance TYPE amount, ALTER note TYPE notes, ADD "odd ""name%" amount`)
	return b
}

// quoted runs a statement in a session that quotes all names, as a server quotes those that a later version reserves.
func (b *bed) quoted(sql string, args ...any) {
	b.Helper()
	err := pgx.BeginFunc(b.ctx, b.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(b.ctx, `SET LOCAL quote_all_identifiers = on`); err != nil {
			return err
		}
		_, err := tx.Exec(b.ctx, sql, args...)
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
}

// A dump that another version of Postgres restores would else have a table that refuses each write.
func TestAWatchDoesNotDependOnHowNamesAreQuoted(t *testing.T) {
	b := newQuotedBed(t)
	b.watch("balance", "note", `odd "name%`)
	b.quoted(`INSERT INTO account VALUES (1, 10, 'ada', '{"a": 1}', 7)`)
	b.wantChanges(`1.: null -> {"note": {"a": 1}, "balance": 10, "odd \"name%": 7}`)
	b.quoted(`SELECT penstock.watch('account', 'changes', '{balance,note}')`)
	b.exec(`UPDATE account SET balance = 11, note = '2'`)
	b.wantChanges(`1.balance: 10 -> 11`, `1.note: {"a": 1} -> 2`)
}

// earlier gives a watch the condition that triggers of earlier builds have, with the expressions as Postgres 15 wrote
// them.
func (b *bed) earlier(column, expression string) {
	b.Helper()
	rows, _ := b.pool.Query(b.ctx, `SELECT pg_get_functiondef(tgfoid) FROM pg_trigger
		WHERE tgrelid = 'account'::regclass AND NOT tgisinternal`)
	functions, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(functions) != 4 {
		b.Fatalf("%d functions, want 4; %v", len(functions), err)
	}
	for _, function := range functions {
		before, rest, begun := strings.Cut(function, "OR EXISTS (SELECT FROM penstock.watch_changed_types(")
		_, after, ended := strings.Cut(rest, " THEN\n        RAISE EXCEPTION")
		if !begun || !ended {
			b.Fatalf("the function has no condition on types:\n%s", function)
		}
		b.exec(before + fmt.Sprintf("OR EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = TG_RELID AND a.attname = '%[1]s' "+
			"AND penstock.watch_column_sql(TG_RELID, a.attname) IS DISTINCT FROM "+
			"'{\"%[1]s\": \"%[2]s\"}'::jsonb ->> a.attname) THEN\n        RAISE EXCEPTION", column, expression) + after)
	}
}

// migrate applies all functions again.
func (b *bed) migrate() {
	b.Helper()
	b.exec(`DELETE FROM penstock.schema_version`)
	if _, err := migrations.Up(b.ctx, b.pool.Config().ConnConfig); err != nil {
		b.Fatal(err)
	}
}

func TestMigrateMakesTriggersOfEarlierBuildsAnew(t *testing.T) {
	b := newQuotedBed(t)
	b.watch("balance")
	b.earlier("balance", `to_jsonb(%1$s.balance::pg_catalog.int4)`)
	b.exec(`INSERT INTO account VALUES (1, 10)`)
	b.wantChanges(`1.: null -> {"balance": 10}`)
	const write = `UPDATE account SET balance = balance + 1`
	_, err := b.pool.Exec(b.ctx, `SET quote_all_identifiers = on; `+write+`; RESET quote_all_identifiers`)
	if err == nil || !strings.Contains(err.Error(), "PS006") {
		t.Errorf("a trigger of an earlier build took a write of a session that quotes names: %v", err)
	}
	b.pool.Reset()
	b.migrate()
	b.quoted(write)
	b.wantChanges(`1.balance: 10 -> 11`)

	// One that cannot be made again stops no migration, and refuses changes as before.
	b.earlier("balance", `to_jsonb(%1$s.balance::pg_catalog.int4)`)
	b.exec(`ALTER TABLE account DROP balance`)
	b.migrate()
	if _, err := b.pool.Exec(b.ctx, `UPDATE account SET owner = 'bob'`); err == nil {
		t.Error("a watch of a column that is gone took a change")
	}
}
