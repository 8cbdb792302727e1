package scale

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/postgres"
)

// A decision pass reads all models once a second: one without work must cost a few look-ups by index,
// and no functions of its own, whatever queues without a model have running.
func TestAnIdleModelCostsFewBuffers(t *testing.T) {
	const models, each = 60, 30
	const locks = 100_000 // of a queue without a model
	db := fleet(t)
	do(t, db, `SELECT penstock.register_model('m' || i, '{"protocol": "openai"}', 'test') FROM generate_series(1, $1) i`, models)
	do(t, db, `SELECT penstock.set_deployment('m' || i, 'm' || i, '{}', 'test') FROM generate_series(1, $1) i`, models)
	push(t, db, 7)
	do(t, db, `SELECT penstock.create_queue('tasks', '{}')`)
	do(t, db, `
INSERT INTO penstock.lock (token, node_id, pos, last_entry_id, claimed_at, queue_id, claim_id, entry_count, cost, priority, flow, lock_key)
SELECT i, 1, i, i, now(), q.id, 1, 1, 1, 1, '', '#' || i FROM penstock.queue q, generate_series(1, $1) i WHERE q.name = 'tasks'`, locks)
	do(t, db, `ANALYZE`)
	tx, err := db.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	names := one[[]string](t, db, `SELECT array_agg(model) FROM penstock.deployment`)
	// The first reading fills the catalog cache of the session.
	rows, err := pgx.CollectRows(query(t, tx, inputSQL, names), pgx.RowToStructByName[input])
	if err != nil || len(rows) != models+1 {
		t.Fatalf("%d models, %v", len(rows), err)
	}
	waiting := 0
	for _, row := range rows {
		waiting += row.Waiting
	}
	if metric := one[float64](t, db, `SELECT penstock.scale_metric('llama')`); waiting != 7 || metric != 7 {
		t.Errorf("%d wait, the metric is %g, want 7", waiting, metric)
	}
	var plans []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	var text string
	if err := tx.QueryRow(t.Context(), `EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) `+inputSQL, names).Scan(&text); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(text), &plans); err != nil {
		t.Fatal(err)
	}
	if n := plans[0].Plan.Hit + plans[0].Plan.Read; n > each*models {
		t.Errorf("%d buffers for %d models, want at most %d each", n, models, each)
	} else {
		t.Logf("%d buffers for %d models", n, models)
	}
}

func query(t *testing.T, tx pgx.Tx, sql string, args ...any) pgx.Rows {
	t.Helper()
	rows, err := tx.Query(t.Context(), sql, args...)
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

// product is a pool with the settings of the product's sessions.
func product(t testing.TB, db *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	p, err := postgres.Open(t.Context(), postgres.Config{DSN: db.Config().ConnString()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// The inputs of a thousand models are a pass over them only while each is found by an index, whatever the statistics say:
// here the tables were empty when they were analyzed.
func TestInputsAreReadByIndexes(t *testing.T) {
	db := fleet(t)
	do(t, db, `ANALYZE penstock.queue, penstock.instance, penstock.slot, penstock.cold_start, penstock.deployment`)
	p := product(t, db)
	for _, sql := range []string{
		`SELECT * FROM penstock.scale_input`, `SELECT * FROM penstock.scale_input WHERE model = ANY ('{llama}')`,
		`SELECT * FROM penstock.scale_input WHERE model = ANY ('{llama,mistral,qwen}')`,
		`SELECT * FROM penstock.scale_wanted`, `SELECT * FROM penstock.scale_wanted WHERE model = ANY ('{llama,mistral,qwen}')`,
	} {
		lines, err := pgx.CollectRows(postgres.Query(t.Context(), p, "EXPLAIN "+sql), pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range lines {
			for _, table := range []string{"queue", "pg_class", "instance", "slot", "lock", "ready", "cold_start", "slot_demand"} {
				if strings.Contains(line, "Seq Scan on "+table+" ") {
					t.Errorf("%s: %s", sql, strings.TrimSpace(line))
				}
			}
		}
	}
}
