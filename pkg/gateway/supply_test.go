package gateway

import (
	"testing"
	"time"
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
		x.send(0, &Request{Flow: "a", Class: Critical})
	}
	p := x.pools[0]
	p.owe(1)
	x.run(1500 * time.Millisecond)
	if began != 3 || p.stock != 1 {
		t.Errorf("%d calls have begun and %d are in flight, want 3 and 1: one of two slots is owed", began, p.stock)
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
	if began != 5 || p.stock != 0 || p.waiting != 0 {
		t.Errorf("%d calls have begun, %d are in flight, %d wait", began, p.stock, p.waiting)
	}
	if held, idle := p.fleet.held(); held != 1 || idle != 1 {
		t.Errorf("%d slots are held and %d idle", held, idle)
	}
}
