package scale

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
)

// refusedAs returns the SQLSTATE of a statement that is refused.
func refusedAs(t *testing.T, db *pgxpool.Pool, sql string, args ...any) string {
	t.Helper()
	_, err := db.Exec(t.Context(), sql, args...)
	var refused *pgconn.PgError
	if err != nil && !errors.As(err, &refused) {
		t.Fatal(err)
	}
	if refused == nil {
		return ""
	}
	return refused.Code
}

// The backend that has the instances would never be told to end them, and what serves would count as gone.
func TestADeploymentWithInstancesKeepsItsBackendAndObject(t *testing.T) {
	const (
		object    = `{"backend": "kubernetes", "target": {"name": "llama", "port": 1, "namespace": "gpu"}}`
		elsewhere = `{"target": {"name": "other", "port": 1, "namespace": "gpu"}}`
		set       = `SELECT penstock.set_deployment('llama-own', 'llama', $1)`
		template  = `SELECT penstock.set_deployment_template('llama', $1)`
	)
	for name, onDemand := range map[string]bool{"a deployment": false, "one that was made from a template": true} {
		t.Run(name, func(t *testing.T) {
			db, c := pgtest.New(t), &cluster{}
			do(t, db, `SELECT penstock.register_model('llama', '{"protocol": "openai"}')`)
			do(t, db, set, object)
			do(t, db, template, object)
			do(t, db, `UPDATE penstock.deployment SET on_demand = $1`, onDemand)
			w := &term{t, db, New(db, free{db}, Config{Backends: map[string]Backend{backendKubernetes: c}})}
			w.round()
			override(t, db, 1)
			for range 3 {
				w.round()
			}
			if len(c.names()) != 1 {
				t.Fatalf("%v exist", c.names())
			}
			moves := map[string]string{set: elsewhere}
			if onDemand {
				moves[template] = `{"backend": "kubernetes", "target": {"name": "other", "port": 1, "namespace": "gpu"}}`
			}
			for sql, options := range moves {
				if got := refusedAs(t, db, sql, options); got != "PS002" {
					t.Errorf("%s of %s: got %q while an instance exists", sql, options, got)
				}
			}
			for _, options := range []string{
				`{"backend": "advise"}`, `{"target": {"name": "llama", "port": 1, "namespace": "cpu"}}`,
				`{"target": {"name": "llama", "port": 1}}`,
			} {
				if got := refusedAs(t, db, set, options); got != "PS002" {
					t.Errorf("%s: got %q while an instance exists", options, got)
				}
			}
			do(t, db, set, `{"target": {"name": "llama", "port": 2, "namespace": "gpu", "group": "apps"}, "policy": {"max": 3}}`)
			do(t, db, template, object)
			override(t, db, 0)
			for range 6 {
				w.round()
			}
			if len(c.names()) != 0 {
				t.Fatalf("%v exist", c.names())
			}
			for sql, options := range moves {
				do(t, db, sql, options)
			}
		})
	}
}

// What is ordered may have begun, and who announced itself to a number that is published may be a pod of the object.
func TestWhatIsOrderedOrRegisteredKeepsTheBackend(t *testing.T) {
	db := fleet(t)
	const set = `SELECT penstock.set_deployment('llama-own', 'llama', $1)`
	do(t, db, `SELECT penstock.announce_instance('llama', 'gpu-1', 'http://gpu-1', 2, deployment => 'llama-own')`)
	if got := refusedAs(t, db, set, `{"backend": "local", "target": {"command": "x"}}`); got != "PS002" {
		t.Errorf("a backend that reports: got %q while one is registered", got)
	}
	for _, backend := range []string{"keda", "advise", "webhook"} { // it serves on: these report nothing
		do(t, db, set, `{"backend": "`+backend+`"}`)
	}
	do(t, db, `SELECT penstock.remove_instance('llama', 'gpu-1', false, 'test', 'test')`)
	do(t, db, `INSERT INTO penstock.deployment_state (name, ordered) VALUES ('llama-own', 1)`)
	if got := refusedAs(t, db, set, `{"backend": "advise"}`); got != "PS002" {
		t.Errorf("got %q while one is ordered", got)
	}
	do(t, db, set, `{"target": {"url": "https://receiver.example"}}`) // the next order has all numbers
	do(t, db, `UPDATE penstock.deployment_state SET ordered = 0`)
	do(t, db, set, `{"backend": "advise"}`)
}
