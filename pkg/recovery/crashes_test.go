package recovery_test

import (
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/recovery"
)

func TestOnlyEntriesThatTheLastHeartbeatCalledRunningCountACrash(t *testing.T) {
	f := newUsualFleet(t)
	dead := f.register(shortLease)
	f.push(108, "")
	locks := f.claim(dead, 108)
	if len(locks) != 108 {
		t.Fatalf("claimed %d locks", len(locks))
	}
	var running []invalidation.Token
	var entries []invalidation.EntryID
	for i := 5; len(running) < 8; i += 11 { // not those that an order of claims and positions would name
		running, entries = append(running, locks[i].Token), append(entries, locks[i].Entries[0].ID)
	}
	f.beat(dead, locks...)
	f.exec(`UPDATE penstock.node SET threads = 8, running = $1`, running)
	f.lapse(dead, time.Minute)
	f.start(recovery.Config{})
	eventually(t, "all locks are freed", func() bool { return f.locks() == 0 })
	if n := f.count(`SELECT count(*) FROM penstock.entry WHERE crashes = 1 AND id = ANY ($1)`, entries); n != 8 {
		t.Errorf("%d of the 8 that ran count a crash", n)
	}
	if n := f.count(`SELECT count(*) FROM penstock.entry WHERE crashes = 0`); n != 100 {
		t.Errorf("%d entries count no crash, want the 100 that waited", n)
	}
}

// An entry that kills its node as soon as it runs is in no heartbeat's list.
func TestAnEntryThatBeganOnAFreeThreadAfterTheLastHeartbeatCountsACrash(t *testing.T) {
	f := newUsualFleet(t)
	dead := f.register(shortLease)
	f.push(10, "")
	locks := f.claim(dead, 10)
	f.exec(`UPDATE penstock.node SET threads = 3, running = $1`, []invalidation.Token{locks[7].Token, locks[8].Token})
	f.lapse(dead, time.Minute)
	f.start(recovery.Config{})
	eventually(t, "all locks are freed", func() bool { return f.locks() == 0 })
	var crashed []int64
	for _, i := range []int{0, 7, 8} {
		crashed = append(crashed, int64(locks[i].Entries[0].ID))
	}
	if n := f.count(`SELECT count(*) FROM penstock.entry WHERE crashes = 1 AND id = ANY ($1)`, crashed); n != 3 {
		t.Errorf("%d of 3 count a crash", n)
	}
	if n := f.count(`SELECT count(*) FROM penstock.entry WHERE crashes > 0`); n != 3 {
		t.Errorf("%d entries count a crash, want the two that ran and the first that waited", n)
	}
}

// While a lock holds a key, an entry that is before those that it covers may become claimable.
func TestACrashCountsForTheEntryOfAGroupThatRan(t *testing.T) {
	for name, earlier := range map[string]struct {
		before, during string // the claim
		listed         bool
	}{
		"an entry came due": {
			`UPDATE penstock.entry SET status = 'initial', due_at = clock_timestamp() + interval '1 hour' WHERE id = $1`,
			`UPDATE penstock.entry SET status = 'pending', due_at = clock_timestamp() WHERE id = $1`, false,
		},
		"an entry was enabled": {
			`UPDATE penstock.entry SET priority = -1 WHERE id = $1`,
			`UPDATE penstock.entry SET priority = 1 WHERE id = $1`, true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, pgtest.New(t), invalidation.Config{QuantumCount: 10})
			dead := f.register(shortLease)
			f.push(4, "K")
			first := f.count(`SELECT min(id) FROM penstock.entry`)
			f.exec(earlier.before, first)
			lock := f.claim(dead, 1)[0]
			if len(lock.Entries) != 3 {
				t.Fatalf("claimed %d entries, want 3", len(lock.Entries))
			}
			ran := lock.Entries[0].ID
			beat := listing([]*invalidation.Lock{lock})
			if earlier.listed { // the first entry of the lock has ended since the heartbeat
				ran = lock.Entries[1].ID
				beat.Running, beat.RunningEntries = beat.Tokens, []invalidation.EntryID{lock.Entries[0].ID}
			}
			if _, err := invalidation.Renew(t.Context(), f.pool, dead, beat); err != nil {
				t.Fatal(err)
			}
			f.exec(`DELETE FROM penstock.entry WHERE id < $1 AND id > $2`, ran, first)
			f.exec(earlier.during, first)
			f.lapse(dead, time.Minute)
			f.start(recovery.Config{})
			eventually(t, "the lock is freed", func() bool { return f.locks() == 0 })
			if n := f.count(`SELECT max(id) FROM penstock.entry WHERE crashes = 1`); n != int(ran) {
				t.Errorf("entry %d counts the crash, want %d", n, ran)
			}
			if n := f.count(`SELECT count(*) FROM penstock.entry WHERE crashes = 1`); n != 1 {
				t.Errorf("%d entries count a crash", n)
			}
		})
	}
}

// The ending of a run cannot be recorded, its thread runs another entry, and the node dies before its next heartbeat:
// by the number of threads the second entry waited. Which entries began cannot be counted then, so all may have run.
func TestAnEntryBehindAnEndingThatWasNotRecordedMayHaveRun(t *testing.T) {
	f := newUsualFleet(t)
	dead := f.register(shortLease)
	f.push(3, "")
	locks := f.claim(dead, 3)
	f.beat(dead, locks...)
	f.exec(`UPDATE penstock.node SET threads = 1, running = $1`, []invalidation.Token{locks[0].Token})
	f.lapse(dead, time.Minute)
	f.start(recovery.Config{})
	eventually(t, "all locks are freed", func() bool { return f.locks() == 0 })
	if n := f.count(`SELECT count(*) FROM penstock.entry WHERE may_have_run`); n != 3 {
		t.Errorf("%d entries have the mark that they may have run, want all 3 that the dead node held", n)
	}
	if n := f.count(`SELECT count(*) FROM penstock.entry WHERE crashes > 0`); n != 1 {
		t.Errorf("%d entries count a crash, want the one that the last heartbeat lists as running", n)
	}
}

func TestCrashesOfANodeThatIsHeardAgainAreTakenBack(t *testing.T) {
	f := newFleet(t, pgtest.New(t), invalidation.Config{CrashLimit: 3})
	f.push(1, "")
	duty, _ := f.start(recovery.Config{})
	for preemption := range 4 { // more than the crash limit
		node := f.register(shortLease)
		eventually(t, "the entry can be claimed", func() bool { return len(f.claim(node, 1)) == 1 })
		f.lapse(node, 30*time.Second)
		eventually(t, "the crash is counted", func() bool {
			return f.count(`SELECT count(*) FROM penstock.entry WHERE crashes = 1`) == 1 && f.locks() == 0
		})
		eventually(t, "the crash is taken back", func() bool {
			f.beat(node) // as it goes on: after one heartbeat alone its lease may be over before recovery looks
			return f.count(`SELECT count(*) FROM penstock.entry WHERE crashes = 0 AND coalesce(jsonb_array_length(history), 0) = 0`) == 1
		})
		eventually(t, "it is counted", func() bool { return duty.Status().TakenBack == int64(preemption)+1 })
		f.exec(`DELETE FROM penstock.node WHERE id = $1`, node)
	}
}

// An entry that another transaction has locked keeps neither the other crashes of a node counted, nor its heartbeat waiting.
func TestCrashesAreTakenBackBesideALockedEntry(t *testing.T) {
	f := newUsualFleet(t)
	f.push(2, "")
	node := f.register(aliveLease)
	locks := f.claim(node, 2)
	f.lapse(node, time.Minute)
	f.start(recovery.Config{})
	crashed := func(n int) func() bool {
		return func() bool { return f.count(`SELECT count(*) FROM penstock.entry WHERE crashes = 1`) == n }
	}
	eventually(t, "both crashes are counted", crashed(2))
	letGo := f.hold(`SELECT FROM penstock.entry WHERE id = $1 FOR UPDATE`, locks[0].Entries[0].ID)
	f.beat(node)
	defer f.keepAlive(node)()
	eventually(t, "one crash is taken back", crashed(1))
	letGo()
	eventually(t, "the other one is taken back", crashed(0))
}

func TestAPassThatLeavesLocksOverIsFollowedByTheNextAtOnce(t *testing.T) {
	f := newUsualFleet(t)
	dead := f.register(10 * time.Second)
	f.push(500, "")
	for claimed := 0; claimed < 500; {
		n := len(f.claim(dead, 100))
		if n == 0 {
			t.Fatal("nothing to claim")
		}
		claimed += n
	}
	f.lapse(dead, time.Minute)
	last := 500
	beforePause := func() float64 { // the length of a pause is drawn at its beginning
		var left int
		err := f.pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.lock`).Scan(&left)
		if err != nil && t.Context().Err() == nil {
			t.Error(err)
		}
		if 0 < left && left < last {
			t.Errorf("a pause after a pass that freed %d locks and left %d over", last-left, left)
		}
		last = left
		return 0
	}
	cfg := recovery.Config{PassLocksMax: 50, Random: beforePause}.WithBatchLocksMax(20)
	run(t, recovery.NewLocks(f.pool, &term{db: f.pool}, cfg))
	eventually(t, "all locks are freed", func() bool { return f.locks() == 0 })
}

func TestAPassThatWorksLongIsNoStallOfTheDatabase(t *testing.T) {
	judge := func(unanswered time.Duration) string {
		s := recovery.Suspender{Share: 0.3, NodesMin: 3}
		at, clock := time.Unix(1_000_000, 0), time.Hour
		beating := []recovery.Node{{ID: 1, Lease: 10 * time.Second, Silent: time.Second}}
		reading := func(after, unanswered time.Duration) string {
			at, clock = at.Add(after), clock+after
			return s.Judge(recovery.Reading{At: at, Clock: clock, Uptime: clock, Unanswered: unanswered, Nodes: beating})
		}
		reading(0, 0)
		reading(4*time.Second, 4*time.Second) // the first readings of a term are over
		if reason := reading(500*time.Millisecond, 500*time.Millisecond); reason != "" {
			t.Fatalf("suspended: %s", reason)
		}
		return reading(16*time.Second, unanswered)
	}
	if reason := judge(300 * time.Millisecond); reason != "" {
		t.Errorf("16 s of work that was answered all the while: %s", reason)
	}
	if reason := judge(6 * time.Second); !strings.Contains(reason, "out of reach") {
		t.Errorf("6 s without an answer: %q", reason)
	}
}
