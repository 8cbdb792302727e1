package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
)

// offer is what a flow offers at a gateway: so many clients, each of which sends its next request when it has the
// answer to the last one.
type offer struct {
	flow    string
	clients int
	ms      int // that the worker takes for a call
}

// keepAsking runs the clients until every gateway has answered so many calls, or all of them together most, and returns
// how many calls of each flow and of each gateway were answered.
func keepAsking(t *testing.T, fronts []*front, offers [][]offer, each, most int) (flows map[string]int, gateways []int) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var group sync.WaitGroup
	var mu sync.Mutex
	flows, gateways = map[string]int{}, make([]int, len(fronts))
	count := func(flow string, g int) {
		mu.Lock()
		defer mu.Unlock()
		flows[flow]++
		gateways[g]++
		total := 0
		for _, n := range gateways {
			total += n
		}
		if slices.Min(gateways) >= each || total >= most {
			stop()
		}
	}
	for g, list := range offers {
		for _, o := range list {
			body := fmt.Sprintf(`{"model":"m","messages":[],"ms":%d}`, o.ms)
			for range o.clients {
				group.Go(func() {
					for ctx.Err() == nil {
						if _, _, err := fronts[g].ask(t.Context(), body, "X-Penstock-Flow", o.flow); err != nil {
							t.Error(err)
							stop()
							return
						}
						count(o.flow, g)
					}
				})
			}
		}
	}
	group.Wait()
	return flows, gateways
}

// Two flows that have waiters at each of three gateways share the GPU time, however much more one offers, and wherever
// it does: the gateways share the slots by need, and each shares its slots between the flows. No gateway keeps the slots
// that it leased first while the others go without. The account of the time is that in the database.
func TestLongFlowsShareTheTimeOfRealGateways(t *testing.T) {
	t.Parallel()
	const slots, each, most, least = 12, 500, 3300, 0.15
	s := newSite(t, slots)
	s.exec(`SELECT penstock.set_gateway_policy('m', '{"queue_ttl": 300}', 'test')`)
	var fronts []*front
	for i := range 3 {
		fronts = append(fronts, s.startGateway(func(c *Config) { c.Gateway.Name = fmt.Sprint("gateway-", i) }))
	}
	offers := [][]offer{
		{{"many", 30, 40}, {"few", 10, 80}},
		{{"many", 10, 40}, {"few", 20, 80}},
		{{"many", 20, 40}, {"few", 10, 80}},
	}
	flows, gateways := keepAsking(t, fronts, offers, each, most)
	total := flows["many"] + flows["few"]
	if part := float64(slices.Min(gateways)) / float64(total); part < least {
		t.Errorf("the gateways answered %v calls: one of them has %.3f of all", gateways, part)
	}
	s.eventually("the use of every call is folded", func() bool {
		return s.count(`SELECT coalesce(sum(calls), 0)::int FROM penstock.usage_hour`) == total
	})
	took := func(flow string) float64 {
		return float64(s.count(`SELECT sum(gpu_ms)::int FROM penstock.usage_hour WHERE flow = $1`, flow))
	}
	many, few := took("many"), took("few")
	share := many / (many + few)
	t.Logf("calls by gateway %v, by flow %v: %.0f and %.0f ms, share of the first flow %.3f", gateways, flows, many, few, share)
	if share < 0.45 || share > 0.55 {
		t.Errorf("the flow that offers more has %.3f of the time", share)
	}
	if _, running, _ := s.gpu.counts(); running > slots {
		t.Errorf("%d calls at once on %d slots", running, slots)
	}
}
