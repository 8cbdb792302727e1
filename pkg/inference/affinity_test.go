package inference

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"

	"pgregory.net/rapid"
)

// Something waits only if it may, and for a busy candidate that has it loaded and that few wait for; it goes where
// it is loaded if that is idle, and before it unloads anything where nothing is loaded; and no idle candidate is
// left out.
func TestRankingPrefersWhatIsLoadedAndWaitsForNothingElse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		affinities := rapid.SampledFrom([]string{"", "x", "y"})
		var candidates []candidate
		for i := range rapid.Int32Range(0, 5).Draw(t, "candidates") {
			candidates = append(candidates, candidate{
				id: i + 1, idle: rapid.IntRange(0, 2).Draw(t, "idle"), busy: rapid.IntRange(0, 3).Draw(t, "busy"),
				awaited: rapid.IntRange(0, 9).Draw(t, "awaited"), loaded: affinities.Draw(t, "loaded"),
				pressed: rapid.Bool().Draw(t, "pressed"),
			})
		}
		affinity, mayWait := affinities.Draw(t, "affinity"), rapid.Bool().Draw(t, "may wait")
		order, await := rankCandidates(candidates, affinity, mayWait)
		if await != 0 {
			s := candidates[await-1]
			if !mayWait || affinity == "" || s.loaded != affinity || s.awaited >= awaitedMax*s.busy || len(order) > 0 {
				t.Fatalf("%q waits for %+v, may wait %t", affinity, s, mayWait)
			}
		}
		idle := 0
		for _, s := range candidates {
			if s.idle == 0 {
				continue
			}
			idle++
			if await != 0 && s.loaded == affinity {
				t.Fatalf("%q waits although %+v is idle", affinity, s)
			}
			if await == 0 && !slices.Contains(order, s.id) {
				t.Fatalf("%+v is left out of %v", s, order)
			}
			first := candidates[max(0, int(append(order, 1)[0])-1)]
			if await == 0 && first.pressed && !s.pressed && s.swapCost(affinity) == first.swapCost(affinity) {
				t.Fatalf("%q goes to %+v, which is pressed, before %+v", affinity, first, s)
			}
			if await == 0 && affinity != "" && s.swapCost(affinity) < candidates[order[0]-1].swapCost(affinity) {
				t.Fatalf("%q goes to %+v before %+v", affinity, candidates[order[0]-1], s)
			}
		}
		if await == 0 && len(order) != idle {
			t.Fatalf("order %v of %d idle candidates", order, idle)
		}
	})
}

var variants = worker.Model{AffinityField: "lora", AffinityWait: worker.Seconds(5 * time.Minute)}

// Two workers, two adapters, one line in which they alternate: each worker keeps to the one that it has loaded.
func TestWorkersKeepToTheAdapterTheyHaveLoaded(t *testing.T) {
	b := newBed(t, variants)
	for i := range 2 {
		g := b.gpu(func(r *http.Request) (int, string) {
			time.Sleep(time.Duration(1+rand.IntN(20)) * time.Millisecond)
			return answers(r)
		})
		b.instance(fmt.Sprint("gpu-", i), g.URL, 1)
	}
	var payloads []string
	for i := range 60 {
		payloads = append(payloads, `{"lora":"`+string(rune('x'+i%2))+`"}`)
	}
	ids := b.push(payloads...)
	n := b.start(ServiceConfig{}, func(t *tuning) { t.idleMax = time.Hour })
	swapped := 0
	for _, id := range ids {
		if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 {
			t.Fatalf("outcome %+v", o)
		}
		if b.meta(id)["swapped"] == true {
			swapped++
		}
	}
	tally := n.Pool.Tallies()[b.model.Name]
	if tally.Calls != 60 || int(tally.Swaps) != swapped || swapped > 10 {
		t.Errorf("%d results say that a worker swapped, expected hardly any; %+v", swapped, tally)
	}
	t.Logf("%d swaps in 60 calls", swapped)
}

// The worker that has it loaded is busy for long: the entry waits as long as it may, and then has another one swap.
func TestAffinityWaitIsBounded(t *testing.T) {
	model := variants
	model.AffinityWait = worker.Seconds(300 * time.Millisecond)
	b := newBed(t, model)
	goOn := make(chan struct{})
	goOnAll := sync.OnceFunc(func() { close(goOn) })
	var calls atomic.Int32
	for i := range 2 {
		g := b.gpu(func(r *http.Request) (int, string) {
			calls.Add(1)
			if body, _ := io.ReadAll(r.Body); strings.Contains(string(body), "slow") {
				<-goOn
			}
			return answers(r)
		})
		b.instance(fmt.Sprint("gpu-", i), g.URL, 1)
	}
	t.Cleanup(goOnAll)
	n := b.start(ServiceConfig{}, func(t *tuning) { t.idleMax = time.Hour })
	// Each worker loads one: the second has to take x, for the first is busy with y.
	first := b.push(`{"lora":"y","do":"slow"}`)[0]
	workertest.WaitFor(t, func() bool { return calls.Load() == 1 })
	b.outcome(b.push(`{"lora":"x"}`)[0])
	goOn <- struct{}{}
	b.outcome(first)
	slow := b.push(`{"lora":"x","do":"slow"}`)[0] // where x is loaded
	workertest.WaitFor(t, func() bool { return calls.Load() == 3 })
	pushed := time.Now()
	id := b.push(`{"lora":"x"}`)[0]
	b.outcome(id)
	waited := time.Since(pushed)
	if m := b.meta(id); m["swapped"] != true || m["instance"] != b.meta(first)["instance"] {
		t.Errorf("noted %v", m)
	}
	if waited < 300*time.Millisecond { // the worker that has it loaded stays busy: without a bound there is no outcome
		t.Errorf("waited %s, want 300 ms at least", waited)
	}
	if n.Pool.Tallies()[b.model.Name].Swaps != 1 {
		t.Error("the swap is not counted")
	}
	goOnAll()
	b.outcome(slow)
}
