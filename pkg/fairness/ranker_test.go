package fairness

import (
	"math"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// A lower band that goes first for its guarantee is told how much it is owed, and no other lane is.
func TestALowBandIsToldWhatItIsOwed(t *testing.T) {
	r := NewRanker(RankerConfig{}, nil)
	q := &invalidation.Queue{ID: 1}
	high, low := &Candidate{Queue: q, Lane: invalidation.Lane{Priority: 9}}, &Candidate{Queue: q}
	high.Since, low.Since = time.Now().Add(time.Hour), time.Now().Add(time.Hour) // however slow the test, shares do not grow
	next := func(what string, want *Candidate, least, most float64) {
		t.Helper()
		candidates := []*Candidate{high, low}
		first := r.Next(nil, candidates, 1, true)
		if len(first) != 1 || candidates[first[0]] != want || want.Owed < least || want.Owed > most {
			t.Errorf("%s: first is %v; high is owed %v, low %v, want %v to %v", what, first, high.Owed, low.Owed, least, most)
		}
	}
	next("nothing has run", low, math.SmallestNonzeroFloat64, 1e-9)
	r.Charge(*low, 1)
	next("low has had its turn", high, 0, 0)
	r.Charge(*high, 100)
	next("high runs", low, 100*0.05-1+101*0.05-0.1, 100*0.05-1+101*0.05+0.1)
	r.Correct(*high, 100, 100)
	next("high has run", low, 100*0.05-1+1*0.05-0.1, 100*0.05-1+1*0.05+0.1)
	if high.Owed != 0 {
		t.Errorf("the high band is owed %v", high.Owed)
	}
	only := []*Candidate{low}
	if first := r.Next(nil, only, 1, true); len(first) != 1 || low.Owed != 0 {
		t.Errorf("a band alone is bounded by %v (%v)", low.Owed, first)
	}
}

// Between the ranking and the look at what is owed, another claim of the band may be charged for.
func TestALowBandIsBoundedAlsoWhereAnotherClaimWasChargedMeanwhile(t *testing.T) {
	b, now := New(Config{}), time.Now()
	low, high := Lane{Queue: 1}, Lane{Queue: 1, Priority: 9}
	if first := b.Rank(nil, []Lane{high, low}, 1, now); len(first) != 1 || first[0] != 1 {
		t.Fatalf("first is %v, want the low band, which had nothing yet", first)
	}
	b.Charge(low, 1, now)
	if owed := b.owed(low.Priority); owed <= 0 || owed > 0.06 {
		t.Errorf("the low band is owed %v, want its share of the one run", owed)
	}
	if owed := b.owed(high.Priority); owed != 0 {
		t.Errorf("the high band is bounded by %v", owed)
	}
}
