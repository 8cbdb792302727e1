package scale

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/pkg/invalidation"
)

// cluster is a backend in memory. A failure is returned by Apply before or after it has had its effect.
type cluster struct {
	mu        sync.Mutex
	instances []BackendInstance
	orders    []Order
	started   int
	before    error
	after     error
	away      error
	growth    error         // of an order that is to start one
	room      int           // instances at most; 0 for no limit
	ahead     time.Duration // of its clock
}

func (c *cluster) List(context.Context, BackendTarget) ([]BackendInstance, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.instances), c.away
}

func (c *cluster) Apply(_ context.Context, o Order) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.orders = append(c.orders, o)
	if c.before != nil {
		return c.before
	}
	c.instances = slices.DeleteFunc(c.instances, func(i BackendInstance) bool { return slices.Contains(o.Remove, i.Name) })
	for len(c.instances) < o.Count {
		if c.growth != nil {
			return c.growth
		}
		if c.room > 0 && len(c.instances) >= c.room {
			return fmt.Errorf("all %d devices are in use: %w", c.room, ErrNoRoom)
		}
		c.started++
		name := fmt.Sprintf("gpu-%d", c.started)
		c.instances = append(c.instances, BackendInstance{
			Name: name, Endpoint: "http://" + name, Began: time.Now().Add(c.ahead), State: InstanceRunning, TemplateHash: o.TemplateHash,
		})
	}
	return c.after
}

func (c *cluster) names() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var names []string
	for _, i := range c.instances {
		names = append(names, i.Name)
	}
	return names
}

// term is a leader of the fleet whose deployment is driven through a backend.
type term struct {
	t    *testing.T
	db   *pgxpool.Pool
	duty *Duty
}

func newTerm(t *testing.T, db *pgxpool.Pool, c *cluster) *term {
	t.Helper()
	return &term{t, db, New(db, free{db}, Config{Backends: map[string]Backend{backendLocal: c}})}
}

// round decides once, and has the backend follow. It returns the errors of the backend.
func (w *term) round() {
	w.t.Helper()
	if err := w.duty.Pass(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	var calls sync.WaitGroup
	if err := w.duty.applier.startRounds(w.t.Context(), &calls, nil); err != nil {
		w.t.Fatal(err)
	}
	calls.Wait()
}

func driven(t *testing.T) *pgxpool.Pool {
	t.Helper()
	db := fleet(t)
	do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"backend": "local", "policy": {"slots": 2, "max": 8}}')`)
	return db
}

func override(t *testing.T, db *pgxpool.Pool, n int) {
	t.Helper()
	do(t, db, `SELECT penstock.set_scale_override('llama-own', $1, clock_timestamp() + interval '1 hour', 'test')`, n)
}

// An order, and what follows from the report of a backend, is written before the backend is called.
func TestATermThatIsOverOrdersNothing(t *testing.T) {
	db, c := driven(t), &cluster{}
	w := newTerm(t, db, c)
	w.round()
	late := New(db, over{}, Config{Backends: map[string]Backend{backendLocal: c}})
	for _, n := range []int{2, 0} {
		override(t, db, n)
		if err := w.duty.Pass(t.Context()); err != nil {
			t.Fatal(err)
		}
		before := len(c.orders)
		var calls sync.WaitGroup
		if err := late.applier.startRounds(t.Context(), &calls, nil); err != nil {
			t.Fatal(err)
		}
		calls.Wait()
		if ordered := c.orders[before:]; len(ordered) != 0 {
			t.Errorf("%d are wanted, and %v was ordered in a term that is over", n, ordered)
		}
		if n := one[int](t, db, `SELECT count(*) FROM penstock.instance WHERE draining_at IS NOT NULL`); n != 0 {
			t.Errorf("%d instances drain", n)
		}
		for range 3 {
			w.round()
		}
		if got := c.names(); len(got) != n {
			t.Fatalf("%v exist, want %d", got, n)
		}
	}
}

func TestABackendFollowsAndNothingThatRunsIsStopped(t *testing.T) {
	db, c := driven(t), &cluster{}
	w := newTerm(t, db, c)
	w.round() // asks what exists
	override(t, db, 3)
	for range 3 {
		w.round()
	}
	if got := c.names(); len(got) != 3 {
		t.Fatalf("%v exist", got)
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.instance WHERE deployment = 'llama-own' AND state = 'starting'`); n != 3 {
		t.Fatalf("%d are registered as starting", n)
	}
	do(t, db, `UPDATE penstock.instance SET state = 'ready'`)
	if n := one[int](t, db, `SELECT count(*) FROM penstock.cold_start WHERE model = 'llama'`); n != 3 {
		t.Errorf("%d cold starts are noted", n)
	}
	// Two run a request each; one is to go, then two.
	do(t, db, `INSERT INTO penstock.node (id, name, application, lease, threads, queue_ids) VALUES (9, 'cpu', 'default', '1h', 1, '{}')`)
	do(t, db, `INSERT INTO penstock.slot (instance_id, number, token, node_id)
	           SELECT id, 0, nextval('penstock.token_seq'), 9 FROM penstock.instance WHERE server <> 'gpu-2'`)
	override(t, db, 1)
	for range 4 {
		w.round()
	}
	if got := c.names(); len(got) != 2 || slices.Contains(got, "gpu-2") {
		t.Fatalf("%v exist: want the two that hold a slot", got)
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.instance WHERE draining_at IS NOT NULL`); n != 1 {
		t.Errorf("%d drain", n)
	}
	// The number rises again: the drain ends, and nothing is started.
	override(t, db, 2)
	started := c.started
	for range 3 {
		w.round()
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.instance WHERE draining_at IS NOT NULL`); n != 0 || c.started != started {
		t.Errorf("%d drain, %d were started", n, c.started-started)
	}
	override(t, db, 1)
	do(t, db, `DELETE FROM penstock.slot`)
	for range 4 {
		w.round()
	}
	if got := c.names(); len(got) != 1 {
		t.Errorf("%v exist, want 1", got)
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.instance`); n != 1 {
		t.Errorf("%d are registered", n)
	}
}

// told is a backend that tells of changes, and whose lists a test holds back.
type told struct {
	cluster
	lists   atomic.Int64
	listing chan struct{} // gets one for each list that has been read
	changed chan func(model string)
}

func (c *told) Watch(ctx context.Context, changed func(model string)) {
	c.changed <- changed
	<-ctx.Done()
}

func (c *told) List(ctx context.Context, d BackendTarget) ([]BackendInstance, error) {
	found, err := c.cluster.List(ctx, d)
	c.lists.Add(1)
	select {
	case c.listing <- struct{}{}:
	case <-ctx.Done():
	}
	return found, err
}

// A change that a backend tells of is followed by a round of that deployment, also where one has read before it. No tick
// comes here.
func TestAChangeThatABackendTellsOfWaitsForNoTick(t *testing.T) {
	db := driven(t)
	c := &told{listing: make(chan struct{}), changed: make(chan func(string), 1)}
	a := newApplier(product(t, db), free{db}, Config{Pause: time.Hour, Backends: map[string]Backend{backendLocal: c}}.withDefaults())
	go func() { _ = a.run(t.Context()) }()
	changed := <-c.changed
	for deadline := time.Now().Add(time.Minute); c.lists.Load() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("there was no first round, which reads what exists")
		}
	}
	c.mu.Lock()
	c.instances = []BackendInstance{{Name: "other", Endpoint: "http://other", State: InstanceRunning, Began: time.Now()}}
	c.mu.Unlock()
	changed("llama")
	rounds := func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		n := a.notes["llama-own"]
		return n != nil && n.round != nil && n.round.again
	}
	for deadline := time.Now().Add(time.Minute); !rounds(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the change was not noted")
		}
	}
	<-c.listing
	<-c.listing // of the round after it
	for deadline := time.Now().Add(time.Minute); one[int](t, db, `SELECT count(*) FROM penstock.instance WHERE server = 'other'`) == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the instance was not registered")
		}
	}
}

// A round that is asked for some models reads all of them under a budget, and where they are many. It calls no backend
// for the others, and repeats no round of theirs.
func TestARoundThatIsAskedForConcernsNoOtherModel(t *testing.T) {
	db := driven(t)
	do(t, db, `SELECT penstock.set_scale_setting('scale.budget', '100')`)
	names := []string{"mistral", "qwen", "gemma", "phi", "olmo"}
	for _, name := range names {
		do(t, db, `SELECT penstock.register_model($1, '{"protocol": "openai"}')`, name)
		do(t, db, `SELECT penstock.set_deployment($1, $1, '{"backend": "local", "policy": {"slots": 2, "max": 8}}')`, name)
	}
	c := &told{listing: make(chan struct{}), changed: make(chan func(string), 1)}
	a := newApplier(product(t, db), free{db}, Config{Backends: map[string]Backend{backendLocal: c}}.withDefaults())
	asked := map[string]bool{}
	for _, name := range names {
		asked[name] = true
		var calls sync.WaitGroup
		a.begin("llama-own", false) // a round of another model is under way
		if err := a.startRounds(t.Context(), &calls, maps.Clone(asked)); err != nil {
			t.Fatal(err)
		}
		for range asked {
			<-c.listing
		}
		calls.Wait()
		if n := c.lists.Swap(0); n != int64(len(asked)) {
			t.Errorf("%d lists, want those of %d models", n, len(asked))
		}
		if a.end("llama-own") {
			t.Error("the round of another model is to be repeated")
		}
	}
}

// A deployment that is waited for waits for no turn behind a round of the tick that does: that round ends, without a turn.
func TestAWantedDeploymentDoesNotWaitBehindItsOwnTurn(t *testing.T) {
	db, c := driven(t), &cluster{}
	w := newTerm(t, db, c)
	w.round()
	w.round()
	a := w.duty.applier
	override(t, db, 1)
	for range connsMax { // other deployments have them
		a.conns <- struct{}{}
	}
	do(t, db, `UPDATE penstock.deployment_state SET seen_at = clock_timestamp() - interval '1 minute'`)
	var calls sync.WaitGroup
	if err := a.startRounds(t.Context(), &calls, nil); err != nil {
		t.Fatal(err)
	}
	if err := w.duty.Pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	limit := time.After(time.Minute)
	for started := false; !started; {
		select {
		case <-a.wake:
			if err := a.startRounds(t.Context(), &calls, a.take()); err != nil {
				t.Fatal(err)
			}
		case <-time.After(time.Millisecond):
		case <-limit:
			t.Fatal("nothing was started while the turns were taken")
		}
		started = len(c.names()) > 0
	}
	calls.Wait()
}

// A round that ends for its time alone is told of.
func TestARoundThatRunsOutOfTimeIsLogged(t *testing.T) {
	db := driven(t)
	var log bytes.Buffer
	a := newApplier(db, free{db}, Config{
		Backends: map[string]Backend{backendLocal: &cluster{}}, Log: slog.New(slog.NewTextHandler(&log, nil)),
	}.withDefaults())
	a.limit = time.Millisecond
	for range connsMax {
		a.conns <- struct{}{}
	}
	var calls sync.WaitGroup
	if err := a.startRounds(t.Context(), &calls, nil); err != nil {
		t.Fatal(err)
	}
	calls.Wait()
	if text := log.String(); !strings.Contains(text, "llama-own") || !strings.Contains(text, "wait for a turn") {
		t.Errorf("the log has %q", text)
	}
}

func TestALeaderThatDiesBetweenAnOrderAndItsRecordStartsNothingTwice(t *testing.T) {
	db, c := driven(t), &cluster{}
	w := newTerm(t, db, c)
	w.round()
	override(t, db, 3)
	c.after = errors.New("the connection broke after the order") // had its effect, and was not recorded
	w.round()
	w.round()
	c.after = nil
	do(t, db, `UPDATE penstock.deployment_state SET retry_at = NULL`)
	w = newTerm(t, db, c)
	for range 3 {
		w.round()
	}
	if c.started != 3 {
		t.Errorf("%d were started, want 3", c.started)
	}
	if got := one[int64](t, db, `SELECT order_id - applied_id FROM penstock.deployment_state`); got != 0 {
		t.Errorf("the order is not recorded: %d behind", got)
	}
}

func TestABackendThatDoesNotAnswerIsNotEmpty(t *testing.T) {
	db, c := driven(t), &cluster{}
	w := newTerm(t, db, c)
	w.round()
	override(t, db, 2)
	for range 3 {
		w.round()
	}
	do(t, db, `UPDATE penstock.instance SET state = 'ready'`)
	c.away = errors.New("timeout")
	for range 3 {
		w.round()
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.instance WHERE draining_at IS NULL`); n != 2 {
		t.Errorf("%d are registered", n)
	}
	if text := one[string](t, db, `SELECT error FROM penstock.deployment_state`); text != "timeout" {
		t.Errorf("the error is %q", text)
	}
	if n := w.duty.applier.figures().Failed; n != 3 {
		t.Errorf("%d failed calls are counted, want 3: the alert watches these", n)
	}
}

// What keeps a backend from removing instances as it should is shown as long as it lasts, and is no failure.
func TestAnOrderThatWasCarriedOutInAnotherWayIsNoFailure(t *testing.T) {
	db, c := driven(t), &cluster{}
	w := newTerm(t, db, c)
	lowered := func(to int) {
		override(t, db, to)
		for range 4 {
			w.round()
		}
	}
	lowered(3)
	c.after = fmt.Errorf("%w: no right", ErrCarriedOut)
	lowered(2)
	c.after = nil
	for range 3 {
		w.round()
	}
	state := func() string {
		return one[string](t, db, `SELECT failures || ' ' || (applied_id = order_id) || ' ' || coalesce(error, '') FROM penstock.deployment_state`)
	}
	if got := state(); got != "0 true the order was carried out in another way: no right" || len(c.names()) != 2 {
		t.Errorf("%v exist: %s", c.names(), got)
	}
	lowered(1)
	if got := state(); got != "0 true " || len(c.names()) != 1 {
		t.Errorf("%v exist: %s", c.names(), got)
	}
}

func TestOrdersThatFailAreRetriedLaterEachTime(t *testing.T) {
	db, c := driven(t), &cluster{before: errors.New("no capacity")}
	w := newTerm(t, db, c)
	w.round()
	override(t, db, 2)
	w.round()
	do(t, db, `UPDATE penstock.deployment_state SET retry_at = retry_at + interval '4 minutes' WHERE retry_at > failed_at`)
	for range 4 {
		w.round()
	}
	if len(c.orders) != 1 {
		t.Errorf("%d orders within the pause", len(c.orders))
	}
	for range 3 {
		do(t, db, `UPDATE penstock.deployment_state SET retry_at = clock_timestamp()`)
		w.round()
	}
	if n := one[int](t, db, `SELECT failures FROM penstock.deployment_state`); n != 4 {
		t.Errorf("%d failures after %d orders", n, len(c.orders))
	}
	if pause := one[float64](t, db, `SELECT extract(epoch FROM retry_at - failed_at)::float8 FROM penstock.deployment_state`); pause < 7.9 || pause > 8.1 {
		t.Errorf("the fourth pause is %g s, want 8", pause)
	}
	c.before = nil
	do(t, db, `UPDATE penstock.deployment_state SET retry_at = clock_timestamp()`)
	w.round() // one try
	w.round()
	if n := one[int](t, db, `SELECT failures FROM penstock.deployment_state`); n != 0 || len(c.names()) != 2 {
		t.Errorf("%d failures, %v exist", n, c.names())
	}
}

// A receiver takes an order that it has had for a repetition: another number needs another order, also after one that
// failed, of which it is not known whether it was carried out.
func TestAnOrderThatFailedIsNotGivenAgainWithAnotherNumber(t *testing.T) {
	for name, fails := range map[string]*cluster{
		"before it has an effect": {before: errors.New("status 503")}, "after it": {after: errors.New("status 500")}, "without room": {growth: ErrNoRoom},
	} {
		t.Run(name, func(t *testing.T) {
			db, c := driven(t), fails
			w := newTerm(t, db, c)
			w.round()
			for _, desired := range []int{2, 0, 3, 2} {
				override(t, db, desired)
				do(t, db, `UPDATE penstock.deployment_state SET retry_at = clock_timestamp()`)
				w.round()
			}
			if len(c.orders) < 3 {
				t.Errorf("%d orders", len(c.orders))
			}
			counts := map[int64]int{}
			for _, o := range c.orders {
				if n, known := counts[o.ID]; known && n != o.Count {
					t.Errorf("order %d was for %d, and is for %d", o.ID, n, o.Count)
				}
				counts[o.ID] = o.Count
			}
		})
	}
}

// throttling is the error of a backend that asks to wait.
type throttling time.Duration

func (throttling) Error() string               { return "status 429" }
func (t throttling) RetryAfter() time.Duration { return time.Duration(t) }

// A backend that asks to wait is tried no sooner. An order that starts nothing waits too.
func TestABackendThatAsksToWaitIsTriedNoSooner(t *testing.T) {
	for wait, want := range map[throttling][2]float64{
		throttling(25 * time.Second): {25, 25}, throttling(time.Millisecond): {1, 2}, throttling(24 * time.Hour): {300, 300},
	} {
		db, c := driven(t), &cluster{before: wait}
		w := newTerm(t, db, c)
		w.round()
		override(t, db, 2)
		for i := range 2 {
			do(t, db, `UPDATE penstock.deployment_state SET retry_at = clock_timestamp()`)
			w.round()
			pause := one[float64](t, db, `SELECT extract(epoch FROM retry_at - failed_at)::float8 FROM penstock.deployment_state`)
			if math.Abs(pause-want[i]) > 0.1 {
				t.Errorf("it asks for %s: pause %d is %g s, want %g", time.Duration(wait), i+1, pause, want[i])
			}
		}
		var n notes
		now := time.Now()
		n.answered(Order{Count: 1, Current: 2, Remove: []string{"a"}}, wait, now)
		if got, pause := n.failed.retryAt.Sub(now), time.Duration(want[0])*time.Second; got != pause {
			t.Errorf("it asks for %s: a removal is tried again after %s, want %s", time.Duration(wait), got, pause)
		}
	}
}

// What is noted about a deployment goes with it: one that gets its name later is another one.
func TestNotesGoWithTheirDeployment(t *testing.T) {
	db := driven(t)
	w := newTerm(t, db, &cluster{})
	w.round()
	a := w.duty.applier
	for _, name := range []string{"llama-own", "removed before"} {
		a.noted(name, func(n *notes) { n.removed, n.notice, n.failed = "x", "x", failedOrders{n: 1} })
	}
	w.round()
	if n := a.notes["llama-own"]; len(a.notes) != 1 || n == nil || n.notice != "x" {
		t.Errorf("kept: %v", a.notes)
	}
	do(t, db, `SELECT penstock.remove_deployment('llama-own')`)
	w.round()
	if len(a.notes) != 0 {
		t.Errorf("kept without a deployment: %v", a.notes)
	}
}

// A machine has room for fewer instances than are wanted: those that fit are started once, and stay while they start.
// When there is more room it is used.
func TestStartsStayWhereOneMoreHasNoRoom(t *testing.T) {
	db, c := driven(t), &cluster{room: 4}
	w := newTerm(t, db, c)
	w.round()
	override(t, db, 8)
	tried := func(rounds int) {
		for range rounds {
			w.round()
			do(t, db, `UPDATE penstock.deployment_state SET retry_at = clock_timestamp()`)
		}
	}
	tried(12)
	if got := c.names(); c.started != 4 || len(got) != 4 {
		t.Errorf("%d were started for 4 places, %v exist", c.started, got)
	}
	if n := one[int](t, db, `SELECT failures FROM penstock.deployment_state`); n != 0 {
		t.Errorf("no room counts as %d failures", n)
	}
	if text := one[string](t, db, `SELECT error FROM penstock.deployment_state`); !strings.Contains(text, ErrNoRoom.Error()) {
		t.Errorf("the error is %q", text)
	}
	w = newTerm(t, db, c)
	c.room = 6
	tried(6)
	if got := c.names(); c.started != 6 || len(got) != 6 {
		t.Errorf("%d were started for 6 places, %v exist", c.started, got)
	}
}

// Orders fail that start an instance. The one that follows asks for those that exist, and proves nothing.
func TestAnOrderThatStartsNothingEndsNoFailures(t *testing.T) {
	db, c := driven(t), &cluster{}
	w := newTerm(t, db, c)
	w.round()
	override(t, db, 2)
	for range 3 {
		w.round()
	}
	c.growth = errors.New("quota exceeded")
	override(t, db, 5)
	for range blockedAfter {
		w.round()
		do(t, db, `UPDATE penstock.deployment_state SET retry_at = clock_timestamp()`)
	}
	do(t, db, `UPDATE penstock.deployment_state SET retry_at = clock_timestamp() + interval '1 minute'`)
	for range 3 {
		w.round()
		do(t, db, `UPDATE penstock.deployment_state SET applied_at = clock_timestamp() - interval '1 hour'`)
	}
	if n := one[int](t, db, `SELECT failures FROM penstock.deployment_state`); n != blockedAfter || len(c.names()) != 2 {
		t.Errorf("%d failures, %v exist", n, c.names())
	}
	c.growth = nil
	do(t, db, `UPDATE penstock.deployment_state SET retry_at = clock_timestamp()`)
	w.round()
	w.round()
	if n := one[int](t, db, `SELECT failures FROM penstock.deployment_state`); n != 0 || len(c.names()) != 5 {
		t.Errorf("%d failures, %v exist", n, c.names())
	}
}

// An instance that ended by itself is one failure, however long a slot of it is held.
func TestACrashCountsOnce(t *testing.T) {
	db, c := driven(t), &cluster{}
	w := newTerm(t, db, c)
	w.round()
	override(t, db, 2)
	for range 3 {
		w.round()
	}
	do(t, db, `UPDATE penstock.instance SET state = 'ready'`)
	do(t, db, `INSERT INTO penstock.node (id, name, application, lease, threads, queue_ids) VALUES (9, 'cpu', 'default', '1h', 1, '{}')`)
	do(t, db, `INSERT INTO penstock.slot (instance_id, number, token, node_id)
	           SELECT id, 0, nextval('penstock.token_seq'), 9 FROM penstock.instance WHERE server = 'gpu-1'`)
	c.instances[0].State, c.instances[0].Message = InstanceFailed, "killed"
	for range 6 {
		w.round()
	}
	if n := one[int](t, db, `SELECT failures FROM penstock.deployment_state`); n != 1 {
		t.Errorf("%d failures", n)
	}
}

// One deployment of a model has a target that does not exist. The other one serves the model.
func TestADeploymentThatIsNotReportedHoldsUpNoOther(t *testing.T) {
	db, c := driven(t), &cluster{}
	w := newTerm(t, db, c)
	w.round()
	w.duty.cfg.Backends[backendKubernetes] = &cluster{away: errors.New(`deployments.apps "lama" not found`)}
	do(t, db, `SELECT penstock.set_deployment('llama-typo', 'llama', '{"backend": "kubernetes", "fill_order": -5, "target": {"name": "lama", "port": 1}, "policy": {"slots": 2, "max": 8}}')`)
	push(t, db, 40)
	for range 3 {
		w.round()
	}
	if len(c.names()) == 0 {
		t.Error("40 entries wait, and the deployment whose backend answers starts nothing")
	}
	if text := one[string](t, db, `SELECT error FROM penstock.deployment_state WHERE name = 'llama-typo'`); !strings.Contains(text, "not found") {
		t.Errorf("the error of the other one is %q", text)
	}
}

func TestAPushWakesAModelWithoutInstances(t *testing.T) {
	db, c := driven(t), &cluster{}
	w := newTerm(t, db, c)
	w.round()
	w.round()
	q, err := invalidation.Open(t.Context(), db, "llama")
	if err != nil {
		t.Fatal(err)
	}
	queue := one[int32](t, db, `SELECT id FROM penstock.queue WHERE name = 'llama'`)
	w.duty.WakeQueue(queue + 1)
	if len(w.duty.hints.wake) != 0 {
		t.Error("another queue woke the duty")
	}
	w.duty.WakeQueue(queue)
	if len(w.duty.hints.wake) != 1 {
		t.Fatal("the queue of a model without instances did not wake the duty")
	}
	if _, err := q.Push(t.Context(), invalidation.Push{Payload: []byte(`{}`)}); err != nil {
		t.Fatal(err)
	}
	w.round()
	if got := c.names(); len(got) != 1 {
		t.Errorf("%v exist after a push", got)
	}
	<-w.duty.hints.wake
	w.round()
	w.duty.WakeQueue(queue)
	if len(w.duty.hints.wake) != 0 {
		t.Error("a model with instances wakes the duty")
	}
}

func TestInstancesThatDoNotAnnounceThemselvesAgainGo(t *testing.T) {
	db := fleet(t)
	announce := func() string {
		return one[string](t, db, `SELECT penstock.announce_instance('llama', 'gpu-1', 'http://gpu-1', 2, ttl => '1 minute')`)
	}
	if got := announce(); got != "serve" {
		t.Errorf("the answer is %q", got)
	}
	do(t, db, `UPDATE penstock.instance SET state = 'ready'`)
	do(t, db, `SELECT penstock.drain_instance('llama', 'gpu-1', 'test')`)
	do(t, db, `INSERT INTO penstock.slot (instance_id, number, token, node_id) SELECT id, 0, 1, 9 FROM penstock.instance`)
	if got := announce(); got != "drain" {
		t.Errorf("with a slot held the answer is %q", got)
	}
	do(t, db, `DELETE FROM penstock.slot`)
	if got := announce(); got != "stop" {
		t.Errorf("without one it is %q", got)
	}
	if n := one[int](t, db, `SELECT penstock.expire_instances()`); n != 0 {
		t.Errorf("%d went before their time", n)
	}
	do(t, db, `UPDATE penstock.instance SET expires_at = clock_timestamp(), draining_at = NULL`)
	if usable := one[bool](t, db, `SELECT penstock.usable(i) FROM penstock.instance i`); usable {
		t.Error("it takes calls after its time to live")
	}
	if n := one[int](t, db, `SELECT penstock.expire_instances()`); n != 1 {
		t.Errorf("%d went", n)
	}
}

func TestAnAnnouncementChangesNoInstanceThatWasRegistered(t *testing.T) {
	db := driven(t)
	do(t, db, `SELECT penstock.set_deployment('llama-spot', 'llama', '{"backend": "webhook"}')`)
	do(t, db, `SELECT penstock.register_model('other', '{"protocol": "openai"}')`)
	do(t, db, `SELECT penstock.set_deployment('other-spot', 'other', '{"backend": "webhook"}')`)
	do(t, db, `SELECT penstock.register_instance('llama', 'known', 'http://known', 4)`)
	do(t, db, `SELECT penstock.announce_instance('llama', 'local', 'http://local', 4, ttl => NULL, deployment => 'llama-own')`)
	do(t, db, `SELECT penstock.announce_instance('llama', 'mine', 'http://mine', 4)`)
	for _, c := range []struct{ name, sql, code string }{
		{"renew", `SELECT penstock.announce_instance('llama', 'mine', 'http://mine:2', 2, deployment => 'llama-spot')`, ""},
		{"its backend again", `SELECT penstock.announce_instance('llama', 'local', 'http://local:2', 4, ttl => NULL, deployment => 'llama-own')`, ""},
		{"registered", `SELECT penstock.announce_instance('llama', 'known', 'http://attacker', 4)`, "PS006"},
		{"registered, by a backend", `SELECT penstock.announce_instance('llama', 'known', 'http://attacker', 4, ttl => NULL, deployment => 'llama-own')`, "PS006"},
		{"started by a backend", `SELECT penstock.announce_instance('llama', 'local', 'http://attacker', 4)`, "PS006"},
		{"for a backend that lists", `SELECT penstock.announce_instance('llama', 'new', 'http://new', 4, deployment => 'llama-own')`, "PS002"},
		{"for another model", `SELECT penstock.announce_instance('llama', 'new', 'http://new', 4, deployment => 'other-spot')`, "PS002"},
		{"for none", `SELECT penstock.announce_instance('llama', 'new', 'http://new', 4, deployment => 'absent')`, "PS008"},
	} {
		_, err := db.Exec(t.Context(), c.sql)
		var refused *pgconn.PgError
		if errors.As(err, &refused); (err == nil) != (c.code == "") || refused != nil && refused.Code != c.code {
			t.Errorf("%s: %v, want code %q", c.name, err, c.code)
		}
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.instance WHERE endpoint = 'http://attacker'`); n != 0 {
		t.Errorf("%d endpoints were replaced", n)
	}
}

func TestADeploymentWithInstancesKeepsItsModel(t *testing.T) {
	db, c := driven(t), &cluster{}
	do(t, db, `SELECT penstock.register_model('other', '{"protocol": "openai"}')`)
	w := newTerm(t, db, c)
	w.round()
	override(t, db, 1)
	for range 3 {
		w.round()
	}
	if len(c.names()) != 1 {
		t.Fatalf("%v exist", c.names())
	}
	_, err := db.Exec(t.Context(), `SELECT penstock.set_deployment('llama-own', 'other')`)
	var refused *pgconn.PgError
	if !errors.As(err, &refused) || refused.Code != "PS002" {
		t.Errorf("its model was changed: %v", err)
	}
	override(t, db, 0)
	for range 6 {
		w.round()
	}
	if len(c.names()) != 0 {
		t.Fatalf("%v exist", c.names())
	}
	do(t, db, `SELECT penstock.set_deployment('llama-own', 'other')`)
}

func TestAnInstanceWhoseTimeToLiveEndedIsReplaced(t *testing.T) {
	db := driven(t)
	do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"backend": "webhook"}')`)
	hook := &hooked{}
	w := &term{t, db, New(db, free{db}, Config{Backends: map[string]Backend{backendWebhook: hook}})}
	announce := func() string {
		return one[string](t, db, `SELECT penstock.announce_instance('llama', 'gpu-1', 'http://gpu-1', 2, deployment => 'llama-own')`)
	}
	drainedBy := func() string { return one[string](t, db, `SELECT coalesce(drain_by, '') FROM penstock.instance`) }
	announce()
	do(t, db, `UPDATE penstock.instance SET state = 'ready'`)
	do(t, db, `INSERT INTO penstock.slot (instance_id, number, token, node_id) SELECT id, 0, 1, 9 FROM penstock.instance`)
	override(t, db, 1)
	w.round()
	do(t, db, `UPDATE penstock.instance SET expires_at = clock_timestamp() - interval '1 second'`)
	do(t, db, `SELECT penstock.expire_instances()`)
	for range 3 {
		w.round()
	}
	if by := drainedBy(); by != "expired" {
		t.Errorf("it is drained by %q: the autoscaler ended the drain", by)
	}
	if n := hook.last().Count; n != 2 {
		t.Errorf("%d are to exist, want the one that drains and another", n)
	}
	if got := announce(); got != "serve" || drainedBy() != "" {
		t.Errorf("announced again it is to %s, drained by %q", got, drainedBy())
	}
}

// hooked is a backend that lists nothing, as a receiver of orders.
type hooked struct {
	mu     sync.Mutex
	orders []Order
}

func (h *hooked) List(context.Context, BackendTarget) ([]BackendInstance, error) {
	return nil, ErrUnlisted
}

func (h *hooked) Apply(_ context.Context, o Order) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.orders = append(h.orders, o)
	return nil
}

func (h *hooked) last() Order {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.orders) == 0 {
		return Order{}
	}
	return h.orders[len(h.orders)-1]
}

// An instance that an operator drains or removes, or whose device a node lost, is replaced, and goes at its backend. It does not
// come back, and none is left where none is wanted.
func TestAnInstanceThatSomethingElseDrainsGoes(t *testing.T) {
	for name, sql := range map[string]string{
		"drained":  `SELECT penstock.drain_instance('llama', 'gpu-1', 'a bad card', 'anna')`,
		"recycled": `SELECT penstock.recycle_instance((SELECT id FROM penstock.instance WHERE server = 'gpu-1'))`,
		"removed":  `SELECT penstock.remove_instance('llama', 'gpu-1', false, 'a bad card', 'anna')`,
	} {
		t.Run(name, func(t *testing.T) {
			db, c := driven(t), &cluster{}
			w := newTerm(t, db, c)
			rounds := func() {
				for range 4 {
					w.round()
					do(t, db, `UPDATE penstock.instance SET state = 'ready'`)
				}
			}
			w.round()
			override(t, db, 2)
			rounds()
			do(t, db, sql)
			rounds()
			if got := c.names(); !slices.Equal(got, []string{"gpu-2", "gpu-3"}) {
				t.Errorf("%v exist, want the second one and a third in the place of the first", got)
			}
			if n := one[int](t, db, `SELECT count(*) FROM penstock.instance WHERE draining_at IS NULL`); n != 2 {
				t.Errorf("%d are registered and serve", n)
			}
			do(t, db, `SELECT penstock.drain_instance('llama', server, 'clean up', 'anna') FROM penstock.instance`)
			override(t, db, 0)
			rounds()
			if got := c.names(); len(got) != 0 {
				t.Errorf("none is wanted, and %v exist", got)
			}
		})
	}
}

// The row of an instance goes at once where no backend would remove it: no leader drives it, or nothing of ours started it.
func TestAnInstanceThatNoBackendHasIsRemovedAtOnce(t *testing.T) {
	db, c := driven(t), &cluster{}
	w := newTerm(t, db, c)
	w.round()
	override(t, db, 1)
	w.round()
	w.round()
	do(t, db, `SELECT penstock.register_instance('llama', 'by-hand', 'http://by-hand', 1)`)
	do(t, db, `UPDATE penstock.deployment_state SET seen_at = now() - interval '2 minutes'`)
	do(t, db, `SELECT penstock.remove_instance('llama', server, false, 'test', 'anna') FROM penstock.instance`)
	if n := one[int](t, db, `SELECT count(*) FROM penstock.instance`); n != 0 {
		t.Errorf("%d are left", n)
	}
}

// Nothing announces, reports or expires these again: a drain in place of the removal would have no end.
func TestAnInstanceThatNothingElseEndsIsRemoved(t *testing.T) {
	db := driven(t)
	do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"backend": "webhook"}')`)
	do(t, db, `INSERT INTO penstock.deployment_state (name, seen_at) VALUES ('llama-own', clock_timestamp())`)
	announce(t, db, "gpu-1")
	announce(t, db, "gpu-2")
	do(t, db, `SELECT penstock.register_instance('llama', 'gpu-1', 'http://gpu-1', 2)`) // it has no time to live any more
	left := func(call, want string) {
		do(t, db, call)
		got := one[string](t, db, `SELECT coalesce(string_agg(server || coalesce(' ' || drain_by, ''), ', ' ORDER BY id), '')
		                             FROM penstock.instance`)
		if got != want {
			t.Errorf("%s leaves %q, want %q", call, got, want)
		}
	}
	left(`SELECT penstock.remove_instance('llama', 'gpu-1', false, 'test', 'anna')`, "gpu-2")
	left(`SELECT penstock.remove_instance('llama', 'gpu-2', true, 'test', 'anna')`, "gpu-2 removed")
	left(`SELECT penstock.remove_instance('llama', 'gpu-2', false, 'test', 'anna')`, "gpu-2 removed")
	left(`SELECT penstock.remove_instance('llama', 'gpu-2', true, 'test', 'anna')`, "")
}

func TestTheAutoscalerLeavesADrainOfAnOperatorAsItIs(t *testing.T) {
	db := fleet(t)
	do(t, db, `SELECT penstock.register_instance('llama', 'gpu-1', 'http://gpu-1', 2)`)
	do(t, db, `SELECT penstock.drain_instance('llama', 'gpu-1', 'repair', 'anna')`)
	do(t, db, `SELECT penstock.drain_instance('llama', 'gpu-1', '0 desired', 'autoscaler')`)
	if by := one[string](t, db, `SELECT drain_by || ': ' || drain_reason FROM penstock.instance`); by != "anna: repair" {
		t.Errorf("drained by %s", by)
	}
}

// A probe locks the row of its instance, and then that of inference_version. A round that changes several
// instances must not hold the second while it waits for one of the first.
func TestARoundLocksInstancesBeforeTheirVersion(t *testing.T) {
	db := driven(t)
	for _, server := range []string{"gpu-1", "gpu-2"} {
		do(t, db, `SELECT penstock.announce_instance('llama', $1, 'http://' || $1, 2, ttl => NULL, deployment => 'llama-own')`, server)
	}
	probe, err := db.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer probe.Rollback(t.Context())
	if _, err := probe.Exec(t.Context(), `SELECT FROM penstock.instance WHERE server = 'gpu-2' FOR NO KEY UPDATE`); err != nil {
		t.Fatal(err)
	}
	a := newApplier(db, free{db}, Config{}.withDefaults())
	done := make(chan error, 1)
	go func() {
		done <- a.write(t.Context(), decidedRow(), "", &steps{drain: []string{"gpu-1", "gpu-2"}})
	}()
	waiting := `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`
	for one[int](t, db, waiting) == 0 {
		time.Sleep(time.Millisecond)
	}
	if _, err := probe.Exec(t.Context(), `UPDATE penstock.inference_version SET version = version + 1`); err != nil {
		t.Fatalf("the probe: %v", err)
	}
	if err := probe.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("the round: %v", err)
	}
}

func decidedRow() applied {
	return applied{deploymentRow: deploymentRow{Name: "llama-own", Model: "llama", Backend: backendLocal, Mode: "full"}}
}

func TestAStartThatDoesNotComeAgesWhileItsOrderIsConfirmed(t *testing.T) {
	db := driven(t)
	do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"backend": "webhook"}')`)
	hook := &hooked{}
	w := &term{t, db, New(db, free{db}, Config{Backends: map[string]Backend{backendWebhook: hook}})}
	override(t, db, 2)
	w.round()
	w.round()
	do(t, db, `UPDATE penstock.deployment_state
	              SET ordered_at = ordered_at - interval '1 hour', applied_at = applied_at - interval '1 hour'`)
	before := len(hook.orders)
	w.round()
	if len(hook.orders) != before+1 {
		t.Fatalf("%d orders, want one more than %d", len(hook.orders), before)
	}
	deployments, err := w.duty.deployments(t.Context(), []string{"llama"})
	if err != nil {
		t.Fatal(err)
	}
	for _, since := range deployments["llama"][0].unregistered() {
		if age := time.Since(since); age < 50*time.Minute {
			t.Errorf("the start is %v old", age)
		}
	}
	if n := len(deployments["llama"][0].unregistered()); n != 2 {
		t.Errorf("%d starts are under way", n)
	}
}

func TestAPushWakesNoModelThatCannotGrow(t *testing.T) {
	for name, change := range map[string]string{
		"disabled": `SELECT penstock.set_deployment('llama-own', 'llama', '{"mode": "disabled"}')`,
		"advise":   `SELECT penstock.set_deployment('llama-own', 'llama', '{"mode": "advise"}')`,
		"off":      `SELECT penstock.set_scale_setting('scale.off', 'true')`,
		"override": `SELECT penstock.set_scale_override('llama-own', 0, clock_timestamp() + interval '1 hour')`,
	} {
		t.Run(name, func(t *testing.T) {
			db := driven(t)
			do(t, db, change)
			w := newTerm(t, db, &cluster{})
			w.round()
			w.round()
			w.duty.WakeModel("llama")
			if len(w.duty.hints.wake) != 0 {
				t.Error("it woke the duty")
			}
		})
	}
}

func TestAnInstanceThatCannotBeRegisteredIsReported(t *testing.T) {
	db, c := driven(t), &cluster{}
	do(t, db, `SELECT penstock.register_instance('llama', 'gpu-1', 'http://elsewhere', 2)`)
	w := newTerm(t, db, c)
	override(t, db, 2)
	for range 4 {
		w.round()
	}
	text := one[string](t, db, `SELECT coalesce(error, '') FROM penstock.deployment_state`)
	if !strings.Contains(text, "was not announced") {
		t.Errorf("the error is %q", text)
	}
}

// A backend that refuses to remove instances for a moment is asked again later each time. It blocks no start, and
// nothing of it is left when the instances are gone.
func TestARemovalThatFailedBlocksNothing(t *testing.T) {
	db, c := driven(t), &cluster{}
	w := newTerm(t, db, c)
	w.round()
	override(t, db, 3)
	for range 3 {
		w.round()
	}
	do(t, db, `UPDATE penstock.instance SET state = 'ready'`)
	override(t, db, 1)
	w.round() // drains
	c.before = errors.New("status 503")
	began := time.Now()
	for range 6 {
		w.round()
	}
	n, took := w.duty.applier.figures().Failed, time.Since(began)
	if least := time.Second<<max(n-1, 0) - time.Second; n < 1 || took < least {
		t.Errorf("%d orders failed in %s, want at least %s", n, took, least)
	}
	state := func() string {
		return one[string](t, db, `SELECT failures || ' ' || (retry_at > clock_timestamp()) || ' ' || coalesce(error, '') FROM penstock.deployment_state`)
	}
	if got := state(); got != "0 false status 503" {
		t.Errorf("while it fails: %s", got)
	}
	c.before = nil
	w.duty.applier.notes["llama-own"].failed = failedOrders{} // the pause is over
	for range 3 {
		w.round()
	}
	if got := state(); got != "0 false " || len(c.names()) != 1 {
		t.Errorf("when they are gone: %s, %v exist", got, c.names())
	}
}

// A leader that is elected and does not have the backend of a deployment tells so, and one that has it forgets it.
func TestALeaderWithoutTheBackendOfADeploymentSaysSo(t *testing.T) {
	db, c := driven(t), &cluster{}
	without := &term{t, db, New(db, free{db}, Config{})}
	without.round()
	without.round()
	message := func() string {
		return one[string](t, db, `SELECT coalesce(max(error), '') FROM penstock.deployment_state`)
	}
	if text := message(); !strings.Contains(text, "not configured for backend local") || without.duty.Status().Orders.Failed != 2 {
		t.Errorf("the error is %q, %+v", text, without.duty.Status().Orders)
	}
	newTerm(t, db, c).round()
	if text := message(); text != "" {
		t.Errorf("under a leader that has it the error is %q", text)
	}
}
