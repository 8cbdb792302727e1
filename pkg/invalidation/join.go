package invalidation

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
)

// joiner lets pushes that come at the same time go together. A push that finds fewer than two of the queue under way goes at
// once; those that come meanwhile stand in line, and go as one statement with one commit when one of them has returned: many
// when much happens, none when little does, without a timer. Each caller still gets its own answer after the commit, and all or none
// of what it asked for:
//
//   - An error that the server reports has rolled the statement back. Each call then goes by itself, so that none fails for
//     what another one asked, and none is blamed for it.
//   - Where nobody knows what became of the statement, because the connection is lost, all its callers are told so.
//   - A caller whose context ends leaves at once. The others' push goes on; one that nobody waits for ends.
type joiner struct {
	mu       sync.Mutex
	underWay int
	began    time.Time // the last statement
	line     []*call
	watched  bool // see watch
}

const (
	// joinAtOnce statements may be under way: while one waits for the disk, the server works on the other. With more, there are
	// fewer calls in each: of 16 callers, one pushed 20,000 entries/s, two 27,000, three 24,500, four 21,000.
	joinAtOnce = 2
	// joinEntries and joinBytes bound a statement; a call of more than a tenth of them goes by itself.
	joinEntries, joinBytes = 500, 1 << 20
	// joinPatience is after what time a statement under way does not hold up others any more: it waits for a lock, or its
	// connection is dead.
	joinPatience = time.Second
)

// call is a push that stands in line.
type call struct {
	pushes []Push
	bytes  int
	keyed  bool          // goes with others that have an Idempotency-Key, so that none waits for a lock for long
	load   *load         // that it is part of; nil while it stands in line
	done   chan struct{} // closed when what follows is known

	pushed []Pushed
	err    error
	alone  bool // go by yourself
}

// load is a statement for several calls.
type load struct {
	calls   []*call
	waiting int // callers that have not left
	end     context.CancelFunc
}

// joinable returns how large pushes are, whether one has an Idempotency-Key, and whether they may go with others. Those with a key that is unique wait for
// entries with the same one, and must not let anybody wait with them.
func joinable(pushes []Push) (bytes int, keyed, ok bool) {
	for i := range pushes {
		p := &pushes[i]
		if p.UniqueKey != "" {
			return 0, false, false
		}
		bytes, keyed = bytes+len(p.Payload)+len(p.Callback), keyed || p.IdempotencyKey != ""
	}
	return bytes, keyed, len(pushes) > 0 && len(pushes) <= joinEntries/10 && bytes <= joinBytes/10
}

// pushJoined pushes, with others if there are any.
func (q *Queue) pushJoined(ctx context.Context, pushes []Push) ([]Pushed, error) {
	bytes, keyed, ok := joinable(pushes)
	if !ok || q.joiner == nil || q.inside() {
		return q.pushAlone(ctx, pushes)
	}
	c := q.joiner.enter(pushes, bytes, keyed)
	if c == nil {
		pushed, err := q.pushTogether(ctx, pushes, keyed)
		q.joiner.leave(q)
		if err != nil && postgres.Code(err) == lockNotAvailable {
			return q.pushAlone(ctx, pushes)
		}
		return pushed, err
	}
	q.joiner.watch(q)
	select {
	case <-c.done:
	case <-ctx.Done():
		q.joiner.abandon(c)
		return nil, ctx.Err()
	}
	if c.alone {
		return q.pushAlone(ctx, pushes)
	}
	return c.pushed, c.err
}

// enter returns nil if the push may go at once, leave must follow; else it stands in line.
func (j *joiner) enter(pushes []Push, bytes int, keyed bool) *call {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.underWay < joinAtOnce || j.hangs() {
		j.underWay++
		j.began = time.Now()
		return nil
	}
	c := &call{pushes: copied(pushes), bytes: bytes, keyed: keyed, done: make(chan struct{})}
	j.line = append(j.line, c)
	return c
}

// hangs says that what is under way holds up others for too long.
func (j *joiner) hangs() bool { return time.Since(j.began) > joinPatience }

// watch lets those in line go where what is under way hangs: nobody else may come who would.
func (j *joiner) watch(q *Queue) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.watched || len(j.line) == 0 {
		return
	}
	j.watched = true
	time.AfterFunc(joinPatience, func() {
		late := j.late()
		j.watch(q)
		for late && j.next(q) {
		}
	})
}

// late ends a watch. If those in line are to go, that counts as under way.
func (j *joiner) late() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.watched = false
	if len(j.line) == 0 || !j.hangs() {
		return false
	}
	j.underWay++
	j.began = time.Now()
	return true
}

// copied is for a caller that leaves, and uses its memory again, while its push is under way.
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

// leave ends a push that went at once. Somebody else goes on for those who stand in line: its caller has its answer.
func (j *joiner) leave(q *Queue) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.line) == 0 {
		j.underWay--
		return
	}
	go func() {
		for j.next(q) {
		}
	}()
}

// next pushes for those who are first in line, and says whether there were any.
func (j *joiner) next(q *Queue) bool {
	ctx, l := j.load()
	if l == nil {
		return false
	}
	defer l.end()
	var pushes []Push
	for _, c := range l.calls {
		pushes = append(pushes, c.pushes...)
	}
	pushed, err := q.pushTogether(ctx, pushes, l.calls[0].keyed)
	for _, c := range l.calls {
		if err != nil {
			c.err, c.alone = err, rolledBack(err)
		} else {
			n := len(c.pushes)
			c.pushed, pushed = pushed[:n:n], pushed[n:]
		}
		close(c.done)
	}
	runtime.Gosched() // those who were answered may have more to push: it goes with the next load
	return true
}

// pushTogether pushes while others wait. An Idempotency-Key that somebody uses in a transaction under way is not waited for:
// lockNotAvailable.
func (q *Queue) pushTogether(ctx context.Context, pushes []Push, keyed bool) ([]Pushed, error) {
	if !keyed {
		return q.pushAlone(ctx, pushes)
	}
	var ids []EntryID
	var verdicts []Verdict
	batch := &pgx.Batch{}
	batch.Queue(`SELECT set_config('lock_timeout', '250ms', true)`)
	batch.Queue(pushSQL, pushColumns(q.Name, pushes)...).QueryRow(func(row pgx.Row) error { return row.Scan(&ids, &verdicts) })
	if err := q.db.SendBatch(ctx, batch).Close(); err != nil {
		return nil, err
	}
	return answers(ids, verdicts), nil
}

// load takes the first in line; nil if there is nobody.
func (j *joiner) load() (context.Context, *load) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.line) == 0 {
		j.underWay--
		return nil, nil
	}
	ctx, end := context.WithCancel(context.Background())
	l, n, entries, bytes := &load{end: end}, 0, 0, 0
	for ; n < len(j.line) && entries < joinEntries && bytes < joinBytes && j.line[n].keyed == j.line[0].keyed; n++ {
		c := j.line[n]
		c.load = l
		entries, bytes = entries+len(c.pushes), bytes+c.bytes
	}
	l.calls, l.waiting = slices.Clone(j.line[:n]), n
	j.line = slices.Delete(j.line, 0, n)
	j.began = time.Now()
	return ctx, l
}

// abandon is for a caller that does not wait any more.
func (j *joiner) abandon(c *call) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if c.load == nil {
		j.line = slices.DeleteFunc(j.line, func(other *call) bool { return other == c })
		return
	}
	if c.load.waiting--; c.load.waiting == 0 {
		c.load.end()
	}
}

// rolledBack says that the server refused a statement and lives on, so that nothing of it was done. A server process that
// was ended says nothing about what it had done before.
func rolledBack(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.SeverityUnlocalized == "ERROR" && !postgres.Unavailable(err)
}
