package gateway

import (
	"context"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
)

// awayLeases are the leases of a gateway that holds 4 slots of one instance, on a database that does not answer.
func awayLeases(t *testing.T) (*Leases, *sharedPool) {
	t.Helper()
	db, err := pgxpool.New(t.Context(), "host="+t.TempDir()+" user=none")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(db.Close)
	l := NewLeases(LeasesConfig{}, startTestbed(t, nil, nil).gateway, db, func() invalidation.NodeID { return 1 })
	return l, l.pool("m")
}

// The leaser of a model that was removed is forgotten once it has nothing to do.
func TestTheLeaserOfARemovedModelIsForgottenOnceItIsIdle(t *testing.T) {
	t.Parallel()
	l, _ := awayLeases(t)
	l.mu.Lock()
	for _, model := range []string{"m", "removed"} {
		l.leaser(model)
	}
	l.mu.Unlock()
	l.doubt("removed in doubt", slot.Held{Instance: 1, Number: 1, Token: 1}, "no answer")
	l.OfferIdle("removed and asked for")
	l.compare(t.Context())
	if got := slices.Sorted(maps.Keys(l.leasers)); !slices.Equal(got, []string{"m", "removed and asked for", "removed in doubt"}) {
		t.Errorf("leasers of %q are left", got)
	}
}

// While the database is away no slot can be given back: the slots that are owed stay, and serve the requests that wait.
func TestOwedSlotsStayWhileTheDatabaseIsAway(t *testing.T) {
	t.Parallel()
	l, pool := awayLeases(t)
	var calls []*Request
	launched := 0
	send := func(now time.Time, p *Pool) {
		r := &Request{Flow: "a", Criticality: Critical, Leave: func(_ *Request, why Dropped) {
			if why == DropNone {
				launched++
			}
		}}
		if inFlight, refused := p.Arrive(now, r); refused != nil {
			t.Error(refused)
		} else if inFlight {
			launched++
		}
		calls = append(calls, r)
	}
	pool.do(func(now time.Time, p *Pool) {
		for range 6 {
			send(now, p)
		}
		p.owe(3)
		p.End(now, calls[0], CallEnd{Took: time.Second})
		if launched != 4 || len(p.returning) != 1 {
			t.Errorf("%d calls have begun and %d slots are returning, want 4 and 1", launched, len(p.returning))
		}
	})
	l.tick(t.Context())
	pool.do(func(now time.Time, p *Pool) {
		if held, _ := p.fleet.held(); held != 4 || launched != 5 || p.owed != 0 {
			t.Errorf("%d slots are held, %d calls have begun, %d slots are owed, want 4, 5 and 0", held, launched, p.owed)
		}
		p.owe(1) // as if shares had been read just before
		p.End(now, calls[1], CallEnd{Took: time.Second})
	})
	l.leaser("m").leaseWhileWaiting(t.Context())
	pool.do(func(_ time.Time, p *Pool) {
		if held, _ := p.fleet.held(); held != 4 || launched != 6 || p.inFlight != 4 {
			t.Errorf("%d slots are held, %d calls have begun, %d are in flight, want 4, 6 and 4", held, launched, p.inFlight)
		}
	})
}

// At its end a gateway gives back the slots too that were owed and whose calls have ended.
func TestOwedSlotsAreGivenBackAtTheEnd(t *testing.T) {
	t.Parallel()
	l, pool := awayLeases(t)
	r := &Request{Flow: "a", Criticality: Critical}
	pool.do(func(now time.Time, p *Pool) {
		if inFlight, refused := p.Arrive(now, r); !inFlight {
			t.Fatal(refused)
		}
		p.owe(1)
		p.End(now, r, CallEnd{Took: time.Second})
	})
	l.giveBackAll(t.Context())
	pool.do(func(_ time.Time, p *Pool) {
		if held, _ := p.fleet.held(); held != 0 {
			t.Errorf("%d slots are kept", held)
		}
	})
}

// A call may be put in doubt after the database has answered which slots are held, and before the answer is
// applied: the slot must not be taken for one that was handed over.
func TestAlignGrantsNoSlotInDoubt(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, nil, nil)
	l := NewLeases(LeasesConfig{}, p.gateway, nil, nil)
	pool := l.pool("m")
	doubted := slot.Held{Instance: 1, Number: 0, Token: 1}
	ours, byInstance := map[slot.Held]bool{doubted: true}, map[int32][]slot.Held{1: {doubted}}

	l.doubt("m", doubted, "test")
	pool.do(func(now time.Time, p *Pool) { p.Lose(now, []slot.Held{doubted}) })
	l.align(pool, ours, nil, byInstance)
	if held := p.state().Held; held != 3 {
		t.Errorf("%d slots are held, want the 3 that are not in doubt", held)
	}
}

// A slot that was given back while a comparison was under way must not be taken for one that was handed over, though the
// answer lists it.
func TestAlignGrantsNoSlotThatIsGivenBack(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, nil, nil)
	l := NewLeases(LeasesConfig{}, p.gateway, nil, nil)
	pool := l.pool("m")
	var out []slot.Held
	pool.do(func(now time.Time, p *Pool) {
		out = p.Retire(now, 1)
		l.leaser("m").giveBackSoon(out)
	})
	ours, byInstance := map[slot.Held]bool{out[0]: true}, map[int32][]slot.Held{1: out}
	asked := time.Now()
	l.align(pool, ours, nil, byInstance)
	l.leaser("m").gaveBack(out, true)
	l.align(pool, ours, nil, byInstance)
	l.leaser("m").leaving.ForgetBefore(asked)
	l.align(pool, ours, nil, byInstance)
	if held := p.state().Held; held != 3 {
		t.Errorf("%d slots are held, want the 3 that were not given back", held)
	}
}

// An answer that was long on its way lists a slot whose number came in again meanwhile, under a later token: it was not
// granted now.
func TestAlignCountsNoSlotThatIsNotTakenIn(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, nil, nil)
	l := NewLeases(LeasesConfig{}, p.gateway, nil, nil)
	early, late := slot.Held{Instance: 1, Number: 0, Token: 8}, slot.Held{Instance: 1, Number: 0, Token: 9}
	l.align(l.pool("m"), map[slot.Held]bool{late: true}, nil, map[int32][]slot.Held{1: {late}})
	l.align(l.pool("m"), map[slot.Held]bool{early: true}, nil, map[int32][]slot.Held{1: {early}})
	if n := l.Figures().Granted; n != 1 {
		t.Errorf("%d slots were granted, want the one that was taken in", n)
	}
}

// deafBank is a database with four slots of the gateway, under the tokens 1 to 4. The first give-backs have no answer, and
// are not carried out before they are sent again.
type deafBank struct {
	bank
	mu    sync.Mutex
	lost  int // answers
	given [][]int64
	gone  []int64
}

func (b *deafBank) Query(_ context.Context, sql string, _ ...any) (pgx.Rows, error) {
	if callsFunction(sql, "held_slots") {
		b.mu.Lock()
		defer b.mu.Unlock()
		var held []slot.Held
		for n := range int32(4) {
			if token := int64(n) + 1; !slices.Contains(b.gone, token) {
				held = append(held, slot.Held{Instance: 1, Number: n, Token: token})
			}
		}
		return &slotRows{slots: held}, nil
	}
	return &slotRows{}, nil
}

func (b *deafBank) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if !callsFunction(sql, "hand_over_slots") {
		return pgconn.CommandTag{}, nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	tokens := args[4].([]int64) //nolint:errcheck,forcetypeassert // of hand_over_slots
	b.given = append(b.given, tokens)
	if b.lost > 0 {
		b.lost--
		b.mu.Unlock()
		<-ctx.Done()
		b.mu.Lock()
		return pgconn.CommandTag{}, ctx.Err()
	}
	b.gone = append(b.gone, tokens...)
	return pgconn.CommandTag{}, nil
}

// sent returns the tokens of all give-backs.
func (b *deafBank) sent() [][]int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.given)
}

// deafLeases runs the leases of a gateway with four idle slots, the first give-back of which loses its answer.
func deafLeases(t *testing.T) (db *deafBank, p *sharedPool, stop func()) {
	t.Helper()
	db = &deafBank{lost: 1}
	g := New(Config{Open: true})
	l := NewLeases(LeasesConfig{}, g, db, func() invalidation.NodeID { return 1 })
	g.SetModels([]ModelState{{
		Name: "m", Protocol: worker.ProtocolOpenAI, Policy: DefaultPolicy(),
		Instances: []InstanceState{{ID: 1, Slots: 4, Usable: true}},
	}})
	g.Fixed()
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	group.Go(func() { _ = l.Run(ctx) })
	return db, l.pool("m"), func() {
		cancel()
		group.Wait()
	}
}

// A give-back without an answer may be carried out at any later time: its slots are not used again, though a comparison
// lists them, and are given back once more.
func TestSlotsAreNotUsedBehindAGiveBackWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, pool, stop := deafLeases(t)
		defer stop()
		time.Sleep(1100 * time.Millisecond)
		given := db.sent()
		if len(given) != 1 {
			t.Fatalf("%d give-backs in a second, want 1", len(given))
		}
		first := given[0][0]
		for range 100 {
			pool.do(func(_ time.Time, p *Pool) {
				for s := range p.fleet.instances[0].slots.All() {
					if s.Token == first {
						t.Fatalf("the slot of a give-back that has no answer is used again")
					}
				}
			})
			time.Sleep(100 * time.Millisecond)
		}
		times := 0
		for _, tokens := range db.sent() {
			if slices.Contains(tokens, first) {
				times++
			}
		}
		if times != 2 {
			t.Errorf("the slot was given back %d times, want once more than the answer was lost", times)
		}
	})
}

// A give-back that the end of the gateway breaks off is sent again: its slots would else be those of a dead node.
func TestGiveBackThatWasBrokenOffIsSentAgainAtTheEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, _, stop := deafLeases(t)
		time.Sleep(1100 * time.Millisecond)
		stop()
		given := db.sent()
		last := slices.Sorted(slices.Values(given[len(given)-1]))
		if want := []int64{1, 2, 3, 4}; !slices.Equal(last, want) {
			t.Errorf("the slots %v were given back at the end, want %v", last, want)
		}
	})
}

// A gateway keeps idle slots for what it was called for of late, and none once it has not been called for a while.
func TestSlotsOfAPoolThatIsNotCalledAreAllGivenBack(t *testing.T) {
	t.Parallel()
	held, peak := 64, 40.0
	for second := range 180 {
		n := surplusOf(held, held, 0, peak, 0, false)
		if kept := held - n; second < 3 && kept < 40 {
			t.Errorf("%d slots are kept %d s after 40 calls", kept, second)
		}
		held -= n
		peak *= peakFalls
	}
	if held != 0 {
		t.Errorf("%d slots are kept after three minutes without a call", held)
	}
}

// slowBank is a database that takes a moment to tell which slots are held, and has none to lease.
type slowBank struct{ bank }

func (*slowBank) Query(_ context.Context, sql string, _ ...any) (pgx.Rows, error) {
	if callsFunction(sql, "held_slots") {
		time.Sleep(3 * time.Millisecond)
	}
	return &slotRows{}, nil
}

func (*slowBank) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, nil
}

// Where slots of other models come in all the time, one comparison follows the other: a pool whose requests wait leases
// all the same.
func TestLeasesWaitForComparisonsForAMomentAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := New(Config{Open: true})
		l := NewLeases(LeasesConfig{}, g, &slowBank{}, func() invalidation.NodeID { return 1 })
		policy := DefaultPolicy()
		policy.Preempt = false
		g.SetModels([]ModelState{{
			Name: "m", Protocol: worker.ProtocolOpenAI, Policy: policy, Instances: []InstanceState{{ID: 1, Slots: 4, Usable: true}},
		}})
		ctx, cancel := context.WithCancel(t.Context())
		var group sync.WaitGroup
		group.Go(func() { _ = l.Run(ctx) })
		defer group.Wait()
		defer cancel()
		l.pool("m").do(func(now time.Time, p *Pool) {
			if _, refused := p.Arrive(now, &Request{Flow: "a", Criticality: Critical, Leave: func(*Request, Dropped) {}}); refused != nil {
				t.Fatal(refused)
			}
		})
		for range 500 {
			l.Granted(1)
			time.Sleep(2 * time.Millisecond)
		}
		if n := l.Figures().Leases; n < 3 || n > 10 {
			t.Errorf("%d leases were sent in a second, want one every 275 ms at the latest", n)
		}
	})
}
