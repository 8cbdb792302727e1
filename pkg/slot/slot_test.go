package slot

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// rack is a database with a model on one instance of 4 slots.
type rack struct {
	*testing.T
	pool     *pgxpool.Pool
	instance int32
}

func newRack(t *testing.T) *rack {
	t.Helper()
	return newRackOn(t, pgtest.New(t))
}

func newRackOn(t *testing.T, pool *pgxpool.Pool) *rack {
	t.Helper()
	r := &rack{T: t, pool: pool}
	r.query(`SELECT penstock.register_model('m', '{"protocol": "openai"}', 'test')`)
	r.query(`SELECT penstock.register_instance('m', 'gpu-1', 'http://gpu-1', 4, '{}', 'test')`, &r.instance)
	return r
}

// query runs a statement, and reads its row if there is something to read it into.
func (r *rack) query(sql string, into ...any) {
	r.Helper()
	var err error
	if len(into) == 0 {
		_, err = r.pool.Exec(r.Context(), sql)
	} else {
		err = r.pool.QueryRow(r.Context(), sql).Scan(into...)
	}
	if err != nil {
		r.Fatal(err)
	}
}

// lastingDemands makes a demand count for an hour instead of 3 s, which a busy machine may take from the demand to what
// comes of it.
func (r *rack) lastingDemands() {
	r.Helper()
	for _, name := range []string{"hungry_nodes", "lease_slots_within"} {
		var text string
		r.query(`SELECT pg_get_functiondef(oid) FROM pg_proc
		          WHERE pronamespace = 'penstock'::regnamespace AND proname = '`+name+`'`, &text)
		lasting := strings.ReplaceAll(text, "interval '3 seconds'", "interval '1 hour'")
		if lasting == text {
			r.Fatalf("penstock.%s has no demand of 3 seconds", name)
		}
		r.query(lasting)
	}
}

// node registers a task node.
func (r *rack) node(id invalidation.NodeID) *Holder {
	r.Helper()
	node := invalidation.Node{ID: id, Name: "test", Application: "default", Lease: time.Minute}
	if err := invalidation.Register(r.Context(), r.pool, node); err != nil {
		r.Fatal(err)
	}
	return &Holder{DB: r.pool, Node: func() invalidation.NodeID { return id }}
}

// gateway registers a gateway.
func (r *rack) gateway(id invalidation.NodeID) *Holder {
	r.Helper()
	if _, err := r.pool.Exec(r.Context(), `SELECT penstock.register_gateway($1, 'gateway', 'default', interval '1 minute')`,
		id); err != nil {
		r.Fatal(err)
	}
	return &Holder{DB: r.pool, Node: func() invalidation.NodeID { return id }}
}

func (r *rack) lease(h *Holder, want int) Holding {
	r.Helper()
	leased, err := h.Lease(r.Context(), "m", want)
	if err != nil {
		r.Fatal(err)
	}
	return leased
}

// holds checks which slots a node holds, in any order.
func (r *rack) holds(h *Holder, want ...Held) {
	r.Helper()
	held, err := h.Slots(r.Context())
	if err != nil {
		r.Fatal(err)
	}
	byNumber := func(a, b Held) int { return int(a.Number - b.Number) }
	slices.SortFunc(held.Slots, byNumber)
	slices.SortFunc(want, byNumber)
	if !slices.Equal(held.Slots, want) {
		r.Errorf("the node holds %v, want %v", held.Slots, want)
	}
}

func (r *rack) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// What a node leases is what it holds, and both answers say for how long.
func TestANodeHoldsWhatItLeased(t *testing.T) {
	t.Parallel()
	r := newRack(t)
	one := r.node(1)
	before := time.Now()
	leased := r.lease(one, 3)
	if len(leased.Slots) != 3 {
		t.Fatalf("leased %v, want 3 slots", leased.Slots)
	}
	if left := leased.Until.Sub(before); left <= 0 || left > time.Minute+time.Since(before) {
		t.Errorf("the slots may be used for %s, want no more than the lease of a minute", left)
	}
	r.holds(one, leased.Slots...)
	if rest := r.lease(r.node(2), 4).Slots; len(rest) != 1 {
		t.Errorf("another node got %v, want the slot that is left", rest)
	}
}

// A node without a slot learns how much of its lease is left.
func TestANodeWithoutSlotsLearnsWhatIsLeftOfItsLease(t *testing.T) {
	t.Parallel()
	held, err := newRack(t).node(1).Slots(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(held.Slots) != 0 || !held.Until.After(time.Now()) {
		t.Errorf("got %+v", held)
	}
}

// lateDB answers after some time that a slot is held, for 30 s more.
type lateDB struct {
	postgres.DB
	pgx.Rows
	read bool
}

func (d *lateDB) Query(context.Context, string, ...any) (pgx.Rows, error) {
	time.Sleep(10 * time.Second)
	return d, nil
}

func (d *lateDB) Next() bool {
	defer func() { d.read = true }()
	return !d.read
}

func (d *lateDB) Scan(to ...any) error {
	instance, number, token := int32(1), int32(0), int64(1)
	for i, value := range []any{&instance, &number, &token, false, int64(30_000)} {
		reflect.ValueOf(to[i]).Elem().Set(reflect.ValueOf(value))
	}
	return nil
}

func (*lateDB) Close()                        {}
func (*lateDB) Err() error                    { return nil }
func (*lateDB) CommandTag() pgconn.CommandTag { return pgconn.CommandTag{} }

// What is left of a lease counts from before the question was sent, however long the answer takes.
func TestWhatIsLeftOfALeaseCountsFromTheQuestion(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := Holder{DB: &lateDB{}, Node: func() invalidation.NodeID { return 1 }}
		asked := time.Now()
		held, err := h.Slots(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if want := asked.Add(30 * time.Second); !held.Until.Equal(want) || len(held.Slots) != 1 {
			t.Errorf("got %+v, want the slot until %s", held, want)
		}
	})
}

// A statement that names a slot under a token that it has no more changes nothing.
func TestStatementsUnderAnOldTokenChangeNothing(t *testing.T) {
	t.Parallel()
	r := newRack(t)
	one := r.node(1)
	leased := r.lease(one, 1).Slots
	old := []Held{{Instance: leased[0].Instance, Number: leased[0].Number, Token: leased[0].Token - 1}}
	r.must(one.Return(t.Context(), old))
	r.must(one.HandOver(t.Context(), "m", old))
	r.must(one.Doubt(t.Context(), []Doubt{{Held: old[0], Reason: "test"}}))
	if _, adopted, err := one.Adopt(t.Context(), old[0]); adopted || err != nil {
		t.Errorf("adopted: %v, %v", adopted, err)
	}
	r.holds(one, leased...)
}

// Slots that are returned are free, also when they are returned once more.
func TestReturnedSlotsAreFree(t *testing.T) {
	t.Parallel()
	r := newRack(t)
	one, two := r.node(1), r.node(2)
	leased := r.lease(one, 4).Slots
	r.must(one.Return(t.Context(), leased[:2]))
	r.must(one.Return(t.Context(), leased[:2]))
	r.holds(one, leased[2:]...)
	if got := r.lease(two, 4).Slots; len(got) != 2 {
		t.Errorf("the other node got %v, want 2 slots", got)
	}
}

// A slot in doubt is not its node's to use, and stays counted until it is adopted or freed. It names the entry of its
// call, if that has one.
func TestSlotsInDoubtWaitForAnAdoptionOrAProbe(t *testing.T) {
	t.Parallel()
	r := newRack(t)
	one, two := r.node(1), r.node(2)
	leased := r.lease(one, 4).Slots
	r.must(one.Doubt(t.Context(), []Doubt{
		{Held: leased[0], Reason: "of an entry", Queue: 7, Entry: 8}, {Held: leased[1], Reason: "of a request"},
	}))
	r.holds(one, leased[2:]...)
	var named, unnamed int
	r.query(`
SELECT count(*) FILTER (WHERE doubt = 'of an entry' AND queue_id = 7 AND entry_id = 8),
       count(*) FILTER (WHERE doubt = 'of a request' AND queue_id IS NULL AND entry_id IS NULL)
  FROM penstock.slot`, &named, &unnamed)
	if named != 1 || unnamed != 1 {
		t.Errorf("%d slots name an entry and %d none, want one of each", named, unnamed)
	}
	own, adopted, err := two.Adopt(t.Context(), leased[0])
	if err != nil || !adopted {
		t.Fatalf("adopted: %v, %v", adopted, err)
	}
	r.holds(two, own)
	orphans, err := Orphans(t.Context(), r.pool, r.instance)
	if err != nil || len(orphans) != 1 || orphans[0].Token != leased[1].Token || orphans[0].Dead {
		t.Fatalf("orphans %+v, %v, want the slot in doubt", orphans, err)
	}
	if n, err := Free(t.Context(), r.pool, r.instance, []int64{leased[1].Token, leased[2].Token}); n != 1 || err != nil {
		t.Errorf("%d slots were freed, %v, want the one that no node follows", n, err)
	}
}

// The slot of a call is adopted from a node that is dead or does not follow it, and by one that lives.
func TestALivingNodeAdoptsWhatNoOtherFollows(t *testing.T) {
	t.Parallel()
	r := newRack(t)
	one, two := r.node(1), r.node(2)
	leased := r.lease(one, 2).Slots
	r.must(one.Doubt(t.Context(), []Doubt{{Held: leased[1], Reason: "test"}}))
	adopts := func(when string, s Held, want bool) {
		t.Helper()
		if _, adopted, err := two.Adopt(t.Context(), s); adopted != want || err != nil {
			t.Errorf("%s: adopted %v, %v", when, adopted, err)
		}
	}
	adopts("the holder lives", leased[0], false)
	r.query(`UPDATE penstock.node SET beat_at = beat_at - interval '1 hour' WHERE id = 2`)
	adopts("the node that asks is dead", leased[1], false)
	r.query(`UPDATE penstock.node SET beat_at = CASE id WHEN 2 THEN clock_timestamp() ELSE beat_at - interval '1 hour' END`)
	adopts("the holder is dead", leased[0], true)
	adopts("it is in doubt", leased[1], true)
}

// Slots go to the gateways that miss some: all that are handed over leave their holder, and of those that are offered
// as many as are missed.
func TestSlotsGoToGatewaysThatMissSome(t *testing.T) {
	t.Parallel()
	for _, offered := range []bool{false, true} {
		t.Run(fmt.Sprint("offered ", offered), func(t *testing.T) {
			t.Parallel()
			r := newRack(t)
			r.lastingDemands()
			one, two := r.gateway(1), r.gateway(2)
			leased := r.lease(one, 4).Slots
			if _, err := two.LeaseWithin(t.Context(), "m", 1, Limited{Instances: []int32{}, Rooms: []int32{}}); err != nil {
				t.Fatal(err)
			}
			keeps := leased[2:]
			if offered {
				missed, err := one.Offer(t.Context(), "m", leased[:2])
				r.must(err)
				if missed != 1 {
					t.Errorf("%d slots were missed, want 1", missed)
				}
				keeps = leased[1:]
			} else {
				r.must(one.HandOver(t.Context(), "m", leased[:2]))
			}
			got, err := two.Slots(t.Context())
			if err != nil || len(got.Slots) != 1 {
				t.Errorf("the gateway that misses a slot holds %v, %v", got.Slots, err)
			}
			r.holds(one, keeps...)
		})
	}
}

// A node learns its share of a model from when another one goes without, and not after the other has withdrawn.
func TestSharesAreThoseOfModelsOfWhichOthersGoWithout(t *testing.T) {
	t.Parallel()
	r := newRack(t)
	r.lastingDemands()
	one, two := r.gateway(1), r.gateway(2)
	r.lease(one, 4)
	lacks := func(h *Holder) {
		t.Helper()
		if _, err := h.LeaseWithin(t.Context(), "m", 2, Limited{Instances: []int32{}, Rooms: []int32{}}); err != nil {
			t.Fatal(err)
		}
	}
	check := func(when string, contended bool) {
		t.Helper()
		shares, err := one.Shares(t.Context(), []string{"m"})
		r.must(err)
		full, err := one.SharesAndShortages(t.Context(), []string{"m"})
		r.must(err)
		share, is := shares["m"]
		of, too := full["m"]
		if is != contended || too != contended || share != of.Slots {
			t.Errorf("%s: shares %v and %v", when, shares, full)
		}
		if contended && (of.Slots != 2 || of.Shortage != 2) {
			t.Errorf("%s: got %+v, want a share of 2 and 2 that the other one misses", when, of)
		}
	}
	lacks(one)
	check("no other node goes without", false)
	lacks(two)
	check("another gateway goes without", true)
	r.must(two.Withdraw(t.Context(), "m"))
	check("it has withdrawn", false)
}

// A new session has planned the statements about slots before its first use, and nothing has come of it.
func TestSessionsAreWarmedWithoutEffect(t *testing.T) {
	t.Parallel()
	r := newRack(t)
	conn, err := r.pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	r.must(Warm(t.Context(), conn.Conn()))
	var rows int
	r.query(`
SELECT (SELECT count(*) FROM penstock.slot) + (SELECT count(*) FROM penstock.slot_demand)
       + (SELECT count(*) FROM penstock.preemption)`, &rows)
	if rows != 0 {
		t.Errorf("%d rows are left", rows)
	}
}
