package scale

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// pair is a fleet with a second model, of which all is usual. Both have a request that waits.
func pair(t *testing.T) *pgxpool.Pool {
	t.Helper()
	db := fleet(t)
	do(t, db, `SELECT penstock.register_model('usual', '{"protocol": "openai"}', 'test')`)
	do(t, db, `SELECT penstock.set_deployment('usual-own', 'usual', '{"cost": 1}')`)
	do(t, db, `SELECT penstock.push('usual', '{}'::jsonb)`)
	push(t, db, 1)
	return db
}

// One value that no decision can be calculated with, or stored, holds up the model that has it and no other one.
func TestAnExtremeNumberOfOneModelStopsNoOther(t *testing.T) {
	for name, sql := range map[string]string{
		"cold starts that overflow":  `INSERT INTO penstock.cold_start (model, server, seconds) VALUES ('llama', 'a', 1e308), ('llama', 'b', 1e308)`,
		"a cold start of NaN":        `INSERT INTO penstock.cold_start (model, server, seconds) VALUES ('llama', 'a', 'NaN')`,
		"minutes that overflow":      `INSERT INTO penstock.model_minute SELECT now() - i * interval '1 minute', 'llama', 1e308, 0, 0, 1e308, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 FROM generate_series(1, 3) i`,
		"usage that overflows":       `INSERT INTO penstock.usage_hour (hour, queue_id, model, flow, calls, gpu_ms, wasted_ms, tokens_in, tokens_cached, tokens_out) SELECT date_trunc('hour', now(), 'UTC'), i, 'llama', '', 9e18, 9e18, 0, 0, 0, 0 FROM generate_series(1, 3) i`,
		"a state of absurd numbers":  `INSERT INTO penstock.scale_state (model, state, arrived, desired, base, raw, stabilised, ready, metric, why, decided_at) VALUES ('llama', '{"at": "2026-01-01T00:00:00Z", "counted": "2026-01-01T00:00:00Z", "desired": 9000000000000000000, "rate": 1e308, "recent": 1e308, "shadow": [1e308, 1e308]}', 0, 1, 0, 0, 0, 0, 0, '', now())`,
		"a state that is unreadable": `INSERT INTO penstock.scale_state (model, state, arrived, desired, base, raw, stabilised, ready, metric, why, decided_at) VALUES ('llama', '{"desired": "many"}', 0, 1, 0, 0, 0, 0, 0, '', now())`,
		"an override without end":    `UPDATE penstock.deployment SET override = 2, override_until = 'infinity' WHERE model = 'llama'`,
		"a cost that is no number":   `UPDATE penstock.deployment SET cost = 'NaN' WHERE model = 'llama'`,
		"a cost beyond all budgets":  `UPDATE penstock.deployment SET cost = 1e308, override = 3, override_until = now() + interval '1 hour' WHERE model = 'llama'`,
		"a policy of absurd numbers": `UPDATE penstock.deployment SET policy = '{"max": 4000000000, "slots": -3, "beta": 1e308, "slo_seconds": 1e300}' WHERE model = 'llama'`,
	} {
		t.Run(name, func(t *testing.T) {
			db := pair(t)
			do(t, db, `SELECT penstock.set_scale_setting('scale.budget', '10')`)
			do(t, db, sql)
			s := New(db, free{db}, Config{keep: time.Nanosecond})
			for range 2 {
				if err := s.Pass(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if n := one[int](t, db, `SELECT coalesce(max(desired), 0) FROM penstock.scale_state WHERE model = 'usual'`); n != 1 {
				t.Errorf("%d instances of the other model are desired, want 1: %s", n,
					one[string](t, db, `SELECT coalesce(max(why), '') FROM penstock.scale_state WHERE model = 'usual'`))
			}
			(&term{t, db, s}).round()
		})
	}
}

// A deployment that was removed and made again begins with what exists, and not with the number that the one before had.
func TestADeploymentThatIsMadeAgainDoesNotStartTheOldFleet(t *testing.T) {
	for name, leader := range map[string]bool{"under one leader": false, "under the next": true} {
		t.Run(name, func(t *testing.T) {
			db, c := driven(t), &cluster{}
			w := newTerm(t, db, c)
			w.round()
			override(t, db, 5)
			w.round()
			if n := one[int](t, db, `SELECT desired FROM penstock.scale_state`); n != 5 {
				t.Fatalf("%d are desired at first", n)
			}
			do(t, db, `SELECT penstock.remove_deployment('llama-own')`)
			do(t, db, `DELETE FROM penstock.instance`)
			c.instances = nil
			if leader {
				w.duty = New(db, free{db}, Config{Backends: map[string]Backend{backendLocal: c}})
			}
			do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"backend": "local", "policy": {"slots": 2, "max": 8}}')`)
			for range 3 {
				w.round()
			}
			if n := one[int](t, db, `SELECT desired FROM penstock.scale_state`); n != 0 || len(c.names()) != 0 {
				t.Errorf("%d are desired and %v exist, without a request", n, c.names())
			}
		})
	}
}

// The times of a deployment that was driven while the clock was ahead count as now, and are stored so.
func TestADeploymentGoesOnAfterTheClockWasAhead(t *testing.T) {
	db, c := driven(t), &cluster{}
	w := newTerm(t, db, c)
	w.round()
	override(t, db, 1)
	w.round()
	w.round()
	do(t, db, `UPDATE penstock.deployment_state SET seen_at = now() + '1 day', ordered_at = now() + '1 day', applied_at = now() + '1 day',
	             failed_at = now() + '1 day', no_room_at = now() + '1 day', retry_at = now() + '1 day', failures = 1`)
	override(t, db, 3)
	for range 8 { // its backend had no room: one start after another
		w.round()
		do(t, db, `UPDATE penstock.instance SET state = 'ready'`)
	}
	if n := len(c.names()); n != 3 {
		t.Errorf("%d exist, want 3", n)
	}
	do(t, db, `UPDATE penstock.deployment_state SET decided_at = now() + '1 day'`) // its number is not decided anew
	w.round()
	if n := one[int](t, db, `SELECT count(*) FROM penstock.deployment_state
	                          WHERE greatest(decided_at, seen_at, ordered_at, applied_at, failed_at, no_room_at) > clock_timestamp()`); n != 0 {
		t.Error("a time is in the future still")
	}
}

// A policy that a release before allowed keeps its model going, and its status tells what of it is not.
func TestAPolicyThatIsNotAllowedAnyMoreIsToldInTheStatus(t *testing.T) {
	db := fleet(t)
	do(t, db, `UPDATE penstock.deployment SET policy = '{"min": 2, "max": 4, "rho": 3, "floors": [{"cron": "x", "lasts_seconds": 60, "min": 3}]}'`)
	if err := New(db, free{db}, Config{}).Pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := one[int](t, db, `SELECT coalesce(max(desired), 0) FROM penstock.scale_state
	                          WHERE why LIKE '%rho is 3%' AND why LIKE '%floors[0]: %it is ignored%'`); n != 2 {
		t.Errorf("%d are desired, want 2 and the reasons", n)
	}
}

// One row that the database refuses holds up no other instance of the deployment, and is told.
func TestAnInstanceThatCannotBeRegisteredHoldsUpNoOther(t *testing.T) {
	db, c := driven(t), &cluster{}
	w := newTerm(t, db, c)
	w.round()
	override(t, db, 3)
	w.round()
	c.mu.Lock()
	c.instances[1].Endpoint = "no address"
	c.mu.Unlock()
	w.round()
	if n := one[int](t, db, `SELECT count(*) FROM penstock.instance`); n != 2 {
		t.Errorf("%d are registered, want 2", n)
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.deployment_state WHERE existing = 3 AND error LIKE 'register gpu-2%' AND error NOT LIKE E'%\n%'`); n != 1 {
		t.Errorf("%d states have the reason: %s", n, one[string](t, db, `SELECT coalesce(max(error), 'none') FROM penstock.deployment_state`))
	}
	override(t, db, 4) // and the deployment goes on
	w.round()
	w.round()
	if n := one[int](t, db, `SELECT count(*) FROM penstock.instance`); n != 3 {
		t.Errorf("%d are registered after one more start, want 3", n)
	}
}

// One that stays refused is tried later each time, and its error is told meanwhile. With another endpoint it is tried at once.
func TestAnInstanceThatStaysRefusedIsTriedLaterEachTime(t *testing.T) {
	db, c := driven(t), &cluster{}
	w := newTerm(t, db, c)
	change := func(slots int, endpoint string) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.instances[0].Slots, c.instances[0].Endpoint = slots, endpoint
	}
	number := func() int { // each try takes a number from the sequence, also one that is refused
		return one[int](t, db, `SELECT nextval(pg_get_serial_sequence('penstock.instance', 'id'))`)
	}
	w.round()
	override(t, db, 1)
	w.round()
	change(1_000_000, "http://gpu-1")
	before, began := number(), time.Now()
	for range 8 {
		w.round()
		if n := one[int](t, db, `SELECT count(*) FROM penstock.deployment_state WHERE existing = 1 AND error LIKE 'register gpu-1%'`); n != 1 {
			t.Error("the error is not told")
		}
	}
	tries := number() - before - 1
	if least := time.Second<<max(tries-1, 0) - time.Second; tries < 1 || time.Since(began) < least {
		t.Errorf("%d tries in %s, want at least %s", tries, time.Since(began), least)
	}
	change(2, "http://other")
	w.round()
	w.round()
	if n := one[int](t, db, `SELECT count(*) FROM penstock.instance i, penstock.deployment_state s WHERE i.endpoint = 'http://other' AND s.error IS NULL`); n != 1 || c.started != 1 {
		t.Errorf("%d are registered without an error and %d were started, want 1 of each", n, c.started)
	}
}

// Instances that hold slots after their time to live take no places of those that have come behind them.
func TestExpiredInstancesThatHoldSlotsHoldUpNoOther(t *testing.T) {
	db := fleet(t)
	do(t, db, `INSERT INTO penstock.node (id, name, application, lease, threads, queue_ids) VALUES (9, 'cpu', 'default', '1h', 1, '{}')`)
	do(t, db, `SELECT penstock.announce_instance('llama', 'gpu-' || i, 'http://gpu-' || i, 1) FROM generate_series(1, 61) i`)
	do(t, db, `UPDATE penstock.instance SET expires_at = clock_timestamp() - interval '1 minute'`)
	do(t, db, `INSERT INTO penstock.slot (instance_id, number, token, node_id)
	           SELECT id, 0, nextval('penstock.token_seq'), 9 FROM penstock.instance ORDER BY id LIMIT 60`)
	for range 3 {
		do(t, db, `SELECT penstock.expire_instances()`)
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.instance WHERE draining_at IS NOT NULL`); n != 60 {
		t.Errorf("%d drain, want 60", n)
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.instance`); n != 60 {
		t.Errorf("%d are left, want the 60 that hold slots", n)
	}
}

func announce(t *testing.T, db *pgxpool.Pool, server string) string {
	t.Helper()
	return one[string](t, db, `SELECT penstock.announce_instance('llama', $1, 'http://' || $1, 2)`, server)
}

// A worker that a receiver of orders has started, and that names no deployment, belongs to the one that ordered it: it is
// drained when it is too much.
func TestAnInstanceWithoutADeploymentBelongsToTheOnlyWebhook(t *testing.T) {
	db := fleet(t)
	announce(t, db, "gpu-1") // while there is none
	do(t, db, `UPDATE penstock.instance SET state = 'ready', created_at = now() - interval '5 hours'`)
	do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"backend": "webhook", "target": {"url": "https://example.org"}}')`)
	announce(t, db, "gpu-1")
	announce(t, db, "gpu-2")
	if n := one[int](t, db, `SELECT count(*) FROM penstock.instance WHERE deployment = 'llama-own'`); n != 2 {
		t.Errorf("%d belong to the deployment, want 2", n)
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.cold_start`); n != 0 {
		t.Error("the start of one that was ready before counts as a cold start")
	}
	w := &term{t, db, New(db, free{db}, Config{Backends: map[string]Backend{backendWebhook: &cluster{away: ErrUnlisted}}})}
	w.round()
	do(t, db, `UPDATE penstock.instance SET state = 'ready'`)
	override(t, db, 1)
	for range 3 {
		w.round()
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.instance WHERE draining_at IS NOT NULL`); n != 1 {
		t.Errorf("%d drain, want 1", n)
	}
}

// One that gets its deployment later was not started by it: its age is no cold start, whatever kept it from taking calls then.
func TestTheAgeOfAnInstanceThatGetsItsDeploymentLaterIsNoColdStart(t *testing.T) {
	for name, unusable := range map[string]string{
		"it starts":      `SELECT`,
		"unhealthy":      `UPDATE penstock.instance SET state = 'unhealthy'`,
		"drains":         `UPDATE penstock.instance SET state = 'ready', draining_at = now()`,
		"in quarantine":  `UPDATE penstock.instance SET state = 'ready', quarantined_until = now() + interval '1 hour'`,
		"ready too late": `UPDATE penstock.instance SET state = 'ready', expires_at = now() - interval '1 minute'`,
	} {
		db := fleet(t)
		announce(t, db, "gpu-1")
		do(t, db, `UPDATE penstock.instance SET created_at = now() - interval '5 hours'`)
		do(t, db, unusable)
		do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"backend": "webhook", "target": {"url": "https://example.org"}}')`)
		announce(t, db, "gpu-1")
		do(t, db, `UPDATE penstock.instance SET state = 'ready', draining_at = NULL, quarantined_until = NULL`)
		announce(t, db, "gpu-1")
		do(t, db, `UPDATE penstock.instance SET state = 'busy'`)
		if n := one[int](t, db, `SELECT count(ready_at) FROM penstock.instance WHERE deployment = 'llama-own'`); n != 1 {
			t.Errorf("%s: the instance does not belong to the deployment, or is not known to have been ready", name)
		}
		if n := one[int](t, db, `SELECT count(*) FROM penstock.cold_start`); n != 0 {
			t.Errorf("%s: %g s count as a cold start", name, one[float64](t, db, `SELECT max(seconds) FROM penstock.cold_start`))
		}
	}
}

// With two such deployments it cannot be told whose a new worker is. A worker keeps the one that it has.
func TestAnInstanceKeepsItsDeploymentWhenItIsRenewed(t *testing.T) {
	db := fleet(t)
	do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"backend": "webhook", "target": {"url": "https://example.org"}}')`)
	announce(t, db, "gpu-1")
	do(t, db, `SELECT penstock.set_deployment('llama-spot', 'llama', '{"backend": "webhook", "target": {"url": "https://example.org"}}')`)
	do(t, db, `SELECT penstock.announce_instance('llama', 'gpu-2', 'http://gpu-2', 2, deployment => 'llama-spot')`)
	for _, server := range []string{"gpu-1", "gpu-2", "gpu-3", "gpu-3"} {
		if told := announce(t, db, server); told != "serve" {
			t.Errorf("%s is told to %s", server, told)
		}
	}
	if got := one[string](t, db, `SELECT string_agg(server || ' ' || coalesce(deployment, '-'), ', ' ORDER BY server) FROM penstock.instance`); got != "gpu-1 llama-own, gpu-2 llama-spot, gpu-3 -" {
		t.Errorf("deployments are %s", got)
	}
}

// Beside a deployment of another backend it cannot be told whose a new worker is either: something that follows a number that
// is only published may have started it.
func TestAnInstanceBesideAnotherBackendBelongsToNoWebhook(t *testing.T) {
	for _, backend := range []string{"keda", "advise", "local"} {
		db := fleet(t)
		do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', jsonb_build_object('backend', $1::text))`, backend)
		do(t, db, `SELECT penstock.set_deployment('llama-hook', 'llama', '{"backend": "webhook", "target": {"url": "https://example.org"}}')`)
		announce(t, db, "gpu-1")
		announce(t, db, "gpu-1") // nor does it when it is renewed
		if n := one[int](t, db, `SELECT count(deployment) FROM penstock.instance`); n != 0 {
			t.Errorf("beside %s: the instance belongs to a deployment", backend)
		}
		do(t, db, `UPDATE penstock.instance SET state = 'ready'`)
		do(t, db, `SELECT penstock.remove_deployment('llama-own')`)
		announce(t, db, "gpu-1")
		if n := one[int](t, db, `SELECT count(*) FROM penstock.instance WHERE deployment = 'llama-hook'`); n != 1 {
			t.Errorf("after %s: the instance does not belong to the only deployment", backend)
		}
	}
}

// One that nothing of ours started and that is never ready is a part of the number for the time of a start, and no longer.
func TestAForeignInstanceThatIsNeverReadyIsNoCapacityForEver(t *testing.T) {
	db, c := driven(t), &cluster{}
	w := newTerm(t, db, c)
	announce(t, db, "foreign")
	w.round()
	override(t, db, 1)
	w.round()
	if n := len(c.names()); n != 0 {
		t.Fatalf("%d are started beside one that is about to be ready", n)
	}
	do(t, db, `UPDATE penstock.instance SET created_at = now() - interval '1 hour'`)
	w.round()
	w.round()
	if n := len(c.names()); n != 1 {
		t.Errorf("%d are started beside one that is never ready, want 1", n)
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.scale_state WHERE state->'stuck' IS NOT NULL`); n != 0 {
		t.Error("starts of the deployment count as stuck, because of one that it did not start")
	}
}

// Numbers of deployments are written in the order of their names, whatever the order of their models.
func TestNumbersOfDeploymentsAreWrittenInTheOrderOfNames(t *testing.T) {
	db := fleet(t) // of model llama: llama-own
	do(t, db, `SELECT penstock.register_model('aaa', '{"protocol": "openai"}', 'test')`)
	do(t, db, `SELECT penstock.set_deployment('zzz', 'aaa', '{"backend": "local", "policy": {"min": 2}}')`)
	do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"backend": "local", "policy": {"min": 2}}')`)
	do(t, db, `INSERT INTO penstock.deployment_state (name, seen_at) VALUES ('llama-own', now()), ('zzz', now())`)
	s := New(db, free{db}, Config{Backends: map[string]Backend{}})
	other, err := db.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Rollback(t.Context()) }()
	touch := func(tx pgx.Tx, name string) {
		t.Helper()
		if _, err := tx.Exec(t.Context(), `UPDATE penstock.deployment_state SET error = 'x' WHERE name = $1`, name); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	touch(other, "llama-own")
	done := make(chan error, 1)
	go func() { done <- s.Pass(t.Context()) }()
	for one[int](t, db, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) == 0 {
		time.Sleep(time.Millisecond)
	}
	touch(other, "zzz")
	if err := other.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}
