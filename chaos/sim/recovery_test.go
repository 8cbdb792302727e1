package sim

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/pkg/recovery"
)

// muteOnce is a gate that lets the answer to one commit never come.
type muteOnce struct{ done bool }

func (g *muteOnce) enter(_ context.Context, what string, _ func() string) (fate, time.Duration, error) {
	if what == "commit" && !g.done {
		g.done = true
		return mute, 0, nil
	}
	return pass, 0, nil
}

// slowCommits is a gate that lets reads answer at once and lets each commit take its time.
type slowCommits time.Duration

func (g slowCommits) enter(ctx context.Context, what string, _ func() string) (fate, time.Duration, error) {
	if what == "commit" {
		select {
		case <-time.After(time.Duration(g)):
		case <-ctx.Done():
			return cut, 0, ctx.Err()
		}
	}
	return pass, 0, nil
}

// timeToFree returns after which time recovery has freed the two locks of a node that has just died, one at a time, and
// at least a minute if it has not.
func timeToFree(t *testing.T, lease time.Duration, g gate) time.Duration {
	t.Helper()
	s := newStore("solo")
	now := time.Now()
	s.tables.nodes[7] = &node{id: 7, name: "dead", lease: lease, threads: 4, beatAt: now}
	for range 2 {
		id := s.tables.push(1, "", now)
		k := lockKey{1, soloKey(id)}
		s.tables.locks[k] = &lock{
			lockKey: k, token: s.tables.nextToken(), node: 7, last: id, pos: id, count: 1, at: now,
			row: s.tables.nextRow(),
		}
	}
	s.tables.ready = nil
	db := connect(s, g)
	ctx, stop := context.WithCancel(t.Context())
	locks := recovery.NewLocks(db, term{1, db}, recovery.Config{PassLocksMax: 1})
	ended := make(chan error, 1)
	go func() { ended <- locks.Run(ctx) }()
	for left := 2; left > 0 && time.Since(now) < time.Minute; time.Sleep(10 * time.Millisecond) {
		<-s.turn
		left = len(s.tables.locks)
		s.turn <- struct{}{}
	}
	took := time.Since(now)
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	return took
}

// A connection freezes while recovery frees the first lock of a dead node. The second one is free within the lease and
// two seconds nevertheless: recovery neither waits long for the answer, nor suspends itself for the time that it did.
func TestAnAnswerThatNeverComesDelaysRecoveryLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := &muteOnce{}
		took := timeToFree(t, lease, gate)
		if !gate.done || took > lease+2*time.Second {
			t.Errorf("both locks were free %v after the death (an answer was lost: %v), want at most %v", took,
				gate.done, lease+2*time.Second)
		}
	})
}

// The bound of a commit grows until the commits of a slow database come in time: that reads are answered at once says
// nothing of them.
func TestCommitsThatTakeSecondsDoNotStopRecovery(t *testing.T) {
	for _, lease := range []time.Duration{3 * time.Second, 10 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			if took := timeToFree(t, lease, slowCommits(3*time.Second)); took >= time.Minute {
				t.Errorf("with a lease of %v the locks were not free %v after the death", lease, took)
			} else {
				t.Logf("lease %v: free %v after the death", lease, took)
			}
		})
	}
}
