package tasknode

import (
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// What comes free between the question for a permit and the note that there was none must not be slept through.
func TestWhatComesFreeDuringAVisitIsNotMissed(t *testing.T) {
	b := newBoard()
	b.serve(map[int32]*service{1: {name: "work", queue: &invalidation.Queue{ID: 1}}})
	b.found(1, []invalidation.LaneHead{{Lane: invalidation.Lane{Priority: 1}, Pos: 1}})
	now := time.Now()
	visit := b.take(&turns{}, now)
	b.free()
	b.refuse(visit, now.Add(time.Hour))
	if visit = b.take(&turns{}, now); visit == nil {
		t.Fatal("the lane rests although something came free")
	}
	b.refuse(visit, now.Add(time.Hour))
	if b.take(&turns{}, now) != nil {
		t.Error("the lane is tried again although nothing came free")
	}
}
