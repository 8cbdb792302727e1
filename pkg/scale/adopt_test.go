package scale

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// ranBefore is a cluster of n instances that have run for three days, each with a call.
func ranBefore(t *testing.T, db *pgxpool.Pool, n int, register string) *guarded {
	t.Helper()
	c := &guarded{t: t, db: db}
	do(t, db, `INSERT INTO penstock.node (id, name, application, lease, threads, queue_ids) VALUES (9, 'cpu', 'default', '1h', 1, '{}')`)
	for i := range n {
		name := fmt.Sprintf("pod-%d", i+1)
		do(t, db, register, i+1)
		c.instances = append(c.instances, BackendInstance{
			Name: name, Endpoint: "http://" + name, Began: time.Now().Add(-72 * time.Hour), State: InstanceRunning,
		})
	}
	do(t, db, `UPDATE penstock.instance SET state = 'ready'`)
	do(t, db, `INSERT INTO penstock.slot (instance_id, number, token, node_id)
	           SELECT id, 0, nextval('penstock.token_seq'), 9 FROM penstock.instance`)
	return c
}

// What a deployment finds running is taken over with its calls, whoever registered it under whatever name.
func TestWhatRanBeforeIsTakenOver(t *testing.T) {
	for name, register := range map[string]string{
		"registered under another name": `SELECT penstock.register_instance('llama', 'old-' || $1::int, 'http://pod-' || $1::int, 2, '{"zone": "a"}')`,
		"registered under its name":     `SELECT penstock.register_instance('llama', 'pod-' || $1::int, 'http://pod-' || $1::int, 2, '{"zone": "a"}')`,
		"announced under another name":  `SELECT penstock.announce_instance('llama', 'old-' || $1::int, 'http://pod-' || $1::int, 2, '{"zone": "a"}')`,
		"announced under its name":      `SELECT penstock.announce_instance('llama', 'pod-' || $1::int, 'http://pod-' || $1::int, 2, '{"zone": "a"}')`,
	} {
		t.Run(name, func(t *testing.T) {
			db := driven(t)
			c := ranBefore(t, db, 4, register)
			w := &term{t, db, New(db, free{db}, Config{Backends: map[string]Backend{backendLocal: c}})}
			for range 4 {
				w.round()
			}
			rows := `SELECT count(*) || ' with ' || (SELECT count(DISTINCT instance_id) FROM penstock.slot) || ' in use, '
			             || count(*) FILTER (WHERE deployment = 'llama-own' AND labels = '{"zone": "a"}' AND endpoint = 'http://' || server)
			             || ' taken over, ' || count(draining_at) || ' drain' FROM penstock.instance`
			if got := one[string](t, db, rows); got != "4 with 4 in use, 4 taken over, 0 drain" {
				t.Errorf("instances: %s", got)
			}
			if n := one[int](t, db, `SELECT count(*) FROM penstock.cold_start`); n != 0 {
				t.Errorf("%g s count as a cold start", one[float64](t, db, `SELECT max(seconds) FROM penstock.cold_start`))
			}
			told := func() string {
				return one[string](t, db, `SELECT string_agg(DISTINCT penstock.announce_instance('llama', 'old-' || i, 'http://pod-' || i, 2), ' ')
				                             FROM generate_series(1, 4) i`)
			}
			if got := told(); got != "serve" {
				t.Errorf("workers that announce themselves on are to %s", got)
			}
			override(t, db, 0)
			for range 4 {
				w.round()
			}
			if got := one[string](t, db, rows); got != "4 with 4 in use, 4 taken over, 4 drain" || told() != "drain" {
				t.Errorf("when none is wanted: %s, and are to %s", got, told())
			}
			for range 4 {
				do(t, db, `DELETE FROM penstock.slot`)
				w.round()
			}
			if n := one[int](t, db, `SELECT count(*) FROM penstock.instance`); n != 0 || len(c.names()) != 0 {
				t.Errorf("without calls %d are registered, %v exist", n, c.names())
			}
		})
	}
}

// An instance whose name is registered by hand with another endpoint is told as an error. It serves, and is neither
// drained nor removed; as many as are wanted are started beside those.
func TestWhatIsRegisteredByHandIsNotRemoved(t *testing.T) {
	db := driven(t)
	c := ranBefore(t, db, 3, `SELECT penstock.register_instance('llama', 'pod-' || $1::int, 'http://service:800' || $1::int, 2)`)
	w := &term{t, db, New(db, free{db}, Config{Backends: map[string]Backend{backendLocal: c}})}
	w.round()
	for _, n := range []int{0, 5} {
		override(t, db, n)
		for range 4 {
			w.round()
		}
		if names := c.names(); len(names) != max(n, 3) || !slices.Equal(names[:3], []string{"pod-1", "pod-2", "pod-3"}) {
			t.Errorf("with %d wanted %v exist", n, names)
		}
	}
	got := one[string](t, db, `SELECT count(i.draining_at) || ' drain, ' || s.error FROM penstock.instance i, penstock.deployment_state s GROUP BY s.error`)
	if want := `0 drain, register pod-1: ERROR: instance "pod-1" of model "llama" was not announced (SQLSTATE PS006)`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if s := w.duty.Status().Models[0]; s.Stuck != 0 {
		t.Errorf("%d starts count as stuck", s.Stuck)
	}
}

// One that may have requests, since a row of its name or its endpoint belongs to no deployment, goes neither as one too
// much nor as a start that is stuck.
func TestAnInstanceThatMayServeIsNoVictim(t *testing.T) {
	old := began(10 * time.Minute)
	for name, row := range map[string]registration{
		"its name":     {Server: "a", Endpoint: "http://elsewhere"},
		"its endpoint": {Server: "other", Endpoint: "http://a"},
	} {
		s := decided(0, 1)
		s.ReplaceBefore = &old
		s.others = []registration{row}
		s.refused = map[string]refusal{"a": {n: 3, message: "refused"}}
		todo := plan(s, nil, in(ready(1, 0)), true, noon)
		if todo.order != nil || len(todo.drain) > 0 || len(todo.starting) > 0 || len(todo.register) != 1 {
			t.Errorf("%s: %v are drained, %d start, %d are registered, the order is %+v", name, todo.drain, len(todo.starting), len(todo.register), todo.order)
		}
	}
}

// A deployment beside another one gives up nothing before its backend has told what there is.
func TestADeploymentGetsNoNumberBeforeItsFirstReport(t *testing.T) {
	db, own := driven(t), &cluster{}
	do(t, db, `SELECT penstock.set_deployment('llama-spot', 'llama', '{"backend": "kubernetes", "cost": 2, "policy": {"slots": 2}}')`)
	spot := &cluster{away: errors.New("timeout"), instances: []BackendInstance{
		{Name: "pod-1", Endpoint: "http://pod-1", Began: time.Now().Add(-time.Hour), State: InstanceRunning},
	}}
	w := &term{t, db, New(db, free{db}, Config{Backends: map[string]Backend{backendLocal: own, backendKubernetes: spot}})}
	for range 3 {
		w.round()
	}
	spot.away = nil
	var calls sync.WaitGroup
	for range 2 {
		if err := w.duty.applier.startRounds(t.Context(), &calls, nil); err != nil {
			t.Fatal(err)
		}
		calls.Wait()
	}
	if got := one[string](t, db, `SELECT count(*) || ' registered, ' || count(draining_at) || ' drain' FROM penstock.instance`); got != "1 registered, 0 drain" {
		t.Error(got)
	}
}

// How long a start took is known where it was followed from its beginning, however long it is not registered. The age of
// an instance that is registered anew, or after a time without reports, is no cold start.
func TestOnlyAStartThatWasFollowedIsAColdStart(t *testing.T) {
	ready := `UPDATE penstock.instance SET state = 'ready'`
	for name, c := range map[string]struct {
		endpoint string // of the instance while it starts
		happens  string
		want     float64 // cold starts in all
	}{
		"started":                     {"http://gpu-1", `SELECT`, 1},
		"registered late":             {"", `SELECT`, 1},
		"registered anew":             {"http://gpu-1", ready + `; DELETE FROM penstock.instance`, 1},
		"registered while none leads": {"", `UPDATE penstock.deployment_state SET seen_at = now() - interval '1 hour'`, 0},
		"not in the report before":    {"", `UPDATE penstock.deployment_state SET starting = '{}'`, 0},
	} {
		t.Run(name, func(t *testing.T) {
			db, backend := driven(t), &cluster{}
			w := newTerm(t, db, backend)
			w.round()
			override(t, db, 1)
			w.round()
			do(t, db, `UPDATE penstock.deployment SET created_at = created_at - interval '1 day'`)
			backend.instances[0].Endpoint = c.endpoint
			if c.endpoint == "" {
				backend.instances[0].Began = time.Now().Add(-time.Hour)
			}
			w.round()
			do(t, db, c.happens)
			backend.instances[0].Began = time.Now().Add(-time.Hour)
			if c.endpoint == "" {
				do(t, db, `UPDATE penstock.deployment_state SET starting = ARRAY[$1::timestamptz] WHERE starting <> '{}'`, backend.instances[0].Began)
			}
			backend.instances[0].Endpoint = "http://gpu-1"
			w.round()
			do(t, db, ready)
			if n := one[float64](t, db, `SELECT count(*) FROM penstock.cold_start`); n != c.want {
				t.Errorf("%g cold starts, the longest of %g s, want %g", n,
					one[float64](t, db, `SELECT coalesce(max(seconds), 0) FROM penstock.cold_start`), c.want)
			}
		})
	}
}

// The time at which a pod began has whole seconds, and is often before that at which a deployment on demand was made.
func TestAStartMaySeemToBeginBeforeItsDeployment(t *testing.T) {
	for earlier, want := range map[string]int{"900 milliseconds": 1, "10 seconds": 0} {
		db, backend := driven(t), &cluster{}
		w := newTerm(t, db, backend)
		w.round()
		override(t, db, 1)
		w.round()
		backend.instances[0].Began = one[time.Time](t, db, `SELECT created_at - $1::interval FROM penstock.deployment`, earlier)
		w.round()
		do(t, db, `UPDATE penstock.instance SET state = 'ready'`)
		if n := one[int](t, db, `SELECT count(*) FROM penstock.cold_start`); n != want {
			t.Errorf("%s before: %d cold starts, want %d", earlier, n, want)
		}
	}
}

// A worker that announces itself when it has loaded is found ready by the first probe: how long its start took is not known.
func TestAWorkerThatIsReadyWhenItAnnouncesItselfHasNoColdStart(t *testing.T) {
	db := driven(t)
	do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"backend": "webhook"}')`)
	announce(t, db, "loaded")
	announce(t, db, "loads")
	do(t, db, `UPDATE penstock.instance SET checked_at = clock_timestamp() WHERE server = 'loads'`)
	do(t, db, `UPDATE penstock.instance SET state = 'ready', checked_at = clock_timestamp()`)
	if got := one[string](t, db, `SELECT string_agg(server, ' ') FROM penstock.cold_start`); got != "loads" {
		t.Errorf("the starts of %q are measured", got)
	}
}

// A start that takes the place of an instance that went begins when that is found, and not when the order grew: whether
// it was lost, or an order removed it.
func TestTheReplacementOfAnInstanceThatWentIsNotStuck(t *testing.T) {
	for name, goes := range map[string]string{
		"lost":    `DELETE FROM penstock.instance WHERE server = 'gpu-3'`,
		"removed": `SELECT penstock.remove_instance('llama', 'gpu-3', false, 'a bad card', 'anna')`,
		"hung": `UPDATE penstock.instance SET state = 'unhealthy' WHERE server = 'gpu-3';
		         UPDATE penstock.deployment_state SET unhealthy = jsonb_build_object('gpu-3', now() - interval '1 hour')`,
	} {
		t.Run(name, func(t *testing.T) {
			w, hook := threeOfAWebhook(t, 3)
			do(t, w.db, goes)
			for range 5 {
				w.round()
				do(t, w.db, `DELETE FROM penstock.instance WHERE server = ANY ($1)`, hook.last().Remove)
				if s := w.duty.Status().Models[0]; s.Stuck != 0 {
					t.Errorf("%d starts are stuck at once", s.Stuck)
				}
			}
			if s := w.duty.Status().Models[0]; s.Started != 1 || hook.last().Count != 3 {
				t.Errorf("%d starts, %d are ordered", s.Started, hook.last().Count)
			}
			passed(t, w.db, "5 hours") // it does not come
			w.round()
			if s := w.duty.Status().Models[0]; s.Stuck != 1 {
				t.Errorf("%d starts are stuck 5 hours later, want 1", s.Stuck)
			}
		})
	}
}

// Starts that do not come are stuck, however often other instances go.
func TestLossesMakeNoMissingStartYoung(t *testing.T) {
	for name, goes := range map[string]string{
		"lost":    `DELETE FROM penstock.instance WHERE server = 'gpu-1'`,
		"removed": `SELECT penstock.remove_instance('llama', 'gpu-1', false, 'a bad card', 'anna')`,
	} {
		t.Run(name, func(t *testing.T) {
			w, hook := threeOfAWebhook(t, 2)
			do(t, w.db, goes)
			for range 3 {
				w.round()
				do(t, w.db, `DELETE FROM penstock.instance WHERE server = ANY ($1)`, hook.last().Remove)
			}
			if since := one[float64](t, w.db, `SELECT extract(epoch FROM now() - ordered_at)::float8
			                                     FROM penstock.deployment_state`); since < 4*3600 {
				t.Errorf("what does not come is %g s old", since)
			}
		})
	}
}

// threeOfAWebhook is a deployment of which three were ordered 5 hours ago, and so many are ready.
func threeOfAWebhook(t *testing.T, ready int) (*term, *hooked) {
	t.Helper()
	db, hook := driven(t), &hooked{}
	do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"backend": "webhook"}')`)
	w := &term{t, db, New(db, free{db}, Config{Backends: map[string]Backend{backendWebhook: hook}})}
	override(t, db, 3)
	w.round()
	for _, server := range []string{"gpu-1", "gpu-2", "gpu-3"}[:ready] {
		announce(t, db, server)
	}
	do(t, db, `UPDATE penstock.instance SET state = 'ready'`)
	w.round()
	passed(t, db, "5 hours")
	return w, hook
}

// passed moves an order into the past.
func passed(t *testing.T, db *pgxpool.Pool, time string) {
	t.Helper()
	do(t, db, `UPDATE penstock.deployment_state
	              SET ordered_at = ordered_at - $1::interval, applied_at = applied_at - $1::interval`, time)
}
