package maintenance_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/pkg/maintenance"
)

func sampler(t *testing.T, f *fleet) *maintenance.Samples {
	t.Helper()
	duty := maintenance.NewSamples(f.pool, &term{db: f.pool}, maintenance.Config{
		Pause: 10 * time.Millisecond, SamplePause: 50 * time.Millisecond, QueuesAtOnce: 1,
	})
	run(t, duty)
	return duty
}

func TestLeaderSamplesEachQueue(t *testing.T) {
	f := newUsualFleet(t)
	node := f.register(time.Minute)
	f.push(3, "")
	f.exec(`UPDATE penstock.entry SET created_at = now() - interval '90 seconds'`)
	f.claim(node)
	duty := sampler(t, f)
	eventually(t, "samples with rates are written", func() bool {
		return f.count(`SELECT count(*) FROM penstock.sample WHERE queue_id = $1 AND in_per_second IS NOT NULL`, f.q.ID) > 0
	})
	if n := f.count(`SELECT count(*) FROM penstock.sample WHERE queue_id = $1 AND pending = 3 AND computing = 1 AND serving = 1
	                    AND head_age BETWEEN 90 AND 200 AND blocked IS NULL AND NOT estimated`, f.q.ID); n == 0 {
		t.Errorf("no sample of the queue: %+v", duty.Latest().Queues)
	}
	f.exec(`SELECT penstock.pause_queue('work', 'test', 'ada')`)
	eventually(t, "a pause is the reason why the queue is blocked, and its head does not age", func() bool {
		return f.count(`SELECT count(*) FROM penstock.sample WHERE queue_id = $1 AND blocked = 'paused' AND head_age IS NULL`, f.q.ID) > 0
	})
	if latest := duty.Latest(); latest.Server.MaxConnections == 0 || len(latest.Queues) < 2 || latest.Took == 0 {
		t.Errorf("the last sampling was %+v", latest)
	}
}

func TestSamplesAreWrittenWithinTheTermOnly(t *testing.T) {
	f := newUsualFleet(t)
	duty := maintenance.NewSamples(f.pool, &term{db: f.pool, over: true},
		maintenance.Config{Pause: time.Millisecond, SamplePause: time.Millisecond, GiveUp: 20 * time.Millisecond})
	if err := duty.Run(t.Context()); !errors.Is(err, errOver) {
		t.Errorf("the duty ended with %v, want the end of the term", err)
	}
	if n := f.count(`SELECT count(*) FROM penstock.sample`); n != 0 {
		t.Errorf("%d samples were written after the term", n)
	}
}

// A queue whose application rests is paused, also where its nodes were stopped: nothing is wrong with it.
func TestTheReasonOfAQueueIsItsPauseAndNotTheLackOfNodes(t *testing.T) {
	f := newUsualFleet(t)
	f.push(1, "")
	blocked := func(by string) int {
		return f.count(`SELECT count(*) FROM penstock.queue q, penstock.measure(q) m WHERE q.id = $1 AND m.blocked = $2`, f.q.ID, by)
	}
	if blocked("no_node") != 1 {
		t.Error("the queue has nodes")
	}
	f.exec(`SELECT penstock.pause('application', 'default', reason => 'maintenance')`)
	if blocked("application_paused") != 1 {
		t.Error("the pause of the application is not the reason")
	}
}

// Readings that cannot be stored are no samples: lists, histories and degradations do not have them.
func TestASamplingThatIsNotStoredIsNotTheLatest(t *testing.T) {
	f := newUsualFleet(t)
	var errs duty.Errors
	samples := maintenance.NewSamples(f.pool, &term{db: f.pool}, maintenance.Config{
		Pause: time.Millisecond, SamplePause: time.Millisecond, Log: errs.Log("samples", slog.New(slog.DiscardHandler)),
	})
	f.exec(`ALTER TABLE penstock.sample ADD CONSTRAINT refused CHECK (queue_id < 0)`)
	run(t, samples)
	eventually(t, "it has tried", func() bool { return errs.Counts()["samples"] > 2 })
	if !samples.Latest().At.IsZero() {
		t.Error("there is a sampling that was not stored")
	}
	f.exec(`ALTER FUNCTION penstock.roll_up_samples() RENAME TO gone`)
	f.exec(`ALTER TABLE penstock.sample DROP CONSTRAINT refused`)
	eventually(t, "samples are stored though minutes are not", func() bool {
		return f.count(`SELECT count(*) FROM penstock.sample`) > 0 && !samples.Latest().At.IsZero()
	})
}

func TestSlotsOfAnInstanceThatDrainsAreNotFreeOnes(t *testing.T) {
	f := newUsualFleet(t)
	f.exec(`SELECT penstock.register_model('m', '{"protocol": "dispatcher"}'), penstock.register_instance('m', 'gpu-1', 'http://127.0.0.1:9', 4),
	               penstock.register_instance('m', 'gpu-2', 'http://127.0.0.1:8', 4)`)
	f.exec(`SELECT penstock.drain_instance('m', 'gpu-1', 'a new disk', 'ada')`)
	f.exec(`INSERT INTO penstock.slot (instance_id, number, token, node_id, leased_at)
	        SELECT i.id, n, 1000 + n, $1, now() FROM penstock.instance i, generate_series(0, 3) n WHERE i.server = 'gpu-1'`, f.register(time.Minute))
	want := maintenance.ModelSlots{Model: "m", Slots: 4, Held: 4}
	if got := firstSampling(t, f).Models; len(got) != 1 || got[0] != want {
		t.Errorf("slots are %+v, want %+v", got, want)
	}
}

func TestMinutesAreRolledUpOnceAndDroppedByPartition(t *testing.T) {
	f := newUsualFleet(t)
	f.exec(`SELECT penstock.make_partition(parent, 0) FROM penstock.retention`)
	for _, parent := range []string{"sample", "sample_minute"} { // yesterday's, for when it is midnight
		f.exec(`DO $$ BEGIN EXECUTE format('CREATE TABLE penstock.` + parent + `_yesterday PARTITION OF penstock.` + parent + ` FOR VALUES FROM (%L) TO (%L)',
		          (now() AT TIME ZONE 'UTC')::date - 1 || 'Z', (now() AT TIME ZONE 'UTC')::date || 'Z'); END $$`)
	}
	f.exec(`CREATE TABLE penstock.sample_20200101 PARTITION OF penstock.sample FOR VALUES FROM ('2020-01-01Z') TO ('2020-01-02Z')`)
	f.exec(`CREATE TABLE penstock.sample_minute_20200101 PARTITION OF penstock.sample_minute FOR VALUES FROM ('2020-01-01Z') TO ('2020-01-02Z')`)
	f.exec(`INSERT INTO penstock.sample SELECT $1, at, 0, n, 0, 0, 0, false, 1, n, CASE WHEN n < 3 THEN 'throttled' END,
	               100 + n, 50, 0, 2, 1
	          FROM generate_series(1, 12) n CROSS JOIN LATERAL (SELECT date_trunc('minute', now()) - interval '5 seconds' * n AS at) t`, f.q.ID)
	for _, want := range []int{1, 0} {
		if n := f.count(`SELECT penstock.roll_up_samples()`); n != want {
			t.Fatalf("%d minutes were written, want %d", n, want)
		}
	}
	if f.count(`SELECT count(*) FROM penstock.sample_minute WHERE pending = 7 AND head_age = 12 AND accepted = 112 AND in_per_second = 2
	              AND blocked IS NULL`) != 1 {
		t.Error("the minute is not the mean of depths, the worst age, the last counters and blocked as most samples were")
	}
	for f.count(`SELECT penstock.drop_old_partitions()`) > 0 {
	}
	if n := f.count(`SELECT count(*) FROM pg_class WHERE relname ~ '_20200101$' AND relkind = 'r'`); n != 0 {
		t.Errorf("%d old partitions are left", n)
	}
}

// The cost of sampling grows linearly with the queues: no statement is planned over the tables of other queues. With five
// times the queues, the cost of a queue may double, where it would be fivefold otherwise. In each round five passes over 20
// queues alternate with one over 100, so that other work on the machine slows both down. One round within the bound is enough:
// were the cost not linear, none would be. Each pass is the first one of a term, for which nothing waits.
func TestTimedSamplingTakesNoLongerForEachOfManyQueues(t *testing.T) {
	const few, many, rounds = 20, 100, 5
	withQueues := func(n int) *fleet {
		f := newUsualFleet(t) // has one
		f.exec(`SELECT penstock.create_queue('q' || n) FROM generate_series(2, $1::int) n`, n)
		firstSampling(t, f) // warms up
		return f
	}
	ofFew, ofMany := withQueues(few), withQueues(many)
	for range rounds {
		var short time.Duration
		for range many / few {
			short += firstSampling(t, ofFew).Took
		}
		long := firstSampling(t, ofMany).Took
		t.Logf("%d passes over %d queues took %v, one over %d took %v", many/few, few, short, many, long)
		if long <= 2*short {
			return
		}
	}
	t.Errorf("in each of %d rounds, sampling a queue took more than twice as long where there are %d as where there are %d",
		rounds, many, few)
}

// firstSampling is that of a term, which ends then.
func firstSampling(t *testing.T, f *fleet) maintenance.Sampling {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	duty := maintenance.NewSamples(f.pool, &term{db: f.pool}, maintenance.Config{})
	ended := make(chan error, 1)
	go func() { ended <- duty.Run(ctx) }()
	eventually(t, "all are sampled", func() bool { return !duty.Latest().At.IsZero() })
	stop()
	if err := <-ended; err != nil {
		t.Errorf("duty ended: %v", err)
	}
	return duty.Latest()
}

// An error of one queue in sampling does not end the term.
func TestSamplesThatCannotBeTakenEndNothing(t *testing.T) {
	f := newUsualFleet(t)
	f.exec(`ALTER FUNCTION penstock.measure(penstock.queue) RENAME TO gone`)
	duty := maintenance.NewSamples(f.pool, &term{db: f.pool}, maintenance.Config{Pause: time.Millisecond, SamplePause: time.Millisecond, GiveUp: time.Millisecond})
	run(t, duty)
	eventually(t, "the duty has tried", func() bool {
		return f.count(`SELECT count(*) FROM pg_class WHERE relname ~ '^sample_[0-9]{8}$'`) > 0
	})
	f.exec(`ALTER FUNCTION penstock.gone(penstock.queue) RENAME TO measure`)
	eventually(t, "it samples again", func() bool { return len(duty.Latest().Queues) > 0 })
}

// A sample reads as many buffers at any depth: it counts up to a bound, and marks a larger depth as
// an estimate. SAMPLE_ENTRIES=10000000 measures at ten million.
func TestUnracedSampleCostsTheSameAtAnyDepth(t *testing.T) {
	most := 200_000
	if text := os.Getenv("SAMPLE_ENTRIES"); text != "" {
		var err error
		if most, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	f := newUsualFleet(t)
	depth := 0
	fill := func(to int) {
		f.exec(`INSERT INTO penstock.entry_work (id, queue_id, status, priority, due_at, payload)
		        SELECT n, $1, (CASE WHEN n % 3 = 0 THEN 'initial' ELSE 'pending' END)::penstock.status, CASE WHEN n % 3 = 1 THEN -1 ELSE 1 END,
		               CASE WHEN n % 3 = 0 THEN now() + interval '1 day' END, '{}' FROM generate_series($2::int, $3) n`, f.q.ID, depth+1, to)
		f.exec(`INSERT INTO penstock.ready (pos, entry_id, queue_id, priority, flow)
		        SELECT n, n, $1, 1, 'flow ' || n % 500 FROM generate_series($2::int, $3) n WHERE n % 3 = 2`, f.q.ID, depth+1, to)
		f.exec(`VACUUM ANALYZE penstock.entry_work, penstock.ready`)
		depth = to
	}
	measured := func() (buffers float64, ms float64) {
		var text []byte
		for range 2 { // the first one fills the caches
			if err := f.pool.QueryRow(t.Context(), `EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON)
			    SELECT m.* FROM penstock.queue q CROSS JOIN LATERAL penstock.measure(q) m`).Scan(&text); err != nil {
				t.Fatal(err)
			}
		}
		var plans []struct {
			Plan struct {
				Hit  float64 `json:"Shared Hit Blocks"`
				Read float64 `json:"Shared Read Blocks"`
			}
			Time float64 `json:"Execution Time"`
		}
		if err := json.Unmarshal(text, &plans); err != nil {
			t.Fatal(err)
		}
		return plans[0].Plan.Hit + plans[0].Plan.Read, plans[0].Time
	}
	fill(40_000)
	small, _ := measured()
	fill(most)
	large, ms := measured()
	t.Logf("sampling every queue reads %.0f buffers at 40,000 entries, %.0f at %d, in %.1f ms", small, large, most, ms)
	if small == 0 || large > 1.5*small+100 {
		t.Errorf("%.0f buffers at 40,000 entries and %.0f at %d", small, large, most)
	}
	if f.count(`SELECT count(*) FROM penstock.queue q CROSS JOIN LATERAL penstock.measure(q) m WHERE q.id = $1 AND m.estimated
	              AND m.initial + m.pending + m.disabled BETWEEN $2::int / 2 AND $2::int * 2`, f.q.ID, most) != 1 {
		t.Error("the estimate is not marked as one, or far from the truth")
	}
}
