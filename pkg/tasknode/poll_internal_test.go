package tasknode

import (
	"testing"
	"time"
)

// A poll that takes long, because the database is slow or away, is waited for by the other scheduling threads: they
// do not wake each millisecond to see whether it has ended.
func TestThreadsRestWhileAnotherOnePolls(t *testing.T) {
	var p lanePoll
	now := time.Now()
	p.want()
	if !p.start(now) {
		t.Fatal("the first poll did not begin")
	}
	p.want()
	if wait := p.wait(now); wait < time.Minute {
		t.Errorf("during a poll the next try comes after %v", wait)
	}
	p.end(now, 10*time.Millisecond, false)
	if wait := p.wait(now); wait != 100*time.Millisecond {
		t.Errorf("after a poll of 10ms the poll that was wanted meanwhile may begin after %v, want 100ms", wait)
	}
}

// A node that is idle polls at the usual time. It polls less often the longer the database takes to answer, so that a
// slow one is not asked more often than before, and as usual again once answers come in time.
func TestIdlePollsGetRarerWhileTheDatabaseIsSlow(t *testing.T) {
	const usual = 250 * time.Millisecond
	var p lanePoll
	now := time.Now()
	for _, c := range []struct{ took, every, notBefore time.Duration }{
		{time.Millisecond, usual, 10 * time.Millisecond},
		{50 * time.Millisecond, time.Second, 500 * time.Millisecond},
		{10 * time.Second, 5 * time.Second, 5 * time.Second},
		{time.Millisecond, usual, 10 * time.Millisecond},
	} {
		p.want()
		if !p.start(now) {
			t.Fatal("a poll that is wanted, and may begin, does not begin")
		}
		now = now.Add(c.took)
		p.end(now, c.took, false)
		if got := p.every(usual); got != c.every {
			t.Errorf("after a poll of %v the next one of an idle node comes after %v, want %v", c.took, got, c.every)
		}
		p.want()
		if got := p.wait(now); got != c.notBefore {
			t.Errorf("after a poll of %v a hint has the next one after %v, want %v", c.took, got, c.notBefore)
		}
		now = now.Add(c.notBefore)
	}
}

// Nodes that missed heartbeats while the database was away do not go on in step.
func TestTheFirstHeartbeatAfterMissedOnesIsFollowedAtARandomTime(t *testing.T) {
	n := &Node{cfg: Config{Beat: 2 * time.Second, Random: func() float64 { return 0.25 }}}
	if d := n.nextBeat(true); d != 500*time.Millisecond {
		t.Errorf("after missed heartbeats the next one but one is %v later, want a quarter of the usual time", d)
	}
	if d := n.nextBeat(false); d != 2*time.Second {
		t.Errorf("the next heartbeat is %v later, want the usual time", d)
	}
}
