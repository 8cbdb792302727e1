package doctor

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// Where ids and tokens were set ahead, and sequences of columns were not, all changes of operators fail. Each duty that
// runs the doctor may read all of them.
func TestASequenceOfAColumnThatIsBehindIsNamed(t *testing.T) {
	pool := newPool(t)
	role := "reader_" + strconv.FormatInt(time.Now().UnixNano(), 36)
	exec(t, pool, `CREATE ROLE `+role)
	t.Cleanup(func() {
		_, _ = pool.Exec(context.WithoutCancel(t.Context()), `DROP OWNED BY `+role+`; DROP ROLE `+role)
	})
	exec(t, pool, `SELECT penstock.grant_duty('read', '`+role+`')`)
	var behind []string
	rows, err := pool.Query(t.Context(), `SELECT sequencename FROM pg_sequences
		WHERE schemaname = 'penstock' AND sequencename NOT IN ('entry_id_seq', 'token_seq', 'term_seq')`)
	if err == nil {
		behind, err = pgx.CollectRows(rows, pgx.RowTo[string])
	}
	if err != nil || len(behind) == 0 {
		t.Fatal(behind, err)
	}
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	for _, name := range behind {
		var may bool
		if err := conn.QueryRow(t.Context(), `SELECT has_sequence_privilege($1, $2, 'SELECT')`, role, "penstock."+name).
			Scan(&may); err != nil || !may {
			t.Errorf("a reader may not read %s: %v", name, err)
		}
	}
	exec(t, pool, `SELECT penstock.create_queue('work'); SELECT setval('penstock.queue_id_seq', 1, false)`)
	exec(t, conn, `SET ROLE `+role)
	defer exec(t, conn, `RESET ROLE`)
	want(t, find(t, conn, "sequences", Config{}), Critical, "queue_id_seq is at 0, and there is", "23505")
}
