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

// A gateway keeps idle slots for what it was called for of late, and none once it has not been called for a while: slots
// that it holds count as calls that run, and would keep the last instance of the model.
func TestSlotsOfAPoolThatIsNotCalledAreAllGivenBack(t *testing.T) {
	t.Parallel()
	held, peak := 64, 40.0
	for second := range 180 {
		n := surplusOf(held, held, 0, peak, 0, false)
		if kept := held - n; second < 3 && kept < 40 {
			t.Errorf("%d slots are kept %d s after 40 calls", kept, second)
		}
		held -= n
		peak *= peakFalls
	}
	if held != 0 {
		t.Errorf("%d slots are kept after three minutes without a call", held)
	}
}
