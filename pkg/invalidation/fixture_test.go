package invalidation

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

// bed is a database with one queue in it, and the few verbs that tests are told in.
type bed struct {
	*testing.T
	ctx  context.Context
	pool *pgxpool.Pool
	q    *Queue
	n    int32 // claims so far
}

// usual is the lane of entries that name neither priority nor flow.
var usual = Lane{Priority: 1}

const (
	here  NodeID = 7001
	there NodeID = 7002
)

// newBed makes a database and a queue; when the test ends, the invariants must hold.
func newBed(t *testing.T, c Config) *bed {
	t.Helper()
	b := &bed{T: t, ctx: t.Context()}
	var q *Queue
	var err error
	if reflect.ValueOf(c).IsZero() {
		b.pool = openOn(t, pgtest.Prepared(t, "work", func(ctx context.Context, pool *pgxpool.Pool) error {
			_, err := Create(ctx, pool, "work", Config{})
			return err
		}))
		q, err = Open(b.ctx, b.pool, "work")
	} else {
		b.pool = openPool(t)
		q, err = Create(b.ctx, b.pool, "work", c)
	}
	if err != nil {
		t.Fatal(err)
	}
	b.q = q
	for id, name := range map[NodeID]string{here: "here", there: "there"} {
		n := Node{ID: id, Name: name, Application: "default", Lease: time.Hour, Queues: []int32{q.ID}}
		if err := Register(b.ctx, b.pool, n); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if !t.Failed() {
			b.checkInvariants()
		}
	})
	return b
}

func openPool(t testing.TB) *pgxpool.Pool {
	t.Helper()
	return openOn(t, pgtest.DSN(t))
}

func openOn(t testing.TB, dsn string) *pgxpool.Pool {
	t.Helper()
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: dsn, MaxConns: 24})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// checkInvariants asks the schema, in a context that outlives the test's.
func (b *bed) checkInvariants() {
	b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	rows, err := b.pool.Query(ctx, `SELECT invariant || ': ' || detail FROM penstock.check_invariants()`)
	if err != nil {
		b.Fatal(err)
	}
	broken, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		b.Fatal(err)
	}
	for _, what := range broken {
		b.Errorf("broken: %s", what)
	}
}

// push pushes one entry for each key, solo for an empty one; its payload says which it was, counted from 1.
func (b *bed) push(keys ...string) []EntryID {
	b.Helper()
	return b.pushOn(b.pool, keys...)
}

func (b *bed) pushOn(db postgres.DB, keys ...string) []EntryID {
	b.Helper()
	pushes := make([]Push, len(keys))
	for i, key := range keys {
		pushes[i] = Push{Payload: json.RawMessage(fmt.Sprintf(`{"n": %d}`, i+1)), LockKey: key}
	}
	return b.pushAll(db, pushes...)
}

func (b *bed) pushAll(db postgres.DB, pushes ...Push) []EntryID {
	b.Helper()
	for i := range pushes {
		if pushes[i].Payload == nil {
			pushes[i].Payload = json.RawMessage(`{}`)
		}
	}
	pushed, err := b.q.WithTx(db).Push(b.ctx, pushes...)
	if err != nil {
		b.Fatal(err)
	}
	ids := make([]EntryID, len(pushed))
	for i, p := range pushed {
		ids[i] = p.ID
	}
	return ids
}

// claim claims up to limit locks of the usual lane, from its head, for this node.
func (b *bed) claim(limit int) []*Lock {
	b.Helper()
	return b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: limit}).Locks
}

func (b *bed) claimAs(r ClaimRequest) Claimed {
	b.Helper()
	b.n++
	r.ClaimID = b.n
	c, err := b.q.Claim(b.ctx, r)
	if err != nil {
		b.Fatal(err)
	}
	return c
}

// claimOne claims the one lock that must be there.
func (b *bed) claimOne() *Lock {
	b.Helper()
	locks := b.claim(1)
	if len(locks) != 1 {
		b.Fatalf("claimed %d locks, want one", len(locks))
	}
	return locks[0]
}

// locksIn are the locks of an answer to a claim.
func locksIn(c Claimed, err error) ([]*Lock, error) { return c.Locks, err }

// settle records endings and wants every token to be ours still.
func (b *bed) settle(endings ...Ending) {
	b.Helper()
	if n := b.settleOn(b.pool, endings...); n != tokensOf(endings) {
		b.Fatalf("%d of %d tokens were ours", n, tokensOf(endings))
	}
}

// settleOn returns how many tokens were still ours.
func (b *bed) settleOn(db postgres.DB, endings ...Ending) int {
	b.Helper()
	ours, err := b.q.WithTx(db).Settle(b.ctx, here, endings)
	if err != nil {
		b.Fatal(err)
	}
	return len(ours)
}

func tokensOf(endings []Ending) int {
	tokens := map[Token]bool{}
	for _, e := range endings {
		tokens[e.Lock.Token] = true
	}
	return len(tokens)
}

// doneAll ends every entry of the locks well.
func doneAll(locks ...*Lock) []Ending {
	return endAll(func(l *Lock, e EntryID) Ending { return Done(l, e, nil, time.Millisecond) }, locks...)
}

// releaseAll hands every lock back at once.
func releaseAll(locks ...*Lock) []Ending {
	return endAll(func(l *Lock, e EntryID) Ending { return Release(l, e, 0) }, locks...)
}

func endAll(end func(*Lock, EntryID) Ending, locks ...*Lock) []Ending {
	var endings []Ending
	for _, l := range locks {
		for i, e := range l.Entries {
			ending := end(l, e.ID)
			ending.Last = i == len(l.Entries)-1
			endings = append(endings, ending)
		}
	}
	return endings
}

func last(e Ending) Ending { e.Last = true; return e }

func entryIDs(locks ...*Lock) []EntryID {
	var ids []EntryID
	for _, l := range locks {
		for _, e := range l.Entries {
			ids = append(ids, e.ID)
		}
	}
	return ids
}

// refs are the names of locks, for Recover.
func refs(held []HeldLock) []LockRef {
	all := make([]LockRef, len(held))
	for i, l := range held {
		all[i] = l.LockRef
	}
	return all
}

// begin opens a transaction that the test holds open; it is rolled back at the end unless it was ended before.
func (b *bed) begin() pgx.Tx {
	b.Helper()
	tx, err := b.pool.Begin(b.ctx)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

func (b *bed) commit(tx pgx.Tx) {
	b.Helper()
	if err := tx.Commit(b.ctx); err != nil {
		b.Fatal(err)
	}
}

func (b *bed) exec(db postgres.DB, sql string, args ...any) {
	b.Helper()
	if _, err := db.Exec(b.ctx, sql, args...); err != nil {
		b.Fatal(err)
	}
}

func (b *bed) count(sql string, args ...any) (n int) {
	b.Helper()
	if err := b.pool.QueryRow(b.ctx, sql, args...).Scan(&n); err != nil {
		b.Fatal(err)
	}
	return n
}

// awaitBlocked returns when somebody waits for tx: the event that opens a race window.
func (b *bed) awaitBlocked(tx pgx.Tx) {
	b.Helper()
	b.awaitBlockedBy(tx.Conn().PgConn().PID())
}

// awaitBlockedBy is awaitBlocked for the session of a server process.
func (b *bed) awaitBlockedBy(pid uint32) {
	b.Helper()
	deadline := time.Now().Add(time.Minute)
	for b.count(`SELECT count(*) FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid))`, pid) == 0 {
		if time.Now().After(deadline) {
			b.Fatal("nobody waits for the transaction")
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// gate is a transaction for which inserts of lock records of node `there` wait once they have drawn their token.
// where is a condition on the record, NEW.
func (b *bed) gate(where string) pgx.Tx {
	b.Helper()
	b.exec(b.pool, `CREATE FUNCTION public.gate() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS
	                $$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NEW; END $$`)
	b.exec(b.pool, fmt.Sprintf(`CREATE TRIGGER gate BEFORE INSERT ON penstock.lock FOR EACH ROW
	                WHEN (NEW.node_id = %d AND %s) EXECUTE FUNCTION public.gate()`, there, where))
	tx := b.begin()
	b.exec(tx, `SELECT pg_advisory_xact_lock(4711)`)
	return tx
}

// later runs fn beside the test; the returned function waits for it and fails the test if it failed.
func later[T any](b *bed, fn func() (T, error)) func() T {
	type answer struct {
		value T
		err   error
	}
	done := make(chan answer, 1)
	go func() {
		v, err := fn()
		done <- answer{v, err}
	}()
	return func() T {
		b.Helper()
		select {
		case a := <-done:
			if a.err != nil {
				b.Fatal(a.err)
			}
			return a.value
		case <-time.After(time.Minute):
			b.Fatal("the other side never came back")
			panic("unreachable")
		}
	}
}

func withPayload(p Push) Push { p.Payload = json.RawMessage(`{}`); return p }
