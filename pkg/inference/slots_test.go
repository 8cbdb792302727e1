package inference

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// watchSlots makes the database itself refuse a lease that would exceed an instance's slots.
func (b *bed) watchSlots() {
	b.Helper()
	for _, sql := range []string{
		`CREATE FUNCTION public.watch() RETURNS trigger LANGUAGE plpgsql AS $$
		 BEGIN
		     IF EXISTS (SELECT FROM penstock.instance i
		                 WHERE (SELECT count(*) FROM penstock.slot s WHERE s.instance_id = i.id) > i.slots
		                   AND i.id IN (SELECT instance_id FROM fresh)) THEN
		         RAISE EXCEPTION 'more slots held than there are';
		     END IF;
		     RETURN NULL;
		 END $$`,
		`CREATE TRIGGER watch AFTER INSERT ON penstock.slot REFERENCING NEW TABLE AS fresh
		 FOR EACH STATEMENT EXECUTE FUNCTION public.watch()`,
	} {
		_, err := b.pool.Exec(b.ctx, sql)
		b.must(err)
	}
}

// node registers a node and returns its id.
func (b *bed) node(lease time.Duration) invalidation.NodeID {
	b.Helper()
	id := invalidation.NodeID(rand.Int64())
	b.must(invalidation.Register(b.ctx, b.pool, invalidation.Node{ID: id, Name: "test", Application: "default", Lease: lease}))
	return id
}

// gateway registers a gateway and returns its id.
func (b *bed) gateway() invalidation.NodeID {
	b.Helper()
	id := invalidation.NodeID(rand.Int64())
	_, err := b.pool.Exec(b.ctx, `SELECT penstock.register_gateway($1, 'gateway', 'default', interval '1 minute')`, id)
	b.must(err)
	return id
}

// holder is a node that talks to the database by itself.
func (b *bed) holder(node invalidation.NodeID) *slot.Holder {
	return &slot.Holder{DB: b.pool, Node: func() invalidation.NodeID { return node }}
}

func (b *bed) lease(node invalidation.NodeID, want int) []slot.Held {
	b.Helper()
	got, err := b.holder(node).Lease(b.ctx, b.model.Name, want)
	b.must(err)
	return got.Slots
}

func (b *bed) giveBack(node invalidation.NodeID, slots ...slot.Held) {
	b.Helper()
	b.must(b.holder(node).Return(b.ctx, slots))
}

const nowhere = "http://127.0.0.1:9"

func TestLongConcurrentLeasesNeverExceedSlotsWhileInstancesShrinkAndGrow(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.watchSlots()
	for i := range 3 {
		b.instance(fmt.Sprint("gpu-", i), nowhere, 4)
	}
	const enough = 500
	ctx, stop := context.WithTimeout(b.ctx, time.Minute)
	defer stop()
	var crew sync.WaitGroup
	var leases atomic.Int64
	for range 6 {
		crew.Go(func() {
			node := b.node(time.Minute)
			var mine []slot.Held
			for ctx.Err() == nil {
				got := b.lease(node, 1+rand.IntN(5))
				if leases.Add(int64(len(got))) >= enough {
					stop()
				}
				mine = append(mine, got...)
				rand.Shuffle(len(mine), func(i, j int) { mine[i], mine[j] = mine[j], mine[i] })
				n := rand.IntN(len(mine) + 1)
				b.giveBack(node, mine[:n]...)
				mine = mine[n:]
			}
			b.giveBack(node, mine...)
		})
	}
	crew.Go(func() {
		for ctx.Err() == nil {
			b.instance(fmt.Sprint("gpu-", rand.IntN(3)), nowhere, 1+rand.IntN(6))
			pause(ctx, 5*time.Millisecond)
		}
	})
	crew.Wait()
	if n := b.count(`SELECT count(*) FROM penstock.slot`); n != 0 || leases.Load() < enough {
		t.Errorf("%d slots are held at rest, after %d leases", n, leases.Load())
	}
}

func TestShrinkWaitsForSlotsToComeHome(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.instance("gpu-1", nowhere, 3)
	node := b.node(time.Minute)
	held := b.lease(node, 3)
	b.instance("gpu-1", nowhere, 2)
	if got := b.lease(node, 1); len(got) != 0 {
		t.Fatal("leased while more are held than there are")
	}
	b.giveBack(node, held[0]) // number 0, which exists still
	if got := b.lease(node, 1); len(got) != 0 {
		t.Fatal("leased a number that is free, while two of two are held")
	}
	b.giveBack(node, held[2])
	if got := b.lease(node, 2); len(got) != 1 || got[0].Number != 0 {
		t.Fatalf("leased %v, want number 0", got)
	}
}

func TestDrainedQuarantinedAndIllInstancesAreNotLeased(t *testing.T) {
	b := newBed(t, worker.Model{})
	id := b.instance("gpu-1", nowhere, 1)
	node := b.node(time.Minute)
	refused := func(what string) {
		t.Helper()
		if got := b.lease(node, 1); len(got) != 0 {
			t.Errorf("leased from an instance that is %s", what)
		}
	}
	b.must(DrainInstance(b.ctx, b.pool, b.model.Name, "gpu-1", By{Reason: "driver update"}))
	refused("draining")
	b.instance("gpu-1", nowhere, 1) // ends the drain
	b.must(quarantine(b.ctx, b.pool, id, 10*time.Minute, "fails fast"))
	refused("quarantined")
	b.must(quarantine(b.ctx, b.pool, id, time.Millisecond, "fails fast on another node"))
	if n := b.count(`SELECT count(*) FROM penstock.instance WHERE quarantined_until > now() + interval '9 minutes'`); n != 1 {
		t.Error("a shorter quarantine of another node replaced a longer one")
	}
	b.instance("gpu-1", nowhere, 1)
	for what, change := range map[string]string{
		"starting":  `state = 'starting'`,
		"unhealthy": `state = 'unhealthy'`,
		"defunct":   `state = 'defunct'`,
		"expired":   `expires_at = now()`,
	} {
		_, err := b.pool.Exec(b.ctx, `UPDATE penstock.instance SET `+change)
		b.must(err)
		refused(what)
		_, err = b.pool.Exec(b.ctx, `UPDATE penstock.instance SET state = 'ready', expires_at = NULL`)
		b.must(err)
	}
	got := b.lease(node, 1)
	if len(got) != 1 {
		t.Error("leased nothing from an instance that is ready")
	}
	b.giveBack(node, got...)
	b.must(RemoveInstance(b.ctx, b.pool, b.model.Name, "gpu-1", false, By{}))
	if n := b.count(`SELECT count(*) FROM penstock.audit WHERE object = 'Flux.1/gpu-1'`); n != 5 {
		t.Errorf("%d lines of audit, want 5", n)
	}
}

// A gateway that drains leases for the requests that it has accepted.
func TestANodeThatDrainsLeasesNothing(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.instance("gpu-1", nowhere, 2)
	node, gateway := b.node(time.Minute), b.gateway()
	for _, id := range []invalidation.NodeID{node, gateway} {
		_, err := b.pool.Exec(b.ctx, `SELECT penstock.drain_node($1, 'test', 'test')`, id)
		b.must(err)
	}
	if got := b.lease(node, 1); len(got) != 0 {
		t.Error("a task node that drains leased a slot")
	}
	if got := b.lease(gateway, 1); len(got) != 1 {
		t.Error("a gateway that drains leased no slot")
	}
}

func TestInstanceWithHeldSlotsIsNotRemoved(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.instance("gpu-1", nowhere, 1)
	b.lease(b.node(time.Minute), 1)
	if err := RemoveInstance(b.ctx, b.pool, b.model.Name, "gpu-1", false, By{}); err == nil {
		t.Fatal("an instance was removed with a call in flight")
	}
	b.must(RemoveInstance(b.ctx, b.pool, b.model.Name, "gpu-1", true, By{}))
}

func TestNodeWhoseLeaseLapsedLeasesNothingAndUsesNothing(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.instance("gpu-1", nowhere, 2)
	node := b.node(time.Hour)
	s := newService(ServiceConfig{Log: quiet}, patient(), b.pool, func() invalidation.NodeID { return node })
	b.must(s.Registry.Refresh(b.ctx))
	n, release := s.Pool.Take(b.queue.Name, 8)
	if n != 1 {
		t.Fatalf("took %d permits, want the first block of one", n)
	}
	release(1)
	_, err := b.pool.Exec(b.ctx, `UPDATE penstock.node SET beat_at = beat_at - lease WHERE id = $1`, node)
	b.must(err)
	s.Pool.mu.Lock()
	s.Pool.until = s.Pool.until.Add(-time.Hour)
	s.Pool.mu.Unlock()
	if n, _ := s.Pool.Take(b.queue.Name, 8); n != 0 {
		t.Error("a permit was given out on a lapsed lease")
	}
	_, err = invalidation.Renew(b.ctx, b.pool, node, invalidation.Beat{Tokens: []invalidation.Token{}})
	b.must(err)
	b.must(s.Pool.Renew(b.ctx))
	if n, _ := s.Pool.Take(b.queue.Name, 8); n == 0 {
		t.Error("no permit after the lease was renewed")
	}
}

func TestNodeReliesOnNoHeartbeatThatTheClockHasNotComeTo(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.instance("gpu-1", nowhere, 2)
	node := b.node(time.Minute)
	s := newService(ServiceConfig{Log: quiet}, patient(), b.pool, func() invalidation.NodeID { return node })
	b.must(s.Registry.Refresh(b.ctx))
	_, release := s.Pool.Take(b.queue.Name, 1)
	release(1)
	before := s.Pool.until
	// The clock was an hour ahead at the last heartbeat, and is right again.
	_, err := b.pool.Exec(b.ctx, `UPDATE penstock.node SET beat_at = beat_at + interval '1 hour' WHERE id = $1`, node)
	b.must(err)
	b.must(s.Pool.Renew(b.ctx))
	if s.Pool.until.After(before) {
		t.Errorf("slots are relied on for %v more, after no heartbeat", s.Pool.until.Sub(before))
	}
	if got := b.lease(node, 1); len(got) > 0 {
		t.Error("a slot was leased on a heartbeat of unknown age")
	}
	_, err = invalidation.Renew(b.ctx, b.pool, node, invalidation.Beat{})
	b.must(err)
	b.must(s.Pool.Renew(b.ctx))
	if left := time.Until(s.Pool.until); !s.Pool.until.After(before) || left > time.Minute {
		t.Errorf("after a heartbeat slots are relied on for %v, want at most the lease of a minute", left)
	}
}

func TestSlotsFreedBehindANodesBackAreNotUsedByIt(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.instance("gpu-1", nowhere, 1)
	node := b.node(time.Minute)
	s := newService(ServiceConfig{Log: quiet}, patient(), b.pool, func() invalidation.NodeID { return node })
	b.must(s.Registry.Refresh(b.ctx))
	_, release := s.Pool.Take(b.queue.Name, 1)
	release(1)
	_, err := b.pool.Exec(b.ctx, `DELETE FROM penstock.slot`)
	b.must(err)
	b.lease(b.node(time.Minute), 1)
	b.must(s.Pool.Renew(b.ctx))
	if n, _ := s.Pool.Take(b.queue.Name, 1); n != 0 {
		t.Error("a slot was used that somebody else holds")
	}
}

// Two nodes, one of which has everything: the other gets its half once it asks.
func TestNodeGivesBackWhatIsBeyondItsShareWhileOthersGoWithout(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.lastingDemands()
	b.instance("gpu-1", nowhere, 8)
	service := func() *Service {
		node := b.node(time.Minute)
		s := newService(ServiceConfig{Log: quiet}, patient(func(t *tuning) { t.leaseRetry = time.Nanosecond }), b.pool,
			func() invalidation.NodeID { return node })
		b.must(s.Registry.Refresh(b.ctx))
		return s
	}
	take := func(s *Service) (n int) {
		for {
			k, _ := s.Pool.Take(b.queue.Name, 64)
			if k == 0 {
				return n
			}
			n += k
		}
	}
	rich, poor := service(), service()
	if n := take(rich); n != 8 {
		t.Fatalf("the first node got %d of 8", n)
	}
	if n := take(poor); n != 0 {
		t.Fatalf("the second node got %d, when all were held", n)
	}
	rich.Pool.stateOf(b.model.Name).ledger.endPermits(8) // its calls have ended
	b.must(rich.Pool.Renew(b.ctx))
	if n := take(poor); n != 4 {
		t.Errorf("the second node got %d, want its share of 4", n)
	}
	if n := take(rich); n != 4 {
		t.Errorf("the first node kept %d, want its share of 4", n)
	}
}

// A node comes up while another one has all slots, a long line of work, and no slot ever idle.
func TestFreshNodeGetsItsShareOfABusyModel(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.watchSlots()
	g := b.gpu(func(r *http.Request) (int, string) { time.Sleep(20 * time.Millisecond); return answers(r) })
	b.instance("gpu-1", g.URL, 4)
	b.push(empty(2000)...)
	rich := b.start(ServiceConfig{})
	b.await(4, `SELECT count(*) FROM penstock.slot WHERE node_id = $1`, rich.id)
	fresh := b.start(ServiceConfig{})
	b.await(2, `SELECT count(*) FROM penstock.slot WHERE node_id = $1`, fresh.id)
	b.await(2, `SELECT held FROM penstock.slot_contention WHERE node_id = $1`, rich.id)
	if _, peak := g.seen(); peak > 4 {
		t.Errorf("%d calls at once through 4 slots", peak)
	}
}

func TestMoreNodesThanSlotsTakeTurns(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.lastingDemands()
	b.instance("gpu-1", nowhere, 1)
	has, first, second := b.node(time.Minute), b.node(time.Minute), b.node(time.Minute)
	held := b.lease(has, 1)
	for _, hungry := range []invalidation.NodeID{first, second} {
		if got := b.lease(hungry, 1); len(got) != 0 {
			t.Fatal("leased a slot that is held")
		}
	}
	share := func() int { return b.count(`SELECT penstock.slot_share($1, $2)`, b.model.Name, has) }
	during := 0
	b.inTime(5*time.Second, func() { // a turn
		_, err := b.pool.Exec(b.ctx, `UPDATE penstock.slot SET leased_at = clock_timestamp()`)
		b.must(err)
		during = share()
	})
	if during != 1 {
		t.Errorf("the holder may hold %d during its turn", during)
	}
	_, err := b.pool.Exec(b.ctx, `UPDATE penstock.slot SET leased_at = leased_at - interval '6 seconds'`)
	b.must(err)
	if n := share(); n != 0 {
		t.Errorf("the holder may hold %d after its turn", n)
	}
	b.giveBack(has, held...)
	for name, node := range map[string]invalidation.NodeID{"the one whose turn is over": has, "the one who came last": second} {
		if got := b.lease(node, 1); len(got) != 0 {
			t.Errorf("%s was served first", name)
		}
	}
	if got := b.lease(first, 1); len(got) != 1 {
		t.Error("the one who went without longest got nothing")
	}
}

// A node that misses slots repeats its demand. One of a time in the future, from before the clock was set back, is over.
func TestADemandFromTheFutureKeepsNoSlotBack(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.instance("gpu-1", nowhere, 2)
	has, poor := b.node(time.Minute), b.node(time.Minute)
	b.lease(has, 2)
	s := newService(ServiceConfig{Log: quiet}, patient(), b.pool, func() invalidation.NodeID { return has })
	for at, want := range map[string]int{"'1 hour'": 0, "'0'": 1, "'-4 seconds'": 0} {
		hungry := 0
		b.inTime(3*time.Second, func() { // for which a demand counts
			b.lease(poor, 1)
			_, err := b.pool.Exec(b.ctx, `UPDATE penstock.slot_demand SET wanted_at = clock_timestamp() + interval `+at)
			b.must(err)
			hungry = b.count(`SELECT count(*) FROM penstock.hungry_nodes($1)`, b.model.Name)
		})
		if hungry != want {
			t.Errorf("after a demand of now and %s %d nodes miss slots, want %d", at, hungry, want)
		}
		s.Prober.sweeper.sweep(b.ctx)
		if n := b.count(`SELECT count(*) FROM penstock.slot_demand`); (n == 0) != (at == "'1 hour'") {
			t.Errorf("after a demand of now and %s there are %d rows", at, n)
		}
	}
}

// A node whose demand was made while the clock was ahead comes not last in line until that time.
func TestADemandFromTheFutureBeginsAnew(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.instance("gpu-1", nowhere, 2)
	has, poor := b.node(time.Minute), b.node(time.Minute)
	b.lease(has, 2)
	b.lease(poor, 1)
	_, err := b.pool.Exec(b.ctx, `UPDATE penstock.slot_demand SET since = since + interval '1 hour', wanted_at = wanted_at + interval '1 hour'`)
	b.must(err)
	b.lease(poor, 1)
	if n := b.count(`SELECT count(*) FROM penstock.slot_demand WHERE since <= clock_timestamp()`); n != 1 {
		t.Errorf("%d demands are from now, want 1", n)
	}
}

// lossy is a database that loses answers to statements that it carried out: every so many, at random.
type lossy struct {
	postgres.DB
	every atomic.Int32 // 0: none
	lost  atomic.Int32
}

func (l *lossy) loses() bool {
	n := l.every.Load()
	if n == 0 || rand.Int32N(n) != 0 {
		return false
	}
	l.lost.Add(1)
	return true
}

func (l *lossy) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	rows, err := l.DB.Query(ctx, sql, args...)
	if err == nil && l.loses() {
		rows.Close()
		return nil, context.DeadlineExceeded
	}
	return rows, err
}

func (l *lossy) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	tag, err := l.DB.Exec(ctx, sql, args...)
	if err == nil && l.loses() {
		err = context.DeadlineExceeded
	}
	return tag, err
}

func (l *lossy) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return lossyRow{l.DB.QueryRow(ctx, sql, args...), l}
}

type lossyRow struct {
	pgx.Row
	*lossy
}

func (r lossyRow) Scan(into ...any) error {
	err := r.Row.Scan(into...)
	if err == nil && r.loses() {
		err = context.DeadlineExceeded
	}
	return err
}

// One answer in ten is lost, about leases, returns, adoptions, doubts and stored runs: no slot is forgotten, none is
// used twice, and all are free at rest.
func TestLongNoSlotLeaksThroughLostAnswers(t *testing.T) {
	model := asyncModel()
	model.PollInterval = worker.Seconds(10 * time.Millisecond)
	b := newBed(t, model)
	b.watchSlots()
	b.lossy = &lossy{DB: b.pool}
	b.alter(map[string]any{"crash_limit": 1000, "retry": map[string]any{"base": 0.02, "cap": 0.1, "max_attempts": 1000}})
	h := newHarms()
	for i := range 2 {
		b.instance(fmt.Sprint("gpu-", i), workertest.NewScript(t, h.pretender()).URL, 3)
	}
	nodes := []*miniNode{b.start(ServiceConfig{}), b.start(ServiceConfig{})}
	b.lossy.every.Store(10)
	ids := b.push(empty(150)...)
	b.eventually("some have ended", func() bool { return b.count(`SELECT count(*) FROM penstock.result`) >= 30 })
	nodes[0].die()
	b.lossy.every.Store(0) // a node that cannot read what there is does not start
	nodes[0] = b.start(ServiceConfig{})
	b.lossy.every.Store(10)
	for _, id := range ids {
		if o := b.outcome(id); o.Outcome != "done" {
			t.Fatalf("outcome %+v", o)
		}
	}
	b.lossy.every.Store(0)
	for _, n := range nodes {
		n.leave()
	}
	for _, n := range nodes {
		n.work.Wait() // one may be about to lease
	}
	b.await(0, `SELECT count(*) FROM penstock.slot`)
	for i, n := range nodes {
		n.Pool.mu.Lock()
		if l := n.Pool.stateOf(b.model.Name).ledger; l.unassigned != 0 || l.held() != 0 {
			t.Errorf("node %d has %d permits out and thinks it holds %d slots", i, l.unassigned, l.held())
		}
		n.Pool.mu.Unlock()
	}
	if b.lossy.lost.Load() == 0 {
		t.Error("no answer was lost: the test shows nothing")
	}
	t.Logf("%d answers were lost", b.lossy.lost.Load())
}

func TestSlotsOfALeaseWhoseAnswerWasLostAreFoundAndGoHome(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.instance("gpu-1", nowhere, 1)
	node, db := b.node(time.Minute), &lossy{DB: b.pool}
	s := newService(ServiceConfig{Log: quiet}, patient(func(t *tuning) { t.idleMax = time.Nanosecond }), db,
		func() invalidation.NodeID { return node })
	b.must(s.Registry.Refresh(b.ctx))
	db.every.Store(1)
	if n, _ := s.Pool.Take(b.queue.Name, 1); n != 0 || b.count(`SELECT count(*) FROM penstock.slot`) != 1 {
		t.Fatalf("took %d; the answer was not lost", n)
	}
	db.every.Store(0)
	b.must(s.Pool.Renew(b.ctx)) // finds it
	b.must(s.Pool.Renew(b.ctx)) // has no use for it
	b.await(0, `SELECT count(*) FROM penstock.slot`)
}

// A node that stops asks for the slots of a lease whose answer was lost, and gives them back.
func TestANodeThatStopsGivesBackTheSlotsOfALostAnswer(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.instance("gpu-1", nowhere, 1)
	node, db := b.node(time.Minute), &lossy{DB: b.pool}
	s := newService(ServiceConfig{Log: quiet}, patient(), db, func() invalidation.NodeID { return node })
	b.must(s.Registry.Refresh(b.ctx))
	db.every.Store(1)
	if n, _ := s.Pool.Take(b.queue.Name, 1); n != 0 || b.count(`SELECT count(*) FROM penstock.slot`) != 1 {
		t.Fatalf("took %d; the answer was not lost", n)
	}
	db.every.Store(0)
	stopped, stop := context.WithCancel(b.ctx)
	stop()
	b.must(s.Pool.Run(stopped))
	if n := b.count(`SELECT count(*) FROM penstock.slot`); n != 0 {
		t.Errorf("%d slots are left", n)
	}
}

// A process that dies while it looks at an instance must not keep the others from looking for long.
func TestLookThatNeverEndsIsTakenUpByOthersSoon(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.instance("gpu-1", nowhere, 1)
	p := newProber(usualTuning(), b.pool, NewRegistry(b.pool, worker.Config{}, 0, quiet), quiet)
	if due, err := p.claimDue(b.ctx, 10); err != nil || len(due) != 1 {
		t.Fatalf("claimed %v, %v", due, err)
	}
	b.await(1, `SELECT count(*) FROM penstock.instance WHERE next_check_at < clock_timestamp() + interval '16 seconds'`)
}

// Where the next regular probe is due soon, the slots of a dead node do not wait for it, and are probed once.
func TestSlotsOfADeadNodeAreProbedAtOnce(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.instance("gpu-1", nowhere, 1)
	gone := b.node(time.Minute)
	b.lease(gone, 1)
	p := newProber(usualTuning(), b.pool, NewRegistry(b.pool, worker.Config{}, 0, quiet), quiet)
	for _, next := range []time.Duration{500 * time.Millisecond, 2500 * time.Millisecond, 4500 * time.Millisecond} {
		_, err := b.pool.Exec(b.ctx, `
			UPDATE penstock.instance SET checked_at = clock_timestamp() - interval '2 seconds',
			       next_check_at = clock_timestamp() + $1::interval`, next)
		b.must(err)
		_, err = b.pool.Exec(b.ctx, `
			UPDATE penstock.node SET beat_at = clock_timestamp() - lease - $2::interval WHERE id = $1`, gone, deadGrace)
		b.must(err)
		for i, want := range []int{1, 0} {
			if due, err := p.claimDue(b.ctx, 10); err != nil || len(due) != want {
				t.Errorf("next regular probe in %s, claim %d: claimed %v, %v, want %d", next, i+1, due, err, want)
			}
		}
	}
}

func TestIdleSlotsGoHome(t *testing.T) {
	b := newBed(t, worker.Model{})
	g := b.gpu(answers)
	b.instance("gpu-1", g.URL, 4)
	b.start(ServiceConfig{})
	for _, id := range b.push(empty(10)...) {
		b.outcome(id)
	}
	b.await(0, `SELECT count(*) FROM penstock.slot`)
}

// The race of a probe with a call: the worker counts 0 because the call is still on its way to it.
func TestSlotOfACallOnItsWayIsNotFreed(t *testing.T) {
	b := newBed(t, worker.Model{})
	g := b.gpu(answers) // reports 0 active
	id := b.instance("gpu-1", g.URL, 2)
	node, gone := b.node(time.Minute), b.node(time.Millisecond)
	b.lease(node, 1)
	registry := NewRegistry(b.pool, worker.Config{}, 0, quiet)
	b.must(registry.Refresh(b.ctx))
	prober := newProber(tuned(func(t *tuning) { t.probeGrace = time.Hour }), b.pool, registry, quiet)
	probe := func() {
		_, err := prober.probe(b.ctx, id)
		b.must(err)
	}
	probe()
	b.await(1, `SELECT count(*) FROM penstock.slot`)

	// One whose node has died is freed, but only once a call could have arrived. A probe that takes longer than that on a busy
	// machine says nothing.
	deadline := time.Now().Add(time.Minute)
	for took := deadGrace; took >= deadGrace; {
		if time.Now().After(deadline) {
			t.Fatalf("for a minute each probe took %s or longer, the last one %s", deadGrace, took)
		}
		_, err := b.pool.Exec(b.ctx, `DELETE FROM penstock.slot`)
		b.must(err)
		b.lease(node, 1)
		died := time.Now()
		_, err = b.pool.Exec(b.ctx, `UPDATE penstock.node SET beat_at = clock_timestamp() - lease WHERE id = $1`, gone)
		b.must(err)
		_, err = b.pool.Exec(b.ctx, `UPDATE penstock.slot SET node_id = $1`, gone)
		b.must(err)
		probe()
		took = time.Since(died)
	}
	b.await(1, `SELECT count(*) FROM penstock.slot`)
	prober.tuning.probeGrace = time.Millisecond
	time.Sleep(5 * time.Millisecond)
	probe()
	b.await(0, `SELECT count(*) FROM penstock.slot`)
}

// The next probe of an instance comes when a slot in doubt may be freed, however long it is until the next regular one.
func TestSlotInDoubtIsProbedWhenItsGraceIsOver(t *testing.T) {
	b := newBed(t, worker.Model{})
	id := b.instance("gpu-1", b.gpu(answers).URL, 2)
	b.lease(b.node(time.Minute), 1)
	_, err := b.pool.Exec(b.ctx, `UPDATE penstock.slot SET doubt_at = clock_timestamp(), doubt = 'hangs'`)
	b.must(err)
	registry := NewRegistry(b.pool, worker.Config{}, 0, quiet)
	b.must(registry.Refresh(b.ctx))
	prober := newProber(tuned(func(t *tuning) { t.probeEvery, t.probeGrace = 24*time.Hour, time.Hour }), b.pool, registry, quiet)
	_, err = prober.probe(b.ctx, id)
	b.must(err)
	b.await(1, `SELECT count(*) FROM penstock.slot s JOIN penstock.instance i ON i.id = s.instance_id
	             WHERE i.next_check_at BETWEEN s.doubt_at + interval '1 hour' AND s.doubt_at + interval '2 hours'`)
}

func TestOrphanIsKeptWhileTheWorkerReportsItsCall(t *testing.T) {
	one := 1
	e := &Endpoint{Model: worker.Model{Name: "m", Protocol: worker.ProtocolGeneric}.WithDefaults(), Slots: 4}
	orphans := []slot.Orphan{orphan(1, time.Minute), orphan(2, 2*time.Minute), orphan(3, time.Second)}
	const grace = 10 * time.Second
	if got := staleOrphans(orphans, worker.Health{State: worker.StateReady, Active: &one}, e, grace); len(got) != 1 || got[0] != 2 {
		t.Errorf("freed %v, want the oldest alone: one call still runs, one slot is too young", got)
	}
	if got := staleOrphans(orphans, worker.Health{State: worker.StateReady}, e, grace); len(got) != 0 {
		t.Errorf("freed %v though the worker says nothing", got)
	}
	if got := staleOrphans(orphans, worker.Health{State: worker.StateUnhealthy, Gone: true}, e, grace); len(got) != 2 {
		t.Errorf("freed %v of a worker that is gone, want the two old ones", got)
	}
}

// Nodes die at any moment and others start; instances shrink and grow; workers go on with calls whose caller is gone.
// No worker ever has more calls than slots, every entry is done once and pays nothing, and all slots are free at rest.
func TestLongSlotsUnderRandomCrashes(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.alter(map[string]any{"crash_limit": 1000})
	b.watchSlots()
	var gpus []*gpu
	for i := range 2 {
		g := b.gpu(func(r *http.Request) (int, string) {
			if rand.IntN(10) == 0 {
				time.Sleep(testLease * 3 / 2) // the slot of a dead node is still in use when the lease has lapsed
			}
			time.Sleep(time.Duration(5+rand.IntN(60)) * time.Millisecond)
			return answers(r)
		})
		gpus = append(gpus, g)
		b.instance(fmt.Sprint("gpu-", i), g.URL, 3)
	}
	ids := b.push(empty(150)...)
	nodes := []*miniNode{b.start(ServiceConfig{}), b.start(ServiceConfig{}), b.start(ServiceConfig{})}
	deaths := 0
	for until := time.Now().Add(pgtest.Long(2*time.Second, 5*time.Second)); time.Now().Before(until); {
		time.Sleep(time.Duration(100+rand.IntN(500)) * time.Millisecond)
		i := rand.IntN(len(nodes))
		nodes[i].die()
		deaths++
		nodes[i] = b.start(ServiceConfig{})
		b.instance("gpu-0", gpus[0].URL, 2+rand.IntN(2))
		b.instance("gpu-1", gpus[1].URL, 2+rand.IntN(2))
	}
	for _, id := range ids {
		if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 {
			t.Fatalf("outcome %+v", o)
		}
	}
	for _, n := range nodes {
		n.leave() // a node that looks for work holds a slot now and then
	}
	b.await(0, `SELECT count(*) FROM penstock.slot`)
	for i, g := range gpus {
		calls, peak := g.seen()
		if peak > 3 {
			t.Errorf("gpu-%d ran %d calls at once, has at most 3 slots", i, peak)
		}
		t.Logf("gpu-%d: %d calls, at most %d at once; %d nodes died", i, calls, peak, deaths)
	}
}

// Instances that come and go, each under a name of its own, leave nothing behind.
func TestInstancesThatAreGoneAreForgotten(t *testing.T) {
	b := newBed(t, worker.Model{})
	s := newService(ServiceConfig{Log: quiet}, patient(), b.pool, func() invalidation.NodeID { return 1 })
	b.instance("gpu-1", nowhere, 1)
	b.instance("gpu-2", nowhere, 1)
	b.must(s.Registry.Refresh(b.ctx))
	s.Pool.mu.Lock()
	of := s.Pool.breakerOf(b.model.Name)
	of.Condemn(time.Now(), "gpu-1", "test")
	of.Condemn(time.Now(), "gpu-2", "test")
	s.Pool.mu.Unlock()
	b.must(RemoveInstance(b.ctx, b.pool, b.model.Name, "gpu-1", true, By{}))
	b.must(s.Registry.Refresh(b.ctx))
	s.Pool.mu.Lock()
	defer s.Pool.mu.Unlock()
	if of.instances["gpu-1"] != nil || of.instances["gpu-2"] == nil {
		t.Errorf("remembered are %v", of.instances)
	}
}
