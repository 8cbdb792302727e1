package invalidation

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
)

// batcher commits pushes that come at the same time as a group. A push that finds fewer than two statements
// of the queue running goes at once; those that come meanwhile wait, and go as one statement with one commit
// when one of the running statements has returned: large batches under load, none without, and no timer. Each
// caller still gets its own answer after the commit, and all or none of the entries that it pushed:
//
//   - An error that the server reports has rolled the statement back. Each call is then repeated in a statement of its
//     own, so that no call fails for an entry of another one, and each error names the right entry.
//   - Where the outcome of the statement is unknown, because the connection is lost, all its callers get that error.
//   - A caller whose context ends leaves at once. The batch goes on for the others; one without callers is cancelled.
type batcher struct {
	mu      sync.Mutex
	running int       // statements
	began   time.Time // the last statement
	waiting []*call
	watched bool // see watch

	pushing atomic.Int32 // pushes that are under way outside transactions of callers, also those that go by themselves
}

const (
	// batchesMax statements may run: while one waits for the disk, the server works on the other. With more, there are
	// fewer calls in each: of 16 callers, one pushed 20,000 entries/s, two 27,000, three 24,500, four 21,000.
	batchesMax = 2
	// batchEntries and batchBytes bound a batch; a call of more than a tenth of them goes by itself.
	batchEntries, batchBytes = 500, 1 << 20
	// batchPatience is how long a running statement may hold up others. One that takes longer waits for a lock, or its
	// connection is dead.
	batchPatience = time.Second
)

// call is a push that waits for its batch.
type call struct {
	pushes []Push
	bytes  int
	keyed  bool          // goes with others that have an Idempotency-Key, so that none waits for a lock for long
	batch  *batch        // nil while it waits
	done   chan struct{} // closed when the fields below are set

	pushed []Pushed
	err    error
	repeat bool // in a statement of its own
}

// batch is a statement for several calls.
type batch struct {
	calls   []*call
	callers int // that have not left
	cancel  context.CancelFunc
}

// batchable returns the size of pushes, whether one has an Idempotency-Key, and whether they may share a
// statement. Those with a unique key may not: they wait for open transactions that push the same one, and
// others must not wait with them.
func batchable(pushes []Push) (bytes int, keyed, ok bool) {
	for i := range pushes {
		p := &pushes[i]
		if p.UniqueKey != "" {
			return 0, false, false
		}
		bytes, keyed = bytes+len(p.Payload)+len(p.Callback), keyed || p.IdempotencyKey != ""
	}
	return bytes, keyed, len(pushes) > 0 && len(pushes) <= batchEntries/10 && bytes <= batchBytes/10
}

// pushBatched pushes, in a batch with others if there are any.
func (q *Queue) pushBatched(ctx context.Context, pushes []Push) ([]Pushed, error) {
	if q.batcher == nil || q.onTx() {
		return q.pushStatement(ctx, pushes)
	}
	q.batcher.pushing.Add(1)
	defer q.batcher.pushing.Add(-1)
	bytes, keyed, ok := batchable(pushes)
	if !ok {
		return q.pushStatement(ctx, pushes)
	}
	c := q.batcher.enter(pushes, bytes, keyed)
	if c == nil {
		pushed, err := q.pushBatch(ctx, pushes, keyed)
		q.batcher.leave(q)
		if err != nil && postgres.Code(err) == postgres.LockNotAvailable {
			return q.pushStatement(ctx, pushes)
		}
		return pushed, err
	}
	q.batcher.watch(q)
	select {
	case <-c.done:
	case <-ctx.Done():
		q.batcher.abandon(c)
		return nil, ctx.Err()
	}
	if c.repeat {
		return q.pushStatement(ctx, pushes)
	}
	return c.pushed, c.err
}

// enter returns no call if the push may go at once, and leave must follow; otherwise a call that waits.
func (b *batcher) enter(pushes []Push, bytes int, keyed bool) (waits *call) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.running < batchesMax || b.hangs() {
		b.running++
		b.began = time.Now()
		return nil
	}
	c := &call{pushes: copied(pushes), bytes: bytes, keyed: keyed, done: make(chan struct{})}
	b.waiting = append(b.waiting, c)
	return c
}

// hangs reports that the running statements hold up others for too long.
func (b *batcher) hangs() bool { return time.Since(b.began) > batchPatience }

// watch starts a batch of the waiting calls where the running statements hang: no other event would.
func (b *batcher) watch(q *Queue) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.watched || len(b.waiting) == 0 {
		return
	}
	b.watched = true
	time.AfterFunc(batchPatience, func() {
		overdue := b.overdue()
		b.watch(q)
		for overdue && b.runNext(q) {
		}
	})
}

// overdue ends a watch, and reports whether the waiting calls are to go now. If so, that counts as running.
func (b *batcher) overdue() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.watched = false
	if len(b.waiting) == 0 || !b.hangs() {
		return false
	}
	b.running++
	b.began = time.Now()
	return true
}

// copied is for a caller that leaves, and uses its memory again, while its push is running.
func copied(pushes []Push) []Push {
	pushes = slices.Clone(pushes)
	for i := range pushes {
		p := &pushes[i]
		p.Payload, p.Callback = slices.Clone(p.Payload), slices.Clone(p.Callback)
		if p.Priority != nil {
			priority := *p.Priority
			p.Priority = &priority
		}
	}
	return pushes
}

// leave ends a push that went at once. Its caller has the answer, so that a new goroutine goes on with the
// waiting calls.
func (b *batcher) leave(q *Queue) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.waiting) == 0 {
		b.running--
		return
	}
	go func() {
		for b.runNext(q) {
		}
	}()
}

// runNext pushes the next batch and reports whether there was one.
func (b *batcher) runNext(q *Queue) bool {
	ctx, next := b.next()
	if next == nil {
		return false
	}
	defer next.cancel()
	var pushes []Push
	for _, c := range next.calls {
		pushes = append(pushes, c.pushes...)
	}
	pushed, err := q.pushBatch(ctx, pushes, next.calls[0].keyed)
	for _, c := range next.calls {
		if err != nil {
			c.err, c.repeat = err, rolledBack(err)
		} else {
			n := len(c.pushes)
			c.pushed, pushed = pushed[:n:n], pushed[n:]
		}
		close(c.done)
	}
	runtime.Gosched() // callers that were answered may have more to push: it goes with the next batch
	return true
}

// pushBatch pushes while others wait. It does not wait for an Idempotency-Key that is used in an open transaction:
// lock_not_available.
func (q *Queue) pushBatch(ctx context.Context, pushes []Push, keyed bool) ([]Pushed, error) {
	if !keyed {
		return q.pushStatement(ctx, pushes)
	}
	pushed, err := pushMany(ctx, impatient(q.db), q.Name, pushes)
	if err == nil {
		q.hinter.HintLanes(q.ID, q.lanes(pushes))
	}
	return pushed, err
}

// impatient runs statements that wait for locks of others for a moment only.
func impatient(db postgres.DB) query {
	return func(ctx context.Context, sql string, args []any, read func(pgx.Rows) error) error {
		statements := &pgx.Batch{}
		statements.Queue(`SELECT set_config('lock_timeout', '250ms', true)`)
		statements.Queue(sql, args...).Query(read)
		return db.SendBatch(ctx, statements).Close()
	}
}

// next takes the calls that have waited longest; nil if there is none.
func (b *batcher) next() (context.Context, *batch) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.waiting) == 0 {
		b.running--
		return nil, nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	next := &batch{cancel: cancel}
	n, entries, bytes := 0, 0, 0
	for ; n < len(b.waiting) && entries < batchEntries && bytes < batchBytes &&
		b.waiting[n].keyed == b.waiting[0].keyed; n++ {
		c := b.waiting[n]
		c.batch = next
		entries, bytes = entries+len(c.pushes), bytes+c.bytes
	}
	next.calls, next.callers = slices.Clone(b.waiting[:n]), n
	b.waiting = slices.Delete(b.waiting, 0, n)
	b.began = time.Now()
	return ctx, next
}

// abandon is for a caller that does not wait any more.
func (b *batcher) abandon(c *call) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.batch == nil {
		b.waiting = slices.DeleteFunc(b.waiting, func(other *call) bool { return other == c })
		return
	}
	c.batch.callers--
	if c.batch.callers == 0 {
		c.batch.cancel()
	}
}

// rolledBack reports that the server refused a statement and lives on, so that the statement changed nothing.
// The error of a server process that was terminated does not tell what it had committed before.
func rolledBack(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.SeverityUnlocalized == "ERROR" && !postgres.Unavailable(err)
}
