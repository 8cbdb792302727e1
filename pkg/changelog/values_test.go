package changelog

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/pkg/invalidation"
)

// An application's own statement does not fail because of a watch where it would succeed without it: not for a key that
// is no lock key, nor for a value that is no payload.
func TestNoValueOfAWatchedTableFailsItsStatement(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE DOMAIN notes AS json;
		CREATE TABLE channel (name text, members numeric, settings json, notes text, "more::pg_catalog.json)" notes)`)
	insert := func(members string) {
		t.Helper()
		for _, name := range []string{`'general'`, `'#general'`, `''`, `repeat('x', 600)`, `repeat('y', 9000)`} {
			b.exec(`INSERT INTO channel VALUES (` + name + `, ` + members + `, '{"a": "\u0000"}', 'x')`)
		}
	}
	insert(`1`)
	if err := Watch(b.ctx, b.pool, "channel", "changes", nil, []string{"name"}, invalidation.By{}); err != nil {
		t.Fatal(err)
	}
	b.exec(`UPDATE channel SET members = 1e400, settings = '{"a": 1e400000, "b": "\ud800"}'`)
	b.exec(`UPDATE channel SET "more::pg_catalog.json)" = '{"b": "\ud800"}'`)
	b.exec(`UPDATE channel SET notes = repeat('n', 8000)`)
	b.exec(`DELETE FROM channel`)
	insert(`-1e-400`)
	b.exec(`TRUNCATE channel`)
	if n := b.count(`SELECT count(*) FROM penstock.entry_changes WHERE payload->>'object' = '#general' AND lock_key LIKE 'sha256:%'`); n != 6 {
		t.Errorf("%d changes of the channel whose name is no lock key, want 6 under one that is", n)
	}
	if n := b.count(`SELECT count(DISTINCT lock_key) FROM penstock.entry_changes`); n != 5 {
		t.Errorf("%d lock keys, want one for each channel", n)
	}
	if n := b.count(`SELECT count(*) FROM penstock.entry_changes WHERE payload->'to' ? 'omitted' AND payload->>'field' = 'members'`); n != 5 {
		t.Errorf("%d numbers that are no payload were left out, want 5", n)
	}
	if n := b.count(`SELECT count(*) FROM penstock.entry_changes WHERE payload->>'from' = '{"a": "\u0000"}'`); n != 5 {
		t.Errorf("%d values of json were recorded as texts, want 5", n)
	}
	if n := b.count(`SELECT count(*) FROM penstock.entry_changes WHERE payload->>'to' = '{"b": "\ud800"}'`); n != 5 {
		t.Errorf("%d values of a domain over json were recorded as texts, want 5", n)
	}
}

// A trigger of an older build that penstock migrate up may not replace refuses each statement once the text that it kept
// is not that of watch_column_sql.
func TestTheExpressionsThatTriggersKeepStayAsTheyAre(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE DOMAIN plain AS json; CREATE TABLE channel (a json, b plain, c text)`)
	for column, want := range map[string]string{
		"a": `to_jsonb(%1$s.a)`, "b": `to_jsonb(%1$s.b::pg_catalog.json)`, "c": `to_jsonb(%1$s.c)`,
	} {
		var text string
		err := b.pool.QueryRow(b.ctx, `SELECT penstock.watch_column_sql('channel', $1)`, column).Scan(&text)
		if err != nil || strings.ReplaceAll(text, `"json"`, "json") != want { // newer servers quote it
			t.Errorf("the expression of column %s is %s, want %s; %v", column, text, want, err)
		}
	}
}

func TestAChangeBeyondThePayloadLimitIsRecordedWithoutValues(t *testing.T) {
	b := newBed(t)
	b.exec(`SELECT penstock.alter_queue('changes', '{"payload_limit": 300}')`)
	b.watch()
	b.exec(`INSERT INTO account (id, owner) VALUES (1, repeat('o', 400))`)
	b.exec(`UPDATE account SET owner = 'ada'`)
	b.wantChanges(`1.: null -> {"omitted": 454}`, `1.owner: {"omitted": 412} -> {"omitted": 12}`)
}

// The key of a row and a value are the same text, whatever the session that changes the row has set: else changes of one
// object would have several lock keys, run side by side, and a change below the digits of the session would be none.
func TestSettingsOfTheWriterDoNotChangeWhatIsRecorded(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE TABLE reading (at timestamptz, size bytea, during tstzrange, every interval, price money, value float8);
		SELECT penstock.alter_queue('changes', '{"grouping": "object"}')`)
	keys := []string{"at", "size", "during", "every", "price"}
	if err := Watch(b.ctx, b.pool, "reading", "changes", []string{"value"}, keys, invalidation.By{}); err != nil {
		t.Fatal(err)
	}
	b.exec(`INSERT INTO reading VALUES ('2026-03-01 12:00+00', '\xff', '[2026-03-01 12:00+00,2026-04-13 12:00+00)',
		'1 day 2 hours', 1::numeric::money, 0.1)`)
	for i, settings := range []string{
		`SET LOCAL TimeZone = 'Asia/Kathmandu'`, `SET LOCAL bytea_output = escape`, `SET LOCAL DateStyle = 'German, DMY'`,
		`SET LOCAL IntervalStyle = sql_standard`, `SET LOCAL extra_float_digits = -10`, `SET LOCAL lc_monetary = 'C.UTF-8'`,
	} {
		b.exec(`BEGIN; ` + settings + fmt.Sprintf(`; UPDATE reading SET value = 0.1 + %d * 1e-15::float8; COMMIT`, i+1))
	}
	if n := b.count(`SELECT count(*) FROM penstock.entry_changes`); n != 7 {
		t.Errorf("%d changes were recorded, want 7", n)
	}
	if n := b.count(`SELECT count(DISTINCT lock_key) FROM penstock.entry_changes`); n != 1 {
		t.Errorf("the changes of one row have %d lock keys", n)
	}
}

// The trigger asks for the type below columns of types that are not Postgres's own, and of no others: a function in
// SQL is planned for each call, which took several times as long as all else that a statement without a change costs.
func TestAStatementAsksForNoTypeOfAColumnOfPostgres(t *testing.T) {
	b := newBed(t)
	b.exec(`ALTER DATABASE "` + b.text(`SELECT current_database()`) + `" SET track_functions = 'all'`)
	b.pool.Reset()
	b.exec(`CREATE TYPE mood AS ENUM ('good', 'bad'); ALTER TABLE account ADD mood mood`)
	b.watch("balance", "owner", "mood")
	calls := func() (n int) {
		err := pgx.BeginFunc(b.ctx, b.pool, func(tx pgx.Tx) error {
			count := func() (calls int, err error) {
				err = tx.QueryRow(b.ctx, `SELECT coalesce(sum(calls), 0) FROM pg_stat_xact_user_functions
					WHERE schemaname = 'penstock' AND funcname = 'watch_base_type'`).Scan(&calls)
				return calls, err
			}
			before, err := count()
			if err != nil {
				return err
			}
			if _, err := tx.Exec(b.ctx, `UPDATE account SET note = NULL`); err != nil {
				return err
			}
			after, err := count()
			n = after - before
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := calls(); n != 0 {
		t.Errorf("%d types were asked for, want none: the enum is not converted by to_jsonb()", n)
	}
	b.exec(`CREATE DOMAIN amount AS int; ALTER TABLE account ALTER balance TYPE amount`)
	b.watch("balance", "owner", "mood")
	if n := calls(); n != 1 {
		t.Errorf("%d types were asked for, want one, of the domain", n)
	}
}

func (b *bed) text(sql string) (text string) {
	b.Helper()
	if err := b.pool.QueryRow(b.ctx, sql).Scan(&text); err != nil {
		b.Fatal(err)
	}
	return text
}
