package recovery_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/devpostgres"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/recovery"
)

// term is a fence that a test can close, as a lost election does.
type term struct {
	db   postgres.DB
	mu   sync.Mutex
	over bool
}

var errOver = errors.New("term is over")

func (f *term) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	f.mu.Lock()
	over := f.over
	f.mu.Unlock()
	if over {
		return errOver
	}
	return postgres.InTx(ctx, f.db, fn)
}

// shortLease makes recovery's waits short: it measures them in leases.
const shortLease = time.Second

// aliveLease is that of nodes that send heartbeats: longer than a machine that is busy with other tests delays one.
const aliveLease = 6 * time.Second

// fleet is a queue and nodes that claim from it.
type fleet struct {
	t    *testing.T
	pool *pgxpool.Pool
	q    *invalidation.Queue
	next invalidation.NodeID
}

func newFleet(t *testing.T, pool *pgxpool.Pool, cfg invalidation.Config) *fleet {
	t.Helper()
	q, err := invalidation.Create(t.Context(), pool, "work", cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &fleet{t: t, pool: pool, q: q}
}

// newUsualFleet is newFleet on a database of the test, with a queue of the usual settings.
func newUsualFleet(t *testing.T) *fleet {
	t.Helper()
	pool := pgtest.NewPrepared(t, "work", func(ctx context.Context, db *pgxpool.Pool) error {
		_, err := invalidation.Create(ctx, db, "work", invalidation.Config{})
		return err
	})
	q, err := invalidation.Open(t.Context(), pool, "work")
	if err != nil {
		t.Fatal(err)
	}
	return &fleet{t: t, pool: pool, q: q}
}

func (f *fleet) register(lease time.Duration) invalidation.NodeID {
	f.t.Helper()
	f.next++
	n := invalidation.Node{ID: f.next, Name: "node", Application: "default", Lease: lease, Queues: []int32{f.q.ID}}
	if err := invalidation.Register(f.t.Context(), f.pool, n); err != nil {
		f.t.Fatal(err)
	}
	return n.ID
}

func (f *fleet) push(n int, lockKey string) {
	f.t.Helper()
	pushes := make([]invalidation.Push, n)
	for i := range pushes {
		pushes[i] = invalidation.Push{Payload: json.RawMessage(`{}`), LockKey: lockKey}
	}
	if _, err := f.q.Push(f.t.Context(), pushes...); err != nil {
		f.t.Fatal(err)
	}
}

// claim lets a node claim up to limit locks and returns them.
func (f *fleet) claim(node invalidation.NodeID, limit int) []*invalidation.Lock {
	f.t.Helper()
	c, err := f.q.Claim(f.t.Context(), invalidation.ClaimRequest{Node: node, ClaimID: 1, Lane: invalidation.Lane{Priority: 1}, Limit: limit})
	if err != nil {
		f.t.Fatal(err)
	}
	return c.Locks
}

func (f *fleet) beat(node invalidation.NodeID, locks ...*invalidation.Lock) {
	f.t.Helper()
	if _, err := invalidation.Renew(f.t.Context(), f.pool, node, listing(locks)); err != nil {
		f.t.Fatal(err)
	}
}

func listing(locks []*invalidation.Lock) invalidation.Beat {
	b := invalidation.Beat{Tokens: []invalidation.Token{}}
	for _, l := range locks {
		b.Tokens = append(b.Tokens, l.Token)
	}
	return b
}

// lapse makes a node's lease lapse: its last heartbeat was so long ago.
func (f *fleet) lapse(node invalidation.NodeID, silent time.Duration) {
	f.t.Helper()
	f.exec(`UPDATE penstock.node SET beat_at = clock_timestamp() - $2::interval WHERE id = $1`, node, silent)
}

func (f *fleet) exec(sql string, args ...any) {
	f.t.Helper()
	if _, err := f.pool.Exec(f.t.Context(), sql, args...); err != nil {
		f.t.Fatal(err)
	}
}

// hold keeps the rows that a statement locks in a transaction of another session, until letGo is called or the test ends.
func (f *fleet) hold(sql string, args ...any) (letGo func()) {
	f.t.Helper()
	tx, err := f.pool.Begin(f.t.Context())
	if err != nil {
		f.t.Fatal(err)
	}
	letGo = func() { _ = tx.Rollback(context.WithoutCancel(f.t.Context())) } // after the first call without effect
	f.t.Cleanup(letGo)
	if _, err := tx.Exec(f.t.Context(), sql, args...); err != nil {
		f.t.Fatal(err)
	}
	return letGo
}

func (f *fleet) count(sql string, args ...any) (n int) {
	f.t.Helper()
	if err := f.pool.QueryRow(f.t.Context(), sql, args...).Scan(&n); err != nil {
		f.t.Fatal(err)
	}
	return n
}

func (f *fleet) locks() int { f.t.Helper(); return f.count(`SELECT count(*) FROM penstock.lock`) }

// log collects what a duty reports.
type log struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *log) contains(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Contains(l.buf.Bytes(), []byte(text))
}

// start runs the duty until the test ends.
func (f *fleet) start(cfg recovery.Config) (*recovery.Locks, *log) {
	f.t.Helper()
	out := &log{}
	cfg.Pause = 20 * time.Millisecond
	cfg.Log = slog.New(slog.NewTextHandler(out, nil))
	duty := recovery.NewLocks(f.pool, &term{db: f.pool}, cfg)
	run(f.t, duty)
	return duty, out
}

// run runs the duty until the test ends.
func run(t *testing.T, duty *recovery.Locks) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- duty.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("duty ended: %v", err)
		}
	})
}

// eventually waits for a condition that the duty brings about.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !holds(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

func TestLocksOfADeadNodeAreFreedAndCountACrash(t *testing.T) {
	f := newUsualFleet(t)
	dead, alive := f.register(shortLease), f.register(aliveLease)
	f.push(5, "")
	f.push(3, "group")
	if got := len(f.claim(dead, 4)); got != 4 {
		t.Fatalf("claimed %d locks", got)
	}
	kept := f.claim(alive, 10)
	stopBeating := f.keepAlive(alive, kept...)
	f.lapse(dead, time.Minute)
	hinted := make(chan []invalidation.Lane, 10)
	duty, _ := f.start(recovery.Config{Hint: func(_ int32, lanes []invalidation.Lane) { hinted <- lanes }})
	eventually(t, "locks of the dead node are freed", func() bool {
		return f.count(`SELECT count(*) FROM penstock.lock WHERE node_id = $1`, dead) == 0
	})
	lanes := <-hinted
	if len(lanes) == 0 {
		t.Error("hinted at no lane")
	}
	for _, lane := range lanes { // else nodes would look for lanes first, which a busy database delays
		if lane != (invalidation.Lane{Priority: 1}) {
			t.Errorf("hinted at lane %v", lane)
		}
	}
	stopBeating()
	if got := f.count(`SELECT count(*) FROM penstock.lock WHERE node_id = $1`, alive); got != len(kept) {
		t.Errorf("the live node holds %d locks, want %d", got, len(kept))
	}
	if got := f.count(`SELECT count(*) FROM penstock.entry WHERE crashes = 1 AND attempt = 0`); got != 4 {
		t.Errorf("%d entries have a crash and no attempt counted, want 4", got)
	}
	if got := len(f.claim(alive, 10)); got != 4 {
		t.Errorf("%d locks can be claimed again, want 4", got)
	}
	eventually(t, "four locks are counted", func() bool { return duty.Status().Freed[recovery.NodeDead] == 4 })
}

// keepAlive lets a node beat until the returned function is called.
func (f *fleet) keepAlive(node invalidation.NodeID, locks ...*invalidation.Lock) func() {
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Millisecond):
			}
			if _, err := invalidation.Renew(f.t.Context(), f.pool, node, listing(locks)); err != nil {
				f.t.Errorf("heartbeat of node %d: %v", node, err)
				return
			}
		}
	}()
	return func() { close(stop); <-stopped }
}

// By the database's clock the lease of the dead node runs for an hour more.
func TestLocksOfANodeThatDiedWhileTheClockWasAheadAreFreedAfterALease(t *testing.T) {
	f := newUsualFleet(t)
	dead, alive := f.register(shortLease), f.register(aliveLease)
	f.push(2, "")
	f.beat(dead, f.claim(dead, 1)...)
	kept := f.claim(alive, 1)
	f.lapse(dead, -time.Hour)
	f.lapse(alive, -time.Hour)
	defer f.keepAlive(alive, kept...)()
	f.start(recovery.Config{})
	eventually(t, "locks of the dead node are freed", func() bool {
		return f.count(`SELECT count(*) FROM penstock.lock WHERE node_id = $1`, dead) == 0
	})
	if f.count(`SELECT count(*) FROM penstock.node n WHERE penstock.node_lives(n.id)`) != 1 {
		t.Error("the dead node passes for a live one, or the live node for a dead one")
	}
	if got := f.count(`SELECT count(*) FROM penstock.lock WHERE node_id = $1`, alive); got != 1 {
		t.Errorf("the live node holds %d locks, want 1", got)
	}
}

func TestLockThatALiveNodeDoesNotListIsFreedWithoutACrash(t *testing.T) {
	f := newUsualFleet(t)
	node := f.register(aliveLease)
	f.push(2, "")
	locks := f.claim(node, 2)
	stop := f.keepAlive(node, locks[0]) // the claim of the second one was never answered
	defer stop()
	f.start(recovery.Config{})
	eventually(t, "the unlisted lock is freed", func() bool { return f.locks() == 1 })
	if got := f.count(`SELECT count(*) FROM penstock.lock WHERE token = $1`, locks[0].Token); got != 1 {
		t.Error("the listed lock was freed")
	}
	if got := f.count(`SELECT count(*) FROM penstock.entry WHERE crashes > 0 OR attempt > 0`); got != 0 {
		t.Errorf("%d entries have a crash or an attempt counted", got)
	}
}

// A batch that meets a unique key in use must neither stop nor lose an entry.
func TestEntriesWhoseUniqueKeyIsInUseAgainAreFreedWithTheOthers(t *testing.T) {
	f := newUsualFleet(t)
	dead := f.register(shortLease)
	unique := func(policy invalidation.UniquePolicy) {
		t.Helper()
		pushed, err := f.q.Push(t.Context(), invalidation.Push{Payload: json.RawMessage(`{}`), UniqueKey: string(policy), UniquePolicy: policy})
		if err != nil || pushed[0].Verdict != invalidation.Inserted {
			t.Fatalf("push under %s: %v, %v", policy, pushed, err)
		}
	}
	policies := []invalidation.UniquePolicy{invalidation.WhileQueued, invalidation.OneRunningOneQueued}
	for _, policy := range policies {
		unique(policy)
	}
	f.push(3, "")
	if got := len(f.claim(dead, 10)); got != 5 {
		t.Fatalf("claimed %d locks, want 5", got)
	}
	for _, policy := range policies {
		unique(policy) // the first one runs: its key is free for another that is queued
	}
	f.lapse(dead, time.Minute)
	f.start(recovery.Config{})
	eventually(t, "every lock of the dead node is freed", func() bool { return f.locks() == 0 })
	alive := f.register(time.Minute) // it sends no heartbeats here; before, recovery would have waited for its lease
	// Entries that recovery released and entries pushed meanwhile all run in the end.
	eventually(t, "every entry is done", func() bool {
		for _, lock := range f.claim(alive, 10) {
			var done []invalidation.Ending
			for i, e := range lock.Entries {
				ending := invalidation.Done(lock, e.ID, nil, time.Millisecond)
				ending.Last = i == len(lock.Entries)-1
				done = append(done, ending)
			}
			if ours, err := f.q.Settle(t.Context(), alive, done); err != nil || len(ours) != 1 {
				t.Fatalf("finish: %v, %v", ours, err)
			}
		}
		return f.count(`SELECT count(*) FROM penstock.entry`) == 0
	})
	if got := f.count(`SELECT count(*) FROM penstock.result WHERE outcome = 'done'`); got != 7 {
		t.Errorf("%d entries are done, want 7", got)
	}
}

// Entries that a node had only claimed count no crash. Several passes: freeing some must not make
// others count.
func TestOnlyWhatADeadNodeCanHaveBegunCountsACrash(t *testing.T) {
	f := newFleet(t, pgtest.New(t), invalidation.Config{CrashLimit: 1})
	dead := f.register(shortLease)
	f.exec(`UPDATE penstock.node SET threads = 2`)
	f.push(102, "")
	running := f.claim(dead, 2) // there is no first lock of another lane for the spare thread
	if n := len(running) + len(f.claim(dead, 100)); n != 102 {
		t.Fatalf("claimed %d locks", n)
	}
	f.lapse(dead, time.Minute)
	f.start(recovery.Config{PassLocksMax: 30})
	eventually(t, "all locks are freed", func() bool { return f.locks() == 0 })
	if n := f.count(`SELECT count(*) FROM penstock.entry WHERE crashes = 0`); n != 100 {
		t.Errorf("%d entries have no crash counted, want the 100 that waited", n)
	}
	if n := f.count(`SELECT count(*) FROM penstock.failure WHERE class = 'poison' AND entry_id = ANY ($1)`,
		[]invalidation.EntryID{running[0].Entries[0].ID, running[1].Entries[0].ID}); n != 2 {
		t.Errorf("%d of the two that ran are dead-lettered", n)
	}
}

func TestEntryThatKillsNodeAfterNodeIsDeadLettered(t *testing.T) {
	f := newFleet(t, pgtest.New(t), invalidation.Config{CrashLimit: 2})
	f.push(1, "")
	duty, _ := f.start(recovery.Config{})
	for range 2 {
		node := f.register(shortLease)
		eventually(t, "the entry can be claimed", func() bool { return len(f.claim(node, 1)) == 1 })
		f.lapse(node, time.Minute)
	}
	eventually(t, "the entry is dead-lettered", func() bool {
		return f.count(`SELECT count(*) FROM penstock.failure WHERE class = 'poison' AND crashes = 2`) == 1
	})
	eventually(t, "it is counted", func() bool { return duty.Status().DeadLettered == 1 })
	if got := f.locks(); got != 0 {
		t.Errorf("%d locks are left", got)
	}
	var history string
	if err := f.pool.QueryRow(t.Context(), `SELECT history::text FROM penstock.failure`).Scan(&history); err != nil {
		t.Fatal(err)
	}
	var crashes []struct{ Node int64 }
	if err := json.Unmarshal([]byte(history), &crashes); err != nil || len(crashes) != 2 || crashes[0].Node != 1 || crashes[1].Node != 2 {
		t.Errorf("history does not name both nodes: %s (%v)", history, err)
	}
}

func TestLockThatCannotBeFreedIsReportedAndHoldsUpNobody(t *testing.T) {
	f := newUsualFleet(t)
	node := f.register(shortLease)
	f.push(3, "")
	locks := f.claim(node, 3)
	f.exec(`INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, pos, last_entry_id, entry_count, cost, priority, flow, claimed_at)
	        VALUES (999, '#1', 0, $1, 1, 1, 1, 1, 1, 1, '', clock_timestamp())`, node)
	// The database refuses to free one of the locks, for any reason.
	f.exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''refused''; END'`)
	f.exec(`CREATE TRIGGER refuse BEFORE DELETE ON penstock.lock FOR EACH ROW WHEN (OLD.token = ` +
		itoa(int64(locks[0].Token)) + `) EXECUTE FUNCTION refuse()`)
	f.lapse(node, time.Minute)
	duty, out := f.start(recovery.Config{PassLocksMax: 1})
	eventually(t, "the other two locks are freed", func() bool { return f.locks() == 2 })
	eventually(t, "both are reported", func() bool {
		return out.contains("queue 999 is not registered") && out.contains("refused")
	})
	eventually(t, "status says 2 stuck and at least as many reports", func() bool {
		s := duty.Status()
		return s.Stuck == 2 && s.Unresolved >= 2
	})
	f.exec(`DROP TRIGGER refuse ON penstock.lock`)
	eventually(t, "the lock is freed once nothing keeps it", func() bool { return f.locks() == 1 })
}

// What another transaction has locked holds up the lock that it belongs to alone.
func TestRowThatATransactionHoldsIsPassedBy(t *testing.T) {
	for name, sql := range map[string]string{
		"lock record": `SELECT FROM penstock.lock WHERE token = $1 AND last_entry_id = $2 FOR UPDATE`,
		"entry":       `SELECT FROM penstock.entry WHERE $1 > 0 AND id = $2 FOR UPDATE`,
	} {
		t.Run(name, func(t *testing.T) {
			f := newUsualFleet(t)
			node := f.register(shortLease)
			f.push(2, "")
			locks := f.claim(node, 2)
			f.lapse(node, time.Minute)
			letGo := f.hold(sql, locks[0].Token, locks[0].Entries[0].ID)
			f.start(recovery.Config{})
			eventually(t, "the other lock is freed", func() bool { return f.locks() == 1 })
			letGo()
			eventually(t, "the lock is freed once no transaction locks it", func() bool { return f.locks() == 0 })
		})
	}
}

func TestDeadNodeIsRemovedOnceItHoldsNoLockAndNoSlot(t *testing.T) {
	f := newUsualFleet(t)
	dead, alive := f.register(shortLease), f.register(aliveLease)
	defer f.keepAlive(alive)()
	f.push(1, "")
	f.claim(dead, 1)
	f.exec(`SELECT penstock.register_model('m', '{"protocol": "openai"}')`)
	f.exec(`SELECT penstock.register_instance('m', 'gpu-1', 'http://gpu-1', 1)`)
	f.exec(`INSERT INTO penstock.slot (instance_id, number, token, node_id) SELECT id, 0, 1, $1 FROM penstock.instance`, alive)
	f.lapse(dead, time.Hour)
	nodes := func(id invalidation.NodeID) int {
		return f.count(`SELECT count(*) FROM penstock.node WHERE id = $1`, id)
	}
	letGo := f.hold(`SELECT FROM penstock.lock FOR UPDATE`) // recovery passes over it
	duty, _ := f.start(recovery.Config{NodeRetention: time.Second})
	passed := func() {
		t.Helper()
		for range 2 { // the first may have begun before
			before := duty.Status().ReadAt
			eventually(t, "another pass", func() bool { return duty.Status().ReadAt.After(before) })
		}
	}
	eventually(t, "recovery is not suspended", func() bool { s := duty.Status(); return s.Stuck == 1 && s.Suspended == "" })
	passed()
	if nodes(dead) != 1 {
		t.Error("the node was removed before its lock was freed")
	}
	f.exec(`UPDATE penstock.slot SET node_id = $1`, dead)
	letGo()
	eventually(t, "the lock is freed", func() bool { return f.locks() == 0 })
	passed()
	if nodes(dead) != 1 {
		t.Error("the node was removed before its slot was freed")
	}
	f.exec(`DELETE FROM penstock.slot`)
	eventually(t, "the dead node is removed", func() bool { return nodes(dead) == 0 })
	if nodes(alive) != 1 {
		t.Error("the live node was removed")
	}
}

func TestNothingIsFreedOnceTheTermIsOver(t *testing.T) {
	f := newUsualFleet(t)
	node := f.register(shortLease)
	f.push(1, "")
	f.claim(node, 1)
	f.lapse(node, time.Minute)
	// The term is over before the first pass: on a busy machine the lock might be freed before it is told so.
	duty := recovery.NewLocks(f.pool, &term{db: f.pool, over: true}, recovery.Config{
		Pause: 20 * time.Millisecond, Log: slog.New(slog.DiscardHandler),
	})
	run(t, duty)
	passed := time.Now().Add(shortLease)
	eventually(t, "several passes after the suspension of a new term", func() bool {
		s := duty.Status()
		return s.Stuck == 1 && s.Suspended == "" && s.ReadAt.After(passed)
	})
	if f.locks() != 1 {
		t.Error("the lock was freed by a leader whose term is over")
	}
}

func TestDutyThatCannotBeKeptEnds(t *testing.T) {
	f := newUsualFleet(t)
	f.exec(`ALTER TABLE penstock.node RENAME TO node_elsewhere`)
	duty := recovery.NewLocks(f.pool, &term{db: f.pool}, recovery.Config{Pause: time.Millisecond}.WithGiveUp(100*time.Millisecond))
	ended := make(chan error, 1)
	go func() { ended <- duty.Run(t.Context()) }()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("the duty ended without saying why")
		}
	case <-time.After(time.Minute):
		t.Error("the duty goes on although it cannot read the nodes")
	}
}

func TestRestartOfPostgresFreesNoLockOfALiveNode(t *testing.T) {
	own := pgtest.Server(t)
	f := newFleet(t, own.Pool(), invalidation.Config{})
	const lease = aliveLease
	nodes := []invalidation.NodeID{f.register(lease), f.register(lease)}
	f.push(4, "")
	held := map[invalidation.NodeID][]*invalidation.Lock{}
	var fallSilent []func()
	for _, n := range nodes {
		held[n] = f.claim(n, 2)
		f.beat(n, held[n]...)
		fallSilent = append(fallSilent, f.keepAlive(n, held[n]...))
	}
	duty, out := f.start(recovery.Config{})
	eventually(t, "recovery is not suspended", func() bool { s := duty.Status(); return !s.ReadAt.IsZero() && s.Suspended == "" })
	for _, stop := range fallSilent {
		stop()
	}
	own.Stop(devpostgres.Crash)
	<-time.After(lease) // while the database is down, every lease lapses
	own.Start()
	eventually(t, "recovery suspends itself", func() bool {
		return out.contains("recovery suspended") && (out.contains("was restarted") || out.contains("out of reach"))
	})
	var beats atomic.Int64
	for _, n := range nodes {
		go func() {
			for t.Context().Err() == nil {
				if _, err := invalidation.Renew(t.Context(), f.pool, n, listing(held[n])); err == nil {
					beats.Add(1)
					return
				}
				time.Sleep(5 * time.Millisecond)
			}
		}()
	}
	eventually(t, "both nodes beat again", func() bool { return beats.Load() == 2 })
	for _, n := range nodes {
		defer f.keepAlive(n, held[n]...)()
	}
	eventually(t, "recovery goes on", func() bool { return duty.Status().Suspended == "" })
	if got := f.locks(); got != 4 {
		t.Errorf("%d of 4 locks of live nodes are left", got)
	}
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }
