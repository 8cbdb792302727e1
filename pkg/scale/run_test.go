package scale

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

// free is a fence whose term does not end.
type free struct{ db *pgxpool.Pool }

func (f free) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, f.db, fn)
}

// over is a fence whose term is over.
type over struct{}

func (over) InTx(context.Context, func(pgx.Tx) error) error { return fmt.Errorf("the term is over") }

func do(t *testing.T, db *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := db.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func one[T any](t *testing.T, db *pgxpool.Pool, sql string, args ...any) T {
	t.Helper()
	var found T
	if err := db.QueryRow(t.Context(), sql, args...).Scan(&found); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return found
}

// fleet is a database with the model llama, its queue and one deployment of at most eight instances.
func fleet(t *testing.T) *pgxpool.Pool {
	t.Helper()
	db := pgtest.New(t)
	do(t, db, `SELECT penstock.register_model('llama', '{"protocol": "openai"}')`)
	do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"policy": {"slots": 2, "max": 8}}')`)
	return db
}

func push(t *testing.T, db *pgxpool.Pool, n int) {
	t.Helper()
	do(t, db, `SELECT penstock.push('llama', '{}'::jsonb) FROM generate_series(1, $1)`, n)
}

func TestMetricCountsWhatMayStart(t *testing.T) {
	db := fleet(t)
	metric := func() float64 { return one[float64](t, db, `SELECT penstock.scale_metric('llama')`) }
	if got := metric(); got != 0 {
		t.Errorf("an empty queue: %g", got)
	}
	push(t, db, 7)
	if got := metric(); got != 7 {
		t.Errorf("seven wait: %g", got)
	}
	do(t, db, `SELECT penstock.pause_queue('llama', 'test', 'test', NULL)`)
	if got := metric(); got != 0 {
		t.Errorf("a paused queue: %g", got)
	}
	do(t, db, `SELECT penstock.resume_queue('llama', 'test', 'test')`)
	do(t, db, `UPDATE penstock.ready SET not_before = clock_timestamp() + interval '1 hour' WHERE pos = (SELECT min(pos) FROM penstock.ready)`)
	if got := metric(); got != 6 {
		t.Errorf("one is held back: %g", got)
	}
	if _, err := db.Exec(t.Context(), `SELECT penstock.scale_metric('nobody')`); err == nil {
		t.Error("an unknown model has a metric: it must not read as zero")
	}
}

func TestPassDecidesAndANewLeaderGoesOn(t *testing.T) {
	db := fleet(t)
	push(t, db, 40)
	first := New(db, free{db}, Config{})
	if err := first.Pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	desired := one[int](t, db, `SELECT desired FROM penstock.scale_state WHERE model = 'llama'`)
	if desired < 1 {
		t.Fatalf("40 wait and %d are desired", desired)
	}
	why := one[string](t, db, `SELECT why FROM penstock.scale_decision WHERE model = 'llama'`)
	if !strings.HasPrefix(why, fmt.Sprintf("0 -> %d: ", desired)) {
		t.Errorf("why: %q", why)
	}

	// The next leader knows the starts that the first one asked for, and asks for no second wave.
	second := New(db, free{db}, Config{})
	if err := second.Pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := one[int](t, db, `SELECT (state->>'desired')::integer FROM penstock.scale_state WHERE model = 'llama'`)
	if before < desired || before > max(5, 2*desired) {
		t.Errorf("the first leader desired %d, the second %d", desired, before)
	}
}

// Nothing of ours starts instances for backend advise: a number that nothing followed is no start that is stuck.
func TestAPublishedNumberIsNoStart(t *testing.T) {
	s := New(nil, nil, Config{})
	shares := []share{{Name: "llama-own", Model: "llama", Backend: "advise", Policy: []byte(`{"slots": 2, "max": 8}`), Mode: "full"}}
	in := input{Model: "llama", Waiting: 40, Arrived: 40, Service: 5}
	first := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	decide := func() Decision {
		t.Helper()
		v, err := s.decide(in, shares)
		if err != nil {
			t.Fatal(err)
		}
		s.past[in.Model] = past{state: v.next, arrived: in.Arrived, counters: in.counters()}
		for _, note := range v.d.Notes {
			if len(in.Starting) == 0 && (note.Code == NoteStuck || note.Code == NoteReplace || note.Code == NoteBlocked) {
				t.Fatalf("at %v: %s", in.At.Sub(first), v.d.Explain())
			}
		}
		return v.d
	}
	var d Decision
	for second := range 3600 {
		in.At = first.Add(time.Duration(second) * time.Second)
		d = decide()
	}
	if d.Desired != 2 { // 2 slots in the 60 s of a drain: 120 of 200 slot-seconds
		t.Errorf("40 wait for an hour, nothing is ready, and %d are desired: %s", d.Desired, d.Explain())
	}
	// The next leader comes an hour after a number that changed last.
	state, err := json.Marshal(State{At: in.At, Desired: 2, Changes: []Step{{At: in.At, By: 2}}})
	if err != nil {
		t.Fatal(err)
	}
	in.State, in.At = state, in.At.Add(time.Hour)
	s = New(nil, nil, Config{})
	decide()

	in.Starting = []time.Time{first}
	decide()
	in.At = in.At.Add(10 * time.Second)
	if d := decide(); !strings.Contains(d.Explain(), "are not ready after") {
		t.Errorf("an instance that is registered and starts for an hour is not stuck: %s", d.Explain())
	}
}

func TestSwitchesReachTheNextPass(t *testing.T) {
	db := fleet(t)
	push(t, db, 40)
	do(t, db, `SELECT penstock.set_scale_setting('scale.off', 'true', 'incident')`)
	s := New(db, free{db}, Config{})
	pass := func() int {
		t.Helper()
		if err := s.Pass(t.Context()); err != nil {
			t.Fatal(err)
		}
		return s.past["llama"].state.Desired
	}
	if got := pass(); got != 0 {
		t.Errorf("scaling is off and %d are desired", got)
	}
	do(t, db, `SELECT penstock.set_scale_setting('scale.off', NULL)`)
	do(t, db, `SELECT penstock.set_scale_override('llama-own', 6, clock_timestamp() + interval '1 hour', 'launch')`)
	if got := pass(); got != 6 {
		t.Errorf("the override is 6 and %d are desired", got)
	}
	do(t, db, `SELECT penstock.set_scale_setting('scale.max_all', '3')`)
	if got := pass(); got != 3 {
		t.Errorf("the cap is 3 and %d are desired", got)
	}
	do(t, db, `SELECT penstock.set_scale_override('llama-own', NULL)`)
	do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"mode": "manual"}')`)
	if got := pass(); got != 3 {
		t.Errorf("the mode is manual at 3 and %d are desired", got)
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.audit WHERE verb LIKE 'set_scale%'`); n != 5 {
		t.Errorf("%d orders are in the audit", n)
	}
}

func TestATermThatIsOverStoresNothing(t *testing.T) {
	db := fleet(t)
	push(t, db, 40)
	if err := New(db, over{}, Config{}).Pass(t.Context()); err == nil {
		t.Error("no error")
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.scale_state`); n != 0 {
		t.Errorf("%d states", n)
	}
}

func TestABadPolicyStopsNoOtherModel(t *testing.T) {
	db := fleet(t)
	push(t, db, 40)
	do(t, db, `SELECT penstock.register_model('aaa', '{"protocol": "openai"}')`)
	do(t, db, `SELECT penstock.set_deployment('aaa', 'aaa', '{"policy": {"min": 9, "max": 1}}')`)
	if err := New(db, free{db}, Config{}).Pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.scale_state WHERE model = 'llama'`); n != 1 {
		t.Error("llama was not decided")
	}
}

func TestOrdersAreChecked(t *testing.T) {
	db := fleet(t)
	for _, sql := range []string{
		`SELECT penstock.set_deployment('x', 'nobody')`,
		`SELECT penstock.set_deployment('x', 'llama', '{"colour": 1}')`,
		`SELECT penstock.set_deployment('x', 'llama', '{"mode": "odd"}')`,
		`SELECT penstock.set_scale_override('nobody', 1, now() + interval '1 hour')`,
		`SELECT penstock.set_scale_override('llama-own', 1)`,
		`SELECT penstock.set_scale_override('llama-own', -1, now() + interval '1 hour')`,
		`SELECT penstock.set_scale_setting('scale.off', '3')`,
		`SELECT penstock.set_scale_setting('colour', 'true')`,
		`SELECT penstock.set_scale_setting('scale.max_all', '3000000000')`,
		`SELECT penstock.set_scale_setting('scale.max_all', '-1')`,
		`SELECT penstock.remove_deployment('nobody')`,
	} {
		if _, err := db.Exec(t.Context(), sql); err == nil {
			t.Errorf("%s was accepted", sql)
		} else if !strings.Contains(err.Error(), "SQLSTATE PS0") {
			t.Errorf("%s: %v", sql, err)
		}
	}
}

func TestInstancesThatTakeNoRequestsAreNoPartOfTheNumber(t *testing.T) {
	db := fleet(t)
	for server, change := range map[string]string{
		"good": `state = 'ready'`, "sick": `state = 'unhealthy'`, "held": `quarantined_until = clock_timestamp() + interval '1 hour'`,
		"late": `state = 'ready', expires_at = clock_timestamp()`,
		"dead": `state = 'starting', expires_at = clock_timestamp()`, "new": `state = 'starting'`,
	} {
		do(t, db, `SELECT penstock.register_instance('llama', $1, 'http://' || $1, 2)`, server)
		do(t, db, `UPDATE penstock.instance SET `+change+` WHERE server = $1`, server)
	}
	if n := one[int](t, db, `SELECT unmanaged FROM penstock.scale_input WHERE model = 'llama'`); n != 2 {
		t.Errorf("%d count, want the one that is ready and the one that starts", n)
	}
}

func TestDueEntriesAreCountedWhereThereAreSome(t *testing.T) {
	db := fleet(t)
	due := func() int { return one[int](t, db, `SELECT due FROM penstock.scale_input WHERE model = 'llama'`) }
	if n := due(); n != 0 {
		t.Errorf("%d become due in an empty queue", n)
	}
	for _, in := range []string{"20 seconds", "30 seconds", "1 hour"} {
		do(t, db, `SELECT penstock.push('llama', '{}'::jsonb, due_at => now() + $1::interval)`, in)
	}
	if n := due(); n != 2 {
		t.Errorf("%d become due within a minute, want 2", n)
	}
}

func TestAPausedQueueHasNothingThatIsLate(t *testing.T) {
	db := fleet(t)
	push(t, db, 3)
	do(t, db, `UPDATE penstock.entry SET start_by = clock_timestamp() + interval '1 second'`)
	late := func() int { return one[int](t, db, `SELECT penstock.scale_late('llama', 60)`) }
	if n := late(); n != 3 {
		t.Errorf("%d are late, want 3", n)
	}
	do(t, db, `SELECT penstock.pause_queue('llama', 'test', 'test', NULL)`)
	if n := late(); n != 0 {
		t.Errorf("%d are late in a paused queue", n)
	}
}

// A gateway keeps slots for a while after its calls: they are no requests that run. Slots that it leased after its last
// heartbeat are, as is each slot of one that reported nothing.
func TestIdleSlotsOfGatewaysAreNoRequests(t *testing.T) {
	db := fleet(t)
	do(t, db, `SELECT penstock.register_instance('llama', 'gpu-1', 'http://10.0.0.1:80', 16)`)
	for node, load := range map[int]string{
		1: `{"pools": {"llama": {"stock": 2}}}`, 2: `{}`, 3: `{"pools": {"llama": {"stock": 90}}}`, 4: `{"pools": {"llama": {"stock": "x"}}}`,
	} {
		do(t, db, `SELECT penstock.register_gateway($1, $2, 'default', '1 minute')`, node, fmt.Sprint("g", node))
		do(t, db, `UPDATE penstock.node SET load = $2, beat_at = clock_timestamp() + interval '1 hour' WHERE id = $1`, node, load)
	}
	lease := func(node, first, n int) {
		do(t, db, `INSERT INTO penstock.slot (instance_id, number, token, node_id)
		           SELECT i.id, g, nextval('penstock.token_seq'), $1 FROM penstock.instance i, generate_series($2::int, $2 + $3 - 1) g`, node, first, n)
	}
	running := func() int {
		n := one[int](t, db, `SELECT penstock.scale_running('llama')::int`)
		if online := one[int](t, db, `SELECT online_running::int FROM penstock.scale_input WHERE model = 'llama'`); online != n {
			t.Errorf("decisions read that %d requests run at gateways, want %d", online, n)
		}
		return n
	}
	lease(1, 0, 5)
	if n := running(); n != 2 {
		t.Errorf("%d of 5 slots with 2 calls run", n)
	}
	lease(2, 5, 1)
	lease(3, 6, 3)
	lease(4, 9, 1)
	if n := running(); n != 2+1+3+1 {
		t.Errorf("%d run, want 7: a report is worth no more than the slots, and none means all of them", n)
	}
	do(t, db, `UPDATE penstock.node SET beat_at = clock_timestamp() - interval '1 minute' WHERE id = 1`)
	do(t, db, `UPDATE penstock.slot SET leased_at = clock_timestamp() - interval '2 minutes' WHERE number < 4`)
	if n := running(); n != 3+1+3+1 {
		t.Errorf("%d run, want 8: one slot was leased since", n)
	}
}

func TestAModelWithADeploymentIsNotRemoved(t *testing.T) {
	db := fleet(t)
	_, err := db.Exec(t.Context(), `SELECT penstock.remove_model('llama')`)
	if postgres.Code(err) != "PS006" || !strings.Contains(err.Error(), "llama-own") {
		t.Fatalf("got %v", err)
	}
	do(t, db, `SELECT penstock.remove_deployment('llama-own')`)
	do(t, db, `SELECT penstock.set_deployment_template('llama', '{"backend": "advise"}')`)
	do(t, db, `SELECT penstock.remove_model('llama')`)
	if n := one[int](t, db, `SELECT count(*)::int FROM penstock.deployment_template`); n != 0 {
		t.Errorf("%d templates are left", n)
	}
}

// The budget is one of all deployments: those that may not change, or whose policy cannot be read, have their part of it.
func TestTheBudgetCountsDeploymentsThatDoNotChange(t *testing.T) {
	db := fleet(t)
	for _, m := range []string{"fixed", "broken"} {
		do(t, db, `SELECT penstock.register_model($1, '{"protocol": "openai"}')`, m)
		do(t, db, `SELECT penstock.set_deployment($1, $1, '{"backend": "keda", "policy": {"slots": 2, "max": 8}}')`, m)
		do(t, db, `INSERT INTO penstock.deployment_state (name, desired, decided_at) VALUES ($1, 3, now())`, m)
	}
	do(t, db, `SELECT penstock.set_deployment('fixed', 'fixed', '{"mode": "disabled"}')`)
	do(t, db, `SELECT penstock.set_deployment('broken', 'broken', '{"policy": {"slots": "many"}}')`)
	do(t, db, `SELECT penstock.set_scale_setting('scale.budget', '8')`)
	push(t, db, 400)
	d := New(db, free{db}, Config{})
	for range 2 {
		if err := d.Pass(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := one[int](t, db, `SELECT desired FROM penstock.scale_state WHERE model = 'llama'`); n != 2 {
		t.Errorf("%d are desired where the budget has room for 2", n)
	}
}
