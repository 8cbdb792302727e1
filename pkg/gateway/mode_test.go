package gateway

import (
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/slot"
)

// A pool goes over to QUEUE above the upper bound of its band, and back to PASS below the lower one: it does not go to and
// fro with each call between the two.
func TestTheModeChangesAtTheBoundsOfItsBand(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	policy := DefaultPolicy()
	policy.Watermark, policy.Deviation = 10, 0.2 // the band is 8 to 12 calls
	p := NewPool(policy, nil)
	p.SetInstances(now, []InstanceState{{ID: 1, Slots: 20, Usable: true}})
	for n := range int32(20) {
		p.Grant(now, []slot.Held{{Instance: 1, Number: n, Token: int64(n) + 1}})
	}
	var calls []*Request
	for _, step := range []struct {
		load int
		mode PoolMode
	}{
		{7, ModePass},
		{10, ModePass},
		{12, ModePass},
		{13, ModeQueue},
		{10, ModeQueue},
		{8, ModeQueue},
		{9, ModeQueue},
		{7, ModePass},
		{12, ModePass},
		{13, ModeQueue},
		{0, ModePass},
	} {
		for len(calls) < step.load {
			r := &Request{Flow: "f", Criticality: Critical, Leave: func(*Request, Dropped) {}}
			if inFlight, refused := p.Arrive(now, r); !inFlight {
				t.Fatalf("call %d does not begin (%v)", len(calls)+1, refused)
			}
			calls = append(calls, r)
		}
		for len(calls) > step.load {
			p.End(now, calls[0], CallEnd{})
			calls = calls[1:]
		}
		if p.mode != step.mode {
			t.Errorf("with %d calls the mode is %s, want %s", step.load, p.mode, step.mode)
		}
	}
}
