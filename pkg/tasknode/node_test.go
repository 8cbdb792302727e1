package tasknode_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

func open(t testing.TB) *pgxpool.Pool {
	t.Helper()
	pool, err := postgres.Open(context.Background(), postgres.Config{DSN: pgtest.DSN(t), MaxConns: 8})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func create(t testing.TB, db postgres.DB, name string, c invalidation.Config) *invalidation.Queue {
	t.Helper()
	q, err := invalidation.Create(t.Context(), db, name, c)
	if err != nil {
		t.Fatal(err)
	}
	return q
}

// start runs a node until the test ends, and returns it with a function that stops it and waits.
func start(t testing.TB, pool *pgxpool.Pool, c tasknode.Config, handlers map[string]invalidation.HandlerFunc) (*tasknode.Node, func()) {
	t.Helper()
	c.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	n := tasknode.New(c, pool, pool)
	for q, h := range handlers {
		n.Handle(q, h)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("node: %v", err)
		}
	})
	t.Cleanup(stop)
	return n, stop
}

// barrier returns a channel for runs to wait on, and what opens it. As a cleanup behind the start of the node that lets
// a test which has failed end: a node that stops waits for its runs.
func barrier() (closed <-chan struct{}, open func()) {
	c := make(chan struct{})
	return c, sync.OnceFunc(func() { close(c) })
}

func push(t testing.TB, q *invalidation.Queue, pushes ...invalidation.Push) []invalidation.Pushed {
	t.Helper()
	pushed, err := q.Push(t.Context(), pushes...)
	if err != nil {
		t.Fatal(err)
	}
	return pushed
}

// refs are the names of locks, for Recover.
func refs(held []invalidation.HeldLock) []invalidation.LockRef {
	all := make([]invalidation.LockRef, len(held))
	for i, l := range held {
		all[i] = l.LockRef
	}
	return all
}

// eventually waits for a condition of the database, asked again and again.
func eventually(t testing.TB, pool *pgxpool.Pool, what, sql string, args ...any) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		var ok bool
		if err := pool.QueryRow(t.Context(), sql, args...).Scan(&ok); err != nil {
			t.Fatal(err)
		}
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

const emptySQL = `SELECT NOT EXISTS (SELECT FROM penstock.entry) AND NOT EXISTS (SELECT FROM penstock.lock)`

func TestEveryEntryRunsOnceAndGroupsInOrder(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	const keys, each, solo = 20, 15, 300
	var mu sync.Mutex
	ran := map[string][]int{}
	n, _ := start(t, pool, tasknode.Config{Threads: 8}, map[string]invalidation.HandlerFunc{
		"work": func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
			var p struct {
				Key string
				N   int
			}
			if err := json.Unmarshal(r.Entry.Payload, &p); err != nil {
				return nil, err
			}
			mu.Lock()
			defer mu.Unlock()
			ran[p.Key] = append(ran[p.Key], p.N)
			return json.RawMessage(`{"ok": true}`), nil
		},
	})
	for i := range each {
		var pushes []invalidation.Push
		for k := range keys {
			key := fmt.Sprintf("key-%d", k)
			pushes = append(pushes, invalidation.Push{LockKey: key, Payload: json.RawMessage(fmt.Sprintf(`{"Key":%q,"N":%d}`, key, i))})
		}
		push(t, q, pushes...)
		n.Wake(q.ID, nil)
	}
	for i := range solo {
		push(t, q, invalidation.Push{Payload: json.RawMessage(fmt.Sprintf(`{"Key":"solo-%d"}`, i))})
	}
	eventually(t, pool, "all entries done", emptySQL)
	mu.Lock()
	defer mu.Unlock()
	if len(ran) != keys+solo {
		t.Errorf("%d keys ran, want %d", len(ran), keys+solo)
	}
	for k := range keys {
		got := ran[fmt.Sprintf("key-%d", k)]
		if len(got) != each {
			t.Fatalf("key %d ran %v", k, got)
		}
		for i := range got {
			if got[i] != i {
				t.Fatalf("key %d ran out of order: %v", k, got)
			}
		}
	}
	var results int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.result WHERE outcome = 'done'`).Scan(&results); err != nil || results != keys*each+solo {
		t.Errorf("%d results (%v), want %d", results, err, keys*each+solo)
	}
}

// A key that used up its quantum stands in line again. Its node knows, and needs no poll to go on with it.
func TestAKeyGoesOnAfterItsQuantumWithoutAPoll(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{QuantumCount: 2})
	pushes := make([]invalidation.Push, 60)
	for i := range pushes {
		pushes[i] = invalidation.Push{LockKey: "K", Payload: json.RawMessage(`1`)}
	}
	push(t, q, pushes...)
	start(t, pool, tasknode.Config{Threads: 4, Poll: time.Minute}, map[string]invalidation.HandlerFunc{
		"work": func(context.Context, *invalidation.Run) (json.RawMessage, error) { return nil, nil },
	})
	eventually(t, pool, "all entries of the key done", emptySQL)
}

// What was pushed while its key was locked stands before entries of others that have been claimed since.
func TestAKeyGoesOnBeforeTheLowWaterMarkWithoutAPoll(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	running := make(chan struct{})
	goOn, letGo := barrier()
	n, _ := start(t, pool, tasknode.Config{Threads: 4, Poll: time.Hour}, map[string]invalidation.HandlerFunc{
		"work": func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
			if string(r.Entry.Payload) == `"stay"` {
				close(running)
				<-goOn
			}
			return nil, nil
		},
	})
	t.Cleanup(letGo)
	push(t, q, invalidation.Push{LockKey: "K", Payload: json.RawMessage(`"stay"`)})
	n.Wake(q.ID, nil)
	<-running
	push(t, q, invalidation.Push{LockKey: "K", Payload: json.RawMessage(`1`)})
	push(t, q, invalidation.Push{Payload: json.RawMessage(`2`)}, invalidation.Push{Payload: json.RawMessage(`3`)})
	n.Wake(q.ID, &invalidation.Lane{Priority: 1})
	eventually(t, pool, "others ran, and the key's ready row is gone", `SELECT count(*) = 2 FROM penstock.result`)
	eventually(t, pool, "others ran, and the key's ready row is gone", `SELECT NOT EXISTS (SELECT FROM penstock.ready)`)
	letGo()
	eventually(t, pool, "the key goes on", emptySQL)
}

// Recovery tells by it what a dead node can have begun.
func TestAClaimOfSeveralLanesIsRunByPositionButForTheFirstOfEach(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	var mu sync.Mutex
	var order []string
	hold, letGo := barrier()
	config := tasknode.Config{Threads: 1, Beat: time.Minute, Lease: 3 * time.Minute} // what waits is not handed back
	start(t, pool, config, map[string]invalidation.HandlerFunc{
		"work": func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
			if r.Entry.Name == "hold" {
				<-hold
			}
			mu.Lock()
			defer mu.Unlock()
			order = append(order, r.Entry.Name)
			return nil, nil
		},
	})
	t.Cleanup(letGo)
	for range 20 { // so that runs are known to be short
		push(t, q, payload(invalidation.Push{Name: "warm"}))
	}
	eventually(t, pool, "the node is warm", emptySQL)
	push(t, q, payload(invalidation.Push{Name: "hold"}))
	eventually(t, pool, "the thread is busy", `SELECT count(*) = 1 FROM penstock.lock`)
	var pushes []invalidation.Push
	for i := range 3 {
		for _, flow := range []string{"a", "b"} {
			pushes = append(pushes, payload(invalidation.Push{Flow: flow, Name: fmt.Sprint(flow, i)}))
		}
	}
	push(t, q, pushes...)
	eventually(t, pool, "one claim has brought all", `SELECT count(*) = 6 AND count(DISTINCT claim_id) = 1 FROM penstock.lock WHERE flow <> ''`)
	letGo()
	eventually(t, pool, "all have run", emptySQL)
	var rest []string
	for _, name := range order[21:] {
		if name != "a0" && name != "b0" {
			rest = append(rest, name)
		}
	}
	if want := []string{"a1", "b1", "a2", "b2"}; !slices.Equal(rest, want) {
		t.Errorf("behind the first of each lane ran %v, want %v", rest, want)
	}
}

func payload(p invalidation.Push) invalidation.Push {
	p.Payload = json.RawMessage(`{}`)
	return p
}

func TestErrorIsRetriedThenFails(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{Retry: invalidation.RetryPolicy{MaxAttempts: 3, Base: invalidation.Seconds(time.Millisecond)}})
	var runs atomic.Int64
	start(t, pool, tasknode.Config{Threads: 2, Poll: 10 * time.Millisecond}, map[string]invalidation.HandlerFunc{
		"work": func(context.Context, *invalidation.Run) (json.RawMessage, error) {
			if runs.Add(1) == 2 {
				panic("boom 42")
			}
			return nil, errors.New("no luck")
		},
	})
	id := push(t, q, invalidation.Push{Payload: json.RawMessage(`1`)})[0].ID
	go promote(t, q)
	eventually(t, pool, "entry failed", `SELECT EXISTS (SELECT FROM penstock.failure WHERE entry_id = $1 AND attempt = 3 AND jsonb_array_length(history) = 3 AND history->1->>'class' = 'panic')`, id)
	eventually(t, pool, "queue empty", emptySQL)
	if runs.Load() != 3 {
		t.Errorf("%d runs, want 3", runs.Load())
	}
}

func promote(t testing.TB, q *invalidation.Queue) {
	for t.Context().Err() == nil {
		_, _ = q.Promote(t.Context(), 100)
		time.Sleep(5 * time.Millisecond)
	}
}

func TestDrainHandsBackWithoutAnAttempt(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	var begun atomic.Int64
	_, stop := start(t, pool, tasknode.Config{Threads: 4, Grace: 50 * time.Millisecond}, map[string]invalidation.HandlerFunc{
		"work": func(ctx context.Context, _ *invalidation.Run) (json.RawMessage, error) {
			begun.Add(1)
			<-ctx.Done()
			return nil, ctx.Err()
		},
	})
	for range 20 {
		push(t, q, invalidation.Push{Payload: json.RawMessage(`1`)})
	}
	eventuallyTrue(t, "four entries run", func() bool { return begun.Load() >= 4 })
	stop()
	eventually(t, pool, "entries handed back", `SELECT count(*) = 20 AND sum(attempt) = 0 AND sum(crashes) = 0 AND (SELECT count(*) FROM penstock.ready) = 20
		AND NOT EXISTS (SELECT FROM penstock.lock) AND NOT EXISTS (SELECT FROM penstock.node) FROM penstock.entry`)
}

func TestWithoutAGraceRunsEndAtOnceAndAreHandedBack(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	begun := make(chan struct{})
	_, stop := start(t, pool, tasknode.Config{Threads: 1, Grace: -1}, map[string]invalidation.HandlerFunc{
		"work": func(ctx context.Context, _ *invalidation.Run) (json.RawMessage, error) {
			close(begun)
			<-ctx.Done()
			time.Sleep(50 * time.Millisecond) // it cleans up
			return nil, ctx.Err()
		},
	})
	push(t, q, invalidation.Push{Payload: json.RawMessage(`1`)})
	<-begun
	from := time.Now()
	stop()
	if took := time.Since(from); took > 20*time.Second {
		t.Errorf("the node stopped after %s", took)
	}
	eventually(t, pool, "the entry is handed back", `SELECT count(*) = 1 AND sum(attempt) = 0 AND (SELECT count(*) FROM penstock.ready) = 1
		AND NOT EXISTS (SELECT FROM penstock.lock) FROM penstock.entry`)
}

func TestNodeServesOnlyItsApplication(t *testing.T) {
	pool := open(t)
	ours := create(t, pool, "ours", invalidation.Config{Application: "blue"})
	theirs := create(t, pool, "theirs", invalidation.Config{Application: "green"})
	unknown := create(t, pool, "unknown", invalidation.Config{Application: "blue"})
	ok := func(context.Context, *invalidation.Run) (json.RawMessage, error) { return nil, nil }
	start(t, pool, tasknode.Config{Threads: 2, Application: "blue"}, map[string]invalidation.HandlerFunc{"ours": ok, "theirs": ok})
	push(t, theirs, invalidation.Push{Payload: json.RawMessage(`1`)})
	push(t, unknown, invalidation.Push{Payload: json.RawMessage(`1`)})
	push(t, ours, invalidation.Push{Payload: json.RawMessage(`1`)})
	eventually(t, pool, "our entry done", `SELECT NOT EXISTS (SELECT FROM penstock.entry_ours)`)
	eventually(t, pool, "others untouched", `SELECT count(*) = 2 FROM penstock.ready`)
}

func BenchmarkNodeSolo(b *testing.B) {
	pool := open(b)
	q := create(b, pool, "work", invalidation.Config{ResultRetention: -1})
	var ran atomic.Int64
	done := make(chan struct{})
	total := int64(b.N)
	for i := 0; i < b.N; i += 1000 {
		pushes := make([]invalidation.Push, min(1000, b.N-i))
		for j := range pushes {
			pushes[j].Payload = json.RawMessage(`{"n": 1}`)
		}
		push(b, q, pushes...)
	}
	b.ResetTimer()
	start(b, pool, tasknode.Config{Threads: 32}, map[string]invalidation.HandlerFunc{
		"work": func(context.Context, *invalidation.Run) (json.RawMessage, error) {
			if ran.Add(1) == total {
				close(done)
			}
			return nil, nil
		},
	})
	<-done
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "entries/s")
}
