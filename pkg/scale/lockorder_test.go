package scale

import (
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
)

// Deployments are locked in the order of their names. A template that changes several locks them so too: whoever has the first one
// can get the second one while it waits.
func TestATemplateLocksItsDeploymentsByName(t *testing.T) {
	db := pgtest.New(t)
	do(t, db, `SELECT penstock.register_model('llama', '{"protocol": "openai"}')`)
	for _, name := range []string{"b", "a"} {
		do(t, db, `SELECT penstock.set_deployment($1, 'llama')`, name)
	}
	do(t, db, `UPDATE penstock.deployment SET on_demand = true, fill_order = CASE name WHEN 'a' THEN 2 ELSE 1 END`)
	do(t, db, `VACUUM FULL penstock.deployment`)
	other, err := db.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Exec(t.Context(), `SELECT FROM penstock.deployment WHERE name = 'a' FOR NO KEY UPDATE`); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := db.Exec(t.Context(), `SELECT penstock.set_deployment_template('llama', '{"cost": 2}')`)
		done <- err
	}()
	waiting := `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`
	for one[int](t, db, waiting) == 0 {
		if t.Context().Err() != nil {
			t.Fatal("it waits for nothing")
		}
	}
	if _, err := other.Exec(t.Context(), `SELECT FROM penstock.deployment WHERE name = 'b' FOR NO KEY UPDATE NOWAIT`); err != nil {
		t.Errorf("the second one is locked while it waits for the first one: %v", err)
	}
	if err := other.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}
