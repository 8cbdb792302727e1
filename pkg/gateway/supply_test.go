package gateway

import (
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/slot"
)

// A slot that is owed leaves with the end of its call, goes to no waiter, and cannot come in again before it is given
// back.
func TestAnOwedSlotLeavesWithItsCall(t *testing.T) {
	t.Parallel()
	x := newTraffic(1, 1, 2, DefaultPolicy())
	x.took = func(*Request) time.Duration { return time.Second }
	began := 0
	x.began = func(int, *Request) { began++ }
	for range 5 {
		x.send(0, &Request{Flow: "a", Criticality: Critical})
	}
	p := x.pools[0]
	p.owe(1)
	x.run(1500 * time.Millisecond)
	if began != 3 || p.inFlight != 1 {
		t.Errorf("%d calls have begun and %d are in flight, want 3 and 1: one of two slots is owed", began, p.inFlight)
	}
	held, idle := p.fleet.held()
	if held != 2 || idle != 0 {
		t.Errorf("%d slots are held and %d idle: the owed one is to stay busy until it is given back", held, idle)
	}
	if out := p.surrender(); len(out) != 1 || len(p.surrender()) != 0 {
		t.Errorf("got %v", out)
	}
	if held, _ := p.fleet.held(); held != 1 {
		t.Errorf("%d slots are held", held)
	}
	p.owe(-3)
	x.run(10 * time.Second)
	if began != 5 || p.inFlight != 0 || p.waiting != 0 {
		t.Errorf("%d calls have begun, %d are in flight, %d wait", began, p.inFlight, p.waiting)
	}
	if held, idle := p.fleet.held(); held != 1 || idle != 1 {
		t.Errorf("%d slots are held and %d idle", held, idle)
	}
}

// poolWithACallOnItsSlot is a pool with one slot, on which a call runs.
func poolWithACallOnItsSlot(t *testing.T) (p *Pool, now time.Time, slots []slot.Held, call *Request) {
	t.Helper()
	now = time.Unix(1_700_000_000, 0)
	p = NewPool(DefaultPolicy(), nil)
	p.SetInstances(now, []InstanceState{{ID: 1, Slots: 2, Usable: true}})
	slots = []slot.Held{{Instance: 1, Number: 0, Token: 1}}
	p.Grant(now, slots)
	call = &Request{Flow: "f", Criticality: Critical}
	if inFlight, refused := p.Arrive(now, call); !inFlight {
		t.Fatal(refused)
	}
	return p, now, slots, call
}

// Slots that were dropped while the database was away come in again under their tokens, while calls run on them: the end
// of such a call does not make the slot idle for a third call, while a second one runs on it.
func TestTheEndOfACallOnASlotThatWasLostFreesNothing(t *testing.T) {
	t.Parallel()
	p, now, slots, first := poolWithACallOnItsSlot(t)
	second := &Request{Flow: "f", Criticality: Critical}
	p.Lose(now, slots)
	p.Grant(now, slots)
	if inFlight, refused := p.Arrive(now, second); !inFlight {
		t.Fatal(refused)
	}
	p.End(now, first, CallEnd{Took: time.Second})
	if held, idle := p.fleet.held(); p.inFlight != 1 || held-idle != 1 {
		t.Errorf("%d calls are in flight, and %d of %d slots are idle", p.inFlight, idle, held)
	}
}

// A slot that is owed, whose call has ended, and that was dropped while the database was away comes in again under its
// token: it is not given back while another call runs on it.
func TestAnOwedSlotThatWasLostIsNotGivenBackFromUnderACall(t *testing.T) {
	t.Parallel()
	p, now, slots, first := poolWithACallOnItsSlot(t)
	second := &Request{Flow: "f", Criticality: Critical}
	p.owe(1)
	p.End(now, first, CallEnd{Took: time.Second})
	p.Lose(now, slots)
	p.Grant(now, slots)
	if inFlight, refused := p.Arrive(now, second); !inFlight {
		t.Fatal(refused)
	}
	out := p.surrender()
	if held, idle := p.fleet.held(); len(out) != 0 || held != 1 || idle != 0 {
		t.Errorf("%v are given back, %d slots are held and %d idle while a call runs", out, held, idle)
	}
	p.End(now, second, CallEnd{Took: time.Second})
	if held, idle := p.fleet.held(); held != 1 || idle != 1 {
		t.Errorf("%d slots are held and %d idle after the call", held, idle)
	}
}

// Where the limit of each instance is below its slots, or the instances cool, a pool wants no slots that it could not
// use, and says how many requests wait for another instance.
func TestAPoolWantsTheSlotsThatItsInstancesTake(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		limit     float64
		cool      bool
		held      int32
		want      int
		overLimit int
	}{
		"no limit":                    {10, false, 1, 8, 0},
		"all slots are held":          {10, false, 10, 0, 0},
		"limit of the slots held":     {1, false, 1, 0, 8},
		"limit with room":             {4, false, 1, 3, 5},
		"idle slots beyond the limit": {1, false, 9, 0, 8},
		"cools":                       {10, true, 3, 0, 8},
	} {
		now := time.Unix(1_700_000_000, 0)
		p := NewPool(DefaultPolicy(), nil)
		p.SetInstances(now, []InstanceState{{ID: 1, Slots: 10, Usable: true}})
		i := p.fleet.find(1)
		i.limit.limit = c.limit
		p.Grant(now, []slot.Held{{Instance: 1, Number: 0, Token: 1}})
		for range 9 {
			if _, refused := p.Arrive(now, &Request{Flow: "f", Criticality: Critical, Leave: func(*Request, Dropped) {}}); refused != nil {
				t.Fatal(refused)
			}
		}
		if c.cool {
			i.backoff.Until = now.Add(time.Second)
		}
		for k := int32(1); k < c.held; k++ {
			p.Grant(now, []slot.Held{{Instance: 1, Number: k, Token: int64(k) + 1}})
		}
		if want, over := p.wanted(now), p.overLimit(now); want != c.want || over != c.overLimit {
			t.Errorf("%s: %d slots are wanted and %d requests are over the limit, want %d and %d", name, want, over, c.want, c.overLimit)
		}
	}
}

// The autoscaler counts the requests that wait because the instances take no more calls, as a gateway reports them.
func TestRequestsOverTheLimitAreDemand(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	x.join(1)
	for load, want := range map[string]int{
		`{"pools": {"m": {"over_limit": 8}, "n": {"over_limit": 5}}}`: 8,
		`{"pools": {"m": {"stock": 3}}}`:                              0,
		`{"pools": {"m": {"over_limit": "many"}}}`:                    0,
	} {
		x.exec(`UPDATE penstock.node SET load = $1::text::jsonb`, load)
		if n := x.count(`SELECT missing FROM penstock.scale_online_waits('m')`); n != want {
			t.Errorf("%s: %d requests wait, want %d", load, n, want)
		}
	}
}

// Slots are leased of the instances that can use them: those beyond the limit of one would lie idle, while others wait for
// them.
func TestNoSlotIsLeasedBeyondALimit(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	var second int32
	err := x.pool.QueryRow(t.Context(),
		`SELECT penstock.register_instance('m', 'gpu-2', 'http://gpu-2', 10, '{}', 'test')`).Scan(&second)
	if err != nil {
		t.Fatal(err)
	}
	g := x.join(1)
	g.do(func(now time.Time, p *Pool) {
		p.SetInstances(now, []InstanceState{
			{ID: x.instance, Slots: 10, Usable: true}, {ID: second, Slots: 10, Usable: true},
		})
		p.fleet.find(x.instance).limit.limit = 1
	})
	x.exec(`SELECT penstock.register_gateway(2, 'other', 'default', interval '1 hour')`)
	x.exec(`INSERT INTO penstock.slot (instance_id, number, token, node_id) SELECT $1, n, 1000 + n, 2 FROM generate_series(0, 5) n`, second)
	x.admit(g, 5)
	of := func(server string) int {
		return x.count(`SELECT count(*) FROM penstock.slot s JOIN penstock.instance i ON i.id = s.instance_id
WHERE s.node_id = 1 AND i.server = '` + server + `'`)
	}
	if limited, free := of("gpu-1"), of("gpu-2"); limited != 1 || free != 4 {
		t.Errorf("%d slots of an instance with a limit of 1 are leased, and %d of the other, want 1 and 4", limited, free)
	}
}
