package tasknode

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// The rows are those of the table in doc.go.
func TestTheEndOfALeaseDecidesWhenTheLaneIsTriedAgain(t *testing.T) {
	claimed := func(c invalidation.Claimed) func(*laneTable, *laneLease, time.Time) {
		return func(t *laneTable, v *laneLease, now time.Time) { t.end(v, claimEnd{answer: c}, now, exactly) }
	}
	refused := func(why refusal) func(*laneTable, *laneLease, time.Time) {
		return func(t *laneTable, v *laneLease, now time.Time) { t.endRefused(v, why, now, exactly) }
	}
	type answer = invalidation.Claimed
	type outcome struct {
		asleep            bool
		rest, queueRest   time.Duration
		untilFreed, wants bool
	}
	for _, c := range []struct {
		name   string
		hinted bool // during the lease
		end    func(*laneTable, *laneLease, time.Time)
		want   outcome
	}{
		{"unclaimed", false, func(t *laneTable, v *laneLease, _ time.Time) { t.endUnclaimed(v) }, outcome{}},
		{"refused by threads", false, refused(refusedThreads), outcome{wants: true}},
		{"refused by a gate", false, refused(refusedByGate), outcome{rest: 200 * time.Millisecond, untilFreed: true, wants: true}},
		{"refused by the queue's limit", false, refused(refusedByLimit), outcome{
			rest: 200 * time.Millisecond, queueRest: 200 * time.Millisecond, untilFreed: true, wants: true,
		}},
		{"failed", false, func(t *laneTable, v *laneLease, now time.Time) {
			t.end(v, claimEnd{answer: answer{Locks: make([]*invalidation.Lock, 1)}, err: errors.New("lost")}, now, exactly)
		}, outcome{rest: 200 * time.Millisecond}},
		{"contended", false, claimed(answer{TryLater: true}), outcome{rest: 2 * time.Millisecond}},
		{"limited by locks", false, claimed(answer{Limited: true}), outcome{
			rest: 50 * time.Millisecond, untilFreed: true, wants: true,
		}},
		{"limited by locks that all lanes share", false, claimed(answer{Limited: true, QueueWide: true}), outcome{
			rest: 50 * time.Millisecond, queueRest: 50 * time.Millisecond, untilFreed: true, wants: true,
		}},
		{"limited by a rate", false, claimed(answer{Limited: true, Wait: 10 * time.Second}), outcome{
			rest: 10 * time.Second,
		}},
		{"limited by a slow rate", false, claimed(answer{Limited: true, Wait: time.Hour}), outcome{rest: time.Minute}},
		{"limited by a fast rate of a small burst", false, claimed(answer{Limited: true, Wait: 2 * time.Millisecond}), outcome{
			rest: 2 * time.Millisecond,
		}},
		{"limited by a rate that all lanes share", false, claimed(answer{Limited: true, QueueWide: true, Wait: 10 * time.Second}), outcome{
			rest: 10 * time.Second, queueRest: time.Second,
		}},
		{"left rows", false, claimed(answer{Scanned: 1, LowWater: 7}), outcome{}},
		{"left rows, for it is not hinted at and had many", false, claimed(answer{Scanned: few, LowWater: 7, Drained: true}), outcome{}},
		{"rewound", false, claimed(answer{Scanned: 1, Skipped: 1, LowWater: 7, Drained: true}), outcome{rest: 2 * time.Millisecond}},
		{"rewound, for not all were swept", false, func(t *laneTable, v *laneLease, now time.Time) {
			t.end(v, claimEnd{answer: answer{Scanned: 2, Skipped: 2, LowWater: 7, Drained: true}, swept: 1}, now, exactly)
		}, outcome{rest: 2 * time.Millisecond}},
		{"drained, for all were swept", false, func(t *laneTable, v *laneLease, now time.Time) {
			t.end(v, claimEnd{answer: answer{Scanned: 2, Skipped: 2, LowWater: 7, Drained: true}, swept: 2}, now, exactly)
		}, outcome{asleep: true}},
		{"delayed", false, claimed(answer{Drained: true, DelayedFor: 30 * time.Millisecond}), outcome{rest: 30 * time.Millisecond}},
		{"delayed for long", false, claimed(answer{Drained: true, DelayedFor: time.Second}), outcome{rest: 100 * time.Millisecond}},
		{"drained", false, claimed(answer{Scanned: 1, LowWater: 7, Drained: true}), outcome{asleep: true}},
		{"drained, but hinted at", true, claimed(answer{Scanned: 1, LowWater: 7, Drained: true}), outcome{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			table := newLaneTable(&turns{})
			table.serve(map[int32]*servedQueue{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
			lane := invalidation.Lane{Priority: 1}
			table.found(1, []invalidation.LaneHead{{Lane: lane, Position: 7}})
			now := time.Now()
			v := takeOne(table, nil, true, now)
			if c.hinted {
				table.hint(1, &lane)
			}
			c.end(table, v, now)
			left := func(r rest) time.Duration { return max(0, r.until.Sub(now)) }
			l, s := v.lane, table.queues[1]
			got := outcome{
				l.awake == 0, left(l.rest), left(s.rest), l.rest.refusedIn.freed != 0,
				slices.Contains(table.wants.lanes, l),
			}
			if l.lease != nil || got != c.want {
				t.Errorf("leased %t, %+v, want %+v", l.lease != nil, got, c.want)
			}
		})
	}
}

// What comes free puts no units into a token bucket; what changes limits, or gives units back, may.
func TestALaneThatWaitsForARateIsNotTriedForWhatComesFree(t *testing.T) {
	table := newLaneTable(&turns{})
	table.serve(map[int32]*servedQueue{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	table.found(1, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1}, Position: 7}})
	now := time.Now()
	limited := claimEnd{answer: invalidation.Claimed{Limited: true, Wait: 10 * time.Second}}
	table.end(takeOne(table, nil, true, now), limited, now, exactly)
	table.nextEpoch()
	if takeOne(table, nil, true, now) != nil {
		t.Fatal("the lane is tried again since something came free")
	}
	table.limitsChanged()
	v := takeOne(table, nil, true, now)
	if v == nil {
		t.Fatal("the lane rests on although the limits may have changed")
	}
	table.limitsChanged() // during the claim
	table.end(v, limited, now, exactly)
	if v = takeOne(table, nil, true, now); v == nil {
		t.Fatal("a change of the limits during the claim was missed")
	}
	table.end(v, limited, now, exactly)
	if takeOne(table, nil, true, now.Add(10*time.Second)) == nil {
		t.Error("the lane rests longer than the rate needs")
	}
}

// A lease knows whether a claim before it was fruitless, unless one since brought a lock: see Node.passLocked.
func TestALeaseKnowsOfAFruitlessClaimBefore(t *testing.T) {
	table := newLaneTable(&turns{})
	table.serve(map[int32]*servedQueue{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	table.found(1, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1}, Position: 7}})
	now, fruitless := time.Now(), false
	for _, c := range []struct {
		end  claimEnd
		then bool
	}{
		{claimEnd{answer: invalidation.Claimed{Scanned: 1, Skipped: 1, LowWater: 7}, swept: 1}, false},
		{claimEnd{answer: invalidation.Claimed{Scanned: 1, Skipped: 1, LowWater: 8}}, true},
		{claimEnd{answer: invalidation.Claimed{TryLater: true}}, true},
		{claimEnd{answer: invalidation.Claimed{Scanned: 1, LowWater: 9, Locks: make([]*invalidation.Lock, 1)}}, false},
	} {
		v := takeOne(table, nil, true, now)
		if v.fruitless != fruitless {
			t.Errorf("before %+v the lease has fruitless %t, want %t", c.end, v.fruitless, fruitless)
		}
		table.end(v, c.end, now, exactly)
		now, fruitless = now.Add(time.Second), c.then
	}
	if v := takeOne(table, nil, true, now); v.fruitless {
		t.Error("a claim brought a lock, and the next lease has fruitless still")
	}
}
