package scale

import (
	"testing"
	"time"
)

// serving is a term whose deployment has one instance, which is ready.
func serving(t *testing.T, c *cluster) *term {
	t.Helper()
	w := newTerm(t, driven(t), c)
	w.round()
	override(t, w.db, 1)
	w.round()
	w.round()
	do(t, w.db, `UPDATE penstock.instance SET state = 'ready'`)
	w.round()
	return w
}

// An instance that is idle and drains is removed, however far the clock of its backend is from the database's.
func TestAnInstanceIsNotItsOwnSuccessorByAnotherClock(t *testing.T) {
	for _, ahead := range []time.Duration{time.Minute, -time.Minute} {
		c := &cluster{ahead: ahead}
		w := serving(t, c)
		override(t, w.db, 0)
		for range 4 {
			w.round()
		}
		if got := c.names(); len(got) != 0 {
			t.Errorf("%s ahead: %v are left", ahead, got)
		}
		if n := one[int](t, w.db, `SELECT count(*) FROM penstock.audit WHERE verb = 'announce_instance'`); n != 1 {
			t.Errorf("%s ahead: registered %d times", ahead, n)
		}
	}
}

// The row of an instance that drains does not go on to the next one of its name, however close their starts are.
func TestTheSuccessorOfAnInstanceIsRegisteredAnew(t *testing.T) {
	c := &cluster{ahead: -time.Minute}
	w := serving(t, c)
	override(t, w.db, 0)
	w.round() // it drains
	c.instances[0].Began = c.instances[0].Began.Add(time.Millisecond)
	override(t, w.db, 1)
	w.round()
	w.round()
	got := one[string](t, w.db, `SELECT count(*) || ' registered, ' || count(draining_at) || ' drain' FROM penstock.instance`)
	if got != "1 registered, 0 drain" || c.started != 1 {
		t.Errorf("%s, %d started", got, c.started)
	}
	if n := one[int](t, w.db, `SELECT count(*) FROM penstock.audit WHERE verb = 'announce_instance'`); n != 2 {
		t.Errorf("registered %d times", n)
	}
}
