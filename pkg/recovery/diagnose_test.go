package recovery_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/recovery"
)

const lease = 10 * time.Second

// seq is the observations of successive passes.
type seq = []recovery.Observation

func lock(token int, node int, age time.Duration) invalidation.HeldLock {
	ref := invalidation.LockRef{QueueID: 1, Token: invalidation.Token(token)}
	return invalidation.HeldLock{LockRef: ref, Node: invalidation.NodeID(node), Age: age}
}

func node(id int, beat int64, silent time.Duration, tokens ...invalidation.Token) recovery.Node {
	return recovery.Node{ID: invalidation.NodeID(id), Beat: beat, Silent: silent, Lease: lease, Tokens: tokens}
}

func observe(n recovery.Node, locks ...invalidation.HeldLock) recovery.Observation {
	return recovery.Observation{Locks: locks, Nodes: []recovery.Node{n}}
}

func TestLockThatItsNodeListsIsLeftAloneForEver(t *testing.T) {
	stuck, _ := recovery.Diagnose(observe(node(1, 40_000, time.Second, 7), lock(7, 1, 24*time.Hour)), nil)
	if len(stuck) != 0 {
		t.Errorf("stuck: %v", stuck)
	}
}

func TestLockIsStuckWhenItsNodesLeaseHasLapsed(t *testing.T) {
	for silent, want := range map[time.Duration]int{lease: 0, lease + 1: 1} {
		stuck, _ := recovery.Diagnose(observe(node(1, 3, silent, 7), lock(7, 1, time.Minute)), nil)
		if len(stuck) != want || want == 1 && (stuck[0].Cause != recovery.NodeDead || !stuck[0].Cause.Crashed()) {
			t.Errorf("node silent for %v: %v, want %d", silent, stuck, want)
		}
	}
}

func TestLockOfAnUnknownNodeIsStuck(t *testing.T) {
	stuck, _ := recovery.Diagnose(recovery.Observation{Locks: []invalidation.HeldLock{lock(7, 1, 0)}}, nil)
	if len(stuck) != 1 || stuck[0].Cause != recovery.NodeGone {
		t.Errorf("stuck: %v", stuck)
	}
}

func TestNodeIsOverdueALeaseAfterTheLastNewHeartbeatWasSeen(t *testing.T) {
	heard, start := recovery.Heard{}, time.Now()
	for _, c := range []struct {
		after, silent time.Duration
		beat          int64
		overdue       bool
	}{
		{0, -time.Hour, 7, false},
		{lease, -time.Hour + lease, 7, false},
		{lease + 1, -time.Hour + lease + 1, 7, true},
		{lease + 2, lease + 2, 7, false}, // lapsed by the database's clock: nothing is to be corrected
		{lease + 3, -time.Hour, 8, false},
		{2*lease + 3, -time.Hour, 8, false},
		{2*lease + 4, 0, 8, true},
	} {
		overdue := heard.Overdue([]recovery.Node{node(1, c.beat, c.silent)}, start.Add(c.after))
		if (len(overdue) == 1) != c.overdue {
			t.Errorf("beat %d silent for %v, after %v: overdue %v", c.beat, c.silent, c.after, overdue)
		}
	}
	heard.Overdue(nil, start)
	if len(heard) != 0 {
		t.Error("a node that was removed is remembered")
	}
}

// One heartbeat without the token says little: it may have been on its way when the claim was committed.
func TestLockLeftOutOfTwoHeartbeatsIsStuck(t *testing.T) {
	old := lock(7, 1, time.Minute)
	for _, c := range []struct {
		name         string
		observations []recovery.Observation
		want         bool
	}{
		{"one heartbeat, seen twice", seq{observe(node(1, 5, 0), old), observe(node(1, 5, time.Second), old)}, false},
		{"two", seq{observe(node(1, 5, 0), old), observe(node(1, 6, 0), old)}, true},
		{"several between two observations", seq{observe(node(1, 5, 0), old), observe(node(1, 8, 0), old)}, true},
		{"the first while the claim's answer may be on its way", seq{observe(node(1, 5, 0), lock(7, 1, lease*3/4-1)), observe(node(1, 6, 0), lock(7, 1, lease+1))}, false},
		{"both when that cannot be", seq{observe(node(1, 5, 0), lock(7, 1, lease*3/4)), observe(node(1, 6, 0), lock(7, 1, lease+1))}, true},
		{"listed in between", seq{observe(node(1, 5, 0), old), observe(node(1, 6, 0, 7), old), observe(node(1, 7, 0), old)}, false},
		{"younger than a lease", seq{observe(node(1, 5, 0), lock(7, 1, time.Second)), observe(node(1, 6, 0), lock(7, 1, 3*time.Second))}, false},
		{"claimed after the heartbeat", seq{observe(node(1, 5, 2*time.Minute), old), observe(node(1, 6, 0), old)}, false},
		{"listed by another node", []recovery.Observation{
			{Locks: []invalidation.HeldLock{old}, Nodes: []recovery.Node{node(1, 5, 0), node(2, 9, 0, 7)}},
			{Locks: []invalidation.HeldLock{old}, Nodes: []recovery.Node{node(1, 6, 0), node(2, 10, 0, 7)}},
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var stuck []recovery.Stuck
			var seen recovery.Sightings
			for i, l := range c.observations {
				if l.Nodes[0].Silent == 2*time.Minute {
					l.Nodes[0].Lease = time.Hour // alive, and its last heartbeat is older than the claim
				}
				stuck, seen = recovery.Diagnose(l, seen)
				if i < len(c.observations)-1 && len(stuck) != 0 {
					t.Errorf("stuck after observation %d: %v", i+1, stuck)
				}
			}
			if got := len(stuck) == 1 && stuck[0].Cause == recovery.Unlisted; got != c.want {
				t.Errorf("stuck: %v, want %v", stuck, c.want)
			}
		})
	}
}

func observations() *rapid.Generator[recovery.Observation] {
	return rapid.Custom(func(t *rapid.T) recovery.Observation {
		var l recovery.Observation
		for id := range rapid.IntRange(0, 5).Draw(t, "nodes") {
			var tokens []invalidation.Token
			for token := range 20 {
				if rapid.Bool().Draw(t, "listed") {
					tokens = append(tokens, invalidation.Token(token))
				}
			}
			silent := time.Duration(rapid.IntRange(0, 20).Draw(t, "silent")) * time.Second
			l.Nodes = append(l.Nodes, node(id, rapid.Int64Range(0, 3).Draw(t, "beat"), silent, tokens...))
		}
		for token := range 20 {
			age := time.Duration(rapid.IntRange(0, 30).Draw(t, "age")) * time.Second
			l.Locks = append(l.Locks, lock(token, rapid.IntRange(0, 6).Draw(t, "holder"), age))
		}
		return l
	})
}

func TestDiagnosisHoldsForAnySequenceOfLooks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var seen recovery.Sightings
		for _, l := range rapid.SliceOfN(observations(), 1, 6).Draw(t, "observations") {
			stuck, after := recovery.Diagnose(l, seen)
			shuffled := recovery.Observation{Locks: slices.Clone(l.Locks), Nodes: slices.Clone(l.Nodes)}
			rand.Shuffle(len(l.Locks), func(i, j int) {
				shuffled.Locks[i], shuffled.Locks[j] = shuffled.Locks[j], shuffled.Locks[i]
			})
			if again, _ := recovery.Diagnose(shuffled, seen); !slices.Equal(again, stuck) {
				t.Fatalf("the order of rows matters: %v, then %v", stuck, again)
			}
			seen = after
			checkStuck(t, l, stuck)
			if len(seen) > len(l.Locks) {
				t.Fatalf("%d sightings of %d locks: memory grows", len(seen), len(l.Locks))
			}
		}
	})
}

// checkStuck asserts what one observation decides.
func checkStuck(t *rapid.T, l recovery.Observation, stuck []recovery.Stuck) {
	causes := map[invalidation.Token]recovery.StuckCause{}
	for _, s := range stuck {
		causes[s.Token] = s.Cause
	}
	for _, held := range l.Locks {
		cause := causes[held.Token]
		i := slices.IndexFunc(l.Nodes, func(n recovery.Node) bool { return n.ID == held.Node })
		switch {
		case i < 0:
			if cause != recovery.NodeGone {
				t.Fatalf("lock %d of an unknown node: cause %q", held.Token, cause)
			}
		case l.Nodes[i].Silent > lease:
			if cause != recovery.NodeDead {
				t.Fatalf("lock %d of a dead node: cause %q", held.Token, cause)
			}
		case slices.Contains(l.Nodes[i].Tokens, held.Token) || held.Age <= lease:
			if cause != "" {
				t.Fatalf("lock %d that its live node lists or has just claimed: cause %q", held.Token, cause)
			}
		}
	}
}

// A node lets the first lock of a lane go before those that it has in line, takes the locks of a claim by their places,
// and has a spare thread beside its two, for first locks alone.
func TestWhatWasLetGoFirstCanHaveBegun(t *testing.T) {
	var locks []invalidation.HeldLock
	for i := range 20 {
		l := lock(1+i, 1, time.Minute)
		l.Claim, l.Position = 1, int64(100-i) // the statement drew tokens in the order of the disk
		locks = append(locks, l)
	}
	quiet := lock(21, 1, time.Minute)
	quiet.Claim, quiet.Position, quiet.Lane.Flow = 2, 200, "quiet"
	dead := node(1, 3, lease+1)
	dead.Threads = 2
	stuck, _ := recovery.Diagnose(observe(dead, append(locks, quiet)...), nil)
	recovery.Begun{}.Mark(stuck, []recovery.Node{dead})
	var begun []invalidation.Token
	for _, s := range stuck {
		if !s.Waited {
			begun = append(begun, s.Token)
		}
	}
	if want := []invalidation.Token{19, 20, 21}; !slices.Equal(begun, want) {
		t.Errorf("can have begun: %v, want %v", begun, want)
	}
}

// The row of a node is removed only while it holds no lock: the claim came behind that.
func TestLockOfANodeWithoutARowHasNotBegun(t *testing.T) {
	stuck, _ := recovery.Diagnose(recovery.Observation{Locks: []invalidation.HeldLock{lock(7, 1, 0)}}, nil)
	recovery.Begun{}.Mark(stuck, nil)
	if len(stuck) != 1 || !stuck[0].Waited {
		t.Errorf("stuck: %+v, want one that waited", stuck)
	}
}
