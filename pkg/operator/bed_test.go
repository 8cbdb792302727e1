package operator_test

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	. "github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

var ann = By{Actor: "ann", Reason: "it is on fire"}

// queueBed is a database with the queue `work` in it, two registered nodes, and the operator's functions.
type queueBed struct {
	*testing.T
	ctx  context.Context
	pool *pgxpool.Pool
	q    *Queue
	d    *operator.Database
	n    int32 // claims so far
}

// do carries out a verb that takes no time.
func (b *queueBed) do(v operator.Verb, thing any, by By) error {
	switch id := thing.(type) {
	case EntryID:
		thing = int64(id)
	case NodeID:
		thing = int64(id)
	}
	_, err := b.d.Do(b.ctx, v, thing, by, time.Time{})
	return err
}

// did fails the test where a pause was refused.
func (b *queueBed) did(_ *operator.Replaced, err error) {
	b.Helper()
	b.must(err)
}

var usual = Lane{Priority: 1}

const (
	here  NodeID = 7001
	there NodeID = 7002
)

func newQueueBed(t *testing.T, c Config) *queueBed {
	t.Helper()
	b := &queueBed{T: t, ctx: t.Context()}
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
	b.d = operator.New(b.pool)
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

func (b *queueBed) checkInvariants() {
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

func (b *queueBed) push(keys ...string) []EntryID {
	b.Helper()
	return b.pushOn(b.pool, keys...)
}

func (b *queueBed) pushOn(db postgres.DB, keys ...string) []EntryID {
	b.Helper()
	pushes := make([]Push, len(keys))
	for i, key := range keys {
		pushes[i] = Push{Payload: json.RawMessage(fmt.Sprintf(`{"n": %d}`, i+1)), LockKey: key}
	}
	return b.pushAll(db, pushes...)
}

func (b *queueBed) pushAll(db postgres.DB, pushes ...Push) []EntryID {
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

func (b *queueBed) claim(limit int) []*Lock {
	b.Helper()
	return b.claimAs(ClaimRequest{Node: here, Lane: usual, Limit: limit}).Locks
}

func (b *queueBed) claimAs(r ClaimRequest) Claimed {
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
func (b *queueBed) claimOne() *Lock {
	b.Helper()
	locks := b.claim(1)
	if len(locks) != 1 {
		b.Fatalf("claimed %d locks, want one", len(locks))
	}
	return locks[0]
}

func (b *queueBed) settle(endings ...Ending) {
	b.Helper()
	if n := b.settleOn(b.pool, endings...); n != tokensOf(endings) {
		b.Fatalf("%d of %d tokens were ours", n, tokensOf(endings))
	}
}

func (b *queueBed) settleOn(db postgres.DB, endings ...Ending) int {
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

func doneAll(locks ...*Lock) []Ending {
	return endAll(func(l *Lock, e EntryID) Ending { return Done(l, e, nil, time.Millisecond) }, locks...)
}

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

func (b *queueBed) begin() pgx.Tx {
	b.Helper()
	tx, err := b.pool.Begin(b.ctx)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

func (b *queueBed) exec(db postgres.DB, sql string, args ...any) {
	b.Helper()
	if _, err := db.Exec(b.ctx, sql, args...); err != nil {
		b.Fatal(err)
	}
}

func (b *queueBed) count(sql string, args ...any) (n int) {
	b.Helper()
	if err := b.pool.QueryRow(b.ctx, sql, args...).Scan(&n); err != nil {
		b.Fatal(err)
	}
	return n
}

func withPayload(p Push) Push { p.Payload = json.RawMessage(`{}`); return p }

func (b *queueBed) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

func (b *queueBed) want(got, want any) {
	b.Helper()
	g, err := json.Marshal(got)
	b.must(err)
	w, err := json.Marshal(want)
	b.must(err)
	if string(g) != string(w) {
		b.Errorf("got %s, want %s", g, w)
	}
}

func (b *queueBed) cancel(id EntryID) operator.Cancelled {
	b.Helper()
	answer, err := b.d.CancelEntry(b.ctx, int64(id), ann)
	if err != nil {
		b.Fatal(err)
	}
	return answer
}

func (b *queueBed) outcome(id EntryID) Ended {
	b.Helper()
	e, err := Outcome(b.ctx, b.pool, id)
	if err != nil {
		b.Fatal(err)
	}
	return e
}

// reasons are the codes of the explanation of an entry.
func (b *queueBed) reasons(id EntryID) []string {
	b.Helper()
	e, err := b.d.Explain(b.ctx, int64(id))
	b.must(err)
	codes := []string{}
	for _, r := range e.Reasons {
		if r.Text == "" {
			b.Errorf("reason %s of entry %d has no text", r.Code, id)
		}
		codes = append(codes, r.Code)
	}
	slices.Sort(codes)
	return codes
}

func (b *queueBed) again() *Queue {
	b.Helper()
	q, err := Open(b.ctx, b.pool, b.q.Name)
	if err != nil {
		b.Fatal(err)
	}
	return q
}

func (b *queueBed) fail(f Failure) {
	b.Helper()
	b.settle(endAll(func(l *Lock, e EntryID) Ending { return Fail(l, e, f, 0) }, b.claim(1000)...)...)
}

func (b *queueBed) start(o operator.OperationRequest) int64 {
	b.Helper()
	o.Queue, o.By = "work", ann
	id, err := b.d.StartOperation(b.ctx, o)
	b.must(err)
	return id
}

// runOperations steps every running operation until it has ended or is throttled, and returns how much they changed.
func (b *queueBed) runOperations() (total int) {
	b.Helper()
	ids, err := pgx.CollectRows(postgres.Query(b.ctx, b.pool, `SELECT id FROM penstock.operation WHERE status = 'running' ORDER BY id`), pgx.RowTo[int64])
	b.must(err)
	for _, id := range ids {
		var ended bool
		for wait := time.Duration(0); !ended && wait == 0; {
			var n int
			b.must(b.pool.QueryRow(b.ctx, `SELECT changed, wait, ended FROM penstock.step_operation($1)`, id).Scan(&n, &wait, &ended))
			total += n
		}
	}
	return total
}
