package inference

import (
	"slices"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// After the clock was set back the next probe of an instance was due when the clock had caught up, and the slots of dead
// nodes stayed taken until then.
func TestAnInstanceIsProbedAfterTheClockWasSetBack(t *testing.T) {
	b := newBed(t, worker.Model{})
	b.instance("gpu-1", nowhere, 1)
	p := newProber(usualTuning(), b.pool, NewRegistry(b.pool, worker.Config{}, 0, quiet), quiet)
	set := func(checked, next string) {
		_, err := b.pool.Exec(b.ctx, `UPDATE penstock.instance SET checked_at = clock_timestamp() + $1::interval,
		                                     next_check_at = clock_timestamp() + $2::interval`, checked, next)
		b.must(err)
	}
	due := func(want int) {
		t.Helper()
		if due, err := p.claimDue(b.ctx, 10); err != nil || len(due) != want {
			t.Errorf("claimed %v, want %d; %v", due, want, err)
		}
	}
	set("0", "7 seconds") // more than the longest pause
	due(0)
	set("1 hour", "1 hour")
	due(1)
	due(0)

	node := b.node(time.Minute)
	_, err := b.pool.Exec(b.ctx, `INSERT INTO penstock.slot (instance_id, node_id, number, token) SELECT id, $1, 0, 1 FROM penstock.instance`, node)
	b.must(err)
	_, err = b.pool.Exec(b.ctx, `UPDATE penstock.node SET beat_at = clock_timestamp() - lease - interval '2 seconds' WHERE id = $1`, node)
	b.must(err)
	set("0", "6 seconds")
	due(0)
	set("5 seconds", "6 seconds")
	due(1)
}

// By a clock that stepped ahead leases have lapsed of nodes that live, and that have not beaten since.
func TestSlotsOfNodesAreKeptAfterAStepOfTheClock(t *testing.T) {
	lapsed := []slot.Orphan{{Token: 1, Dead: true, Age: time.Minute}, {Token: 2, Age: time.Minute}}
	start, clock := time.Now(), time.Now().Add(time.Hour)
	for name, c := range map[string]struct {
		after, stepped, took time.Duration // since the first reading, of the clock, and of the second statement
		trusted              int
	}{
		"a right clock":                        {time.Second, 0, 0, 2},
		"a step ahead":                         {time.Second, time.Minute, 0, 1},
		"a step back":                          {time.Second, -time.Minute, 0, 2},
		"an answer that was long on its way":   {time.Second, -2 * time.Second, 2 * time.Second, 2},
		"no answer for more than three probes": {4 * time.Second, 0, 0, 1},
	} {
		p := newProber(usualTuning(), nil, nil, quiet)
		p.heard(start, start, clock)
		came := start.Add(c.after + c.took)
		p.heard(start.Add(c.after), came, clock.Add(c.after+c.took+c.stepped))
		if got := p.trusted(slices.Clone(lapsed), came.Add(time.Second)); len(got) != c.trusted {
			t.Errorf("%s: %d of 2 orphans are trusted, want %d", name, len(got), c.trusted)
		}
		if got := p.trusted(slices.Clone(lapsed), came.Add(5*time.Second)); len(got) != 2 {
			t.Errorf("%s: %d of 2 orphans are trusted five seconds later", name, len(got))
		}
		p.lease = time.Minute // of a node that beats each 20 seconds
		if got := p.trusted(slices.Clone(lapsed), came.Add(19*time.Second)); len(got) != c.trusted {
			t.Errorf("%s: %d of 2 orphans are trusted before all nodes have beaten, want %d", name, len(got), c.trusted)
		}
	}
}

// A node that lives, and whose lease has lapsed by a step ahead of the clock, keeps its slot in a probe that overtakes its
// next heartbeat.
func TestAProbeReadsTheClockBehindTheOrphans(t *testing.T) {
	b := newBed(t, worker.Model{Protocol: worker.ProtocolOpenAI}) // a closed connection ends its run
	s := workertest.NewScript(t, healthy(workertest.Says(200, `{}`)))
	b.instance("gpu-1", s.URL, 1)
	registry := NewRegistry(b.pool, worker.Config{}, 0, quiet)
	b.must(registry.Refresh(b.ctx))
	node := b.node(time.Minute)
	_, err := b.pool.Exec(b.ctx, `INSERT INTO penstock.slot (instance_id, node_id, number, token) SELECT id, $1, 0, 1 FROM penstock.instance`, node)
	b.must(err)
	_, err = b.pool.Exec(b.ctx, `UPDATE penstock.node SET beat_at = clock_timestamp() - lease - interval '1 minute' WHERE id = $1`, node)
	b.must(err)
	_, err = b.pool.Exec(b.ctx, `UPDATE penstock.slot SET leased_at = clock_timestamp() - interval '1 hour'`)
	b.must(err)
	instance := int32(b.count(`SELECT id FROM penstock.instance`)) //nolint:gosec // an id
	p := newProber(usualTuning(), b.pool, registry, quiet)
	p.heard(time.Now(), time.Now(), time.Now().Add(-2*time.Minute)) // so the clock has stepped ahead by two minutes
	_, err = p.probe(b.ctx, instance)
	b.must(err)
	if n := b.count(`SELECT count(*) FROM penstock.slot`); n != 1 {
		t.Error("the slot was freed")
	}
	p = newProber(usualTuning(), b.pool, registry, quiet)
	_, err = p.claimDue(b.ctx, 10)
	b.must(err)
	if p.clock.IsZero() {
		t.Error("the claim of probes has read no clock")
	}
	_, err = p.probe(b.ctx, instance)
	b.must(err)
	if n := b.count(`SELECT count(*) FROM penstock.slot`); n != 0 {
		t.Error("the slot of a dead node was not freed")
	}
}

// By a clock that was set back, a run that is followed on has not begun yet: that takes nothing from the bill.
func TestARunIsNotCountedBelowNothingAfterAStepOfTheClockBack(t *testing.T) {
	t.Parallel()
	for age, least := range map[time.Duration]time.Duration{-time.Hour: 0, time.Minute: time.Minute} {
		d := dispatch{model: worker.Model{Timeouts: worker.Timeouts{Run: worker.Seconds(time.Hour)}}}
		d.takeOver(&remoteRun{Remote: "r", Age: age, Found: time.Now()}, false)
		if took := d.took(); took < least {
			t.Errorf("a run of the age %v took %v, want %v at least", age, took, least)
		}
	}
}
