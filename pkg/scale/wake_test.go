package scale

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
)

func due(w *wakeups) string {
	models, some := w.take()
	if !some {
		return "none"
	}
	return cmp.Or(strings.Join(models, " "), "all")
}

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
	w.begin(nil)
	w.end(nil, map[string][]int32{"llama": {7, 8}, "mistral": nil})
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
	w.begin(nil)
	w.end(nil, map[string][]int32{"llama": {7}})
	w.queue(9)
	w.model("mistral")
	if got := due(w); got != "none" {
		t.Errorf("models with instances: %s", got)
	}
}

func TestAPassOverSomeModelsLeavesTheOthersAsleep(t *testing.T) {
	w := newWakeups()
	w.end(nil, map[string][]int32{"a": {1}, "b": {2}})
	w.begin([]string{"a"})
	w.end([]string{"a"}, nil)
	w.queue(1)
	w.queue(2)
	if got := due(w); got != "b" {
		t.Errorf("due: %s", got)
	}
}

func TestManyDueModelsAreOnePassOverAll(t *testing.T) {
	w := newWakeups()
	for i := range wokenMax {
		w.now(fmt.Sprint(i))
	}
	if got := due(w); got != "0 1 2 3" {
		t.Errorf("due: %s", got)
	}
	w.now("one more")
	if got := due(w); got != "all" {
		t.Errorf("due: %s", got)
	}
}

func TestDeploymentsAtRestAreAskedInTurn(t *testing.T) {
	now, none := time.Now(), 0
	seen := func(ago time.Duration) *time.Time { at := now.Add(-ago); return &at }
	rows := []share{
		{Name: "new"},
		{Name: "wanted", Desired: 1, Existing: &none, SeenAt: seen(0)},
		{Name: "failed", Error: "no answer", Existing: &none, SeenAt: seen(0)},
		{Name: "draining", Draining: 1, Existing: &none, SeenAt: seen(0)},
		{Name: "lately", Existing: &none, SeenAt: seen(restEvery - time.Second)},
	}
	for i := range restMax + 1 {
		rows = append(rows, share{Name: fmt.Sprint("old", i), Existing: &none, SeenAt: seen(restEvery + time.Duration(i)*time.Second)})
	}
	var names []string
	for _, s := range withoutResting(rows, now) {
		names = append(names, s.Name)
	}
	if got := names[:4]; !slices.Equal(got, []string{"new", "wanted", "failed", "draining"}) {
		t.Errorf("asked: %q", got)
	}
	if len(names) != 4+restMax || names[4] != fmt.Sprint("old", restMax) || slices.Contains(names, "old0") {
		t.Errorf("at rest: %q", names[4:])
	}
}

func TestAWokenPassReadsItsModelAlone(t *testing.T) {
	db := fleet(t)
	do(t, db, `SELECT penstock.register_model('mistral', '{"protocol": "openai"}')`)
	do(t, db, `SELECT penstock.set_deployment('mistral-own', 'mistral', '{"policy": {"slots": 2, "max": 8}}')`)
	push(t, db, 3)
	do(t, db, `SELECT penstock.push('mistral', '{}'::jsonb)`)
	d := New(db, free{db}, Config{})
	decided := func() string {
		return one[string](t, db, `SELECT coalesce(string_agg(model, ' ' ORDER BY model), '') FROM penstock.scale_state WHERE desired > 0`)
	}
	if err := d.pass(t.Context(), []string{"llama"}); err != nil {
		t.Fatal(err)
	}
	if got := decided(); got != "llama" {
		t.Errorf("decided: %q", got)
	}
	if err := d.Pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := d.pass(t.Context(), []string{"llama"}); err != nil {
		t.Fatal(err)
	}
	if got := len(d.Status().Models); got != 2 {
		t.Errorf("figures of %d models", got)
	}
	// The budget is one of all deployments.
	d = New(db, free{db}, Config{})
	do(t, db, `SELECT penstock.set_scale_setting('scale.budget', '100')`)
	do(t, db, `DELETE FROM penstock.scale_state`)
	if err := d.pass(t.Context(), []string{"llama"}); err != nil {
		t.Fatal(err)
	}
	if got := decided(); got != "llama mistral" {
		t.Errorf("decided under a budget: %q", got)
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
	db := templated(t)
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

// BenchmarkReadInputsOfIdleModels is the statement of the tick that reads all inputs.
func BenchmarkReadInputsOfIdleModels(b *testing.B) {
	db := product(b, idleModels(b))
	for b.Loop() {
		if _, err := readModels[input](b.Context(), db, inputSQL, inputOfSQL, nil); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkWakeAmongIdleModels is the time from a hint about a model at zero to the order to its backend, while the leader
// decides for the others once a second.
func BenchmarkWakeAmongIdleModels(b *testing.B) {
	db := product(b, idleModels(b))
	c := &called{}
	d := New(db, free{db}, Config{Backends: map[string]Backend{backendLocal: c}})
	go func() { _ = d.Run(b.Context()) }()
	rows, err := db.Query(b.Context(), `SELECT name, id FROM penstock.queue WHERE model IS NOT NULL ORDER BY id`)
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
		if err := db.QueryRow(b.Context(), `SELECT (SELECT count(*) FROM penstock.deployment)
		     - (SELECT count(*) FROM penstock.deployment_state WHERE decided_at IS NOT NULL)`).Scan(&unseen); err != nil {
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
		before := c.started.Load()
		if _, err := db.Exec(b.Context(), `SELECT penstock.push($1, '{}'::jsonb)`, q.Name); err != nil {
			b.Fatal(err)
		}
		began := time.Now()
		d.WakeQueue(q.ID)
		for c.started.Load() == before {
			time.Sleep(100 * time.Microsecond)
		}
		took = append(took, time.Since(began))
		time.Sleep(1100 * time.Millisecond) // a wake-up beside others is spaced from them
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(took[(len(took)*99)/100].Microseconds())/1000, "p99-ms")
}
