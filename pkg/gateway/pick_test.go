package gateway

import (
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/slot"
)

// An instance counts as one that has an adapter loaded for some time after its last call for it, and its record of
// adapters does not grow with each that was ever called.
func TestAdaptersAreForgotten(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	p := NewPool(DefaultPolicy(), nil)
	list := []InstanceState{{ID: 1, Slots: 4, Usable: true}, {ID: 2, Slots: 4, Usable: true}}
	p.SetInstances(now, list)
	for n := range int32(4) {
		p.Grant(now, []slot.Held{{Instance: 1, Number: n, Token: int64(n) + 1}, {Instance: 2, Number: n, Token: int64(n) + 11}})
	}
	call := func(adapter string) (r *Request) {
		r = &Request{Class: Default, Adapter: adapter}
		if inFlight, refused := p.Arrive(now, r); !inFlight || refused != nil {
			t.Fatalf("the call does not begin: %v", refused)
		}
		return r
	}
	// other occupies the first instance, so that the adapter is loaded by the second.
	other := call("")
	first := call("lora-1")
	p.End(now, first, CallEnd{Took: time.Second})
	p.End(now, other, CallEnd{Took: time.Second})
	if other.instance.id != 1 || first.instance.id != 2 {
		t.Fatalf("the calls went to %d and %d, want 1 and 2", other.instance.id, first.instance.id)
	}
	now = now.Add(adapterKept - time.Second)
	again := call("lora-1")
	p.End(now, again, CallEnd{Took: time.Second})
	if again.instance.id != 2 {
		t.Errorf("the adapter was called at %d, and is loaded by 2", again.instance.id)
	}
	now = now.Add(adapterKept)
	late := call("lora-1")
	if late.instance.id != 1 {
		t.Errorf("the adapter was called at %d: 2 had it %s ago", late.instance.id, adapterKept)
	}
	p.SetInstances(now, list)
	if n := len(p.fleet.find(2).adapters); n != 0 {
		t.Errorf("%d adapters are remembered", n)
	}
	if n := len(p.fleet.find(1).adapters); n != 1 {
		t.Errorf("%d adapters are remembered of the instance that was called just now", n)
	}
}
