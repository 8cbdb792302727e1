package web

import (
	"net/url"
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// A leader whose clock was behind the database's refused short pauses and overrides, and ended long ones too early.
func TestDurationsInFormsCountFromTheDatabasesClock(t *testing.T) {
	tx := pgtest.ClockAhead(t, pgtest.New(t), `2 hours`)
	if _, err := tx.Exec(t.Context(), `
SELECT penstock.create_queue('work'), penstock.register_model('llama', '{"protocol": "openai"}');
SELECT penstock.set_deployment('own', 'llama', '{}')`); err != nil {
		t.Fatal(err)
	}
	d, by := &Dashboard{change: operator.New(tx)}, invalidation.By{Actor: "ada", Reason: "test"}
	in := form{values: url.Values{"name": {"work"}, "deployment": {"own"}, "instances": {"2"}, "for": {"1h"}}}
	if _, err := d.named(operator.PauseQueue, "", "%s", lasts).do(t.Context(), in, by); err != nil {
		t.Errorf("pause: %v", err)
	}
	if _, err := d.overrideDeployment(t.Context(), in, by); err != nil {
		t.Errorf("override: %v", err)
	}
	var right bool
	if err := tx.QueryRow(t.Context(), `
SELECT q.paused_until - clock_timestamp() BETWEEN '50 minutes' AND '1 hour'
   AND d.override_until - clock_timestamp() BETWEEN '50 minutes' AND '1 hour'
  FROM penstock.queue q, penstock.deployment d WHERE q.name = 'work'`).Scan(&right); err != nil || !right {
		t.Errorf("pause and override do not last for an hour of the database's clock (%v)", err)
	}
}
