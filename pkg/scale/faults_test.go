package scale

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// guarded is a cluster that reports each instance with a run that it is told to remove.
type guarded struct {
	cluster
	t  *testing.T
	db *pgxpool.Pool
}

func (g *guarded) Apply(ctx context.Context, o Order) error {
	g.t.Helper()
	lease(g.t, g.db, 2) // at the last moment
	for _, name := range o.Remove {
		if n := one[int](g.t, g.db, `SELECT count(*) FROM penstock.slot s JOIN penstock.instance i ON i.id = s.instance_id
		                              WHERE i.endpoint = 'http://' || $1`, name); n > 0 {
			g.t.Errorf("order %d removes %s, where %d requests run", o.ID, name, n)
		}
	}
	return g.cluster.Apply(ctx, o)
}

func lease(t *testing.T, db *pgxpool.Pool, n int) {
	t.Helper()
	do(t, db, `SELECT penstock.lease_slots('llama', 9, $1)`, n)
}

// faulty is a leader whose database, backend and term fail at any time, and the runs on its instances.
type faulty struct {
	*term
	c     *guarded
	fence *unsteady
	draw  *rand.Rand
}

func (f *faulty) begin() {
	f.fence = &unsteady{free: free{f.db}}
	f.duty = New(f.db, f.fence, Config{Backends: map[string]Backend{backendLocal: f.c}})
}

// step decides and applies once. Both may fail.
func (f *faulty) step() {
	f.t.Helper()
	_ = f.duty.Pass(f.t.Context())
	var calls sync.WaitGroup
	if err := f.duty.applier.startRounds(f.t.Context(), &calls, nil); err != nil {
		f.t.Fatal(err)
	}
	calls.Wait()
}

// happen has one of the things happen that may happen between two steps.
func (f *faulty) happen() {
	f.t.Helper()
	f.c.before, f.c.after, f.c.away = nil, nil, nil
	switch f.draw.IntN(14) {
	case 0, 1, 2:
		override(f.t, f.db, f.draw.IntN(5))
	case 3:
		f.c.before = errors.New("status 503")
	case 4:
		f.c.after = errors.New("timeout")
	case 5:
		f.c.after = fmt.Errorf("%w: no right", ErrCarriedOut)
	case 6:
		f.c.away = errors.New("timeout")
	case 7:
		f.begin() // a new leader
	case 8:
		f.fence.fails = 1 + f.draw.IntN(3)
	case 9:
		if n := len(f.c.instances); n > 0 {
			f.c.instances[f.draw.IntN(n)].State = InstanceFailed
		}
	case 10:
		do(f.t, f.db, `UPDATE penstock.instance SET state = CASE state WHEN 'ready' THEN 'unhealthy' ELSE 'ready' END
		                WHERE id = (SELECT id FROM penstock.instance WHERE state <> 'starting' ORDER BY id * 7 % $1, id LIMIT 1)`,
			1+f.draw.IntN(5))
	case 11:
		do(f.t, f.db, `SELECT penstock.set_deployment('llama-own', 'llama', jsonb_build_object('template', jsonb_build_object('version', $1::int)))`,
			f.draw.IntN(3))
	case 12:
		do(f.t, f.db, `UPDATE penstock.instance SET created_at = created_at - interval '1 hour' WHERE state = 'starting'`)
	}
	do(f.t, f.db, `UPDATE penstock.instance SET state = 'ready' WHERE state = 'starting' AND created_at > clock_timestamp() - interval '1 minute'`)
	lease(f.t, f.db, f.draw.IntN(4))
	do(f.t, f.db, `DELETE FROM penstock.slot WHERE (token + $1) % 5 < 2`, f.draw.IntN(5))
	f.settle()
}

// settle ends the pauses after failures.
func (f *faulty) settle() {
	f.t.Helper()
	do(f.t, f.db, `UPDATE penstock.deployment_state SET retry_at = clock_timestamp()`)
	for _, n := range f.duty.applier.notes {
		n.failed = failedOrders{}
	}
}

// Whatever fails, in whatever order, no instance is removed where a request runs, be it one that ran before. When the faults are over, as many exist
// as are desired.
func TestLongNoRunIsInterruptedWhateverFails(t *testing.T) {
	for seed := range uint64(2) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			db := driven(t)
			do(t, db, `INSERT INTO penstock.node (id, name, application, lease, threads, queue_ids) VALUES (9, 'cpu', 'default', '1h', 1, '{}')`)
			f := &faulty{
				term: &term{t: t, db: db}, c: &guarded{t: t, db: db},
				draw: rand.New(rand.NewPCG(seed, 1)), //nolint:gosec // the same each time
			}
			for i, server := range []string{"hand-1", "old"} { // they ran before, one of them under another name
				name := fmt.Sprint("hand-", i+1)
				do(t, db, `SELECT penstock.register_instance('llama', $1, 'http://' || $2, 2)`, server, name)
				f.c.instances = append(f.c.instances, BackendInstance{Name: name, Endpoint: "http://" + name, State: InstanceRunning})
			}
			lease(t, db, 3)
			f.begin()
			f.step()
			for range 60 {
				f.happen()
				f.step()
			}
			if f.c.started < 10 {
				t.Errorf("%d were started in all", f.c.started)
			}
			f.c.before, f.c.after, f.c.away = nil, nil, nil
			do(t, db, `DELETE FROM penstock.slot`)
			override(t, db, 2)
			for tries := 0; !f.steady(2); tries++ {
				if tries == 40 {
					t.Fatalf("2 are desired, %v exist: %s", f.c.names(),
						one[string](t, db, `SELECT to_jsonb(s)::text FROM penstock.deployment_state s`))
				}
				do(t, db, `DELETE FROM penstock.slot`)
				do(t, db, `UPDATE penstock.instance SET state = 'ready'`)
				f.settle()
				f.step()
			}
		})
	}
}

// steady says whether n instances run, and all of them take requests.
func (f *faulty) steady(n int) bool {
	f.t.Helper()
	ready := one[int](f.t, f.db, `SELECT count(*) FROM penstock.instance i WHERE penstock.usable(i)`)
	return len(f.c.instances) == n && ready == n &&
		!slices.ContainsFunc(f.c.instances, func(i BackendInstance) bool { return i.State != InstanceRunning })
}
