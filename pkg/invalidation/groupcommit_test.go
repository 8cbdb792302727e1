package invalidation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
)

// joinBed has pushes that are held up, and calls that stand in line behind them, in their order.
type joinBed struct {
	*bed
	gate  pgx.Tx
	first func()
	calls []func() (told, error)
}

type told struct {
	pushed []Pushed
	err    error
}

func newJoinBed(t *testing.T, c Config) *joinBed {
	b := newBed(t, c)
	b.exec(b.pool, `CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql AS
	                $$ BEGIN PERFORM pg_advisory_xact_lock_shared(CASE WHEN NEW.payload = '"first"' THEN 1 ELSE 2 END); RETURN NEW; END $$`)
	b.exec(b.pool, `CREATE TRIGGER wait BEFORE INSERT ON penstock.entry_work FOR EACH ROW EXECUTE FUNCTION public.wait()`)
	j := &joinBed{bed: b, gate: b.begin()}
	b.exec(j.gate, `SELECT pg_advisory_xact_lock(1)`)
	var first []func() EntryID
	for range batchesMax {
		first = append(first, later(b, func() (EntryID, error) {
			pushed, err := b.q.Push(b.ctx, Push{Payload: text("first")})
			return append(pushed, Pushed{})[0].ID, err
		}))
	}
	j.first = func() {
		for _, done := range first {
			done()
		}
	}
	b.await("all that go at once are held up", func() bool {
		return b.count(`SELECT count(*) FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid))`, j.gate.Conn().PgConn().PID()) == batchesMax
	})
	j.beganAt(time.Now().Add(time.Hour)) // however long the test takes, nothing hangs yet
	return j
}

func (c *joinBed) beganAt(at time.Time) {
	c.q.batcher.mu.Lock()
	defer c.q.batcher.mu.Unlock()
	c.q.batcher.began = at
}

// call pushes beside the test.
func (c *joinBed) call(ctx context.Context, pushes ...Push) {
	c.Helper()
	inLine := c.inLine()
	answered := make(chan told, 1)
	go func() {
		pushed, err := c.q.Push(ctx, pushes...)
		answered <- told{pushed, err}
	}()
	c.calls = append(c.calls, func() (told, error) {
		select {
		case a := <-answered:
			return a, nil
		case <-time.After(time.Minute):
			return told{}, errors.New("the push never came back")
		}
	})
	c.await("the call stands in line", func() bool { return c.inLine() == inLine+1 })
}

func (c *joinBed) inLine() int {
	c.q.batcher.mu.Lock()
	defer c.q.batcher.mu.Unlock()
	return len(c.q.batcher.waiting)
}

func (c *joinBed) answer(i int) told {
	c.Helper()
	a, err := c.calls[i]()
	if err != nil {
		c.Fatal(err)
	}
	return a
}

func (c *joinBed) payloads() string {
	c.Helper()
	var all string
	if err := c.pool.QueryRow(c.ctx, `SELECT coalesce(string_agg(payload #>> '{}', ' ' ORDER BY id), '') FROM penstock.entry WHERE payload <> '"first"'`).Scan(&all); err != nil {
		c.Fatal(err)
	}
	return all
}

func text(s string) json.RawMessage { return json.RawMessage(`"` + s + `"`) }

func TestPushesThatComeMeanwhileGoTogether(t *testing.T) {
	c := newJoinBed(t, Config{})
	nine := int16(9)
	c.call(c.ctx, Push{Payload: text("a")}, Push{Payload: text("b"), LockKey: "K", Flow: "f"})
	c.call(c.ctx, Push{Payload: text("c"), LockKey: "K", Flow: "f"})
	c.call(c.ctx, Push{Payload: text("d"), Priority: &nine, DueAt: time.Now().Add(time.Hour)})
	c.commit(c.gate)
	for i, n := range []int{2, 1, 1} {
		a := c.answer(i)
		if a.err != nil || len(a.pushed) != n {
			t.Fatalf("call %d got %v, %v", i, a.pushed, a.err)
		}
		for k, p := range a.pushed {
			want := strings.Fields("a b c d")[[]int{0, 2, 3}[i]+k]
			if got := c.count(`SELECT count(*) FROM penstock.entry WHERE id = $1 AND payload #>> '{}' = $2`, p.ID, want); got != 1 || p.Verdict != Inserted {
				t.Errorf("call %d was told %+v, which is not entry %q", i, p, want)
			}
		}
	}
	if n := c.count(`SELECT count(DISTINCT xmin::text) FROM penstock.entry WHERE payload <> '"first"'`); n != 1 {
		t.Errorf("%d transactions, want one", n)
	}
	if got := c.payloads(); got != "a b c d" {
		t.Errorf("accepted in the order %s", got)
	}
}

func TestPushesWithAnIdempotencyKeyGoTogetherAndReplay(t *testing.T) {
	c := newJoinBed(t, Config{})
	for range 3 {
		c.call(c.ctx, Push{Payload: text("a"), IdempotencyKey: "A"})
	}
	c.call(c.ctx, Push{Payload: text("b"), IdempotencyKey: "B"})
	c.commit(c.gate)
	var got []Pushed
	for i := range c.calls {
		a := c.answer(i)
		if a.err != nil {
			t.Fatal(a.err)
		}
		got = append(got, a.pushed...)
	}
	c.want(got, []Pushed{{got[0].ID, Inserted}, {got[0].ID, Replayed}, {got[0].ID, Replayed}, {got[3].ID, Inserted}})
	c.want(c.payloads(), "a b")
	if n := c.count(`SELECT count(DISTINCT xmin::text) FROM penstock.entry WHERE payload <> '"first"'`); n != 1 {
		t.Errorf("%d transactions, want one", n)
	}
}

// Somebody else's transaction has the key. Only the push that comes with it waits for the end of that.
func TestAKeyInUseHoldsUpNobodyElse(t *testing.T) {
	b := newBed(t, Config{})
	other := b.begin()
	b.pushAll(other, Push{Payload: text("a"), IdempotencyKey: "A"})
	b.q.batcher.began = time.Now().Add(time.Hour) // nothing hangs
	var waits []func() EntryID
	for range 2 * batchesMax {
		waits = append(waits, later(b, func() (EntryID, error) {
			pushed, err := b.q.Push(b.ctx, Push{Payload: text("a"), IdempotencyKey: "A"})
			return append(pushed, Pushed{})[0].ID, err
		}))
	}
	b.await("all who come with the key wait by themselves", func() bool {
		b.q.batcher.mu.Lock()
		defer b.q.batcher.mu.Unlock()
		return b.q.batcher.running == 0 &&
			b.count(`SELECT count(*) FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid))`, other.Conn().PgConn().PID()) == len(waits)
	})
	for range 2 * batchesMax {
		if _, err := b.q.Push(b.ctx, Push{Payload: text("b")}); err != nil {
			t.Fatal(err)
		}
	}
	b.commit(other)
	for _, wait := range waits {
		b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE id = $1 AND payload = '"a"'`, wait()), 1)
	}
}

func TestAPushThatIsRefusedFailsNobodyElse(t *testing.T) {
	c := newJoinBed(t, Config{PayloadLimit: 1000, EntryPriority: 2})
	ten := int16(10)
	c.call(c.ctx, Push{Payload: text("a")})
	c.call(c.ctx, Push{Payload: text("b")}, Push{Payload: text("c"), Priority: &ten})
	c.call(c.ctx, Push{Payload: text(strings.Repeat("x", 2000))})
	c.call(c.ctx, Push{Payload: json.RawMessage(`{not json`)})
	c.call(c.ctx, Push{Payload: text("d"), LockKey: "K"})
	c.commit(c.gate)
	for i, want := range []error{nil, ErrInvalid, ErrPayloadTooLarge, ErrInvalid, nil} {
		if a := c.answer(i); !errors.Is(a.err, want) || (want == nil) != (len(a.pushed) == 1) {
			t.Errorf("call %d got %v, %v; want %v", i, a.pushed, a.err, want)
		} else if i == 1 && !strings.Contains(a.err.Error(), "entry 2") {
			t.Errorf("call %d is told %v, want its own entry 2 named", i, a.err)
		}
	}
	if got := strings.Fields(c.payloads()); len(got) != 2 {
		t.Errorf("accepted %v", got)
	}
}

// What is refused for what it says is refused before it is admitted. A push that is rolled back later uses room up until the next
// count, which the elected leader makes about once a second.
func TestWhatALoadIsRefusedForUsesUpNoRoom(t *testing.T) {
	c := newJoinBed(t, Config{Capacity: 10, PayloadLimit: 1000})
	ten := int16(10)
	c.call(c.ctx, Push{Payload: text("a")}, Push{Payload: text("b")})
	c.call(c.ctx, Push{Payload: text("c"), Priority: &ten})
	c.call(c.ctx, Push{Payload: text(strings.Repeat("x", 2000))})
	c.commit(c.gate)
	c.first()
	for i, want := range []error{nil, ErrInvalid, ErrPayloadTooLarge} {
		if a := c.answer(i); !errors.Is(a.err, want) {
			t.Errorf("call %d: %v", i, a.err)
		}
	}
	c.awaitIdle()
	push := func(n int) error {
		_, err := c.q.Push(c.ctx, slices.Repeat([]Push{{Payload: text("more")}}, n)...)
		return err
	}
	if err := push(10 - batchesMax - 2 - 1); err != nil {
		t.Fatalf("what fits is refused: %v", err)
	}
	tx := c.begin()
	c.pushOn(tx, "")
	c.must(tx.Rollback(c.ctx))
	if err := push(1); !errors.Is(err, ErrQueueFull) {
		t.Errorf("before the count: %v", err)
	}
	c.count(`SELECT penstock.count_depth($1)`, c.q.ID)
	if err := push(1); err != nil {
		t.Errorf("after the count: %v", err)
	}
}

func TestACallerThatLeavesTheLinePushesNothingAndHoldsUpNobody(t *testing.T) {
	c := newJoinBed(t, Config{})
	leaving, leave := context.WithCancel(c.ctx)
	c.call(leaving, Push{Payload: text("gone")})
	c.call(c.ctx, Push{Payload: text("a")})
	leave()
	if a := c.answer(0); !errors.Is(a.err, context.Canceled) {
		t.Errorf("the caller that left was told %v", a.err)
	}
	c.commit(c.gate)
	if a := c.answer(1); a.err != nil {
		t.Error(a.err)
	}
	if got := c.payloads(); got != "a" {
		t.Errorf("accepted %s", got)
	}
}

func TestAPushGoesOnForThoseWhoStillWait(t *testing.T) {
	c := newJoinBed(t, Config{})
	leaving, leave := context.WithCancel(c.ctx)
	c.call(leaving, Push{Payload: text("a")})
	c.call(c.ctx, Push{Payload: text("b")})
	second := c.hold()
	leave()
	if a := c.answer(0); !errors.Is(a.err, context.Canceled) {
		t.Errorf("the caller that left was told %v", a.err)
	}
	c.commit(second)
	if a := c.answer(1); a.err != nil {
		t.Error(a.err)
	}
	if got := c.payloads(); got != "a b" {
		t.Errorf("accepted %s", got)
	}
}

func TestAPushThatNobodyWaitsForEnds(t *testing.T) {
	c := newJoinBed(t, Config{})
	leaving, leave := context.WithCancel(c.ctx)
	c.call(leaving, Push{Payload: text("a")})
	c.call(leaving, Push{Payload: text("b")})
	second := c.hold()
	leave()
	c.answer(0)
	c.answer(1)
	c.awaitIdle()
	c.commit(second)
}

// hold lets the first push go, and holds up the one for those in line.
func (c *joinBed) hold() (second pgx.Tx) {
	c.Helper()
	second = c.begin()
	c.exec(second, `SELECT pg_advisory_xact_lock(2)`)
	c.commit(c.gate)
	c.first()
	c.awaitBlocked(second)
	return second
}

func TestAllAreToldThatNobodyKnowsWhatBecameOfTheirPush(t *testing.T) {
	c := newJoinBed(t, Config{})
	c.call(c.ctx, Push{Payload: text("a")})
	c.call(c.ctx, Push{Payload: text("b")})
	second := c.hold()
	c.exec(c.pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid))`, second.Conn().PgConn().PID())
	for i := range 2 {
		if a := c.answer(i); a.err == nil || a.pushed != nil {
			t.Errorf("call %d was told %v, %v", i, a.pushed, a.err)
		}
	}
	c.commit(second)
	if got := c.payloads(); got != "" {
		t.Errorf("accepted %s", got)
	}
}

func TestOnePushThatHangsHoldsUpOthersForASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var j batcher
		for n := range batchesMax + 1 {
			if waits := j.enter([]Push{{}}, 0, false) != nil; waits != (n == batchesMax) {
				t.Errorf("push %d waits: %v", n+1, waits)
			}
		}
		time.Sleep(batchPatience + time.Millisecond)
		if j.enter([]Push{{}}, 0, false) != nil {
			t.Error("a push after a second waits")
		}
		if j.enter([]Push{{}}, 0, false) == nil {
			t.Error("so does not the next one")
		}
	})
}

func TestThoseInLineGoThoughWhatIsUnderWayHangs(t *testing.T) {
	c := newJoinBed(t, Config{})
	c.call(c.ctx, Push{Payload: text("a")})
	c.call(c.ctx, Push{Payload: text("b")})
	c.beganAt(time.Now())
	for i := range 2 {
		if a := c.answer(i); a.err != nil {
			t.Error(a.err)
		}
	}
	if got := c.payloads(); got != "a b" {
		t.Errorf("accepted %s while others hang, want a b", got)
	}
	c.commit(c.gate)
	c.first()
	c.awaitIdle()
}

// awaitIdle waits until nothing is under way.
func (c *joinBed) awaitIdle() {
	c.Helper()
	c.await("nothing is under way", func() bool {
		c.q.batcher.mu.Lock()
		defer c.q.batcher.mu.Unlock()
		return c.q.batcher.running == 0
	})
}

func TestABatchOfPushesIsBounded(t *testing.T) {
	j := batcher{running: batchesMax, began: time.Now().Add(time.Hour)} // however long the test takes, nothing hangs yet
	for range 40 {
		j.enter(make([]Push, 20), batchBytes/10, false)
	}
	for _, want := range []int{11, 11, 11, 7} {
		if _, l := j.next(); len(l.calls) != want || l.callers != want {
			t.Errorf("%d calls, want %d", len(l.calls), want)
		}
	}
	if _, l := j.next(); l != nil || j.running != batchesMax-1 {
		t.Errorf("%v is left, %d under way", l, j.running)
	}
	if _, _, ok := batchable(make([]Push, batchEntries/10+1)); ok {
		t.Error("a bulk push may join")
	}
	if _, _, ok := batchable([]Push{{UniqueKey: "u"}}); ok {
		t.Error("a push with a unique key may join")
	}
}

// Many callers push at once, some what is refused, some with a context that ends; and server processes are killed. What
// was answered is so, what was refused is not there, and what nobody knows is there whole or not at all.
func TestLongAnswersToJoinedPushesAreTrueWhateverHappens(t *testing.T) {
	const callers = 24
	each := pgtest.Long(15, 40)
	b := newBed(t, Config{})
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	ctx, stop := context.WithCancel(b.ctx)
	var chaos, all sync.WaitGroup
	chaos.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			_, _ = b.pool.Exec(ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			                          WHERE datname = current_database() AND query LIKE '%entry_work%' AND pid <> pg_backend_pid()
			                          ORDER BY random() LIMIT 1`)
			time.Sleep(5 * time.Millisecond)
		}
	})
	var mu sync.Mutex
	tally := map[string]int{}
	for i := range callers {
		all.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(i)))
			var last EntryID
			for n := range each {
				what := b.pushSomething(r, fmt.Sprintf("%d-%d", i, n), &last)
				mu.Lock()
				tally[what]++
				mu.Unlock()
			}
		})
	}
	all.Wait()
	stop()
	chaos.Wait()
	b.pool.Reset() // some connections were killed while nobody used them
	t.Log(tally)
	if tally["accepted"] == 0 || tally["refused"] == 0 || tally["unknown"] == 0 {
		t.Errorf("%v: not everything happened", tally)
	}
}

// pushSomething pushes two entries and compares what is there with what was said.
func (b *bed) pushSomething(r *rand.Rand, name string, last *EntryID) string {
	p := Push{Payload: text(name)}
	bad := r.IntN(8) == 0
	if r.IntN(2) == 0 {
		p.Flow, p.LockKey = fmt.Sprint("f", r.IntN(3)), fmt.Sprint("k", r.IntN(3))
	}
	second := p
	if bad {
		second.Cost = -1
	}
	ctx, cancel := context.WithCancel(b.ctx)
	defer cancel()
	if r.IntN(8) == 0 {
		time.AfterFunc(time.Duration(r.IntN(3000))*time.Microsecond, cancel)
	}
	pushed, err := b.q.Push(ctx, p, second)
	var ids []EntryID
	for ids == nil { // the look may be killed as well
		rows, err := b.pool.Query(b.ctx, `SELECT id FROM penstock.entry WHERE payload #>> '{}' = $1 AND flow = $2 AND coalesce(lock_key, '') = $3 ORDER BY id`, name, p.Flow, p.LockKey)
		if err == nil {
			ids, _ = pgx.CollectRows(rows, pgx.RowTo[EntryID])
		}
	}
	switch {
	case err == nil:
		if len(ids) != 2 || len(pushed) != 2 || pushed[0].ID != ids[0] || pushed[1].ID != ids[1] || ids[0] <= *last {
			b.Errorf("%s: was told %v, and there is %v; the one before was %d", name, pushed, ids, *last)
		}
		*last = pushed[1].ID
		return "accepted"
	case errors.Is(err, ErrInvalid):
		if len(ids) != 0 || !strings.Contains(err.Error(), "entry 2") {
			b.Errorf("%s: was refused (%v), and there is %v", name, err, ids)
		}
		return "refused"
	default:
		if len(ids) == 1 || (bad && len(ids) > 0) {
			b.Errorf("%s: was told %v, and there is %v", name, err, ids)
		}
		return "unknown"
	}
}

// A server reads the settings of a busy queue again and again, while pushes by the handle before are running.
func TestAReopenedQueueGoesOnWithTheGroupCommitOfTheHandleBefore(t *testing.T) {
	b := newBed(t, Config{})
	q := b.q.Hinting(NewHinter(b.pool, 0))
	_, err := Alter(b.ctx, b.pool, "work", map[string]any{"entry_priority": 7})
	b.must(err)
	again, err := q.Reopen(b.ctx)
	b.must(err)
	b.want(again.Config.EntryPriority, 7)
	if again.batcher != q.batcher || again.hinter != q.hinter {
		t.Error("the handle has a group commit or hints of its own")
	}
	b.must(Drop(b.ctx, b.pool, "work", true, By{}))
	if _, err := q.Reopen(b.ctx); !errors.Is(err, ErrQueueNotFound) {
		t.Errorf("reopened a queue that was dropped: %v", err)
	}
	_, err = Create(b.ctx, b.pool, "work", Config{})
	b.must(err)
	if again, err = q.Reopen(b.ctx); err != nil || again.batcher == q.batcher {
		t.Errorf("a queue of the same name shares the group commit of the one before (%v)", err)
	}
}
