package invalidation

import (
	"errors"
	"strings"
	"testing"
	"time"
)

// again opens the queue anew, as a node does when the registry's version has changed.
func (b *bed) again() *Queue {
	b.Helper()
	q, err := Open(b.ctx, b.pool, b.q.Name)
	if err != nil {
		b.Fatal(err)
	}
	return q
}

func TestPauseHoldsFlowModelAndApplication(t *testing.T) {
	b := newBed(t, Config{Model: "m", Application: "shop"})
	by := By{Actor: "ada", Reason: "window"}
	b.exec(b.pool, `SELECT penstock.create_queue('others', '{"model": "other"}')`)
	for _, c := range []struct {
		subject    Subject
		held, free string // flows
	}{
		{Subject{Scope: ByFlow, Value: "a"}, "a", "b"},
		{Subject{Scope: ByFlow, Value: "a", Queue: "work"}, "a", "b"},
		{Subject{Scope: ByModel, Value: "m"}, "a", "-"},
		{Subject{Scope: ByApplication, Value: "shop"}, "b", "-"},
		{Subject{Scope: ByModel, Value: "other"}, "-", "a"},
	} {
		version := b.count(`SELECT sum(version) FROM penstock.queue`)
		b.must(Pause(b.ctx, b.pool, c.subject, by, time.Time{}))
		if b.count(`SELECT sum(version) FROM penstock.queue`) == version {
			t.Errorf("%v: nodes do not hear of it", c.subject)
		}
		q := b.again()
		if control, held := q.Held(c.held, time.Now()); c.held != "-" && (!held || control.Actor != "ada" || control.Reason != "window") {
			t.Errorf("%v does not hold flow %q: %+v", c.subject, c.held, control)
		}
		if _, held := q.Held(c.free, time.Now()); c.free != "-" && held {
			t.Errorf("%v holds flow %q", c.subject, c.free)
		}
		b.must(Resume(b.ctx, b.pool, c.subject, by))
		if _, held := b.again().Held(c.held, time.Now()); held {
			t.Errorf("%v holds after it was resumed", c.subject)
		}
	}
	if err := Resume(b.ctx, b.pool, Subject{Scope: ByFlow, Value: "a"}, by); !errors.Is(err, ErrState) {
		t.Errorf("resume of what is not paused: %v", err)
	}
	if err := Pause(b.ctx, b.pool, Subject{Scope: ByName, Value: "a"}, by, time.Time{}); !errors.Is(err, ErrInvalid) {
		t.Errorf("pause of a name of no queue: %v", err)
	}
}

func TestPauseWithAnEndEndsByTheNodesMonotonicClock(t *testing.T) {
	b := newBed(t, Config{})
	b.must(Pause(b.ctx, b.pool, Subject{Scope: ByFlow, Value: "a"}, By{}, time.Now().Add(time.Hour)))
	q := b.again()
	if _, held := q.Held("a", time.Now().Add(59*time.Minute)); !held {
		t.Error("it ended too early")
	}
	if _, held := q.Held("a", time.Now().Add(61*time.Minute)); held {
		t.Error("it did not end")
	}
}

func TestPausedNameAndKeyAreDisabledUntilTheirTimeIsOver(t *testing.T) {
	b := newBed(t, Config{})
	b.pushAll(b.pool, Push{Name: "mail"}, Push{Name: "other"}, Push{LockKey: "k"})
	b.must(Pause(b.ctx, b.pool, Subject{Scope: ByName, Value: "mail", Queue: "work"}, By{Actor: "ada"}, time.Time{}))
	b.must(Pause(b.ctx, b.pool, Subject{Scope: ByLockKey, Value: "k", Queue: "work"}, By{}, time.Now().Add(time.Hour)))
	b.pushAll(b.pool, Push{Name: "mail"}, Push{LockKey: "k"})
	locks := b.claim(10)
	if len(locks) != 1 || locks[0].Entries[0].Name != "other" {
		t.Fatalf("claimed %d locks, want the one that is not paused", len(locks))
	}
	b.settle(doneAll(locks...)...)
	if n, err := EndPauses(b.ctx, b.pool); n != 0 || err != nil {
		t.Errorf("ended %d, %v before their time", n, err)
	}
	b.exec(b.pool, `UPDATE penstock.pause SET until = clock_timestamp() WHERE scope = 'lock_key'`)
	if n, err := EndPauses(b.ctx, b.pool); n != 1 || err != nil {
		t.Errorf("ended %d, %v", n, err)
	}
	locks = b.claim(10)
	if len(locks) != 1 || locks[0].Key != "k" || len(locks[0].Entries) != 2 {
		t.Fatalf("claimed %d locks, want the key with two entries", len(locks))
	}
	b.settle(doneAll(locks...)...)
	b.must(Resume(b.ctx, b.pool, Subject{Scope: ByName, Value: "mail", Queue: "work"}, By{}))
	locks = b.claim(10)
	if len(locks) != 2 {
		t.Errorf("claimed %d, want both mails", len(locks))
	}
	b.settle(doneAll(locks...)...)
	if n := b.count(`SELECT count(*) FROM penstock.pause`); n != 0 {
		t.Errorf("%d pauses left", n)
	}
}

func TestPausedNodeHearsOfItAtItsHeartbeat(t *testing.T) {
	b := newBed(t, Config{})
	const node NodeID = 7050
	b.must(Register(b.ctx, b.pool, Node{ID: node, Name: "gpu-7", Application: "default", Lease: 10 * time.Second}))
	paused := func() bool {
		o, err := Renew(b.ctx, b.pool, node, Beat{Tokens: []Token{}})
		b.must(err)
		return o.Paused
	}
	for _, value := range []string{"gpu-7", "7050"} {
		b.must(Pause(b.ctx, b.pool, Subject{Scope: ByNode, Value: value}, By{}, time.Time{}))
		if !paused() {
			t.Errorf("node %s is not paused", value)
		}
		b.must(Resume(b.ctx, b.pool, Subject{Scope: ByNode, Value: value}, By{}))
		if paused() {
			t.Errorf("node %s is paused still", value)
		}
	}
}

func TestExplainNamesThePause(t *testing.T) {
	b := newBed(t, Config{})
	id := b.pushAll(b.pool, Push{Flow: "tenant"})[0]
	b.must(Pause(b.ctx, b.pool, Subject{Scope: ByFlow, Value: "tenant"}, By{Actor: "ada", Reason: "unpaid"}, time.Time{}))
	e, err := Explain(b.ctx, b.pool, id)
	b.must(err)
	for _, r := range e.Reasons {
		if r.Code == "paused" && strings.Contains(r.Text, `flow "tenant" is paused by ada`) && strings.Contains(r.Text, "unpaid") {
			return
		}
	}
	t.Errorf("reasons %+v do not name the pause", e.Reasons)
}

func TestQuotaBoundsAnApplicationOverAllItsQueues(t *testing.T) {
	b := newBed(t, Config{Application: "shop"})
	two := 2
	b.must(SetQuota(b.ctx, b.pool, "shop", &Limit{MaxUnits: &two}, By{Actor: "ada"}))
	later, err := Create(b.ctx, b.pool, "later", Config{Application: "shop"})
	b.must(err)
	b.q = b.again()
	b.push("", "", "")
	b.must(func() error { _, err := later.Push(b.ctx, withPayload(Push{}), withPayload(Push{})); return err }())
	locks := b.claim(2)
	if len(locks) != 2 {
		t.Fatalf("claimed %d of the first queue, want the quota of 2", len(locks))
	}
	c, err := later.Claim(b.ctx, ClaimRequest{Node: here, ClaimID: 900, Lane: usual, Limit: 2})
	b.must(err)
	if len(c.Locks) != 0 || !c.Limited {
		t.Errorf("claimed %d of the second queue beyond the quota: %+v", len(c.Locks), c)
	}
	if n := b.count(`SELECT count(*) FROM penstock.application_status WHERE application = 'shop' AND queues = 2 AND quota_units = 2 AND used_units = 2`); n != 1 {
		t.Error("the view does not show what the application uses")
	}
	b.settle(doneAll(locks...)...)
	c, err = later.Claim(b.ctx, ClaimRequest{Node: here, ClaimID: 901, Lane: usual, Limit: 2})
	b.must(err)
	if len(c.Locks) != 2 {
		t.Errorf("claimed %d after the quota came free, want 2", len(c.Locks))
	}
	b.exec(b.pool, `SELECT penstock.alter_queue('later', '{"application": "other"}')`)
	if n := b.count(`SELECT count(*) FROM penstock.limit_use WHERE queue_id = $1`, later.ID); n != 0 {
		t.Error("a queue that left the application is under its quota still")
	}
	b.must(SetQuota(b.ctx, b.pool, "shop", nil, By{}))
	b.q = b.again()
	if locks := b.claim(5); len(locks) != 1 {
		t.Errorf("claimed %d without a quota, want the one that is left", len(locks))
	}
}
