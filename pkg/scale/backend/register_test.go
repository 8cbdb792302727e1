package backend

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/scale"
)

// term is a fence whose term does not end.
type term struct{ db *pgxpool.Pool }

func (f term) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, f.db, fn)
}

// A pod is an instance as soon as the API server says that it is ready, and none as soon as it is deleted: no tick of
// the leader and no list comes here.
func TestAReadyPodIsRegisteredAtOnceAndLeavesAtOnce(t *testing.T) {
	db := pgtest.New(t)
	for _, sql := range []string{
		`SELECT penstock.register_model('llama', '{"protocol": "openai"}')`,
		`SELECT penstock.set_deployment('own', 'llama',
		        '{"backend": "kubernetes", "target": {"name": "llama", "port": 8000},
		          "policy": {"slots": 2, "max": 4}}')`,
	} {
		if _, err := db.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	server := newPodServer()
	k := NewKubernetes(KubernetesConfig{Server: "http://api", Namespace: "models", Client: clientOf(server)})
	d := scale.New(db, term{db}, scale.Config{Pause: time.Hour, Backends: map[string]scale.Backend{"kubernetes": k}})
	go func() { _ = d.Run(t.Context()) }()
	await := func(what string, done func() bool) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); !done(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal(what)
			}
		}
	}
	registered := func() (n int) {
		t.Helper()
		const sql = `SELECT count(*) FROM penstock.instance WHERE server = 'llama-0'`
		if err := db.QueryRow(t.Context(), sql).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	await("no pass", func() bool { return d.Status().Passes > 0 })
	var queue int32
	if _, err := db.Exec(t.Context(), `SELECT penstock.push('llama', '{}'::jsonb)`); err != nil {
		t.Fatal(err)
	}
	if err := db.QueryRow(t.Context(), `SELECT id FROM penstock.queue WHERE name = 'llama'`).Scan(&queue); err != nil {
		t.Fatal(err)
	}
	d.WakeQueue(queue)
	await("no pod was ordered, or none is watched", func() bool {
		server.mu.Lock()
		defer server.mu.Unlock()
		return server.scaled == 1 && len(server.open) == 1
	})
	server.set("llama-0", "")
	server.set("llama-0", "10.0.0.1")
	await("the pod is not registered", func() bool { return registered() == 1 })
	server.remove("llama-0")
	await("the pod is registered still", func() bool { return registered() == 0 })
}
