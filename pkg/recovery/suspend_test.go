package recovery_test

import (
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/penstock/penstock/pkg/recovery"
)

// world is a set of nodes that beat, observed by a leader, all on one simulated clock.
type world struct {
	now       time.Time
	clock     time.Duration // of the database, apart from now when it jumps
	started   time.Duration // by the database's clock
	nodes     []*simNode
	suspender recovery.Suspender
}

type simNode struct {
	phase  time.Duration // when in each two seconds it beats
	beatAt time.Duration // by the database's clock
	dead   bool
}

const step = 100 * time.Millisecond

func newWorld(nodes int, phase func(int) time.Duration) *world {
	w := &world{
		now: time.Unix(1_000_000, 0), clock: 1000 * time.Hour, started: 0,
		suspender: recovery.Suspender{Share: 0.3, NodesMin: 3},
	}
	for i := range nodes {
		w.nodes = append(w.nodes, &simNode{phase: phase(i), beatAt: w.clock})
	}
	return w
}

// advance moves time on. reach says whether nodes and leader reach the database. It returns the
// nodes that were dead by their lease in an observation that was not suspended, and how that
// observation was judged.
func (w *world) advance(d time.Duration, nodesReach, leaderReaches bool) (found []*simNode, reason string) {
	for range d / step {
		w.now, w.clock = w.now.Add(step), w.clock+step
		at := w.now.Sub(time.Unix(1_000_000, 0))
		for _, n := range w.nodes {
			if !n.dead && nodesReach && at%(2*time.Second) == n.phase {
				n.beatAt = w.clock
			}
		}
		if leaderReaches && at%(5*step) == 0 {
			var lapsed []*simNode
			lapsed, reason = w.observe()
			found = append(found, lapsed...)
		}
	}
	return found, reason
}

func (w *world) observe() (lapsed []*simNode, reason string) {
	r := recovery.Reading{At: w.now, Clock: w.clock, Uptime: w.clock - w.started}
	for i, n := range w.nodes {
		r.Nodes = append(r.Nodes, node(i, 0, w.clock-n.beatAt))
	}
	if reason = w.suspender.Judge(r); reason != "" {
		return nil, reason
	}
	for i, n := range r.Nodes {
		if n.Silent > n.Lease {
			lapsed = append(lapsed, w.nodes[i])
		}
	}
	return lapsed, ""
}

func phases(t *rapid.T) func(int) time.Duration {
	return func(int) time.Duration { return time.Duration(rapid.IntRange(0, 19).Draw(t, "phase")) * step }
}

func TestStallOfTheDatabaseKillsNobody(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(rapid.IntRange(1, 12).Draw(t, "nodes"), phases(t))
		w.advance(time.Minute, true, true)
		stall := time.Duration(rapid.IntRange(0, 600).Draw(t, "stall")) * step
		w.advance(stall, false, false)
		if found, _ := w.advance(time.Minute, true, true); len(found) != 0 {
			t.Fatalf("after a stall of %v, %d live nodes counted as dead", stall, len(found))
		}
	})
}

// The nodes' network is down while the leader's is up.
func TestNodesThatFallSilentTogetherAreGivenASecondLease(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(rapid.IntRange(3, 12).Draw(t, "nodes"), phases(t))
		w.advance(time.Minute, true, true)
		stall := time.Duration(rapid.IntRange(0, 178).Draw(t, "stall")) * step // two leases less two seconds
		during, _ := w.advance(stall, false, true)
		after, _ := w.advance(time.Minute, true, true)
		if len(during)+len(after) != 0 {
			t.Fatalf("nodes silent for %v counted as dead", stall)
		}
	})
}

func TestNodesThatStaySilentAreFoundDeadInTheEnd(t *testing.T) {
	w := newWorld(5, func(i int) time.Duration { return time.Duration(i) * 2 * step })
	w.advance(time.Minute, true, true)
	if found, _ := w.advance(2*lease+3*time.Second, false, true); len(found) == 0 {
		t.Error("five nodes that died together are still alive after two leases")
	}
}

func TestOneDeadNodeIsFoundWithinASecondOfItsLease(t *testing.T) {
	for _, nodes := range []int{1, 2, 4, 20} {
		w := newWorld(nodes, func(i int) time.Duration { return time.Duration(i%20) * step })
		w.advance(time.Minute, true, true)
		w.nodes[0].dead = true
		lapse := w.nodes[0].beatAt + lease
		if found, _ := w.advance(lapse-w.clock, true, true); len(found) != 0 {
			t.Errorf("of %d nodes: found dead before its lease lapsed", nodes)
		}
		if found, reason := w.advance(time.Second, true, true); len(found) == 0 || found[0] != w.nodes[0] {
			t.Errorf("of %d nodes: not found within a second; suspended by %q", nodes, reason)
		}
	}
}

// However many they are, if others are heard all the while.
func TestNodesThatDieTogetherAreFoundWithinASecondOfTheirLease(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nodes := rapid.IntRange(2, 20).Draw(t, "nodes")
		w := newWorld(nodes, phases(t))
		w.advance(time.Minute, true, true)
		var lapse time.Duration
		for _, n := range w.nodes[:rapid.IntRange(1, nodes-1).Draw(t, "dead")] {
			n.dead = true
			lapse = max(lapse, n.beatAt+lease)
		}
		before, _ := w.advance(lapse-w.clock, true, true)
		found, reason := w.advance(500*time.Millisecond, true, true)
		if reason != "" || len(found) == 0 {
			t.Fatalf("half a second after the last lease has lapsed: %d found, %q", len(found), reason)
		}
		for _, n := range append(before, found...) {
			if !n.dead {
				t.Fatal("a node that beats was found dead")
			}
		}
	})
}

func TestNodesThatDiedAllAreFoundSoonAfterOthersCome(t *testing.T) {
	w := newWorld(8, func(i int) time.Duration { return time.Duration(i) * step })
	w.advance(time.Minute, true, true)
	for _, n := range w.nodes {
		n.dead = true
	}
	if found, reason := w.advance(15*time.Second, true, true); len(found) != 0 || reason == "" {
		t.Errorf("no node is heard, and %d are found dead", len(found))
	}
	w.nodes = append(w.nodes, &simNode{beatAt: w.clock})
	if found, reason := w.advance(lease/3+time.Second, true, true); len(found) == 0 {
		t.Errorf("a third of a lease after a node came: %s", reason)
	}
}

// The database was so slow that many heartbeats were given up, but not all.
func TestNodesThatFallSilentWhileOurLooksAreLateAreGivenTime(t *testing.T) {
	w := newWorld(10, func(i int) time.Duration { return time.Duration(i) * step })
	w.advance(time.Minute, true, true)
	for _, n := range w.nodes[:5] {
		n.dead = true // not heard, that is
	}
	for range 5 {
		w.advance(2500*time.Millisecond, true, false)
		if found, reason := w.advance(5*step, true, true); len(found) > 0 || w.clock-w.nodes[0].beatAt > lease && reason == "" {
			t.Fatalf("%d nodes found dead while observations come every three seconds", len(found))
		}
	}
}

func TestJumpOfTheDatabasesClockKillsNobody(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(rapid.IntRange(1, 12).Draw(t, "nodes"), phases(t))
		w.advance(time.Minute, true, true)
		w.clock += time.Duration(rapid.IntRange(-7200, 7200).Draw(t, "jump")) * time.Second
		if found, _ := w.advance(time.Minute, true, true); len(found) != 0 {
			t.Fatalf("%d live nodes counted as dead", len(found))
		}
	})
}

// A clock that jumps ahead ends the leader's lease as well. The next leader has no earlier
// observation to compare with.
func TestNewTermLooksBeforeItActs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(rapid.IntRange(1, 12).Draw(t, "nodes"), phases(t))
		w.advance(time.Minute, true, true)
		w.clock += time.Hour
		w.suspender = recovery.Suspender{Share: 0.3, NodesMin: 3}
		if found, _ := w.advance(time.Minute, true, true); len(found) != 0 {
			t.Fatalf("%d live nodes counted as dead", len(found))
		}
	})
}

func TestRestartOfTheDatabaseSuspendsForALease(t *testing.T) {
	w := newWorld(2, func(int) time.Duration { return 0 })
	w.advance(time.Minute, true, true)
	w.started = w.clock
	for _, n := range w.nodes {
		n.beatAt = w.clock - lease // their last beats were not flushed to disk
	}
	found, reason := w.advance(lease-step, false, true)
	if len(found) != 0 || !strings.Contains(reason, "restarted") {
		t.Errorf("within a lease after the restart: %d dead, %q", len(found), reason)
	}
	if found, _ = w.advance(time.Second, false, true); len(found) == 0 {
		t.Error("recovery did not go on after a lease")
	}
}

// Gateways run no entries: that they are heard is no evidence that task nodes which fell silent together have died.
func TestGatewaysDoNotCountInASuspension(t *testing.T) {
	for _, gateways := range []bool{false, true} {
		s := recovery.Suspender{Share: 0.3, NodesMin: 3}
		reason := ""
		for at := time.Duration(0); at < 30*time.Second; at += 500 * time.Millisecond {
			r := recovery.Reading{At: time.Unix(1_000_000, 0).Add(at), Clock: 1000*time.Hour + at, Uptime: 1000 * time.Hour}
			for i := range 3 {
				silent := max(0, at-22*time.Second)
				r.Nodes = append(r.Nodes, node(i, 0, silent))
			}
			for i := range 4 {
				heard := node(3+i, 0, 0)
				heard.Gateway = gateways
				r.Nodes = append(r.Nodes, heard)
			}
			reason = s.Judge(r)
		}
		if suspended := reason != ""; suspended != gateways {
			t.Errorf("four others are heard, gateways: %t; recovery is suspended: %q", gateways, reason)
		}
	}
}
