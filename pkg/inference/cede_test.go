package inference

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/slot"
)

// handedOver is a database that takes down how many slots each hand-over has, and when it came.
type handedOver struct {
	postgres.DB
	since time.Time
	slots []int
	at    []time.Duration
}

func (h *handedOver) Exec(_ context.Context, _ string, args ...any) (pgconn.CommandTag, error) {
	instances, _ := args[2].([]int32)
	h.slots, h.at = append(h.slots, len(instances)), append(h.at, time.Since(h.since))
	return pgconn.CommandTag{}, nil
}

// The slots of runs that were preempted together are handed over by one statement, which waits for the disk once; those
// of runs that end later than the others are not waited for.
func TestRunsThatArePreemptedTogetherAreHandedOverAtOnce(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		ends []time.Duration // of the runs, behind the order
		want []int           // slots of each hand-over
		at   time.Duration   // of the first
	}{
		{"at once", []time.Duration{0, 0, 0}, []int{3}, 0},
		{"within a moment", []time.Duration{0, time.Millisecond, 3 * time.Millisecond}, []int{3}, 3 * time.Millisecond},
		{"one of them late", []time.Duration{0, time.Millisecond, time.Second}, []int{2, 1}, cedeGather},
	} {
		synctest.Test(t, func(t *testing.T) {
			db := &handedOver{since: time.Now()}
			p := &SlotPool{
				tuning: usualTuning(), talk: make(talkLock, 1), models: map[string]*modelState{},
				holder: slot.Holder{DB: db, Node: func() invalidation.NodeID { return 7 }},
				idled:  func(string) {}, kick: make(chan struct{}, 1), log: slog.New(slog.DiscardHandler),
			}
			p.mu.Lock()
			p.ceding = len(c.ends)
			for n, end := range c.ends {
				h := p.stateOf("m").ledger.adopt(slotAt(1, int32(n), int64(n)+1), time.Now()) //nolint:gosec // a few
				time.AfterFunc(end, func() { (&slotRef{pool: p, model: "m", slot: h}).cede() })
			}
			p.mu.Unlock()
			time.Sleep(time.Minute)
			synctest.Wait()
			if len(db.slots) != len(c.want) || db.slots[0] != c.want[0] || db.at[0] != c.at {
				t.Errorf("%s: hand-overs of %v slots at %v, want %v, the first after %s", c.name, db.slots, db.at, c.want, c.at)
			}
		})
	}
}
