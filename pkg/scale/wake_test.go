package scale

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

func due(w *wakeups) string { return cmp.Or(strings.Join(w.some(sliceMax), " "), "none") }

// A hint that comes while a pass is under way, or before the first one, may be about what that pass did not read: it is
// not lost with it.
func TestAHintDuringAPassIsKept(t *testing.T) {
	w := newWakeups()
	w.queue(7)
	w.model("mistral")
	w.model("busy")
	if got := due(w); got != "none" {
		t.Errorf("before it is known which models sleep %s are due", got)
	}
	all := []string{"busy", "llama", "mistral"}
	w.begin(all)
	w.end(all, map[string][]int32{"llama": {7, 8}, "mistral": nil})
	if got := due(w); got != "llama mistral" {
		t.Errorf("after the first pass: %s", got)
	}
	w.begin([]string{"llama", "mistral"})
	if got := due(w); got != "none" {
		t.Errorf("during the pass that decides for them: %s", got)
	}
	w.queue(8)
	w.queue(9)
	if got := due(w); got != "llama" {
		t.Errorf("a model that slept before the pass: %s", got)
	}
	w.end([]string{"llama", "mistral"}, map[string][]int32{"mistral": {9}})
	if got := due(w); got != "llama mistral" {
		t.Errorf("a model that sleeps since the pass: %s", got)
	}
	w.begin(all)
	w.end(all, map[string][]int32{"llama": {7}})
	w.queue(9)
	w.model("mistral")
	if got := due(w); got != "none" {
		t.Errorf("models with instances: %s", got)
	}
}

func TestAPassOverSomeModelsLeavesTheOthersAsleep(t *testing.T) {
	w := newWakeups()
	w.end([]string{"a", "b"}, map[string][]int32{"a": {1}, "b": {2}})
	w.begin([]string{"a"})
	w.end([]string{"a"}, nil)
	w.queue(1)
	w.queue(2)
	if got := due(w); got != "b" {
		t.Errorf("due: %s", got)
	}
}

// A queue may change its model, and a model its deployments, between two passes.
func TestAModelThatIsGoneIsNotDue(t *testing.T) {
	w := newWakeups()
	w.end([]string{"a", "b"}, map[string][]int32{"a": {1}, "b": {2}})
	w.now("a")
	w.retain(map[string]bool{"b": true})
	w.queue(1)
	w.queue(2)
	if got := due(w); got != "b" {
		t.Errorf("due: %s", got)
	}
	w.end([]string{"c"}, map[string][]int32{"c": {2}})
	w.end([]string{"b"}, nil)
	w.begin([]string{"b"})
	w.queue(2)
	if got := due(w); got != "c" {
		t.Errorf("the queue of another model now: due: %s", got)
	}
}

func TestModelsThatAreDueAtOnceShareAPass(t *testing.T) {
	w := newWakeups()
	for i := range 5 {
		w.now(fmt.Sprint(i))
	}
	first := w.some(3)
	if got := strings.Join(first, " "); got != "0 1 2" {
		t.Errorf("a pass over three: %s", got)
	}
	w.begin(first)
	if got := due(w); got != "3 4" {
		t.Errorf("left: %s", got)
	}
}

func TestPassesForModelsThatAreDueAreSpaced(t *testing.T) {
	var p pace
	now := time.Now()
	for i := range wokenBurst {
		if left := p.left(now); left != 0 {
			t.Fatalf("pass %d of a burst waits %v", i, left)
		}
		p.spend(now, wokenPause)
	}
	if left := p.left(now); left != wokenPause {
		t.Errorf("the pass after a burst waits %v, want %v", left, wokenPause)
	}
	if left := p.left(now.Add(wokenPause)); left != 0 {
		t.Errorf("after a pause it waits %v", left)
	}
	p.spend(now.Add(wokenPause), wholePause)
	if left := p.left(now.Add(wokenPause)); left != wholePause {
		t.Errorf("after a pass over all: %v, want %v", left, wholePause)
	}
	var whole pace
	for i, want := range []time.Duration{0, 0, wholePause} {
		if left := whole.left(now); left != want {
			t.Errorf("pass %d over all waits %v, want %v", i, left, want)
		}
		whole.spend(now, wholePause)
	}
	for i := range wokenBurst {
		if left := p.left(now.Add(time.Hour)); left != 0 {
			t.Errorf("pass %d after an hour waits %v", i, left)
		}
		p.spend(now.Add(time.Hour), wokenPause)
	}
}

func TestDeploymentsAtRestAreAskedInTurn(t *testing.T) {
	now, none := time.Now(), 0
	seen := func(ago time.Duration) *time.Time { at := now.Add(-ago); return &at }
	rows := []deploymentRow{
		{Name: "new"},
		{Name: "wanted", Desired: 1, Existing: &none, SeenAt: seen(0)},
		{Name: "failed", Error: "no answer", Existing: &none, SeenAt: seen(0)},
		{Name: "draining", Draining: 1, Existing: &none, SeenAt: seen(0)},
		{Name: "lately", Existing: &none, SeenAt: seen(restEvery - time.Second)},
	}
	for i := range restMax + 1 {
		rows = append(rows, deploymentRow{Name: fmt.Sprint("old", i), Existing: &none, SeenAt: seen(restEvery + time.Duration(i)*time.Second)})
	}
	var names []string
	var all []applied
	for _, row := range rows {
		all = append(all, applied{deploymentRow: row})
	}
	for _, s := range withoutResting(all, now) {
		names = append(names, s.Name)
	}
	if got := names[:4]; !slices.Equal(got, []string{"new", "wanted", "failed", "draining"}) {
		t.Errorf("asked: %q", got)
	}
	if len(names) != 4+restMax || names[4] != fmt.Sprint("old", restMax) || slices.Contains(names, "old0") {
		t.Errorf("at rest: %q", names[4:])
	}
}

// spy is a database that calls a function before each reading of inputs.
type spy struct {
	postgres.DB
	reads func(models []string)
}

func (d spy) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if sql == inputSQL {
		d.reads(args[0].([]string)) //nolint:errcheck // a test that panics fails
	}
	return d.DB.Query(ctx, sql, args...)
}

// herd is a database with models at zero that have a deployment, and the duty that has decided for them in slices of
// two, with the models of each of its readings.
func herd(t *testing.T, models ...string) (db *pgxpool.Pool, d *Duty, read *[]string) {
	t.Helper()
	db, read = pgtest.New(t), new([]string)
	for _, m := range models {
		do(t, db, `SELECT penstock.register_model($1, '{"protocol": "openai"}')`, m)
		do(t, db, `SELECT penstock.set_deployment($1, $1, '{"policy": {"slots": 2, "max": 8}}')`, m)
	}
	d = New(spy{db, func(models []string) { *read = append(*read, strings.Join(models, "+")) }}, free{db}, Config{})
	d.slice = 2
	if err := d.Pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	return db, d, read
}

func wokenUp(t *testing.T, db *pgxpool.Pool) string {
	t.Helper()
	return one[string](t, db, `SELECT coalesce(string_agg(model, ' ' ORDER BY model), '') FROM penstock.scale_state WHERE desired > 0`)
}

func TestAWokenPassReadsItsModelsAlone(t *testing.T) {
	db, d, read := herd(t, "a", "b", "c", "d", "e")
	*read = nil
	do(t, db, `SELECT penstock.push(m, '{}'::jsonb) FROM unnest('{b,c}'::text[]) m`)
	d.WakeModel("b")
	if err := d.passDue(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(*read, " "); got != "b" || wokenUp(t, db) != "b" {
		t.Errorf("read %q, decided %q", got, wokenUp(t, db))
	}
	if err := d.passDue(t.Context()); err != nil || len(*read) != 1 {
		t.Errorf("nothing is due: read %q, %v", *read, err)
	}
	if got := len(d.Status().Models); got != 5 {
		t.Errorf("figures of %d models", got)
	}
}

// A wake-up waits for the slice that is under way and not for all models.
func TestAModelIsWokenBetweenSlicesOfAPass(t *testing.T) {
	db, d, read := herd(t, "a", "b", "c", "d", "e")
	*read = nil
	d.db = spy{db, func(models []string) {
		*read = append(*read, strings.Join(models, "+"))
		if len(*read) == 1 {
			d.WakeModel("e")
		}
	}}
	do(t, db, `SELECT penstock.push('e', '{}'::jsonb)`)
	if err := d.Pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(*read, " "); got != "a+b e c+d e" {
		t.Errorf("read in the order %q", got)
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.scale_decision WHERE model = 'e'`); n != 1 {
		t.Errorf("%d decisions changed the number of e", n)
	}
	if d.Status().Woken != 1 || d.hints.any() {
		t.Errorf("%d wake-ups, one is left: %v", d.Status().Woken, d.hints.any())
	}
}

// The budget is one of all deployments: a wake-up is followed by one pass over all, and is over then.
func TestAWakeUpUnderABudgetIsOnePassOverAll(t *testing.T) {
	db, d, read := herd(t, "a", "b", "c")
	do(t, db, `SELECT penstock.set_scale_setting('scale.budget', '1')`)
	if err := d.Pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	*read = nil
	do(t, db, `SELECT penstock.push(m, '{}'::jsonb) FROM unnest('{a,c}'::text[]) m`)
	d.WakeModel("c")
	for range 2 {
		if err := d.passDue(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if got := strings.Join(*read, " "); got != "a+b+c" {
		t.Errorf("read %q", got)
	}
	if n := one[int](t, db, `SELECT sum(desired) FROM penstock.scale_state`); n != 1 {
		t.Errorf("%d are desired under a budget for one", n)
	}
	do(t, db, `SELECT penstock.set_scale_setting('scale.budget', NULL)`)
	if err := d.Pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := wokenUp(t, db); got != "a c" {
		t.Errorf("decided without a budget: %q", got)
	}
}

// A budget counts from the first decision that reads it, be that a wake-up or a slice of a pass that began before.
func TestABudgetThatWasJustSetLimitsWakeUpsAndSlices(t *testing.T) {
	for name, decide := range map[string]func(*Duty, func()) error{
		"wake-up": func(d *Duty, set func()) error {
			set()
			d.WakeModel("c")
			return d.passDue(t.Context())
		},
		"wake-up between slices": func(d *Duty, set func()) error {
			d.WakeModel("c")
			onRead(d, 1, set)
			return d.Pass(t.Context())
		},
		"slice": func(d *Duty, set func()) error {
			onRead(d, 2, set)
			return d.Pass(t.Context())
		},
	} {
		t.Run(name, func(t *testing.T) {
			db, d, _ := herd(t, "a", "b", "c", "d", "e")
			do(t, db, `UPDATE penstock.deployment SET backend = 'keda'`)
			do(t, db, `SELECT penstock.push(m, '{}'::jsonb) FROM unnest('{a,c,e}'::text[]) m`)
			d.WakeModel("a")
			if err := d.passDue(t.Context()); err != nil || wokenUp(t, db) != "a" {
				t.Fatalf("decided at first: %q, %v", wokenUp(t, db), err)
			}
			err := decide(d, func() { do(t, db, `SELECT penstock.set_scale_setting('scale.budget', '1')`) })
			if err != nil {
				t.Fatal(err)
			}
			if n := one[int](t, db, `SELECT sum(desired)::int FROM penstock.scale_state`); n != 1 {
				t.Errorf("%d are desired under a budget for one", n)
			}
			if err := d.Pass(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := wokenUp(t, db); got != "a" {
				t.Errorf("decided by the next pass: %q", got)
			}
		})
	}
}

// onRead calls a function before the nth reading of inputs from now on.
func onRead(d *Duty, n int, call func()) {
	inner, read := d.db, 0
	d.db = spy{inner, func([]string) {
		if read++; read == n {
			call()
		}
	}}
}

// A model whose last deployment went leaves nothing behind.
func TestAModelWithoutADeploymentIsForgotten(t *testing.T) {
	db, d, _ := herd(t, "a", "b")
	do(t, db, `SELECT penstock.remove_deployment('a')`)
	if err := d.Pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, known := d.past["a"]
	if models := d.Status().Models; known || len(models) != 1 || models[0].Model != "b" {
		t.Errorf("known: %v, figures: %+v", known, models)
	}
}

// A wake-up that has to wait for its pause is decided after it, and for no tick: here none comes.
func TestAWakeUpBeyondTheBurstWaitsForItsPauseAlone(t *testing.T) {
	_, d, read := herd(t, "a", "b")
	now := time.Now()
	for range wokenBurst {
		d.woken.spend(now, wokenPause)
	}
	*read = nil
	d.WakeModel("b")
	for d.woken.left(time.Now()) == 0 { // a machine that stood still
		d.woken.spend(time.Now(), wokenPause)
	}
	if err := d.passDue(t.Context()); err != nil || len(*read) > 0 || !d.hints.any() {
		t.Fatalf("before its pause is over: read %q, %v", *read, err)
	}
	if err := d.next(t.Context(), nil)(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(*read, " "); got != "b" {
		t.Errorf("read %q", got)
	}
}

// called is a backend that says when it starts the first instance.
type called struct {
	cluster
	started atomic.Int64
}

func (c *called) Apply(ctx context.Context, o Order) error {
	defer c.started.Add(1)
	return c.cluster.Apply(ctx, o)
}

// From a hint to the order nothing waits for a tick: here none comes.
func TestNoStepFromAHintToTheOrderWaitsForATick(t *testing.T) {
	db := templateBed(t)
	c := &called{}
	d := New(db, free{db}, Config{Pause: time.Hour, Backends: map[string]Backend{backendLocal: c}})
	go func() { _ = d.Run(t.Context()) }()
	for d.Status().Passes == 0 {
		time.Sleep(time.Millisecond)
	}
	push(t, db, 1)
	d.WakeQueue(one[int32](t, db, `SELECT id FROM penstock.queue WHERE name = 'llama'`))
	for deadline := time.Now().Add(time.Minute); c.started.Load() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("nothing was started")
		}
	}
	if n := one[int](t, db, `SELECT desired FROM penstock.scale_state WHERE model = 'llama'`); n != 1 {
		t.Errorf("%d desired", n)
	}
}

// idleModels is a database with so many models at zero, PENSTOCK_BENCH_MODELS or 1,000, each with a deployment.
func idleModels(b *testing.B) *pgxpool.Pool {
	b.Helper()
	n, err := strconv.Atoi(cmp.Or(os.Getenv("PENSTOCK_BENCH_MODELS"), "1000"))
	if err != nil {
		b.Fatal(err)
	}
	db := pgtest.New(b)
	for _, sql := range []string{
		`SELECT count(penstock.register_model('m' || i, '{"protocol": "openai"}', 'bench')) FROM generate_series(1, $1::integer) i`,
		`SELECT count(penstock.set_deployment('m' || i, 'm' || i, '{"backend": "local", "policy": {"slots": 2, "max": 4}}', 'bench')::text)
		   FROM generate_series(1, $1::integer) i`,
	} {
		if _, err := db.Exec(b.Context(), sql, n); err != nil {
			b.Fatal(err)
		}
	}
	return db
}

// BenchmarkPassOverIdleModels is the tick of a leader whose models all have no instance and no work.
func BenchmarkPassOverIdleModels(b *testing.B) {
	db := product(b, idleModels(b))
	d := New(db, free{db}, Config{})
	for range 2 { // the first one knows no state yet
		if err := d.Pass(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		if err := d.Pass(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkReadInputsOfIdleModels is the statement that reads inputs, for all slices of a tick.
func BenchmarkReadInputsOfIdleModels(b *testing.B) {
	db := product(b, idleModels(b))
	var models []string
	var budget bool
	if err := db.QueryRow(b.Context(), modelsSQL).Scan(&models, &budget); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		for slice := range slices.Chunk(models, sliceMax) {
			if _, err := pgx.CollectRows(postgres.Query(b.Context(), db, inputSQL, slice), pgx.RowToStructByName[input]); err != nil {
				b.Fatal(err)
			}
		}
	}
}

// waker is a backend in memory that tells when the first order for a model came.
type waker struct {
	mu     sync.Mutex
	counts map[string]int
	waits  map[string]chan time.Time
}

func (w *waker) List(_ context.Context, d BackendTarget) ([]BackendInstance, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	found := make([]BackendInstance, w.counts[d.Name])
	for i := range found {
		name := fmt.Sprint(d.Name, "-", i)
		found[i] = BackendInstance{Name: name, Endpoint: "http://" + name, State: InstanceRunning, Began: time.Now()}
	}
	return found, nil
}

func (w *waker) Apply(_ context.Context, o Order) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if wait := w.waits[o.Model]; wait != nil && o.Count > 0 {
		wait <- time.Now()
		delete(w.waits, o.Model)
	}
	w.counts[o.Name] = o.Count
	return nil
}

func (w *waker) order(model string) <-chan time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	wait := make(chan time.Time, 1)
	w.waits[model] = wait
	return wait
}

// BenchmarkWakeAmongIdleModels is the time from a hint about a model at zero to the order to its backend, while the leader
// decides for the others once a second. Each model is woken once, at any time of a tick.
func BenchmarkWakeAmongIdleModels(b *testing.B) {
	setup := idleModels(b)
	pool, err := postgres.Open(b.Context(), postgres.Config{DSN: setup.Config().ConnString(), MaxConns: 6}) // as in a leader
	if err != nil {
		b.Fatal(err)
	}
	defer pool.Close()
	backend := &waker{counts: map[string]int{}, waits: map[string]chan time.Time{}}
	d := New(pool, free{pool}, Config{Backends: map[string]Backend{backendLocal: backend}})
	go func() { _ = d.Run(b.Context()) }()
	rows, err := setup.Query(b.Context(), `SELECT name, id FROM penstock.queue WHERE model IS NOT NULL ORDER BY id`)
	if err != nil {
		b.Fatal(err)
	}
	queues, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct {
		Name string
		ID   int32
	}])
	if err != nil {
		b.Fatal(err)
	}
	for { // until all backends were asked, and all models are known to be at zero
		var unseen int
		if err := setup.QueryRow(b.Context(), `SELECT (SELECT count(*) FROM penstock.deployment)
		     - (SELECT count(*) FROM penstock.deployment_state WHERE decided_at IS NOT NULL AND applied_id > 0)`).Scan(&unseen); err != nil {
			b.Fatal(err)
		}
		if unseen == 0 {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	var took []time.Duration
	for b.Loop() {
		q := queues[len(took)%len(queues)]
		ordered := backend.order(q.Name)
		if _, err := setup.Exec(b.Context(), `SELECT penstock.push($1, '{}'::jsonb)`, q.Name); err != nil {
			b.Fatal(err)
		}
		began := time.Now()
		d.WakeQueue(q.ID)
		select {
		case at := <-ordered:
			took = append(took, at.Sub(began))
		case <-time.After(time.Minute):
			b.Fatalf("nothing was started for %s", q.Name)
		}
		time.Sleep(time.Duration(250+37*(len(took)%20)) * time.Millisecond)
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(took[(len(took)*99)/100].Microseconds())/1000, "p99-ms")
	b.ReportMetric(float64(took[len(took)-1].Microseconds())/1000, "max-ms")
}
