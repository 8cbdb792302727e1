package gateway

import (
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker/workertest"
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
		r = &Request{Criticality: Default, Adapter: adapter}
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

// An instance that says that it does not have an adapter is not the one for its requests because it was asked once.
func TestAdapterIsNotLookedForWhereItIsMissing(t *testing.T) {
	t.Parallel()
	var asked atomic.Int32
	p := startTestbed(t, nil, func(w http.ResponseWriter, r *http.Request) {
		if body, _ := io.ReadAll(r.Body); strings.Contains(string(body), "lora-1") {
			asked.Add(1)
			workertest.Says(404, `{"error":{"message":"The model lora-1 does not exist.","type":"NotFoundError","code":404}}`)(w, r)
			return
		}
		workertest.Says(200, "{}")(w, r)
	}, workertest.Says(200, "{}"))
	for range 10 {
		for _, model := range []string{"lora-1", "m"} {
			if a := p.post(chat, `{"model":"`+model+`"}`); a.StatusCode != 200 {
				t.Errorf("%s: got %d %s", model, a.StatusCode, a.body)
			}
			workertest.WaitFor(t, func() bool { return p.state().InFlight == 0 })
		}
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("the instance without the adapter was asked %d times for it", n)
	}
}
