package migrations_test

import (
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

// A push by a snapshot that is older than the switch of a name would be as the name was before, and no step of the switch
// finds the entry: the transaction had no id when the switch looked for transactions to wait for.
func TestAPushBySnapshotDoesNotPassASwitchOfItsName(t *testing.T) {
	dsn := pgtest.DSN(t)
	c, other := connect(t, dsn), connect(t, dsn)
	exec(t, c, `SELECT penstock.create_queue('mail'), penstock.create_queue('keyed', '{"grouping": "$.k"}'), penstock.create_queue('plain')`)
	for sql, refused := range map[string]bool{
		`SELECT penstock.push('mail', '{}', name => 'letter')`:  true,
		`SELECT penstock.push('mail', '{}', lock_key => 'a')`:   true,
		`SELECT penstock.push('keyed', '{"k": 1}')`:             true,
		`SELECT penstock.push('mail', '{}')`:                    false,
		`SELECT penstock.push('mail', '{}', flow => 'acme')`:    false,
		`SELECT penstock.push('plain', '{}', name => 'letter')`: false, // nothing of this queue was switched
	} {
		for _, level := range []string{"REPEATABLE READ", "SERIALIZABLE", "READ COMMITTED"} {
			exec(t, c, `BEGIN ISOLATION LEVEL `+level)
			exec(t, c, `SELECT count(*) FROM penstock.queue`) // takes the snapshot, and no id
			exec(t, other, `SELECT penstock.disable_entries('mail', 'name', 'letter'), penstock.disable_entries('keyed', 'lock_key', '1')`)
			_, err := c.Exec(t.Context(), sql)
			if want := refused && level != "READ COMMITTED"; (postgres.Code(err) == "40001") != want || !want && err != nil {
				t.Errorf("%s, %s: %v, refused should be %v", level, sql, err, want)
			}
			exec(t, c, `ROLLBACK`)
			exec(t, other, `SELECT penstock.enable_entries('mail', 'name', 'letter'), penstock.enable_entries('keyed', 'lock_key', '1')`)
		}
	}

	// The snapshot is as old as the queue is, and the push keeps nobody from a change of it.
	exec(t, c, `BEGIN ISOLATION LEVEL REPEATABLE READ`)
	exec(t, c, `SELECT penstock.push('mail', '{}', name => 'letter')`)
	exec(t, other, `SET lock_timeout = '1s'`)
	id := query[int64](t, other, `SELECT penstock.disable_entries('mail', 'name', 'letter')`)
	exec(t, c, `COMMIT`)
	steps(t, other, id)
	if n := query[int64](t, other, `SELECT count(*) FROM penstock.entry_mail WHERE priority = -1`); n != 1 {
		t.Errorf("%d entries are disabled, want that of the push that was open", n)
	}
}

// A barrier of the server that was dumped can be an id that the server of the restore has not reached for years.
func TestASwitchEndsInARestoredDatabase(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	exec(t, c, `SELECT penstock.create_queue('mail'); SELECT penstock.push('mail', '{}', name => 'letter')`)
	id := query[int64](t, c, `SELECT penstock.disable_entries('mail', 'name', 'letter')`)
	exec(t, c, `UPDATE penstock.operation SET switched_in = '1099511627776', barrier = '1099511627776', open_before = 1`)
	steps(t, c, id)
	if n := query[int64](t, c, `SELECT count(*) FROM penstock.entry_mail WHERE priority = -1`); n != 1 {
		t.Errorf("%d entries are disabled, want 1", n)
	}
}

// steps steps an operation until it has ended.
func steps(t *testing.T, c *pgx.Conn, id int64) {
	t.Helper()
	for range 10 {
		if query[bool](t, c, `SELECT ended FROM penstock.step_operation($1)`, id) {
			return
		}
	}
	t.Error("the operation does not end")
}

// A failure that is retried by such a snapshot would pass a pause as well.
func TestAFailureIsNotRetriedByAnOlderSnapshot(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	exec(t, c, `SELECT penstock.create_queue('mail')`)
	id := query[int64](t, c, `SELECT penstock.push('mail', '{}', name => 'letter')`)
	exec(t, c, `SELECT penstock.fail_entry(e, 'test', 'failed') FROM penstock.entry e WHERE e.id = `+strconv.FormatInt(id, 10))
	retry := `SELECT penstock.retry_failure(` + strconv.FormatInt(id, 10) + `)`
	for level, code := range map[string]string{"REPEATABLE READ": "PS006", "SERIALIZABLE": "PS006", "READ COMMITTED": ""} {
		exec(t, c, `BEGIN ISOLATION LEVEL `+level)
		_, err := c.Exec(t.Context(), retry)
		if postgres.Code(err) != code {
			t.Errorf("%s: %v, want %q", level, err, code)
		}
		exec(t, c, `ROLLBACK`)
	}
}
