package gateway

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// gatewaysOf returns gateways that know one token, and a function by which they read each other's reports.
func gatewaysOf(n int, token TokenState) (list []*Gateway, exchange func()) {
	for range n {
		g := New(Config{})
		g.SetTokens([]TokenState{token})
		list = append(list, g)
	}
	return list, func() {
		for i, g := range list {
			reports := map[invalidation.NodeID]map[string]TokenCounts{}
			for j, other := range list {
				if i != j {
					reports[invalidation.NodeID(j)+1] = other.TokenCounts()
				}
			}
			g.SetTokenCounts(reports)
		}
	}
}

// The rate of a token holds over all gateways: a client that asks each as often as it can gets no more than its rate, but
// for what it had saved up at each before they knew of one another.
func TestTheRateOfATokenHoldsOverAllGateways(t *testing.T) {
	t.Parallel()
	const rate, count, seconds = 50, 4, 60
	synctest.Test(t, func(t *testing.T) {
		list, exchange := gatewaysOf(count, TokenState{Name: "shop", Rate: rate})
		admitted := 0
		for tick := range seconds * 100 {
			if tick%100 == 0 {
				exchange()
			}
			for _, g := range list {
				if c := g.tokens.named("shop")[0]; c.begin(time.Now()) == nil {
					admitted++
					c.dispatched()
					c.leave()
				}
			}
			time.Sleep(10 * time.Millisecond)
		}
		if most := rate * (seconds + 2*count); admitted > most || admitted < rate*seconds*9/10 {
			t.Errorf("%d requests in %d s at a rate of %d are let in, want %d at most and nearly that", admitted, seconds, rate, most)
		}
	})
}

// Tokens come and go: what those did that are no more is forgotten, but while a request of theirs is in flight.
func TestTokensThatAreGoneAreForgotten(t *testing.T) {
	t.Parallel()
	g := New(Config{})
	set := func(names ...string) {
		var list []TokenState
		for i, name := range names {
			list = append(list, TokenState{Name: name, Hash: [32]byte{byte(i)}, InFlightMax: 1})
		}
		g.SetTokens(list)
		reports := map[invalidation.NodeID]map[string]TokenCounts{1: {}}
		for _, name := range names {
			reports[1][name] = TokenCounts{Admitted: 1}
		}
		g.SetTokenCounts(reports)
	}
	set("gone", "busy", "stays")
	busy := g.tokens.named("busy")[0]
	if refused := busy.begin(time.Now()); refused != nil {
		t.Fatal(refused)
	}
	set("stays")
	if uses, elsewhere := len(g.tokens.uses), len(g.others.admitted[1]); uses != 2 || elsewhere != 1 {
		t.Errorf("%d tokens are remembered here and %d elsewhere, want 2, with the busy one, and 1", uses, elsewhere)
	}
	set("stays", "busy")
	if g.tokens.named("busy")[0].begin(time.Now()) == nil {
		t.Error("a request of a token that came back is let in beside the one that it may have")
	}
	busy.leave()
	set("stays")
	if uses := len(g.tokens.uses); uses != 1 {
		t.Errorf("%d tokens are remembered, want 1", uses)
	}
}

// The same of a rate of less than a request in half a minute.
func TestALowRateHoldsOverAllGateways(t *testing.T) {
	t.Parallel()
	const hours, count = 2, 4
	synctest.Test(t, func(t *testing.T) {
		list, exchange := gatewaysOf(count, TokenState{Name: "shop", Rate: 0.01})
		admitted := 0
		for range hours * 3600 {
			exchange()
			for _, g := range list {
				if c := g.tokens.named("shop")[0]; c.begin(time.Now()) == nil {
					admitted++
					c.dispatched()
					c.leave()
				}
			}
			time.Sleep(time.Second)
		}
		if want := hours * 36; admitted > want+2*count || admitted < want*9/10 {
			t.Errorf("%d requests in %d hours at a rate of 36 an hour are let in", admitted, hours)
		}
	})
}

// A client whose requests are spread over gateways gets all of them through at a rate below its own.
func TestReportsOfOtherGatewaysRefuseNobodyBelowItsRate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		list, exchange := gatewaysOf(4, TokenState{Name: "shop", Rate: 50})
		refused := 0
		for tick := range 60 * 40 {
			if tick%40 == 0 {
				exchange()
			}
			if c := list[tick%4].tokens.named("shop")[0]; c.begin(time.Now()) != nil {
				refused++
			} else {
				c.dispatched()
				c.leave()
			}
			time.Sleep(25 * time.Millisecond) // 40 a second
		}
		if refused > 0 {
			t.Errorf("%d of 2,400 requests are refused", refused)
		}
	})
}

// Requests in flight and those that wait count at all gateways, as long as their reports are known.
func TestRequestsInFlightCountAtAllGateways(t *testing.T) {
	t.Parallel()
	for name, token := range map[string]TokenState{
		"in flight": {Name: "shop", InFlightMax: 3},
		"waiting":   {Name: "shop", WaitingMax: 3},
	} {
		synctest.Test(t, func(t *testing.T) {
			list, exchange := gatewaysOf(2, token)
			first, second := list[0].tokens.named("shop")[0], list[1].tokens.named("shop")[0]
			for range 2 {
				if refused := first.begin(time.Now()); refused != nil {
					t.Fatal(refused)
				}
			}
			exchange()
			exchange()
			if refused := second.begin(time.Now()); refused != nil {
				t.Errorf("%s: the third is refused: %s", name, refused.Detail)
			}
			if second.begin(time.Now()) == nil {
				t.Errorf("%s: the fourth is let in", name)
			}
			time.Sleep(countsKept + time.Second) // the database is away: each counts alone
			for range 2 {
				if refused := second.begin(time.Now()); refused != nil {
					t.Errorf("%s: a gateway alone refuses: %s", name, refused.Detail)
				}
			}
		})
	}
}
