package inference

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

func TestUsageIsKeptByFlowAndHour(t *testing.T) {
	b := newBed(t, worker.Model{Protocol: worker.ProtocolOpenAI})
	b.hourLasts()
	s := workertest.NewScript(t, healthy(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(30 * time.Millisecond)
		workertest.Says(200, `{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":5}}}`)(w, r)
	}))
	b.instance("gpu-1", s.URL, 2)
	b.start(ServiceConfig{}, func(t *tuning) { t.usageEvery = 20 * time.Millisecond })
	ids := b.push(`{"messages":[]}`, `{"messages":[]}`)
	for _, id := range ids {
		if o := b.outcome(id); o.Outcome != "done" {
			t.Fatalf("outcome %+v", o)
		}
	}
	b.await(1, `SELECT count(*) FROM penstock.usage_hours WHERE flow = '' AND calls = 2 AND tokens_in = 14
		AND tokens_cached = 10 AND tokens_out = 6 AND gpu_ms >= 60 AND wasted_ms = 0 AND hour >= date_trunc('hour', now()) - interval '1 hour'`)
	if m := b.meta(ids[0]); m["tokens_out"] != 3.0 || m["gpu_ms"] == nil {
		t.Errorf("noted %v", m)
	}
}

// Budgets are read by the database's clock: the answer to each fold has its time, by which the next calls are booked.
func TestUseIsBookedByTheClockOfTheDatabase(t *testing.T) {
	b := newBed(t, worker.Model{})
	m := newUsageMeter(b.pool, patient(), nodeOne, quiet)
	m.Clock.Set(time.Now().Add(100 * time.Hour))
	m.Add(usageKey{hour: m.Hour(), queue: b.queue.ID, model: "m"}, Used{Calls: 1})
	b.must(m.Fold(b.ctx))
	if ahead := time.Until(m.Clock.Now()).Abs(); ahead > time.Minute {
		t.Errorf("after a fold the clock is %v off", ahead)
	}
}

func TestEachEntryOfABatchUsesItsPart(t *testing.T) {
	// A call waits until it has eight entries.
	b := newBed(t, worker.Model{Batch: worker.BatchLimits{Items: 8, Wait: worker.Seconds(time.Minute)}})
	var took atomic.Int64
	w := b.batchWorker(func([]item) {
		began := time.Now()
		time.Sleep(time.Second)
		took.Add(time.Since(began).Milliseconds())
	})
	b.instance("gpu-1", w.URL, 1)
	b.push(items(8, func(*item) {})...)
	pushed := time.Now()
	b.start(ServiceConfig{}, func(t *tuning) { t.usageEvery = 20 * time.Millisecond })
	b.await(1, `SELECT count(*) FROM penstock.usage_hour WHERE calls = 8`)
	if calls := len(w.seen()); calls != 1 {
		t.Fatalf("%d calls, want one for eight entries", calls)
	}
	// The time on the way to the worker and back is charged too. Were each entry charged the call, it would be eight times.
	least, most := took.Load()-8, time.Since(pushed).Milliseconds() // each part is rounded down to a millisecond
	if ms := int64(b.count(`SELECT gpu_ms FROM penstock.usage_hour`)); ms < least || ms > most {
		t.Errorf("%d ms for a call of %d ms, within %d ms", ms, took.Load(), most)
	}
}

// A bill by application has the use of queues that were dropped since.
func TestUseKeepsTheApplicationOfADroppedQueue(t *testing.T) {
	b := newBed(t, worker.Model{})
	m := newUsageMeter(b.pool, patient(), nodeOne, quiet)
	key := usageKey{hour: time.Now().Truncate(time.Hour), queue: b.queue.ID, model: b.model.Name}
	for _, want := range []int{1, 2} { // calls: before the drop, and one that is folded after it
		m.Add(key, Used{Calls: 1})
		b.must(m.Fold(b.ctx))
		_, err := b.pool.Exec(b.ctx, `SELECT penstock.drop_queue(name, true) FROM penstock.queue WHERE id = $1`, b.queue.ID)
		b.must(err)
		if n := b.count(`SELECT sum(calls)::int FROM penstock.usage_hours WHERE application = 'default'`); n != want {
			t.Errorf("the application has %d calls, want %d", n, want)
		}
	}
}

func nodeOne() invalidation.NodeID { return 1 }

// unheard is a database whose answers are lost while it is set.
type unheard struct {
	postgres.DB
	lost bool
}

func (d *unheard) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	row := d.DB.QueryRow(ctx, sql, args...)
	if d.lost {
		var now time.Time
		_ = row.Scan(&now)
		return noRow{}
	}
	return row
}

// A bill must not have twice what the database has taken.
func TestAFoldWhoseAnswerWasLostCountsOnce(t *testing.T) {
	b := newBed(t, worker.Model{})
	db := &unheard{DB: b.pool, lost: true}
	m := newUsageMeter(db, patient(), nodeOne, quiet)
	key := usageKey{hour: time.Now().Truncate(time.Hour), queue: b.queue.ID, model: b.model.Name}
	m.Add(key, Used{Calls: 1})
	for range 2 {
		if err := m.Fold(b.ctx); err == nil {
			t.Error("a fold without an answer returned no error")
		}
	}
	db.lost = false
	m.Add(key, Used{Calls: 2})
	b.must(m.Fold(b.ctx))
	if n := b.count(`SELECT sum(calls)::int FROM penstock.usage_hour`); n != 3 {
		t.Errorf("%d calls are counted, want 3", n)
	}
}

// Use that the database refuses takes no use of other flows with it, keeps no later use back, and is sent no more.
func TestRefusedUseIsDroppedAlone(t *testing.T) {
	b := newBed(t, worker.Model{})
	db := &brokenDB{DB: b.pool}
	m := newUsageMeter(db, patient(), nodeOne, quiet)
	hour := time.Now().Truncate(time.Hour)
	for range 2 {
		evil := Used{Calls: 1, Tokens: worker.Tokens{In: math.MaxInt64}} // the second does not fit the sum
		m.Add(usageKey{hour: hour, queue: b.queue.ID, model: "m", flow: "evil"}, evil)
		for i := range 9 {
			key := usageKey{hour: hour, queue: b.queue.ID, model: "m", flow: fmt.Sprint("honest", i)}
			m.Add(key, Used{Calls: 1})
		}
		b.must(m.Fold(b.ctx))
	}
	if n := b.count(`SELECT sum(calls)::int FROM penstock.usage_hour WHERE flow LIKE 'honest%'`); n != 18 {
		t.Errorf("%d calls of other flows are counted, want 18", n)
	}
	before := db.asked.Load()
	b.must(m.Fold(b.ctx))
	if n := db.asked.Load() - before; n > 0 {
		t.Errorf("%d statements after the refused row was dropped, want none", n)
	}
}

// A label of more GPUs than an instance can have does not make the use of a call overflow.
func TestGPUsOfALabelAreBounded(t *testing.T) {
	t.Parallel()
	for label, want := range map[string]int{
		"": 1, "0": 1, "-4": 1, "four": 1, "8": 8, "1024": 1024, "1025": 1, "100000000000": 1, "99999999999999999999": 1,
	} {
		if got := (&Endpoint{Labels: map[string]string{"gpus": label}}).GPUs(); got != want {
			t.Errorf("%q: %d GPUs, want %d", label, got, want)
		}
	}
}

// Eight entries in one call have used the GPU for the time of one call together, and the time for which they wait
// for each other or for a slot is no GPU's.
func TestFlowsAreChargedTheTimeOfGPUs(t *testing.T) {
	b := newBed(t, batching)
	w := b.batchWorker(func([]item) { time.Sleep(100 * time.Millisecond) })
	b.instance("gpu-1", w.URL, 1)
	ids := b.push(items(24, func(*item) {})...)
	began := time.Now()
	m := b.start(ServiceConfig{})
	for _, id := range ids {
		b.outcome(id)
	}
	m.leave()
	m.work.Wait()
	// With one slot the calls are one after another: a GPU cannot have been used for longer than it all took.
	calls := time.Duration(len(w.seen()))
	if least, most := 100*calls*time.Millisecond, time.Since(began); m.charged < least || m.charged > most {
		t.Errorf("charged %s for %d calls of 100 ms, within %s", m.charged, calls, most)
	}
}

// A call with n sequences is charged for each, on each GPU of its instance; it keeps one slot, for which the autoscaler starts
// instances.
func TestUsageTellsTheTimeOfSlotsFromThatOfGPUs(t *testing.T) {
	b := newBed(t, worker.Model{Protocol: worker.ProtocolOpenAI})
	s := workertest.NewScript(t, healthy(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(30 * time.Millisecond)
		workertest.Says(200, `{"choices":[]}`)(w, r)
	}))
	_, err := RegisterInstance(b.ctx, b.pool, b.model.Name, "gpu-1", s.URL, 1, map[string]string{"gpus": "8"}, By{})
	b.must(err)
	b.start(ServiceConfig{}, func(t *tuning) { t.usageEvery = 20 * time.Millisecond })
	b.push(`{"messages":[],"n":4}`)
	b.await(1, `SELECT count(*) FROM penstock.usage_hour WHERE calls = 1`)
	if n := b.count(`SELECT count(*) FROM penstock.usage_hour WHERE gpu_ms >= 32 * 30 AND abs(gpu_ms - extra_ms - gpu_ms / 32) <= 1`); n != 1 {
		t.Errorf("of %d ms of GPUs %d ms are beyond the slot, want 31 of 32 parts",
			b.count(`SELECT gpu_ms FROM penstock.usage_hour`), b.count(`SELECT extra_ms FROM penstock.usage_hour`))
	}
}

// folding has a node record its use at once.
func folding(t *tuning) { t.usageEvery = 20 * time.Millisecond }

// began5MinutesAgo moves the begin of the runs that are stored.
func (b *bed) began5MinutesAgo() {
	b.Helper()
	_, err := b.pool.Exec(b.ctx, `UPDATE penstock.remote_run SET started_at = started_at - interval '5 minutes'`)
	b.must(err)
}

// used returns when a call is counted, and fails the test where it is not the only one, of a run that took from least to a
// quarter of an hour more, and whose answer was kept or not.
func (b *bed) used(least time.Duration, kept bool) {
	b.Helper()
	b.eventually("a call is counted", func() bool { return b.count(`SELECT count(*) FROM penstock.usage_hour`) > 0 })
	var calls, runs int
	var gpu, run, wasted int64
	b.must(b.pool.QueryRow(b.ctx, `SELECT sum(calls)::int, sum(runs)::int, sum(gpu_ms)::bigint, sum(run_ms)::bigint,
		sum(wasted_ms)::bigint FROM penstock.usage_hour`).Scan(&calls, &runs, &gpu, &run, &wasted))
	want := [3]int64{1, gpu, 0} // runs kept, their time, and what is wasted
	if !kept {
		want = [3]int64{0, 0, gpu}
	}
	got := [3]int64{int64(runs), run, wasted}
	took := time.Duration(gpu) * time.Millisecond
	if calls != 1 || took < least || took > least+15*time.Minute || got != want {
		b.Errorf("%d calls of %v are counted, with %v, want one of %v or little more, with %v", calls, took, got, least, want)
	}
}

// Calls of less than a millisecond, as those of an entry in a batch, come to their time, however often it is folded.
func TestTimesBelowAMillisecondAddUp(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.hourLasts()
	m := newUsageMeter(b.pool, patient(), nodeOne, quiet)
	key := usageKey{hour: m.Hour(), queue: b.queue.ID, model: b.model.Name}
	const half = 500 * time.Microsecond
	for range 8 {
		m.Add(key, Used{Calls: 1, GPU: 3 * half, Extra: half, Wasted: half, Run: half})
		b.must(m.Fold(b.ctx))
	}
	if n := b.count(`SELECT count(*) FROM penstock.usage_hour
		WHERE (calls, gpu_ms, extra_ms, wasted_ms, run_ms) = (8, 12, 4, 4, 4)`); n != 1 {
		t.Errorf("8 calls of 1.5 ms are %d ms, want 12", b.count(`SELECT gpu_ms::int FROM penstock.usage_hour`))
	}
}

// The time of a call whose answer came, and is not kept, is wasted.
func TestAnAnswerThatIsNotKeptIsWasted(t *testing.T) {
	for name, key := range map[string]string{
		"cancelled while it ran":    "k", // the next entry of the key must not start beside the run
		"cancelled as it is stored": "",
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, worker.Model{})
			var calls atomic.Int32
			goOn := make(chan struct{})
			answer := sync.OnceFunc(func() { close(goOn) })
			t.Cleanup(answer)
			w := workertest.NewScript(t, healthy(func(rw http.ResponseWriter, r *http.Request) {
				calls.Add(1)
				if key != "" {
					<-goOn
				}
				workertest.Says(200, `{"status":"success","result":1}`)(rw, r)
			}))
			b.instance("gpu-1", w.URL, 1)
			const away = 1 << 20
			store := &flakyStore{Directory: Directory(t.TempDir())}
			store.failures.Store(away)
			m := b.start(ServiceConfig{Objects: store}, folding, func(t *tuning) {
				t.storeWait = time.Hour
				if key == "" {
					t.inlineBytes = 0
				}
			})
			push := func() invalidation.EntryID {
				pushed, err := b.queue.Push(b.ctx, invalidation.Push{Payload: json.RawMessage(`{}`), LockKey: key})
				b.must(err)
				return pushed[0].ID
			}
			id := push()
			b.eventually("the run has begun", func() bool {
				return calls.Load() == 1 && (key != "" || store.failures.Load() < away)
			})
			m.endRun(id, invalidation.ErrCancelled)
			answer()
			if o := b.outcome(id); o.Outcome != "cancelled" {
				t.Errorf("outcome %+v", o)
			}
			store.failures.Store(0)
			b.outcome(push()) // what is counted of it comes behind
			b.await(2, `SELECT coalesce(sum(calls), 0)::int FROM penstock.usage_hour`)
			if n := b.count(`SELECT count(*) FROM (
				SELECT sum(runs) AS runs, sum(gpu_ms - run_ms - wasted_ms) AS rest FROM penstock.usage_hour) u
				WHERE runs = 1 AND abs(rest) <= 2`); n != 1 {
				t.Error("the time of the call is not wasted")
			}
		})
	}
}

// Sums over models are counters: they keep what one has counted that is removed. All else of it is forgotten.
func TestTalliesKeepARemovedModel(t *testing.T) {
	b := newBed(t, worker.Model{Batch: worker.BatchLimits{Items: 2}})
	g := b.gpu(answers)
	b.instance("gpu-1", g.URL, 1)
	m := b.start(ServiceConfig{})
	if o := b.outcome(b.push(`{}`)[0]); o.Outcome != "done" {
		t.Fatalf("outcome %+v", o)
	}
	_, err := b.pool.Exec(b.ctx, `SELECT penstock.remove_instance($1, 'gpu-1', true, 'test'), penstock.remove_model($1, 'test')`, b.model.Name)
	b.must(err)
	b.eventually("the node knows it", func() bool { _, known := m.Registry.Model(b.model.Name); return !known })
	if n := m.Pool.Tallies()[b.model.Name].Calls; n != 1 {
		t.Errorf("%d calls of the removed model are counted, want 1", n)
	}
	b.eventually("its waitlist and its breaker are forgotten", func() bool {
		m.Dispatcher.mu.Lock()
		waitlists := len(m.Dispatcher.waitlists)
		m.Dispatcher.mu.Unlock()
		m.Pool.mu.Lock()
		defer m.Pool.mu.Unlock()
		return waitlists == 0 && len(m.Pool.breaker) == 0
	})
}
