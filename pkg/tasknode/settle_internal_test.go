package tasknode

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Endings go together as long as a message holds them: one of 1 GB would be refused, and sent again for ever.
func TestEndingsOfATransactionFitIntoAMessage(t *testing.T) {
	large := json.RawMessage(`"` + strings.Repeat("a", 10<<20) + `"`)
	done := func(result json.RawMessage) invalidation.Ending {
		return invalidation.Done(&invalidation.Lock{}, 1, result, 0)
	}
	var small, mixed []invalidation.Ending
	for range 2 * settleMax {
		small = append(small, done(nil))
	}
	for range 10 {
		mixed = append(mixed, done(large))
	}
	for _, c := range []struct {
		name    string
		endings []invalidation.Ending
		want    int
	}{
		{"none", nil, 0},
		{"few", small[:7], 7},
		{"many", small, settleMax},
		{"large", mixed, 3},
		{"one that is larger alone", []invalidation.Ending{done(json.RawMessage(strings.Repeat("a", settleBytesMax+1))), done(nil)}, 1},
	} {
		if got := fitting(c.endings); got != c.want {
			t.Errorf("%s: %d of %d go together, want %d", c.name, got, len(c.endings), c.want)
		}
	}
}

// limited is a database that ends statements which settle more than max entries.
type limited struct {
	*pgxpool.Pool
	max  int
	code string
	// statements that settle, and those that were ended
	settled, ended int
}

func (l *limited) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if strings.Contains(sql, "unnest($2::bigint[], $3::bigint[], $4::jsonb[]") {
		l.settled++
		if ids, ok := args[1].(pgtype.ArrayGetter); ok && int(ids.Dimensions()[0].Length) > l.max {
			l.ended++
			return nil, &pgconn.PgError{Severity: "ERROR", Code: l.code}
		}
	}
	return l.Pool.Query(ctx, sql, args...)
}

// A batch that cannot be recorded in time was sent again for ever, while heartbeats listed its locks. One with a row that
// is refused was sent row by row.
func TestABatchThatCannotBeRecordedIsDivided(t *testing.T) {
	for code, most := range map[string]int{
		"57014": 2*(1+2+4+8) + 16, // each size twice, up to the one that is recorded
		"22P02": 1 + 2 + 4 + 8 + 16,
	} {
		t.Run(code, func(t *testing.T) {
			const entries, fit = 64, 4
			db := &limited{Pool: pgtest.New(t), max: fit, code: code}
			q, err := invalidation.Create(t.Context(), db.Pool, "work", invalidation.Config{})
			if err != nil {
				t.Fatal(err)
			}
			pushes := make([]invalidation.Push, entries)
			for i := range pushes {
				pushes[i].Payload = json.RawMessage(`1`)
			}
			if _, err := q.Push(t.Context(), pushes...); err != nil {
				t.Fatal(err)
			}
			n := New(Config{Log: slog.New(slog.DiscardHandler)}, db, db)
			if err := n.register(t.Context()); err != nil {
				t.Fatal(err)
			}
			claimed, err := q.Claim(t.Context(), invalidation.ClaimRequest{
				Node: n.ID(), ClaimID: 1, Lane: invalidation.Lane{Priority: 1}, Limit: entries,
			})
			if err != nil || len(claimed.Locks) != entries {
				t.Fatalf("claimed %d locks: %v", len(claimed.Locks), err)
			}
			p := pile{queue: q.WithTx(db)}
			for _, l := range claimed.Locks {
				j := assigned()
				j.lock, j.reserved.node, j.reserved.queue = l, n, j.served
				n.jobs.add(j)
				p.endings = append(p.endings, last(invalidation.Done(l, l.Entries[0].ID, nil, 0)))
				p.jobs = append(p.jobs, j)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			n.record(ctx, p, true)
			var left int
			err = db.QueryRow(t.Context(), `SELECT count(*) FROM penstock.lock`).Scan(&left)
			if err != nil || left > 0 || n.stats.Unrecorded.Load() > 0 {
				t.Errorf("%d locks are left, %d endings unrecorded (%v)", left, n.stats.Unrecorded.Load(), err)
			}
			if db.settled > most {
				t.Errorf("%d statements, %d of them ended, want at most %d", db.settled, db.ended, most)
			}
		})
	}
}

// unlet is a database that lets the first session for a statement which settles not begin.
type unlet struct {
	*pgxpool.Pool
	nobody string // the address of a role that does not exist
	tries  int
}

func (u *unlet) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if strings.Contains(sql, "unnest($2::bigint[], $3::bigint[], $4::jsonb[]") {
		if u.tries++; u.tries == 1 {
			_, err := pgx.Connect(ctx, u.nobody)
			return nil, err
		}
	}
	return u.Pool.Query(ctx, sql, args...)
}

// The password of a node's role was changed while it ran, and its pool needed one more connection.
func TestAnEndingIsKeptWhileNoSessionBegins(t *testing.T) {
	s := newSettling(t, 1, "")
	address, err := url.Parse(s.db.Config().ConnString())
	if err != nil {
		t.Fatal(err)
	}
	address.User = url.UserPassword("no_such_role", "x")
	db := &unlet{Pool: s.db, nobody: address.String()}
	l := s.jobs[0].lock
	s.node.record(t.Context(), pile{
		queue: s.queue.WithTx(db), jobs: s.jobs,
		endings: []invalidation.Ending{last(invalidation.Done(l, l.Entries[0].ID, nil, 0))},
	}, true)
	var left int
	err = s.db.QueryRow(t.Context(), `SELECT count(*) FROM penstock.lock`).Scan(&left)
	if lost := s.node.stats.Unrecorded.Load(); err != nil || left > 0 || lost > 0 || db.tries != 2 {
		t.Errorf("%d locks are left and %d endings lost after %d tries (%v)", left, lost, db.tries, err)
	}
}

// silent is a database whose first statement that settles goes on after its client was told of no answer.
type silent struct {
	*pgxpool.Pool
	tx pgx.Tx
}

func (u *silent) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if u.tx != nil || !strings.Contains(sql, "unnest($2::bigint[], $3::bigint[], $4::jsonb[]") {
		return u.Pool.Query(ctx, sql, args...)
	}
	var err error
	if u.tx, err = u.Begin(ctx); err != nil {
		return nil, err
	}
	if _, err = u.tx.Exec(ctx, sql, args...); err != nil {
		return nil, err
	}
	return nil, &pgconn.PgError{Severity: "ERROR", Code: "57014"}
}

// A statement without an answer keeps its rows locked until it has ended: the endings are deferred, and were recorded.
func TestAnEndingThatWasRecordedWithoutAnAnswerIsNotRefused(t *testing.T) {
	s := newSettling(t, 1, "")
	db, l := &silent{Pool: s.db}, s.jobs[0].lock
	busy := s.node.record(t.Context(), pile{
		queue: s.queue.WithTx(db), jobs: s.jobs,
		endings: []invalidation.Ending{last(invalidation.Done(l, l.Entries[0].ID, nil, 0))},
	}, true)
	if len(busy.endings) != 1 {
		t.Fatalf("%d endings are busy, want that whose statement has not ended", len(busy.endings))
	}
	if err := db.tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.node.record(t.Context(), busy, false)
	if refused, repeated := s.node.stats.Refused.Load(), s.node.stats.Repeated.Load(); refused != 0 || repeated != 1 {
		t.Errorf("%d endings were refused and %d were recorded before, want one of these", refused, repeated)
	}
}

// What a try without an answer may have recorded is known once the lock was found: later endings of it may be refused.
// Where the lock is gone, all of its endings were recorded, however many batches they are divided into.
func TestAnEndingBehindATryWithoutAnAnswerIsRefused(t *testing.T) {
	for _, gone := range []bool{false, true} {
		s := newSettling(t, 2, "K")
		l := s.jobs[0].lock
		s.jobs[0].unanswered = true
		record := func(e invalidation.Ending) {
			s.node.record(t.Context(), pile{queue: s.queue, jobs: s.jobs, endings: []invalidation.Ending{e}}, false)
		}
		lose := func() {
			if _, err := s.db.Exec(t.Context(), `DELETE FROM penstock.lock`); err != nil {
				t.Fatal(err)
			}
		}
		wanted := [2]int64{1, 0}
		if gone {
			lose()
			wanted = [2]int64{0, 2}
		}
		record(invalidation.Done(l, l.Entries[0].ID, nil, 0))
		lose()
		record(last(invalidation.Done(l, l.Entries[1].ID, nil, 0)))
		if got := [2]int64{s.node.stats.Refused.Load(), s.node.stats.Repeated.Load()}; got != wanted {
			t.Errorf("lock gone %t: %d endings refused and recorded before, want %d", gone, got, wanted)
		}
	}
}

// settling is a node with n claimed entries of queue work, whose endings are recorded until the test ends.
type settling struct {
	*testing.T
	db    *pgxpool.Pool
	node  *Node
	queue *invalidation.Queue
	jobs  []*job
}

func newSettling(t *testing.T, entries int, lockKey string) *settling {
	t.Helper()
	s := &settling{T: t, db: pgtest.New(t)}
	var err error
	if s.queue, err = invalidation.Create(t.Context(), s.db, "work", invalidation.Config{}); err != nil {
		t.Fatal(err)
	}
	pushes := make([]invalidation.Push, entries)
	for i := range pushes {
		pushes[i].Payload, pushes[i].LockKey = json.RawMessage(`1`), lockKey
	}
	if _, err := s.queue.Push(t.Context(), pushes...); err != nil {
		t.Fatal(err)
	}
	s.node = New(Config{Log: slog.New(slog.DiscardHandler), Lease: 2 * awaitMax}, s.db, s.db)
	if err := s.node.register(t.Context()); err != nil {
		t.Fatal(err)
	}
	claimed, err := s.queue.Claim(t.Context(), invalidation.ClaimRequest{
		Node: s.node.ID(), ClaimID: 1, Lane: invalidation.Lane{Priority: 1}, Limit: entries,
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range claimed.Locks {
		j := assigned()
		j.queue, j.lock, j.reserved.node, j.reserved.queue = s.queue, l, s.node, j.served
		s.node.jobs.add(j)
		s.jobs = append(s.jobs, j)
	}
	var workers sync.WaitGroup
	for range 2 {
		workers.Go(func() { s.node.settle(t.Context()) })
	}
	t.Cleanup(func() {
		s.node.settler.close()
		workers.Wait()
	})
	return s
}

// hold locks an entry in another transaction, and returns what ends that.
func (s *settling) hold(e invalidation.EntryID) (release func()) {
	s.Helper()
	tx, err := s.db.Begin(s.Context())
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	if _, err := tx.Exec(s.Context(), `SELECT FROM penstock.entry WHERE id = $1 FOR UPDATE`, e); err != nil {
		s.Fatal(err)
	}
	return func() {
		if err := tx.Rollback(s.Context()); err != nil {
			s.Error(err)
		}
	}
}

// awaitMax is how long an ending may take that waits for no row. One that waits for a row takes two leases.
const awaitMax = time.Minute

// await waits until so many entries are left.
func (s *settling) await(left int) {
	s.Helper()
	for start := time.Now(); ; time.Sleep(time.Millisecond) {
		var n int
		if err := s.db.QueryRow(s.Context(), `SELECT count(*) FROM penstock.entry`).Scan(&n); err != nil {
			s.Fatal(err)
		}
		if n == left {
			return
		}
		if time.Since(start) > awaitMax {
			s.Fatalf("%d entries are left, want %d", n, left)
		}
	}
}

func (s *settling) end(jobs ...*job) {
	for _, j := range jobs {
		s.node.settler.add(j, last(invalidation.Done(j.lock, j.lock.Entries[0].ID, nil, 0)))
	}
}

// The key of an entry that was handed back keeps its position and its delay, whatever becomes of the others of its lock.
func TestAResultThatIsRefusedLeavesTheKeyItsPosition(t *testing.T) {
	s := newSettling(t, 2, "K")
	j := s.jobs[0]
	if _, err := s.db.Exec(t.Context(), `UPDATE penstock.lock SET pos = pos + 1000`); err != nil {
		t.Fatal(err)
	}
	back, refused := j.lock.Entries[0].ID, j.lock.Entries[1].ID
	s.node.settler.add(j, invalidation.Release(j.lock, back, time.Hour),
		last(invalidation.Done(j.lock, refused, json.RawMessage(`"\u0000"`), 0)))
	s.await(1)
	var kept bool
	if err := s.db.QueryRow(t.Context(), `SELECT pos = $1 AND not_before IS NOT NULL FROM penstock.ready
		WHERE lock_key = 'K'`, back+1000).Scan(&kept); err != nil || !kept {
		t.Errorf("the key lost its position or its delay (%v)", err)
	}
}

// A row that another transaction keeps locked holds up its own ending, and neither the others of the batch nor those
// that come behind it.
func TestARowThatIsHeldHoldsUpNoOtherEnding(t *testing.T) {
	const entries, late = 1000, 10
	s := newSettling(t, entries, "")
	release := s.hold(s.jobs[entries/2].lock.Entries[0].ID)
	s.end(s.jobs[late:]...)
	s.await(1 + late)
	s.end(s.jobs[:late]...)
	s.await(1) // those that came behind
	release()
	s.await(0)
	if n := s.node.stats.Refused.Load() + s.node.stats.Unrecorded.Load(); n != 0 {
		t.Errorf("%d endings were refused or left to recovery", n)
	}
}

// The endings of a lock stay in their order: those behind one that is held wait with it, also those that come later.
func TestEndingsOfALockWaitForOneThatIsHeld(t *testing.T) {
	s := newSettling(t, 3, "k")
	j := s.jobs[0]
	id := func(i int) invalidation.EntryID { return j.lock.Entries[i].ID }
	release := s.hold(id(0))
	s.node.settler.add(j, invalidation.Done(j.lock, id(0), nil, 0), invalidation.Done(j.lock, id(1), nil, 0))
	deferred := func() bool {
		s.node.settler.mu.Lock()
		defer s.node.settler.mu.Unlock()
		return s.node.settler.deferred == 1
	}
	for start := time.Now(); !deferred(); time.Sleep(time.Millisecond) {
		if time.Since(start) > awaitMax {
			t.Fatal("the lock is not deferred")
		}
	}
	s.node.settler.add(j, last(invalidation.Done(j.lock, id(2), nil, 0)))
	release()
	s.await(0)
	var locks int
	if err := s.db.QueryRow(t.Context(), `SELECT count(*) FROM penstock.lock`).Scan(&locks); err != nil || locks != 0 {
		t.Errorf("%d locks are left (%v)", locks, err)
	}
	if n := s.node.stats.Refused.Load(); n != 0 {
		t.Errorf("%d endings were refused", n)
	}
}

// Each of a thousand locks whose rows another transaction holds was tried again by itself, about once a second: a
// thousand transactions a second on all settling threads.
func TestLocksThatAreHeldAreTriedAgainTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const locks = 1000
		n := &Node{settler: newSettler()}
		queue := &invalidation.Queue{ID: 1}
		for i := range locks {
			n.settler.add(&job{servedLane: servedLane{queue: queue}, lock: &invalidation.Lock{Token: invalidation.Token(i)}}, invalidation.Ending{
				Lock: &invalidation.Lock{Token: invalidation.Token(i)}, Entry: invalidation.EntryID(i), Last: true,
			})
		}
		try := func(held func(invalidation.Token) bool) (tried int) {
			key, batch := n.settler.next()
			left := pile{queue: queue}
			for i, e := range batch.endings {
				if held(e.Lock.Token) {
					left.add(e, batch.jobs[i])
				}
			}
			tried = len(batch.endings)
			n.settler.sent(key, batch, left)
			return tried
		}
		all := func(invalidation.Token) bool { return true }
		for range 2 {
			try(all) // a half
		}
		start, tries := time.Now(), 0
		for ; time.Since(start) < 10*time.Second; tries++ {
			if got := try(all); got != locks {
				t.Fatalf("%d of %d locks were tried", got, locks)
			}
		}
		if tries > 16 {
			t.Errorf("%d transactions in 10 s", tries)
		}
		odd := func(k invalidation.Token) bool { return k%2 == 1 }
		if got := try(odd); got != locks {
			t.Errorf("%d of %d locks were tried", got, locks)
		}
		start = time.Now()
		if got := try(odd); got != locks/2 || time.Since(start) > deferMin {
			t.Errorf("%d locks were tried after %s, want %d within %s", got, time.Since(start), locks/2, deferMin)
		}
		n.settler.close()
		if got := try(func(invalidation.Token) bool { return false }); got != locks/2 {
			t.Errorf("%d locks were tried, want %d", got, locks/2)
		}
		if _, batch := n.settler.next(); batch != nil {
			t.Errorf("%d endings are left", len(batch.endings))
		}
	})
}

// Lanes that wait for a rate rest on when locks end, but for an ending that gives units back to token buckets.
func TestARefundWakesLanesThatWaitForARateAndNoOtherEndingDoes(t *testing.T) {
	pool := pgtest.New(t)
	free, err := invalidation.Create(t.Context(), pool, "work", invalidation.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(),
		`SELECT penstock.set_limit('slow', '{"rate": 1, "burst": 9}'), penstock.use_limit('work', 'slow')`); err != nil {
		t.Fatal(err)
	}
	rated, err := invalidation.Open(t.Context(), pool, "work")
	if err != nil {
		t.Fatal(err)
	}
	requeued := func(e invalidation.Ending) invalidation.Ending {
		e.Lock.Requeued = &invalidation.LaneHead{Lane: invalidation.Lane{Priority: 1}, Position: 1}
		return e
	}
	const ended, refunded = "locks ended", "refunded"
	lock := func() *invalidation.Lock { return assigned(1, 2).lock }
	for name, c := range map[string]struct {
		queue  *invalidation.Queue
		ending invalidation.Ending
		want   string
	}{
		"done":                    {rated, last(invalidation.Done(lock(), 2, nil, 0)), ended},
		"done with more to do":    {rated, requeued(last(invalidation.Done(lock(), 2, nil, 0))), ended},
		"done, not the last":      {rated, invalidation.Done(lock(), 1, nil, 0), ""},
		"cancelled":               {rated, last(invalidation.Cancel(lock(), 2, "")), refunded},
		"cancelled, not the last": {rated, invalidation.Cancel(lock(), 1, ""), refunded},
		"released":                {rated, requeued(last(invalidation.Release(lock(), 1, 0))), refunded},
		"yielded":                 {rated, requeued(invalidation.Yield(lock(), 1)), refunded},
		"cancelled without rate":  {free, last(invalidation.Cancel(lock(), 2, "")), ended},
	} {
		n := New(Config{Log: slog.New(slog.DiscardHandler)}, pool, pool)
		j := assigned(1, 2)
		j.lock, j.reserved.node, j.reserved.queue = c.ending.Lock, n, j.served
		before := n.lanes.epoch
		n.forget(pile{queue: c.queue, endings: []invalidation.Ending{c.ending}, jobs: []*job{j}})
		want := before
		switch c.want {
		case ended:
			want.freed++
		case refunded:
			want.changed++
		}
		if got := n.lanes.epoch; got != want {
			t.Errorf("%s: the epoch is %+v after %+v, want %+v", name, got, before, want)
		}
	}
}
