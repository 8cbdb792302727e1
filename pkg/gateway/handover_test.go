package gateway

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
)

// exchange is a database with a model on one instance of 10 slots, 9 of which gateways may hold. Its gateways never
// compare or give back by the clock: slots change hands for hints alone.
type exchange struct {
	*testing.T
	pool     *pgxpool.Pool
	dsn      string
	instance int32
}

func newExchange(t *testing.T) *exchange {
	t.Helper()
	x := &exchange{T: t}
	x.dsn = pgtest.Prepared(t, "exchange", func(ctx context.Context, db *pgxpool.Pool) error {
		_, err := db.Exec(ctx, `SELECT penstock.register_model('m', '{"protocol": "openai"}', 'test'),
		                               penstock.register_instance('m', 'gpu-1', 'http://gpu-1', 10, '{}', 'test')`)
		return err
	})
	var err error
	if x.pool, err = postgres.Open(t.Context(), postgres.Config{DSN: x.dsn, MaxConns: 8}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(x.pool.Close)
	if err := x.pool.QueryRow(t.Context(), `SELECT id FROM penstock.instance`).Scan(&x.instance); err != nil {
		t.Fatal(err)
	}
	return x
}

// join starts the leases of a gateway, and returns its pool.
func (x *exchange) join(id invalidation.NodeID) *sharedPool {
	x.Helper()
	return x.joinEvery(id, time.Hour, true)
}

// joinEvery is join for a gateway that compares and gives back by the clock, and may be deaf for hints.
func (x *exchange) joinEvery(id invalidation.NodeID, every time.Duration, hears bool) *sharedPool {
	x.Helper()
	if _, err := x.pool.Exec(x.Context(), `SELECT penstock.register_gateway($1, 'gateway', 'default', interval '1 hour')`, id); err != nil {
		x.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(x.Output(), nil))
	g := New(Config{Open: true, Log: log})
	l := NewLeases(LeasesConfig{NodeLease: time.Hour, every: every, timeout: time.Minute, Log: log}, g, x.pool,
		func() invalidation.NodeID { return id })
	g.SetModels([]ModelState{{
		Name: "m", Protocol: worker.ProtocolOpenAI, Policy: DefaultPolicy(),
		Instances: []InstanceState{{ID: x.instance, Slots: 10, Usable: true}},
	}})
	conn, err := postgres.ConnConfig(postgres.Config{DSN: x.dsn})
	if err != nil {
		x.Fatal(err)
	}
	listener := invalidation.NewListener(invalidation.ListenConfig{
		EchoWithin: time.Minute, // a hint that is sent while it connects anew is lost
		Conn:       conn, Log: log, Granted: l.Granted, Slots: l.OfferIdle, Wake: func(int32, *invalidation.Lane) {},
	})
	ctx, stop := context.WithCancel(context.WithoutCancel(x.Context()))
	var group sync.WaitGroup
	group.Go(func() { _ = l.Run(ctx) })
	x.Cleanup(func() {
		stop()
		group.Wait()
	})
	if hears {
		group.Go(func() { _ = listener.Run(ctx) })
		x.eventually("the gateway hears hints", func() bool { return listener.Status().Connected })
	}
	return l.pool("m")
}

// admit returns n requests of a pool when all of them are in flight.
func (x *exchange) admit(pool *sharedPool, n int) []*Request {
	x.Helper()
	calls := make([]*Request, n)
	var group sync.WaitGroup
	for i := range calls {
		calls[i] = &Request{Flow: "f", TTL: 2 * time.Minute}
		group.Go(func() {
			if err := pool.await(x.Context(), calls[i]); err != nil {
				x.Error(err)
			}
		})
	}
	group.Wait()
	return calls
}

func (x *exchange) exec(sql string, args ...any) {
	x.Helper()
	if _, err := x.pool.Exec(x.Context(), sql, args...); err != nil {
		x.Fatal(err)
	}
}

func (x *exchange) count(sql string) (n int) {
	x.Helper()
	if err := x.pool.QueryRow(x.Context(), sql).Scan(&n); err != nil {
		x.Fatal(err)
	}
	return n
}

func (x *exchange) eventually(what string, condition func() bool) {
	x.Helper()
	for end := time.Now().Add(2 * time.Minute); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			x.Fatalf("waited in vain until %s", what)
		}
	}
}

// meter is the usage meter of a gateway, and the queue of the model.
func (x *exchange) meter() (m *UsageMeter, queue string) {
	x.Helper()
	x.exec(`SELECT penstock.register_gateway(1, 'g', 'default', interval '1 hour')`)
	if err := x.pool.QueryRow(x.Context(), `SELECT name FROM penstock.queue WHERE model = 'm'`).Scan(&queue); err != nil {
		x.Fatal(err)
	}
	return NewUsageMeter(x.pool, func() invalidation.NodeID { return 1 }, slog.New(slog.DiscardHandler)), queue
}

// keepDemand has slots missed until a test says otherwise, instead of for three seconds after they were asked for.
func (x *exchange) keepDemand() {
	x.Helper()
	pgtest.Redefine(x, x.pool, "penstock.hungry_nodes", "interval '3 seconds'", "interval '1 hour'")
}

const missedSlots = `SELECT coalesce(sum(missing), 0) FROM penstock.slot_demand`

// The slots that lie idle at one gateway go to another one when that misses them. It is not taken to miss any then.
func TestIdleSlotsGoToTheGatewayThatMissesThem(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	x.keepDemand()
	first, second := x.join(1), x.join(2)
	for _, call := range x.admit(first, 9) {
		first.end(call, CallEnd{Took: time.Second})
	}
	x.admit(second, 6)
	if n := x.count(`SELECT count(*) FROM penstock.slot`); n > 9 {
		t.Errorf("gateways hold %d slots, of the 9 that they may hold", n)
	}
	x.eventually("no node is taken to miss slots", func() bool {
		return x.count(`SELECT count(*) FROM penstock.hungry_nodes('m')`) == 0
	})
}

// A gateway whose requests wait no more says so: task nodes would keep slots back for it.
func TestDemandEndsWithTheRequestsThatWait(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	first, second := x.join(1), x.join(2)
	x.admit(first, 9)
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() { left <- second.await(ctx, &Request{Flow: "f", TTL: 2 * time.Minute}) }()
	x.eventually("a slot is missed", func() bool { return x.count(missedSlots) == 1 })
	leave()
	if err := <-left; err == nil {
		t.Error("a request that left was served")
	}
	x.eventually("no slot is missed", func() bool { return x.count(missedSlots) == 0 })
}

// Hints are only a shorter way: gateways that hear none give each other slots by the clock.
func TestSlotsChangeHandsWithoutHints(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	first, second := x.joinEvery(1, 100*time.Millisecond, false), x.joinEvery(2, 100*time.Millisecond, false)
	calls := x.admit(first, 9) // all that online calls may hold
	for _, call := range calls[:4] {
		first.end(call, CallEnd{Took: time.Second})
	}
	x.admit(second, 4)
	for _, call := range calls[4:] {
		first.end(call, CallEnd{Took: time.Second})
	}
}

// callsFunction says whether a statement calls a function of the schema.
func callsFunction(sql, name string) bool { return strings.Contains(sql, "penstock."+name+"(") }

// bank is a database that has nothing to lease, and counts leases.
type bank struct {
	postgres.DB
	leases int
	wants  []int        // of the leases
	asked  int          // how many slots others miss
	orders atomic.Int32 // of preemption
	grant  bool         // comparisons find the slot 0 of the instance 1
}

func (b *bank) Query(_ context.Context, sql string, args ...any) (pgx.Rows, error) {
	if callsFunction(sql, "lease_slots_within") {
		b.leases++
		b.wants = append(b.wants, args[2].(int)) //nolint:errcheck,forcetypeassert // of lease_slots_within
	}
	if callsFunction(sql, "held_slots") && b.grant {
		return &slotRows{slots: []slot.Held{{Instance: 1, Token: 1}}}, nil
	}
	return &slotRows{}, nil
}

func (b *bank) QueryRow(_ context.Context, sql string, _ ...any) pgx.Row {
	switch {
	case callsFunction(sql, "offer_slots"):
		b.asked++
	case callsFunction(sql, "preempt_durable"):
		b.orders.Add(1)
	}
	return noneOrdered{}
}

func (b *bank) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, nil
}

type noneOrdered struct{}

func (noneOrdered) Scan(...any) error { return nil }

// Leases that bring nothing are sent ever less often. A slot that was handed over says that others have some to give:
// the next lease asks for the rest at once.
func TestLeasesBeginAnewWhenASlotWasHandedOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := &bank{}
		g := New(Config{Open: true})
		l := NewLeases(LeasesConfig{every: time.Hour}, g, db, func() invalidation.NodeID { return 1 })
		g.SetModels([]ModelState{{
			Name: "m", Protocol: worker.ProtocolOpenAI, Policy: DefaultPolicy(),
			Instances: []InstanceState{{ID: 1, Slots: 2, Usable: true}},
		}})
		ctx, stop := context.WithCancel(t.Context())
		go func() { _ = l.Run(ctx) }()
		for range 3 {
			go func() { _ = l.pool("m").await(ctx, &Request{Flow: "f", Criticality: Critical, TTL: time.Hour}) }()
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if db.leases > 50 {
			t.Errorf("%d leases in 10 s that brought nothing", db.leases)
		}
		db.leases, db.grant = 0, true
		l.Granted(1)
		synctest.Wait()
		time.Sleep(20 * time.Millisecond)
		synctest.Wait()
		if db.leases != 1 {
			t.Errorf("%d leases within 20 ms of a hand-over, want 1", db.leases)
		}
		stop()
		synctest.Wait()
	})
}

// Requests that come together ask for their slots together: the holder of idle ones hands over as many as are missed
// when it reads the demand, and those of a later lease by a statement of their own.
func TestABurstAsksForItsSlotsAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := &bank{}
		g := New(Config{Open: true})
		l := NewLeases(LeasesConfig{every: time.Hour}, g, db, func() invalidation.NodeID { return 1 })
		g.SetModels([]ModelState{{
			Name: "m", Protocol: worker.ProtocolOpenAI, Policy: DefaultPolicy(),
			Instances: []InstanceState{{ID: 1, Slots: 4, Usable: true}},
		}})
		ctx, stop := context.WithCancel(t.Context())
		go func() { _ = l.Run(ctx) }()
		synctest.Wait()
		for range 4 {
			go func() { _ = l.pool("m").await(ctx, &Request{Flow: "f", TTL: time.Hour}) }()
			synctest.Wait()
			time.Sleep(200 * time.Microsecond)
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
		if len(db.wants) != 1 || db.wants[0] != 4 {
			t.Errorf("leases asked for %v slots, want one for 4", db.wants)
		}
		stop()
		synctest.Wait()
	})
}

// A gateway that has no idle slot when another one says that it misses some gives them as soon as its calls end, also
// between two hints.
func TestSlotThatComesIdleBehindAHintIsHandedOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := &bank{}
		g := New(Config{Open: true})
		l := NewLeases(LeasesConfig{every: time.Hour}, g, db, func() invalidation.NodeID { return 1 })
		g.SetModels([]ModelState{{
			Name: "m", Protocol: worker.ProtocolOpenAI, Policy: DefaultPolicy(),
			Instances: []InstanceState{{ID: 1, Slots: 2, Usable: true}},
		}})
		ctx, stop := context.WithCancel(t.Context())
		go func() { _ = l.Run(ctx) }()
		pool := l.pool("m")
		pool.do(func(now time.Time, p *Pool) {
			p.Trust(now, now.Add(time.Hour))
			p.Grant(now, []slot.Held{{Instance: 1, Number: 0, Token: 1}, {Instance: 1, Number: 1, Token: 1}})
		})
		var calls []*Request
		admit := func() {
			call := &Request{Flow: "f", Criticality: Critical, TTL: time.Hour}
			if err := pool.await(ctx, call); err != nil {
				t.Fatal(err)
			}
			calls = append(calls, call)
		}
		admit()
		admit()
		for i, pause := range []time.Duration{2 * hintLasts, hintLasts / 2} {
			l.OfferIdle("m")
			synctest.Wait()
			time.Sleep(pause)
			pool.end(calls[i], CallEnd{Took: time.Second})
			synctest.Wait()
			if want := i; db.asked != want {
				t.Errorf("%s behind a hint the gateway has asked %d times what others miss, want %d", pause, db.asked, want)
			}
			admit()
		}
		stop()
		synctest.Wait()
	})
}

// stuckBank is a database in which each statement about the model "stuck" hangs, as behind a session that holds its lock,
// and each lease of another model brings a slot.
type stuckBank struct {
	bank
	mu     sync.Mutex
	number int32
}

func (b *stuckBank) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if !callsFunction(sql, "lease_slots_within") {
		return &slotRows{}, nil
	}
	if args[0] == "stuck" {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.number++
	return &slotRows{slots: []slot.Held{{Instance: 2, Number: b.number, Token: int64(b.number)}}}, nil
}

// A statement of one model that hangs delays the leases of no other.
func TestStatementThatHangsDelaysItsOwnModelAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := New(Config{Open: true})
		l := NewLeases(LeasesConfig{}, g, &stuckBank{}, func() invalidation.NodeID { return 1 })
		g.SetModels([]ModelState{
			{Name: "stuck", Policy: DefaultPolicy(), Instances: []InstanceState{{ID: 1, Slots: 9, Usable: true}}},
			{Name: "well", Policy: DefaultPolicy(), Instances: []InstanceState{{ID: 2, Slots: 99, Usable: true}}},
		})
		ctx, stop := context.WithCancel(t.Context())
		var group sync.WaitGroup
		group.Go(func() { _ = l.Run(ctx) })
		group.Go(func() { _ = l.pool("stuck").await(ctx, &Request{Flow: "f", TTL: time.Hour}) })
		time.Sleep(10 * time.Millisecond)
		var longest time.Duration
		for range 20 {
			began := time.Now()
			if err := l.pool("well").await(ctx, &Request{Flow: "f", TTL: time.Hour}); err != nil {
				t.Fatal(err)
			}
			longest = max(longest, time.Since(began))
			time.Sleep(300 * time.Millisecond)
		}
		if longest > 10*time.Millisecond {
			t.Errorf("a request waited %s for its lease", longest)
		}
		stop()
		group.Wait()
	})
}

// Of the slots that are offered those stay that nobody misses, and serve requests again.
func TestSlotsThatNobodyMissesStay(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	x.keepDemand()
	first := x.join(1)
	for _, call := range x.admit(first, 9) {
		first.end(call, CallEnd{Took: time.Second})
	}
	x.exec(`INSERT INTO penstock.node (id, name, application, lease, threads, queue_ids, kind)
VALUES (2, 'other', 'default', interval '1 hour', 0, '{}', 'gateway')`)
	x.exec(`INSERT INTO penstock.slot_demand (model, node_id, missing) VALUES ('m', 2, 2)`)
	x.exec(`SELECT pg_notify('penstock', 'slots m')`)
	held := func(node int) int {
		return x.count(fmt.Sprintf(`SELECT count(*) FROM penstock.slot WHERE node_id = %d`, node))
	}
	x.eventually("the slots that are missed are handed over", func() bool { return held(2) == 2 })
	if n := held(1); n != 7 {
		t.Errorf("%d slots stay, want the 7 that nobody misses", n)
	}
	x.admit(first, 7)
}
