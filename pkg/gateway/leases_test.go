package gateway

import (
	"testing"
	"time"
)

// A call may be put in doubt after the database has answered which slots are held, and before the answer is
// applied: the slot must not be taken for one that was handed over.
func TestAlignGrantsNoSlotInDoubt(t *testing.T) {
	t.Parallel()
	p := startPlant(t, nil, nil)
	l := NewLeases(LeasesConfig{}, p.gateway, nil, nil)
	gate := l.gate("m")
	slot := SlotKey{Instance: 1, Number: 0, Token: 1}
	ours, byInstance := map[SlotKey]bool{slot: true}, map[int32][]SlotKey{1: {slot}}

	l.doubt(slot, "test")
	gate.do(func(now time.Time, p *Pool) { p.Lose(now, []SlotKey{slot}) })
	l.align(gate, ours, nil, byInstance)
	if held := p.state().Held; held != 3 {
		t.Errorf("%d slots are held, want the 3 that are not in doubt", held)
	}
}
