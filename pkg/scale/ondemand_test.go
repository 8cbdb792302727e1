package scale

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
)

// templateBed is a database with the model llama, its queue, and a template instead of a deployment.
func templateBed(t *testing.T) *pgxpool.Pool {
	t.Helper()
	db := pgtest.New(t)
	do(t, db, `SELECT penstock.register_model('llama', '{"protocol": "openai"}')`)
	do(t, db, `SELECT penstock.set_deployment_template('llama', $1)`,
		`{"backend": "local", "target": {"command": "llama"}, "policy": {"slots": 2, "max": 4}, "template": {"version": 1},
		  "idle_seconds": 3600}`)
	return db
}

func deployments(t *testing.T, db *pgxpool.Pool) int {
	t.Helper()
	return one[int](t, db, `SELECT count(*) FROM penstock.deployment WHERE on_demand`)
}

func TestTheFirstPushOfAModelMakesItsDeployment(t *testing.T) {
	db, c := templateBed(t), &cluster{}
	w := newTerm(t, db, c)
	w.round()
	if n := deployments(t, db); n != 0 {
		t.Fatalf("%d deployments without any request", n)
	}
	w.duty.WakeQueue(one[int32](t, db, `SELECT id FROM penstock.queue WHERE name = 'llama'`))
	select {
	case <-w.duty.hints.wake:
	default:
		t.Error("a push does not wake the decision about a model without a deployment")
	}
	w.duty.WakeModel("llama")
	select {
	case <-w.duty.hints.wake:
	default:
		t.Error("a request does not wake it either")
	}
	push(t, db, 1)
	w.round() // makes it, and asks its backend what exists
	if name := one[string](t, db, `SELECT name FROM penstock.deployment WHERE on_demand`); name != "llama" {
		t.Fatalf("the deployment is called %q", name)
	}
	w.round()
	if got := c.names(); len(got) != 1 {
		t.Errorf("%v exist after the first push", got)
	}
	w.round()
	if n := deployments(t, db); n != 1 {
		t.Errorf("%d deployments", n)
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.audit WHERE verb = 'make_deployment' AND object = 'llama'`); n != 1 {
		t.Errorf("%d lines of the audit", n)
	}
}

func TestARequestAtAGatewayMakesADeploymentToo(t *testing.T) {
	db := templateBed(t)
	w := newTerm(t, db, &cluster{})
	do(t, db, `SELECT penstock.register_gateway(7, 'g1', 'default', '1 hour')`)
	do(t, db, `SELECT penstock.lease_slots('llama', 7, 3)`)
	w.round()
	if n := deployments(t, db); n != 1 {
		t.Errorf("%d deployments while a gateway waits", n)
	}
}

func TestNothingIsMadeWhileScalingIsOff(t *testing.T) {
	db := templateBed(t)
	w := newTerm(t, db, &cluster{})
	do(t, db, `SELECT penstock.set_scale_setting('scale.off', 'true')`)
	push(t, db, 1)
	w.round()
	if n := deployments(t, db); n != 0 {
		t.Errorf("%d deployments were made", n)
	}
	do(t, db, `SELECT penstock.set_scale_setting('scale.off', NULL)`)
	w.round()
	if n := deployments(t, db); n != 1 {
		t.Errorf("%d deployments behind it", n)
	}
}

func TestOnlyUnusedDeploymentsOnDemandArePruned(t *testing.T) {
	db, c := templateBed(t), &cluster{}
	w := newTerm(t, db, c)
	push(t, db, 1)
	for range 3 {
		w.round()
	}
	do(t, db, `SELECT penstock.cancel_entry(id, 'test', 'test') FROM penstock.entry`)
	prune := func() []string { return one[[]string](t, db, `SELECT penstock.prune_deployments(100)`) }
	idle := func(text string) {
		do(t, db, `UPDATE penstock.scale_state SET state = state || jsonb_build_object('last_use', clock_timestamp() - $1::interval)`, text)
		do(t, db, `DELETE FROM penstock.model_minute`)
	}
	idle("2 hours")
	if got := prune(); len(got) != 0 {
		t.Fatalf("%v were pruned with an instance", got)
	}
	do(t, db, `DELETE FROM penstock.instance`)
	do(t, db, `UPDATE penstock.deployment_state SET existing = 0, ordered = 0, desired = 0, starting = '{}'`)
	idle("59 minutes")
	if got := prune(); len(got) != 0 {
		t.Errorf("%v were pruned an hour after the last request has not passed", got)
	}
	do(t, db, `UPDATE penstock.scale_state SET state = state - 'last_use'`)
	if got := prune(); len(got) != 0 {
		t.Errorf("%v were pruned although the last request is not known", got)
	}
	idle("2 hours")
	do(t, db, `SELECT penstock.register_gateway(7, 'g1', 'default', '1 hour')`)
	for what, change := range map[string]string{
		"is set to a number": `SELECT penstock.set_scale_override('llama', 0, clock_timestamp() + interval '1 hour', 'test')`,
		"exists":             `UPDATE penstock.deployment_state SET existing = 1`,
		"is ordered":         `UPDATE penstock.deployment_state SET ordered = 1`,
		"is desired":         `UPDATE penstock.deployment_state SET desired = 1`,
		"starts":             `UPDATE penstock.deployment_state SET starting = ARRAY[clock_timestamp()]`,
		"has an order":       `UPDATE penstock.deployment_state SET order_id = coalesce(applied_id, 0) + 1`,
		"is waited for":      `SELECT penstock.push('llama', '{}'::jsonb)`,
		"is due soon":        `SELECT penstock.push('llama', '{}'::jsonb, due_at => clock_timestamp() + interval '30 s')`,
		"is called":          `SELECT penstock.lease_slots('llama', 7, 3)`,
		"takes no more":      `UPDATE penstock.node SET load = '{"pools": {"llama": {"over_limit": 1}}}'`,
	} {
		tx, err := db.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		if _, err = tx.Exec(t.Context(), change); err == nil {
			err = tx.QueryRow(t.Context(), `SELECT penstock.prune_deployments(100)`).Scan(&got)
		}
		if err != nil || len(got) != 0 {
			t.Errorf("one that %s: %v were pruned, %v", what, got, err)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	do(t, db, `SELECT penstock.set_deployment('llama', 'llama', '{"mode": "disabled"}', 'it burns money')`)
	if got := prune(); len(got) != 0 {
		t.Errorf("%v were pruned though disabled: the next push would make it again as full", got)
	}
	do(t, db, `SELECT penstock.set_deployment('llama', 'llama', '{"mode": "full"}')`)
	do(t, db, `SELECT penstock.set_scale_setting('scale.off', 'true')`)
	if got := prune(); len(got) != 0 {
		t.Errorf("%v were pruned while scaling is off", got)
	}
	do(t, db, `SELECT penstock.set_scale_setting('scale.off', NULL)`)
	do(t, db, `SELECT penstock.set_deployment('by-hand', 'llama')`)
	if got := prune(); !slices.Equal(got, []string{"llama"}) {
		t.Errorf("%v were pruned", got)
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.deployment`); n != 1 {
		t.Errorf("%d deployments are left, want the one that was made by hand", n)
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.audit WHERE verb = 'prune_deployment' AND object = 'llama' AND actor = 'autoscaler'`); n != 1 {
		t.Errorf("%d lines of the audit", n)
	}
}

func TestAtMostAHundredDeploymentsArePrunedAtOnce(t *testing.T) {
	db := pgtest.New(t)
	do(t, db, `INSERT INTO penstock.model (name, config) SELECT 'm' || n, '{}' FROM generate_series(1, 120) n`)
	do(t, db, `INSERT INTO penstock.deployment (name, model, on_demand) SELECT name, name, true FROM penstock.model`)
	do(t, db, `INSERT INTO penstock.scale_state (model, state, arrived, desired, base, raw, stabilised, ready, metric, why, decided_at)
	           SELECT name, '{"last_use": "2020-01-01T00:00:00Z"}', 0, 0, 0, 0, 0, 0, 0, '', now() FROM penstock.model`)
	for _, want := range []int{100, 20, 0} {
		if got := one[[]string](t, db, `SELECT penstock.prune_deployments(1000)`); len(got) != want {
			t.Errorf("%d were pruned, want %d", len(got), want)
		}
	}
}

func TestAChangedTemplateRollsOverOneByOneEvenWithoutRoom(t *testing.T) {
	for name, room := range map[string]int{"with room for one more": 0, "without": 2} {
		t.Run(name, func(t *testing.T) {
			db, c := templateBed(t), &cluster{room: room}
			w := newTerm(t, db, c)
			push(t, db, 1)
			w.round()
			do(t, db, `SELECT penstock.set_scale_override('llama', 2, clock_timestamp() + interval '1 hour', 'test')`)
			settle := func() {
				w.round()
				do(t, db, `UPDATE penstock.instance SET state = 'ready' WHERE state = 'starting'`)
			}
			for range 4 {
				settle()
			}
			if got := c.names(); len(got) != 2 {
				t.Fatalf("%v exist", got)
			}
			do(t, db, `SELECT penstock.set_deployment_template('llama', $1)`,
				`{"backend": "local", "target": {"command": "llama"}, "policy": {"slots": 2, "max": 4}, "template": {"version": 2}}`)
			hash := one[string](t, db, `SELECT template_hash FROM penstock.deployment`)
			least, rounds := 2, 0
			for ; rounds < 30 && !c.all(hash, 2); rounds++ {
				settle()
				least = min(least, one[int](t, db, `SELECT count(*) FROM penstock.instance WHERE penstock.usable(instance)`))
			}
			if !c.all(hash, 2) {
				t.Fatalf("after %d rounds %+v exist", rounds, c.instances)
			}
			if want := map[bool]int{true: 1, false: 2}[room > 0]; least < want {
				t.Errorf("%d took requests at the least, want %d", least, want)
			}
			if n := one[int](t, db, `SELECT failures FROM penstock.deployment_state`); n != 0 {
				t.Errorf("%d failures are counted: replacing an instance is none", n)
			}
			if c.started != 4 {
				t.Errorf("%d were started for two instances and their successors", c.started)
			}
		})
	}
}

// all says whether n instances exist, all of a template.
func (c *cluster) all(hash string, n int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.instances) == n &&
		!slices.ContainsFunc(c.instances, func(i BackendInstance) bool { return i.TemplateHash != hash })
}

// sited is a backend that is bound to a place.
type sited struct {
	*cluster
	place string
}

func (s sited) Place() (string, error) { return s.place, nil }

func (s sited) List(ctx context.Context, d BackendTarget) ([]BackendInstance, error) {
	if s.place != "a" {
		return nil, nil // finds nothing of another machine
	}
	return s.cluster.List(ctx, d)
}

func TestALeaderOfAnotherMachineTakesNoInstanceForGone(t *testing.T) {
	db, c := driven(t), &cluster{}
	term := func(place string) *term {
		return &term{t, db, New(db, free{db}, Config{Backends: map[string]Backend{backendLocal: sited{c, place}}})}
	}
	w := term("a")
	w.round()
	override(t, db, 2)
	for range 3 {
		w.round()
	}
	other := term("b")
	for range 3 {
		other.round()
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.instance`); n != 2 || c.started != 2 {
		t.Errorf("%d are registered and %d were started, want 2 and 2", n, c.started)
	}
	text := one[string](t, db, `SELECT error FROM penstock.deployment_state`)
	if !strings.Contains(text, ErrElsewhere.Error()) {
		t.Errorf("the error is %q", text)
	}
	override(t, db, 0)
	w = term("a")
	for range 5 {
		w.round()
	}
	override(t, db, 1)
	for range 3 {
		term("b").round() // nothing is in the other place any more
	}
	if place := one[string](t, db, `SELECT place FROM penstock.deployment_state`); place != "b" {
		t.Errorf("the place is %q", place)
	}
}

func TestATemplateOfDeploymentsIsChecked(t *testing.T) {
	db := pgtest.New(t)
	do(t, db, `SELECT penstock.register_model('llama', '{"protocol": "openai"}')`)
	for bad, field := range map[string]string{
		`{"mode": "full"}`: "mode", `{"backend": "magic"}`: "backend", `{"policy": 3}`: "policy", `{"cost": -1}`: "cost",
		`{"cost": "x"}`: "cost", `{"cost": 1e999}`: "cost", `{"fill_order": 1.5}`: "fill_order", `{"fill_order": [1]}`: "fill_order",
		`{"idle_seconds": 1}`: "idle_seconds", `{"idle_seconds": 1e300}`: "idle_seconds", `{"idle_seconds": "x"}`: "idle_seconds",
	} {
		_, err := db.Exec(t.Context(), `SELECT penstock.set_deployment_template('llama', $1)`, bad)
		if err == nil || !strings.Contains(err.Error(), "PS002") || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", bad, err)
		}
	}
	for _, good := range []string{`{"cost": "0.5", "fill_order": "-2"}`, `{"cost": ".5", "fill_order": " 3 "}`, `{"cost": "1e3"}`} {
		do(t, db, `SELECT penstock.set_deployment('llama', 'llama', $1)`, good)
	}
	do(t, db, `SELECT penstock.set_deployment_template('llama', '{"cost": null, "fill_order": 3, "idle_seconds": 31104000}')`)
	_, err := db.Exec(t.Context(), `SELECT penstock.set_deployment_template('nobody', '{}')`)
	if err == nil || errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "PS008") {
		t.Errorf("an unknown model: %v", err)
	}
}

// A template with the target of a deployment is refused, or makes none where the deployment came later. It keeps no other model from its own.
func TestATemplateWithTheTargetOfADeploymentMakesNone(t *testing.T) {
	db := fleet(t)
	for model, object := range map[string]string{"a": "pods", "b": "own"} {
		do(t, db, `SELECT penstock.register_model($1, '{"protocol": "openai"}')`, model)
		do(t, db, `SELECT penstock.set_deployment_template($1, jsonb_build_object('backend', 'kubernetes',
		           'target', jsonb_build_object('name', $2::text, 'port', 1)))`, model, object)
	}
	do(t, db, `SELECT penstock.set_deployment('pods', 'llama', '{"backend": "kubernetes", "target": {"name": "pods", "port": 1}}')`)
	if made := one[[]string](t, db, `SELECT penstock.make_wanted_deployments('{a,b}')`); !slices.Equal(made, []string{"b"}) {
		t.Errorf("made %v, want b alone", made)
	}
	for target, holder := range map[string]string{
		`{"name": "pods", "port": 2, "namespace": "x"}`: `target: it is the target of deployment "pods"`,
		`{"name": "own", "port": 1}`:                    `target: it is the target of deployment "b"`,
		`{"name": "a", "port": 1}`:                      `target: it is the target of the template of model "c"`,
	} {
		do(t, db, `SELECT penstock.register_model('c', '{"protocol": "openai"}')`)
		do(t, db, `SELECT penstock.set_deployment_template('c', '{"backend": "kubernetes", "target": {"name": "a", "port": 1}}')`)
		_, err := db.Exec(t.Context(), `SELECT penstock.set_deployment_template('a', jsonb_build_object('backend', 'kubernetes', 'target', $1::jsonb))`, target)
		if err == nil || !strings.Contains(err.Error(), holder) || !strings.Contains(err.Error(), "PS002") {
			t.Errorf("%s: %v, want %s", target, err, holder)
		}
	}
	do(t, db, `SELECT penstock.set_deployment_template('a', NULL)`) // the model of the deployment may have a template of its target
	do(t, db, `SELECT penstock.set_deployment_template('llama', '{"backend": "kubernetes", "target": {"name": "pods", "port": 1}}')`)
	const move = `SELECT penstock.set_deployment_template('b', '{"backend": "kubernetes", "target": {"name": "pods", "port": 1}}')`
	if _, err := db.Exec(t.Context(), move); err == nil || !strings.Contains(err.Error(), `target of deployment "pods"`) {
		t.Errorf("got %v", err)
	}
}
