package inference

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// bed is a database with one model in it, and the few verbs that tests are told in.
type bed struct {
	*testing.T
	ctx   context.Context
	pool  *pgxpool.Pool
	model worker.Model
	queue *invalidation.Queue
	lossy *lossy // set: through which nodes talk about slots and runs
}

var quiet = slog.New(slog.DiscardHandler)

// newBed returns a bed for a test that runs beside others: most of them wait for leases, beats and probes.
func newBed(t *testing.T, model worker.Model) *bed {
	t.Helper()
	t.Parallel()
	return newSerialBed(t, model)
}

// newSerialBed returns a bed for a test that shares a server with others.
func newSerialBed(t *testing.T, model worker.Model) *bed {
	t.Helper()
	b := &bed{T: t, ctx: t.Context(), model: model}
	b.model.Name = cmp.Or(b.model.Name, "Flux.1")
	b.model.Protocol = cmp.Or(b.model.Protocol, worker.ProtocolGeneric)
	fill := func(ctx context.Context, db *pgxpool.Pool) error {
		queue, err := RegisterModel(ctx, db, b.model, By{Actor: "test"})
		if err == nil {
			retry := map[string]any{"base": 0.02, "cap": 0.1, "max_attempts": 4}
			_, err = invalidation.Alter(ctx, db, queue, map[string]any{"retry": retry})
		}
		return err
	}
	usual := reflect.ValueOf(model).IsZero() // that of half of the tests
	dsn := ""
	if usual {
		dsn = pgtest.Prepared(t, "usual model", fill)
	} else {
		dsn = pgtest.DSN(t)
	}
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: dsn, MaxConns: 30})
	b.must(err)
	t.Cleanup(pool.Close)
	b.pool = pool
	if !usual {
		b.must(fill(b.ctx, pool))
	}
	var queue string
	b.must(pool.QueryRow(b.ctx, `SELECT penstock.model_queue($1)`, b.model.Name).Scan(&queue))
	b.queue, err = invalidation.Open(b.ctx, pool, queue)
	b.must(err)
	return b
}

// alter changes the model's queue.
func (b *bed) alter(options map[string]any) {
	b.Helper()
	queue, err := invalidation.Alter(b.ctx, b.pool, b.queue.Name, options)
	b.must(err)
	b.queue = queue
}

func (b *bed) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

func (b *bed) instance(server, endpoint string, slots int) int32 {
	b.Helper()
	id, err := RegisterInstance(b.ctx, b.pool, b.model.Name, server, endpoint, slots, nil, By{})
	b.must(err)
	return id
}

func (b *bed) push(payloads ...string) []invalidation.EntryID {
	b.Helper()
	pushes := make([]invalidation.Push, len(payloads))
	for i, p := range payloads {
		pushes[i] = invalidation.Push{Payload: json.RawMessage(p)}
	}
	pushed, err := b.queue.Push(b.ctx, pushes...)
	b.must(err)
	ids := make([]invalidation.EntryID, len(pushed))
	for i, p := range pushed {
		ids[i] = p.ID
	}
	return ids
}

// apartPriority is the priority of entries that no miniNode claims. The last claim of one that has left may still reach
// the database, and would take another entry.
const apartPriority = 2

// pushApart pushes an entry for a claim of the test.
func (b *bed) pushApart(payload string) invalidation.EntryID {
	b.Helper()
	push := invalidation.Push{Payload: json.RawMessage(payload), Priority: new(int16(apartPriority))}
	pushed, err := b.queue.Push(b.ctx, push)
	b.must(err)
	return pushed[0].ID
}

func (b *bed) count(sql string, args ...any) (n int) {
	b.Helper()
	b.must(b.pool.QueryRow(b.ctx, sql, args...).Scan(&n))
	return n
}

// await returns when the query counts as wanted.
func (b *bed) await(want int, sql string, args ...any) {
	b.Helper()
	// Under the race detector, on cores shared by many, an answer of 8 MB alone is read for more than a minute.
	deadline := time.Now().Add(5 * time.Minute)
	for got := b.count(sql, args...); got != want; got = b.count(sql, args...) {
		if time.Now().After(deadline) {
			b.Fatalf("%s: got %d, want %d", sql, got, want)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// eventually returns when something is so, and fails the test where that takes more than two minutes.
func (b *bed) eventually(what string, is func() bool) {
	b.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.Fatalf("not in two minutes: %s", what)
		}
	}
}

// inTime does what shows something within a limit of the product. Where that took longer, on a busy machine, it showed
// nothing and is done again.
func (b *bed) inTime(limit time.Duration, do func()) {
	b.Helper()
	b.eventually("a look within "+limit.String(), func() bool {
		began := time.Now()
		do()
		return time.Since(began) < limit
	})
}

// hourLasts returns when the hour lasts for a minute more: partitions of output and sums of use go by the hour.
func (b *bed) hourLasts() {
	for time.Until(time.Now().Truncate(time.Hour).Add(time.Hour)) < time.Minute {
		time.Sleep(100 * time.Millisecond)
	}
}

// lastingDemands makes a demand for slots count for an hour instead of 3 s, which a busy machine may take from the
// demand to what comes of it.
func (b *bed) lastingDemands() {
	b.Helper()
	for _, name := range []string{"hungry_nodes", "lease_slots_within"} {
		var text string
		b.must(b.pool.QueryRow(b.ctx, `SELECT pg_get_functiondef(oid) FROM pg_proc
			WHERE pronamespace = 'penstock'::regnamespace AND proname = $1`, name).Scan(&text))
		lasting := strings.ReplaceAll(text, "interval '3 seconds'", "interval '1 hour'")
		if lasting == text {
			b.Fatalf("penstock.%s has no demand of 3 seconds", name)
		}
		_, err := b.pool.Exec(b.ctx, lasting)
		b.must(err)
	}
}

// ended returns when all entries have ended, and fails the test where that takes more than two minutes.
func (b *bed) ended(ids ...invalidation.EntryID) {
	b.Helper()
	b.eventually("all entries have ended", func() bool {
		return b.count(`SELECT count(*) FROM penstock.entry WHERE id = ANY ($1)`, ids) == 0
	})
}

func (b *bed) outcome(id invalidation.EntryID) invalidation.Ended {
	b.Helper()
	b.await(1, `SELECT (SELECT count(*) FROM penstock.result WHERE entry_id = $1) + (SELECT count(*) FROM penstock.failure WHERE entry_id = $1)`, id)
	ended, err := invalidation.Outcome(b.ctx, b.pool, id)
	b.must(err)
	return ended
}

// meta is what was noted beside a result.
func (b *bed) meta(id invalidation.EntryID) (m map[string]any) {
	b.Helper()
	b.must(b.pool.QueryRow(b.ctx, `SELECT meta FROM penstock.result WHERE entry_id = $1`, id).Scan(&m))
	return m
}

// miniNode is a task node in miniature: it claims, runs and settles, renews its lease, and can be killed.
type miniNode struct {
	*bed
	*Service
	id     invalidation.NodeID
	alive  context.Context // of everything it does; ends at its death
	kill   context.CancelCauseFunc
	runs   context.Context // of its runs; ends with a drain too
	drain  context.CancelCauseFunc
	leave  context.CancelFunc
	claims atomic.Int32
	work   sync.WaitGroup
	duties sync.WaitGroup

	mu      sync.Mutex
	running map[invalidation.EntryID]context.CancelCauseFunc
	charged time.Duration // for all runs, as a ranker would hear it
}

// testLease is after what time a node that died is found dead. Those that live have a longer lease: on a busy machine a
// heartbeat may take as long as this.
const testLease = 1500 * time.Millisecond

// errKilled ends the contexts of a node that was killed. To the code it looks like a lost lease, upon which nothing
// outside is touched; and mortal keeps it from touching the database.
var errKilled = fmt.Errorf("killed: %w", invalidation.ErrLeaseLost)

// mortal is a database handle that dies with its node.
type mortal struct {
	postgres.DB
	alive context.Context
}

func (m mortal) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if m.alive.Err() != nil {
		return pgconn.CommandTag{}, errKilled
	}
	return m.DB.Exec(ctx, sql, args...)
}

func (m mortal) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if m.alive.Err() != nil {
		return nil, errKilled
	}
	return m.DB.Query(ctx, sql, args...)
}

func (m mortal) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if m.alive.Err() != nil {
		return deadRow{}
	}
	return m.DB.QueryRow(ctx, sql, args...)
}

type deadRow struct{}

func (deadRow) Scan(...any) error { return errKilled }

// tuned is the usual tuning but for some changes.
func tuned(changes ...func(*tuning)) tuning {
	t := usualTuning()
	for _, change := range changes {
		change(&t)
	}
	return t
}

// patient is the usual tuning but for other changes and what a busy machine exceeds: an answer about slots that takes
// longer is given up, and a slot that idles longer is given back.
func patient(changes ...func(*tuning)) tuning {
	long := func(t *tuning) { t.exchangeMax, t.idleMax = time.Minute, time.Hour }
	return tuned(append([]func(*tuning){long}, changes...)...)
}

// start starts a node with its duties, which wait less than usual. It leaves in order when the test ends, unless it was
// killed before or the test has failed.
func (b *bed) start(config ServiceConfig, changes ...func(*tuning)) *miniNode {
	b.Helper()
	m := &miniNode{bed: b, id: invalidation.NodeID(rand.Int64()), running: map[invalidation.EntryID]context.CancelCauseFunc{}}
	m.alive, m.kill = context.WithCancelCause(context.Background())
	m.runs, m.drain = context.WithCancelCause(m.alive)
	b.must(invalidation.Register(b.ctx, b.pool, invalidation.Node{ID: m.id, Name: "test", Application: "default", Lease: time.Minute, Threads: 64}))
	config.Log = quiet
	quick := func(t *tuning) {
		t.poll, t.renewEvery, t.leaseRetry = 50*time.Millisecond, 100*time.Millisecond, 30*time.Millisecond
		t.idleMax, t.busyWait, t.readyWait = 200*time.Millisecond, 20*time.Millisecond, 30*time.Millisecond
		t.suspectWait, t.probeEvery, t.probeGrace = 300*time.Millisecond, 100*time.Millisecond, 300*time.Millisecond
	}
	var db postgres.DB = b.pool
	if b.lossy != nil {
		db = b.lossy
	}
	m.Service = newService(config, patient(append([]func(*tuning){quick}, changes...)...), mortal{db, m.alive}, func() invalidation.NodeID { return m.id })
	b.must(m.Registry.Refresh(b.ctx))
	claiming, leave := context.WithCancel(m.alive)
	m.leave = leave
	m.duties.Go(func() { m.beat(m.alive) })
	m.duties.Go(func() { _ = m.Registry.Run(m.alive) })
	m.duties.Go(func() { _ = m.Prober.Run(m.alive) })
	m.duties.Go(func() { m.recover(m.alive) })
	m.duties.Go(func() { _ = m.Usage.Run(m.alive) })
	slots, closeSlots := context.WithCancel(m.alive)
	m.duties.Go(func() { _ = m.Pool.Run(slots) })
	m.work.Go(func() { m.schedule(claiming) })
	b.Cleanup(func() {
		if b.Failed() { // its calls may wait for what the test does no more
			m.kill(errKilled)
		}
		leave()
		m.work.Wait()
		closeSlots()
		m.kill(nil)
		m.duties.Wait()
	})
	return m
}

func (m *miniNode) beat(ctx context.Context) {
	for ctx.Err() == nil {
		tokens, err := pgx.CollectRows(postgres.Query(ctx, m.pool, `SELECT token FROM penstock.lock WHERE node_id = $1`, m.id),
			pgx.RowTo[invalidation.Token])
		orders, failed := invalidation.Renew(ctx, m.pool, m.id, invalidation.Beat{Tokens: tokens})
		if err == nil && failed == nil {
			m.mu.Lock()
			for _, c := range orders.Cancel {
				if cancel := m.running[c.Entry]; cancel != nil {
					cancel(fmt.Errorf("%w: %s", invalidation.ErrCancelled, c.Reason))
				}
			}
			m.mu.Unlock()
		}
		pause(ctx, 100*time.Millisecond)
	}
}

// refs are the names of locks, for Recover.
func refs(held []invalidation.HeldLock) []invalidation.LockRef {
	all := make([]invalidation.LockRef, len(held))
	for i, l := range held {
		all[i] = l.LockRef
	}
	return all
}

// recover does what the leader does for dead nodes, and promotes what has come due.
func (m *miniNode) recover(ctx context.Context) {
	for ctx.Err() == nil {
		_, _ = m.queue.WithTx(m.pool).Promote(ctx, 100)
		locks, _ := invalidation.HeldLocks(ctx, m.pool)
		_, _ = m.queue.Recover(ctx, refs(locks), nil, true)
		pause(ctx, 50*time.Millisecond)
	}
}

// schedule claims with permits, as a scheduling thread does.
func (m *miniNode) schedule(ctx context.Context) {
	for ctx.Err() == nil {
		n, release := m.Pool.Take(m.queue.Name, 16)
		if n == 0 {
			pause(ctx, 5*time.Millisecond)
			continue
		}
		// A claim that was cut off may be committed, and its locks be of a node that knows nothing of them.
		c, err := m.queue.Claim(m.alive, invalidation.ClaimRequest{
			Node: m.id, ClaimID: m.claims.Add(1), Lane: invalidation.Lane{Priority: 1}, Limit: n, IgnoreRowLocks: true,
		})
		if err != nil {
			release(n)
			continue
		}
		release(n - len(c.Locks))
		for _, l := range c.Locks {
			m.work.Go(func() { m.process(l, release) })
		}
		if len(c.Locks) == 0 {
			pause(ctx, 15*time.Millisecond) // half of the tests wait for something else
		}
	}
}

func (m *miniNode) process(l *invalidation.Lock, release func(int)) {
	defer release(1)
	e := l.Entries[0]
	lasting, end := context.WithCancelCause(m.runs)
	defer end(nil)
	ctx, cancel := context.WithCancelCause(lasting)
	defer cancel(nil)
	m.mu.Lock()
	m.running[e.ID] = cancel
	m.mu.Unlock()
	run := &invalidation.Run{Queue: m.queue, Entry: e, Lock: l, Node: m.id, Lasting: lasting}
	start := time.Now()
	result, err := m.Dispatcher.Handle(ctx, run)
	m.mu.Lock()
	m.charged += run.Charged(time.Since(start))
	m.mu.Unlock()
	if m.alive.Err() != nil && errors.Is(context.Cause(m.alive), errKilled) {
		return // the process is gone
	}
	if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(err, cause) {
		err = fmt.Errorf("%w: %w", cause, err)
	}
	ending := invalidation.Judge(run, result, err, time.Since(start), rand.Float64())
	ending.Last = true
	for range 50 {
		if _, err := m.queue.Settle(context.WithoutCancel(m.alive), m.id, []invalidation.Ending{ending}); err == nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	m.Errorf("entry %d could not be settled", e.ID)
}

// die ends the member as kill -9 does: nothing is given back, connections break.
func (m *miniNode) die() {
	m.kill(errKilled)
	_, err := m.pool.Exec(m.ctx, `UPDATE penstock.node SET lease = $2 WHERE id = $1`, m.id, testLease)
	m.must(err)
}

// gpu is a worker of the dispatcher protocol that goes on with what it has begun, whoever hangs up, and knows how many
// calls it runs at once.
type gpu struct {
	*httptest.Server
	run func(r *http.Request) (status int, body string)

	mu     sync.Mutex
	active int
	peak   int
	calls  int
	byID   map[string]int // runs of each entry
}

func (b *bed) gpu(run func(r *http.Request) (int, string)) *gpu {
	g := &gpu{run: run, byID: map[string]int{}}
	g.Server = httptest.NewServer(http.HandlerFunc(g.serve))
	b.Cleanup(func() {
		g.CloseClientConnections()
		g.Close()
	})
	return g
}

func (g *gpu) serve(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if r.URL.Path == "/health" {
		g.mu.Lock()
		defer g.mu.Unlock()
		fmt.Fprintf(w, `{"active_jobs": %d}`, g.active)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the caller went before all of it was here
	}
	r.Body = io.NopCloser(strings.NewReader(string(body)))
	g.mu.Lock()
	g.active++
	g.calls++
	g.peak = max(g.peak, g.active)
	g.byID[r.Header.Get("Penstock-Entry")]++
	g.mu.Unlock()
	status, text := g.run(r)
	g.mu.Lock()
	g.active--
	g.mu.Unlock()
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text)
}

func (g *gpu) seen() (calls, peak int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.calls, g.peak
}

func answers(*http.Request) (int, string) { return 200, `{"status":"success","result":{"ok":true}}` }
