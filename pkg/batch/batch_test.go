package batch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// bed is a database with a batch queue, `parts`, a stepper and a node that runs entries when the
// test says so.
type bed struct {
	*testing.T
	ctx     context.Context
	pool    *pgxpool.Pool
	db      postgres.DB // of the handler
	q       *invalidation.Queue
	stepper *Stepper
	claims  int32
	flows   []string // that the node claims from besides that of entries without one
	mapped  []string // items of each run of Map
	fail    func(Part) error
}

type open struct{ db postgres.DB }

func (o open) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	return postgres.InTx(ctx, o.db, fn)
}

const here invalidation.NodeID = 7001

func newBed(t *testing.T) *bed {
	t.Helper()
	b := &bed{T: t, ctx: t.Context()}
	dsn := pgtest.Prepared(t, "parts", func(ctx context.Context, pool *pgxpool.Pool) error {
		retry := invalidation.RetryPolicy{MaxAttempts: 1}
		_, err := invalidation.Create(ctx, pool, "parts", invalidation.Config{Kind: invalidation.KindBatch, Retry: retry})
		return err
	})
	var err error
	if b.pool, err = postgres.Open(t.Context(), postgres.Config{DSN: dsn, MaxConns: 10}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.pool.Close)
	b.db = b.pool
	if b.q, err = invalidation.Open(b.ctx, b.pool, "parts"); err != nil {
		t.Fatal(err)
	}
	b.stepper = NewStepper(b.pool, open{b.pool}, Config{})
	return b
}

// work adds up numbers: Map those of a part, Reduce those of all parts.
func (b *bed) work() invalidation.Handler {
	return Handler(b.db, Work{
		Map: func(_ context.Context, p Part) (json.RawMessage, error) {
			sum := 0
			var items []string
			for _, item := range p.Items {
				var n int
				if err := json.Unmarshal(item, &n); err != nil {
					var row struct{ N int }
					if err := json.Unmarshal(item, &row); err != nil {
						return nil, err
					}
					n = row.N
				}
				sum += n
				items = append(items, fmt.Sprint(n))
			}
			b.mapped = append(b.mapped, strings.Join(items, ","))
			if b.fail != nil {
				if err := b.fail(p); err != nil {
					return nil, err
				}
			}
			return json.RawMessage(fmt.Sprint(sum)), nil
		},
		Reduce: func(_ context.Context, results iter.Seq2[json.RawMessage, error]) (json.RawMessage, error) {
			total := 0
			for r, err := range results {
				var n int
				if err := errors.Join(err, json.Unmarshal(r, &n)); err != nil {
					return nil, err
				}
				total += n
			}
			return json.RawMessage(fmt.Sprint(total)), nil
		},
	})
}

func (b *bed) create(c Batch) int64 {
	b.Helper()
	c.Queue = "parts"
	if c.Name == "" {
		c.Name = "sum"
	}
	id, err := Create(b.ctx, b.pool, c, invalidation.By{Actor: "ada", Reason: "test"})
	if err != nil {
		b.Fatal(err)
	}
	return id
}

// numbers are the items 1 to n.
func numbers(n int) []json.RawMessage {
	items := make([]json.RawMessage, n)
	for i := range items {
		items[i] = json.RawMessage(fmt.Sprint(i + 1))
	}
	return items
}

func (b *bed) step() {
	b.Helper()
	for again := true; again; again = b.stepper.after > 0 {
		if err := b.stepper.pass(b.ctx); err != nil {
			b.Fatal(err)
		}
	}
}

func (b *bed) claim(limit int) []*invalidation.Lock {
	b.Helper()
	var locks []*invalidation.Lock
	for _, flow := range append([]string{""}, b.flows...) {
		b.claims++
		lane := invalidation.Lane{Priority: 1, Flow: flow}
		r := invalidation.ClaimRequest{Node: here, ClaimID: b.claims, Lane: lane, Limit: limit - len(locks)}
		c, err := b.q.Claim(b.ctx, r)
		if err != nil {
			b.Fatal(err)
		}
		locks = append(locks, c.Locks...)
		if len(locks) == limit {
			break
		}
	}
	return locks
}

// run runs up to limit ready entries as a node would and returns how many it ran.
func (b *bed) run(limit int) int {
	b.Helper()
	locks := b.claim(limit)
	for _, l := range locks {
		b.runLock(l)
	}
	return len(locks)
}

func (b *bed) runLock(l *invalidation.Lock) {
	b.Helper()
	r := &invalidation.Run{Queue: b.q, Entry: l.Entries[0], Lock: l, Node: here}
	result, err := b.work().Handle(b.ctx, r)
	e := invalidation.Judge(r, result, err, time.Millisecond, 0)
	e.Last = true
	if _, err := b.q.Settle(b.ctx, here, []invalidation.Ending{e}); err != nil {
		b.Fatal(err)
	}
}

// drain lets leader and node work until nothing is left to do.
func (b *bed) drain() {
	b.Helper()
	for began := time.Now(); time.Since(began) < time.Minute; {
		b.step()
		if b.run(100) == 0 && b.count(`SELECT count(*) FROM penstock.batch WHERE ended_at IS NULL AND paused_at IS NULL`) == 0 {
			return
		}
	}
	b.Fatal("it does not come to an end")
}

func (b *bed) status(id int64) Status {
	b.Helper()
	s, err := Read(b.ctx, b.pool, id)
	if err != nil {
		b.Fatal(err)
	}
	return s
}

func (b *bed) count(sql string, args ...any) (n int) {
	b.Helper()
	if err := b.pool.QueryRow(b.ctx, sql, args...).Scan(&n); err != nil {
		b.Fatal(err)
	}
	return n
}

func (b *bed) exec(sql string) {
	b.Helper()
	if _, err := b.pool.Exec(b.ctx, sql); err != nil {
		b.Fatal(err)
	}
}

// completions is how many completion entries there ever were.
func (b *bed) completions() int {
	b.Helper()
	return b.count(`SELECT (SELECT count(*) FROM penstock.entry WHERE payload->>'step' = 'end')
	                     + (SELECT count(*) FROM penstock.result r JOIN penstock.batch b ON b.completion_entry_id = r.entry_id)`)
}

func TestListIsMappedAndReduced(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Items: numbers(1000), PartSize: 7, Window: 50, CompletionQueue: "parts", Detail: json.RawMessage(`{"unit": "m"}`)})
	b.step()
	if s := b.status(id); s.Parts != 143 || s.Queued != 50 || s.Waiting != 93 || s.State != "running" {
		t.Errorf("after a step: %+v", s)
	}
	if n := b.count(`SELECT count(*) FROM penstock.entry WHERE payload->>'unit' = 'm'`); n != 50 {
		t.Errorf("%d entries carry the detail, want 50", n)
	}
	b.drain()
	s := b.status(id)
	if s.State != "done" || string(s.Result) != "500500" || s.Done != 143 || s.Bad != 0 {
		t.Errorf("ended as %+v", s)
	}
	if len(b.mapped) != 143 {
		t.Errorf("Map ran %d times for 143 parts", len(b.mapped))
	}
	if n := b.completions(); n != 1 {
		t.Errorf("%d completion entries, want one", n)
	}
}

func TestQueryIsSplitByANode(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Query: `SELECT i AS n FROM generate_series(1, 10) i ORDER BY i DESC -- all of them
;`, PartSize: 4, CompletionQueue: "parts"})
	b.step()
	if s := b.status(id); s.State != "splitting" || s.Parts != 0 {
		t.Errorf("before a node came: %+v", s)
	}
	b.drain()
	if s := b.status(id); s.State != "done" || string(s.Result) != "55" {
		t.Errorf("ended as %+v", s)
	}
	if got := strings.Join(b.mapped, " "); got != "10,9,8,7 6,5,4,3 2,1" {
		t.Errorf("parts were %s", got)
	}
}

func TestQueryThatFailsFailsTheBatch(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Query: `SELECT 1 / 0 AS n`})
	b.drain()
	if s := b.status(id); s.State != "failed" || !strings.Contains(s.Problem, "division by zero") {
		t.Errorf("ended as %+v", s)
	}
}

func TestEmptySetIsDone(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Items: []json.RawMessage{}, CompletionQueue: "parts"})
	b.drain()
	if s := b.status(id); s.State != "done" || s.Parts != 0 || string(s.Result) != "0" {
		t.Errorf("ended as %+v", s)
	}
}

func TestBatchOfMorePartsThanTheQueueTakesIsFedAsThereIsRoom(t *testing.T) {
	b := newBed(t)
	if _, err := b.pool.Exec(b.ctx, `SELECT penstock.alter_queue('parts', '{"capacity": 3}')`); err != nil {
		t.Fatal(err)
	}
	id := b.create(Batch{Items: numbers(10), PartSize: 1})
	b.step()
	if s := b.status(id); s.Queued != 3 || s.Waiting != 7 {
		t.Errorf("after a step: %+v, want 3 parts in the queue", s)
	}
	for range 4 { // the leader counts again once a second
		b.run(100)
		if _, err := b.pool.Exec(b.ctx, `SELECT penstock.count_depth($1)`, b.q.ID); err != nil {
			t.Fatal(err)
		}
		b.step()
	}
	if s := b.status(id); s.State != "done" || s.Done != 10 {
		t.Errorf("ended as %+v", s)
	}
}

func TestBatchOfMorePartsThanAFlowMayHaveIsFedAsThereIsRoom(t *testing.T) {
	for _, c := range []struct{ name, options, flow string }{
		{"without a flow", `{"capacity_per_flow": 3}`, ""},
		{"with a flow", `{"capacity_per_flow": 3}`, "nightly"},
		{"with a flow beside shards", `{"capacity_per_flow": 3, "shards": 8}`, "nightly"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBed(t)
			b.flows = []string{"nightly"}
			if _, err := b.pool.Exec(b.ctx, `SELECT penstock.alter_queue('parts', $1)`, c.options); err != nil {
				t.Fatal(err)
			}
			id := b.create(Batch{Items: numbers(10), PartSize: 1, Flow: c.flow})
			for _, want := range []int64{3, 3, 3, 1} {
				b.step()
				if s := b.status(id); s.Queued != want {
					t.Errorf("after a step: %+v, want %d parts in the queue", s, want)
				}
				b.run(100)
			}
			b.drain()
			if s := b.status(id); s.State != "done" || s.Done != 10 {
				t.Errorf("ended as %+v", s)
			}
		})
	}
}

func TestBatchIsFedAsTheFullestShardHasRoom(t *testing.T) {
	b := newBed(t)
	options := `{"capacity_per_flow": 3, "shards": 2}`
	if _, err := b.pool.Exec(b.ctx, `SELECT penstock.alter_queue('parts', $1)`, options); err != nil {
		t.Fatal(err)
	}
	b.flows = []string{"shard-0", "shard-1"}
	id := b.create(Batch{Items: numbers(10), PartSize: 1})
	var fed int64
	for step := 0; step < 10 && fed < 10; step++ {
		b.step()
		s := b.status(id)
		if s.Queued < 1 || s.Queued > 3 {
			t.Fatalf("after a step: %+v, want 1 to 3 parts in the queue", s)
		}
		fed += s.Queued
		b.run(100)
	}
	b.drain()
	if s := b.status(id); s.State != "done" || s.Done != 10 {
		t.Errorf("ended as %+v", s)
	}
}

func TestPartThatWasRecordedIsNotRunAgain(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Items: numbers(2), PartSize: 1, CompletionQueue: "parts"})
	b.step()
	l := b.claim(1)[0]
	r := &invalidation.Run{Queue: b.q, Entry: l.Entries[0], Lock: l, Node: here}
	if _, err := b.work().Handle(b.ctx, r); err != nil {
		t.Fatal(err)
	}
	// Here the node dies: the entry is handed out again.
	e := invalidation.Release(l, l.Entries[0].ID, 0)
	e.Last = true
	if _, err := b.q.Settle(b.ctx, here, []invalidation.Ending{e}); err != nil {
		t.Fatal(err)
	}
	b.drain()
	if s := b.status(id); s.State != "done" || string(s.Result) != "3" || len(b.mapped) != 2 {
		t.Errorf("ended as %+v after %d runs of Map, want 2", s, len(b.mapped))
	}
}

func TestRunThatLostItsLockRecordsNothing(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Items: numbers(1)})
	b.step()
	old := b.claim(1)[0]
	e := invalidation.Release(old, old.Entries[0].ID, 0)
	e.Last = true
	if _, err := b.q.Settle(b.ctx, here, []invalidation.Ending{e}); err != nil {
		t.Fatal(err)
	}
	again := b.claim(1)[0]
	_, err := b.work().Handle(b.ctx, &invalidation.Run{Queue: b.q, Entry: old.Entries[0], Lock: old, Node: here})
	if !errors.Is(err, invalidation.ErrLockLost) {
		t.Errorf("a run without its lock recorded: %v", err)
	}
	if s := b.status(id); s.Done != 0 {
		t.Errorf("%+v", s)
	}
	b.runLock(again)
	b.drain()
	if s := b.status(id); s.State != "done" {
		t.Errorf("ended as %+v", s)
	}
}

func TestPausedBatchStartsNothingAndResumesWithoutRedoing(t *testing.T) {
	b := newBed(t)
	by := invalidation.By{Actor: "ada", Reason: "window"}
	id := b.create(Batch{Items: numbers(20), PartSize: 1, Window: 10, CompletionQueue: "parts"})
	b.step()
	b.run(4)
	running := b.claim(2)
	if err := Pause(b.ctx, b.pool, id, by, time.Time{}); err != nil {
		t.Fatal(err)
	}
	b.step()
	if n := len(b.claim(100)); n != 0 {
		t.Errorf("%d parts started during the pause", n)
	}
	for _, l := range running {
		b.runLock(l)
	}
	b.step()
	if s := b.status(id); s.State != "paused" || s.Done != 6 || s.Waiting != 14 || s.Queued != 0 {
		t.Errorf("paused as %+v", s)
	}
	if err := Resume(b.ctx, b.pool, id, by); err != nil {
		t.Fatal(err)
	}
	b.drain()
	if s := b.status(id); s.State != "done" || string(s.Result) != "210" || len(b.mapped) != 20 {
		t.Errorf("ended as %+v after %d runs of Map, want 20", s, len(b.mapped))
	}
}

func TestCancelledBatchEndsWithOneCompletionEntry(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Items: numbers(20), PartSize: 1, Window: 5, CompletionQueue: "parts"})
	b.step()
	running := b.claim(1)[0]
	if err := Cancel(b.ctx, b.pool, id, invalidation.By{Actor: "ada", Reason: "wrong set"}); err != nil {
		t.Fatal(err)
	}
	b.step()
	if s := b.status(id); s.State != "cancelling" || s.Queued != 1 || s.Bad != 19 {
		t.Errorf("while one part runs: %+v", s)
	}
	if n := b.count(`SELECT count(*) FROM penstock.cancel_request WHERE entry_id = $1`, running.Entries[0].ID); n != 1 {
		t.Error("the cancel of the running part was not requested")
	}
	e := invalidation.Cancel(running, running.Entries[0].ID, "asked")
	e.Last = true
	if _, err := b.q.Settle(b.ctx, here, []invalidation.Ending{e}); err != nil {
		t.Fatal(err)
	}
	b.drain()
	if s := b.status(id); s.State != "cancelled" || s.Bad != 20 || s.Result != nil || len(b.mapped) != 0 {
		t.Errorf("ended as %+v", s)
	}
	if n := b.completions(); n != 1 {
		t.Errorf("%d completion entries, want one", n)
	}
	if err := Cancel(b.ctx, b.pool, id, invalidation.By{}); !errors.Is(err, invalidation.ErrState) {
		t.Errorf("cancel of an ended batch: %v", err)
	}
	if err := Cancel(b.ctx, b.pool, 999, invalidation.By{}); !errors.Is(err, ErrNotFound) {
		t.Errorf("cancel of no batch: %v", err)
	}
}

func TestRetryRunsOnlyThePartsThatFailed(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Items: numbers(10), PartSize: 1, CompletionQueue: "parts"})
	b.fail = func(p Part) error {
		if p.No%5 == 0 {
			return errors.New("no fives")
		}
		return nil
	}
	b.drain()
	s := b.status(id)
	if s.State != "failed" || s.Done != 8 || s.Bad != 2 || !strings.Contains(s.Problem, "2 of 10") || s.Result != nil {
		t.Errorf("ended as %+v", s)
	}
	b.fail, b.mapped = nil, nil
	if err := Retry(b.ctx, b.pool, id, invalidation.By{Actor: "ada"}); err != nil {
		t.Fatal(err)
	}
	b.drain()
	if s := b.status(id); s.State != "done" || string(s.Result) != "55" || len(b.mapped) != 2 {
		t.Errorf("ended as %+v after %d runs of Map, want 2", s, len(b.mapped))
	}
	if err := Retry(b.ctx, b.pool, id, invalidation.By{Actor: "ada"}); !errors.Is(err, invalidation.ErrState) {
		t.Errorf("a retry of a batch that is done: %v, want ErrState, or it is completed twice", err)
	}
}

// A list of batches would count all parts of those that ended in the last month.
func TestPartsOfABatchThatEndedAreNotCountedAgain(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Items: numbers(4), PartSize: 1})
	b.fail = func(p Part) error {
		if p.No == 1 {
			return errors.New("not the first")
		}
		return nil
	}
	b.drain()
	if err := Retry(b.ctx, b.pool, id, invalidation.By{Actor: "ada"}); err != nil {
		t.Fatal(err)
	}
	if s := b.status(id); s.Parts != 4 || s.Done != 3 || s.Bad != 0 || s.Waiting != 1 {
		t.Errorf("after a retry it is %+v, want 3 parts done of 4, and one that waits", s)
	}
	b.drain()
	b.exec(`DELETE FROM penstock.batch_part WHERE no <= 2`) // the end of their retention deletes the first ones first
	if s := b.status(id); s.Parts != 4 || s.Done != 3 || s.Bad != 1 || s.Waiting+s.Queued != 0 {
		t.Errorf("ended as %+v, want 3 parts done of 4", s)
	}
}

// A queue may be run by a handler that knows nothing of batches: then the entry's own outcome is the part's.
func TestOutcomeOfAnyHandlerIsThePartsOutcome(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Items: numbers(2), PartSize: 1})
	b.step()
	for i, l := range b.claim(2) {
		e := invalidation.Done(l, l.Entries[0].ID, json.RawMessage(fmt.Sprint(i+7)), 0)
		e.Last = true
		if _, err := b.q.Settle(b.ctx, here, []invalidation.Ending{e}); err != nil {
			t.Fatal(err)
		}
	}
	b.drain()
	var results []string
	for r, err := range Results(b.ctx, b.pool, id) {
		if err != nil {
			t.Fatal(err)
		}
		results = append(results, string(r))
	}
	if s := b.status(id); s.State != "done" || strings.Join(results, " ") != "7 8" {
		t.Errorf("ended as %+v with results %v", s, results)
	}
}

// Without its failure a part that failed would count as done, and so would a completion.
func TestABatchKnowsOfAFailureThatIsDiscarded(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Items: numbers(2), PartSize: 1, CompletionQueue: "parts"})
	b.step()
	discard := func(entry invalidation.EntryID) error {
		_, err := b.pool.Exec(b.ctx, `SELECT penstock.discard_failure($1)`, entry)
		return err
	}
	fail := func(l *invalidation.Lock) invalidation.EntryID {
		e := invalidation.Fail(l, l.Entries[0].ID, invalidation.Failure{Error: "broken"}, 0)
		e.Last = true
		if _, err := b.q.Settle(b.ctx, here, []invalidation.Ending{e}); err != nil {
			t.Fatal(err)
		}
		return l.Entries[0].ID
	}
	for _, l := range b.claim(2) {
		if err := discard(fail(l)); err != nil {
			t.Errorf("discard of the failure of a part: %v", err)
		}
	}
	b.step()
	end := b.claim(1)[0]
	if err := discard(fail(end)); postgres.Code(err) != "PS006" {
		t.Errorf("the failed completion was discarded before the batch knows: %v", err)
	}
	b.step()
	if s := b.status(id); s.State != "failed" || s.Bad != 2 {
		t.Errorf("ended as %+v, want two failed parts", s)
	}
	if err := discard(end.Entries[0].ID); err != nil {
		t.Errorf("discard of a failure that the batch has recorded: %v", err)
	}
}

// What is deleted by hand, or was kept for less long than the leader was away.
func TestAPartWithoutAnOutcomeIsNotDoneUnlessTheQueueKeepsNoResults(t *testing.T) {
	for kept, want := range map[string]string{"1 day": "failed", "0": "done"} {
		b := newBed(t)
		if _, err := b.pool.Exec(b.ctx, `SELECT penstock.alter_queue('parts', jsonb_build_object('result_retention', $1::text))`, kept); err != nil {
			t.Fatal(err)
		}
		id := b.create(Batch{Items: numbers(1), PartSize: 1})
		b.step()
		if _, err := b.pool.Exec(b.ctx, `DELETE FROM penstock.entry`); err != nil {
			t.Fatal(err)
		}
		b.step()
		if s := b.status(id); s.State != want {
			t.Errorf("results are kept for %s: ended as %+v, want %s", kept, s, want)
		}
	}
}

func TestManySteppersCompleteABatchOnce(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Items: numbers(300), PartSize: 1, Window: 100, CompletionQueue: "parts"})
	stop := make(chan struct{})
	var steppers sync.WaitGroup
	for range 4 {
		steppers.Go(func() {
			s := NewStepper(b.pool, open{b.pool}, Config{})
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := s.pass(b.ctx); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	b.drain()
	close(stop)
	steppers.Wait()
	if s := b.status(id); s.State != "done" || string(s.Result) != "45150" || len(b.mapped) != 300 {
		t.Errorf("ended as %+v after %d runs of Map, want 300", s, len(b.mapped))
	}
	if n := b.completions(); n != 1 {
		t.Errorf("%d completion entries, want one", n)
	}
}

func TestStepperRunsUntilItsContextEnds(t *testing.T) {
	b := newBed(t)
	id := b.create(Batch{Items: numbers(5), PartSize: 1, CompletionQueue: "parts"})
	ctx, end := context.WithCancel(b.ctx)
	ended := make(chan error, 1)
	go func() { ended <- b.stepper.Run(ctx) }()
	deadline := time.Now().Add(time.Minute)
	for b.status(id).State != "done" {
		if time.Now().After(deadline) {
			t.Fatalf("it is %+v after 20 s", b.status(id))
		}
		b.run(10)
		time.Sleep(5 * time.Millisecond)
	}
	end()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestCreateRefusesWhatCannotWork(t *testing.T) {
	b := newBed(t)
	if _, err := invalidation.Create(b.ctx, b.pool, "pictures", invalidation.Config{Kind: invalidation.KindInference}); err != nil {
		t.Fatal(err)
	}
	for _, options := range []string{`NULL`, `'[]'`, `'{"items": null}'`} {
		if _, err := b.pool.Exec(b.ctx, `SELECT penstock.create_batch('b', 'parts', `+options+`)`); postgres.Code(err) != "PS002" {
			t.Errorf("options %s: %v, want them refused", options, err)
		}
	}
	for want, c := range map[string]Batch{
		"items or a query": {Queue: "parts"},
		"part_size":        {Queue: "parts", Items: numbers(1), PartSize: -1},
		"none":             {Queue: "none", Items: numbers(1)},
		"kind inference":   {Queue: "pictures", Items: numbers(1)},
	} {
		_, err := Create(b.ctx, b.pool, c, invalidation.By{})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// failedSteps makes a batch whose two parts have failed, which it returns, and one that could not be split.
func (b *bed) failedSteps() int64 {
	b.Helper()
	b.fail = func(Part) error { return errors.New("worker was down") }
	parts := b.create(Batch{Items: numbers(2), PartSize: 1, CompletionQueue: "parts"})
	b.drain()
	b.fail = nil
	unsplit := b.create(Batch{Query: "SELECT 1 / (g - 1) AS n FROM generate_series(1, 1) g"})
	b.drain()
	for _, id := range []int64{parts, unsplit} {
		if status := b.status(id).State; status != "failed" {
			b.Fatalf("batch %d is %s, want failed", id, status)
		}
	}
	return parts
}

// endedSteps are the reasons why the failures of failedSteps cannot be retried by themselves.
var endedSteps = []string{
	"part 1 of batch 1 has ended as failed (worker was down): penstock batch retry 1 runs it again",
	"part 2 of batch 1 has ended as failed (worker was down): penstock batch retry 1 runs it again",
	"batch 2 has ended as failed (split: split batch 2: ERROR: division by zero (SQLSTATE 22012)): create it anew",
}

// Failures of steps that have ended cannot be retried by themselves: the step would end as done without having run.
func TestRetryOfAFailureOfAnEndedStepIsRefusedWhenItIsAskedFor(t *testing.T) {
	b := newBed(t)
	parts := b.failedSteps()
	ids, err := pgx.CollectRows(postgres.Query(b.ctx, b.pool, `SELECT entry_id FROM penstock.failure ORDER BY entry_id`), pgx.RowTo[int64])
	if err != nil || len(ids) != 3 {
		t.Fatalf("%d failures: %v", len(ids), err)
	}
	for i, id := range ids {
		_, err := b.pool.Exec(b.ctx, `SELECT penstock.retry_failure($1, 'the worker is back', 'ada')`, id)
		if postgres.Code(err) != "PS006" || !strings.Contains(err.Error(), endedSteps[i]) {
			t.Errorf("retry of failure %d: %v, want it refused: %s", id, err, endedSteps[i])
		}
	}
	// An operation on nothing else is refused as well.
	start := func(filter string) (id int64, err error) {
		err = b.pool.QueryRow(b.ctx, `SELECT penstock.start_operation('parts', 'retry_failures', $1, 'the worker is back', 'ada')`, filter).Scan(&id)
		return id, err
	}
	if _, err := start(`{"name": "batch:1"}`); postgres.Code(err) != "PS006" || !strings.Contains(err.Error(), endedSteps[0]) {
		t.Errorf("an operation on such failures alone: %v, want it refused: %s", err, endedSteps[0])
	}
	// One with others beside them leaves them as they are.
	b.exec(`INSERT INTO penstock.failure (queue_id, entry_id, created_at, attempt, crashes, flow, priority, payload, error, class, fingerprint)
	        SELECT queue_id, nextval('penstock.entry_id_seq'), created_at, attempt, crashes, flow, priority,
	               '{"batch": 1e3, "step": "part", "part": "x"}', error, class, fingerprint FROM penstock.failure LIMIT 1`)
	operation, err := start(`{"all": true}`)
	if err != nil {
		t.Fatal(err)
	}
	b.exec(fmt.Sprintf(`SELECT penstock.step_operation(%d)`, operation))
	if n := b.count(`SELECT changed FROM penstock.operation WHERE id = $1`, operation); n != 1 {
		t.Errorf("the operation retried %d failures, want the one that is of no batch", n)
	}
	if n := b.count(`SELECT count(*) FROM penstock.failure WHERE entry_id = ANY ($1)`, ids); n != 3 {
		t.Errorf("%d of 3 failures of ended steps are kept", n)
	}
	// Nothing is refused of a batch that goes on: the retry counts.
	b.exec(fmt.Sprintf(`SELECT penstock.retry_batch(%d, 'the worker is back', 'ada')`, parts))
	b.step()
	b.fail = func(Part) error { return errors.New("worker was down") }
	b.run(1)
	b.fail = nil
	retried := b.count(`SELECT max(entry_id) FROM penstock.failure WHERE name = 'batch:1'`)
	b.exec(fmt.Sprintf(`SELECT penstock.retry_failure(%d, 'the worker is back', 'ada')`, retried))
}

// A failure that is retried while its step ends is found out when it runs.
func TestARetriedFailureOfAnEndedStepFailsAgainAndNamesTheRetryOfTheBatch(t *testing.T) {
	b := newBed(t)
	parts := b.failedSteps()
	ran, failures := len(b.mapped), b.count(`SELECT count(*) FROM penstock.failure`)
	b.exec(`SELECT penstock.return_failure(queue_id, entry_id) FROM penstock.failure`)
	b.drain()
	if len(b.mapped) != ran {
		t.Errorf("Map ran for parts that have ended: %v", b.mapped[ran:])
	}
	texts, err := pgx.CollectRows(postgres.Query(b.ctx, b.pool, `SELECT error FROM penstock.failure ORDER BY entry_id`), pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	if failures != 3 || !slices.Equal(texts, endedSteps) {
		t.Errorf("%d failures were retried, and the failures are\n%s\nwant\n%s", failures, strings.Join(texts, "\n"), strings.Join(endedSteps, "\n"))
	}
	b.exec(fmt.Sprintf(`SELECT penstock.retry_batch(%d, 'the worker is back', 'ada')`, parts))
	b.drain()
	if status := b.status(parts); status.State != "done" || len(b.mapped) != ran+2 {
		t.Errorf("after the retry of the batch: %+v, Map ran %v", status, b.mapped[ran:])
	}
}

// counted counts the transactions of a stepper.
type counted struct {
	open
	n int
}

func (c *counted) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	c.n++
	return c.open.InTx(ctx, fn)
}

// A batch that has nothing to step costs a pass no transaction.
func TestPausedBatchesCostAPassNoTransaction(t *testing.T) {
	b := newBed(t)
	counter := &counted{open: open{b.pool}}
	b.stepper = NewStepper(b.pool, counter, Config{})
	b.stepper.clearAfter = time.Now().Add(time.Hour)
	var ids []int64
	for range 20 {
		ids = append(ids, b.create(Batch{Items: numbers(2), PartSize: 1}))
	}
	b.exec(`SELECT penstock.pause_batch(id, 'a test', 'ada') FROM penstock.batch`)
	b.drain()
	counter.n = 0
	b.step()
	if counter.n != 0 {
		t.Errorf("a pass over 20 paused batches made %d transactions", counter.n)
	}
	b.exec(fmt.Sprintf(`SELECT penstock.resume_batch(%d, 'a test', 'ada')`, ids[7]))
	b.exec(fmt.Sprintf(`SELECT penstock.cancel_batch(%d, 'a test', 'ada')`, ids[8]))
	b.exec(fmt.Sprintf(`UPDATE penstock.batch SET paused_until = clock_timestamp() - interval '1 second' WHERE id = %d`, ids[9]))
	b.drain()
	for at, want := range map[int]string{6: "paused", 7: "done", 8: "cancelled", 9: "done"} {
		if status := b.status(ids[at]).State; status != want {
			t.Errorf("batch %d is %s, want %s", ids[at], status, want)
		}
	}
}

// A compaction of the lock key of parts that is under way puts a cancel of the whole batch off, and does not refuse it.
func TestCancelOfABatchWaitsForACompactionOfItsParts(t *testing.T) {
	b := newBed(t)
	b.exec(`SELECT penstock.alter_queue('parts', '{"grouping": "tenant", "mergeable": true, "merge": "last"}')`)
	b.exec(`ALTER FUNCTION penstock.await_compaction SET lock_timeout = 0`) // not 3 s
	id := b.create(Batch{Items: numbers(4), PartSize: 1, Detail: json.RawMessage(`{"tenant": "a"}`)})
	b.step()
	compaction, err := b.pool.Begin(b.ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer compaction.Rollback(b.ctx)
	if _, err := compaction.Exec(b.ctx, `SELECT penstock.compactable(q, 'a') FROM penstock.queue q WHERE q.name = 'parts'`); err != nil {
		t.Fatal(err)
	}
	answer := make(chan error, 1)
	go func() { answer <- Cancel(b.ctx, b.pool, id, invalidation.By{Actor: "ada", Reason: "a test"}) }()
	const waiting = `SELECT count(*) FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid))`
	for b.count(waiting, compaction.Conn().PgConn().PID()) == 0 {
		select {
		case err := <-answer:
			t.Fatalf("the cancel did not wait for the compaction: %v", err)
		case <-time.After(time.Millisecond):
		}
	}
	if err := compaction.Rollback(b.ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-answer; err != nil {
		t.Fatal(err)
	}
	b.drain()
	if s := b.status(id); s.State != "cancelled" || s.Bad != 4 {
		t.Errorf("ended as %+v, want it cancelled with its 4 parts", s)
	}
}
