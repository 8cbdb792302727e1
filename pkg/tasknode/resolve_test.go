package tasknode

import (
	"context"
	"encoding/json"
	"log/slog"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Each of the two scheduling threads would ask for a lease for the locks of a claim on a queue that was dropped, and
// claim nothing from others meanwhile.
func TestClaimOfAQueueThatWasDroppedIsResolvedAtOnce(t *testing.T) {
	pool := pgtest.New(t)
	q, err := invalidation.Create(t.Context(), pool, "work", invalidation.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `SELECT penstock.drop_queue('work')`); err != nil {
		t.Fatal(err)
	}
	n := &Node{cfg: Config{Lease: time.Minute}.withDefaults()}
	start := time.Now()
	claimed := n.resolve(t.Context(), q, invalidation.LanesRequest{Node: 1, ClaimID: 1}, make([]*laneLease, 1))
	if took := time.Since(start); len(claimed) != 1 || len(claimed[0].Locks) != 0 || took > n.cfg.Lease/2 {
		t.Errorf("resolved as %v after %v", claimed, took)
	}
}

// A claim that gives units back to a token bucket lets lanes be tried that were refused while it had them: the claim of
// a key whose entries it cannot have, and one whose answer was lost.
func TestARefundOfAClaimWakesLanesThatWaitForARate(t *testing.T) {
	pool := pgtest.New(t)
	if _, err := invalidation.Create(t.Context(), pool, "work", invalidation.Config{}); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(),
		`SELECT penstock.set_limit('slow', '{"rate": 0.001, "burst": 1}'), penstock.use_limit('work', 'slow')`); err != nil {
		t.Fatal(err)
	}
	q, err := invalidation.Open(t.Context(), pool, "work")
	if err != nil {
		t.Fatal(err)
	}
	pushed, err := q.Push(t.Context(), invalidation.Push{LockKey: "k", Payload: json.RawMessage(`1`)})
	if err != nil {
		t.Fatal(err)
	}
	// A claim may meet the ready row of a key that is blocked.
	if _, err := pool.Exec(t.Context(), `INSERT INTO penstock.blocked_key (queue_id, lock_key, entry_id, class, error)
	    VALUES ($1, 'k', $2, 'permanent', 'broken')`, q.ID, pushed[0].ID); err != nil {
		t.Fatal(err)
	}
	for name, claim := range map[string]func(n *Node, l *laneLease, r reservation){
		"answered": func(n *Node, l *laneLease, r reservation) { n.claim(t.Context(), []*laneLease{l}, r) },
		"its answer was lost": func(n *Node, l *laneLease, r reservation) {
			asked, cancel := context.WithCancel(t.Context())
			cancel() // no claim is sent
			n.claim(asked, []*laneLease{l}, r)
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := New(Config{Log: slog.New(slog.DiscardHandler), Beat: time.Nanosecond}, pool, pool)
			n.lanes.serve(map[int32]*servedQueue{q.ID: {id: q.ID, name: "work", queue: q}})
			find := func(flow string, position int64) *laneLease {
				n.lanes.found(q.ID, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1, Flow: flow}, Position: position}})
				return takeOne(n.lanes, nil, true, time.Now())
			}
			waits := find("a", 1)
			n.lanes.end(waits, claimEnd{answer: invalidation.Claimed{Limited: true, Wait: time.Hour}}, time.Now(), exactly)
			blocked := find("", 2)
			reserved, refused := n.reserve(blocked)
			if refused != refusedNot || blocked.lane == waits.lane {
				t.Fatalf("lane %v, refused %d", blocked.lane.key, refused)
			}
			claim(n, blocked, reserved)
			if waits.lane.rest.lasts(time.Now(), n.lanes.epoch) {
				t.Error("a lane waits for a rate that has a unit again")
			}
		})
	}
}
