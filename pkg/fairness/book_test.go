package fairness

import (
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func at(seconds float64) time.Time {
	return time.Unix(1_000_000, 0).Add(time.Duration(seconds * float64(time.Second)))
}

func minutes(m float64) time.Duration { return time.Duration(m * float64(time.Minute)) }

func TestEqualLanesTakeTurns(t *testing.T) {
	b := New(Config{})
	lanes := []Lane{{Queue: 1, Flow: "a"}, {Queue: 1, Flow: "b"}, {Queue: 1, Flow: "c"}}
	var turns []int
	for range 9 {
		i := b.Rank(nil, lanes, 1, at(0))[0]
		turns = append(turns, i)
		b.Charge(lanes[i], 0, at(0)) // even if nothing costs anything
	}
	for i := 3; i < 9; i++ {
		if turns[i] != turns[i-3] {
			t.Fatalf("turns %v, want the same three again and again", turns)
		}
	}
	first := slices.Sorted(slices.Values(turns[:3]))
	if !slices.Equal(first, []int{0, 1, 2}) {
		t.Errorf("first round %v", turns[:3])
	}
}

func TestFifoIgnoresWhoItIs(t *testing.T) {
	b := New(Config{})
	lanes := []Lane{
		{Queue: 1, Flow: "light", Algorithm: Fifo, HeadAge: time.Second},
		{Queue: 1, Flow: "heavy", Algorithm: Fifo, HeadAge: time.Minute},
	}
	b.Charge(lanes[1], 1000, at(0))
	if order := b.Rank(nil, lanes, 0, at(1)); order[0] != 1 {
		t.Errorf("order %v, want the older head first", order)
	}
	lanes[0].HeadPos, lanes[1].HeadPos = 7, 8
	if order := b.Rank(nil, lanes, 0, at(1)); order[0] != 0 {
		t.Errorf("order %v, want the lower place in line first", order)
	}
}

// Turning fair, a queue does not hold against a flow what it got under fifo.
func TestTurningFairStartsLevel(t *testing.T) {
	b := New(Config{})
	lanes := []Lane{{Queue: 1, Flow: "heavy", Algorithm: Fifo}, {Queue: 1, Flow: "light", Algorithm: Fifo}}
	for range 1000 {
		b.Rank(nil, lanes, 1, at(0))
		b.Charge(lanes[0], 1, at(0))
		b.Correct(lanes[0], 1, 1, at(0))
	}
	lanes[0].Algorithm, lanes[1].Algorithm = Fair, Fair
	served := [2]int{}
	for range 100 {
		i := b.Rank(nil, lanes, 1, at(0))[0]
		served[i]++
		b.Charge(lanes[i], 1, at(0))
		b.Correct(lanes[i], 1, 1, at(0))
	}
	if served[0] < 49 || served[1] < 49 {
		t.Errorf("served %v, want 50 each", served)
	}
}

// One node, no half-life to speak of: the bound of the package document. Two flows that
// always have work never differ by more than one charge of each.
func TestGapNeverExceedsOneChargeOfEach(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := New(Config{HalfLife: 1e6 * time.Hour})
		n := rapid.IntRange(2, 8).Draw(t, "flows")
		lanes := make([]Lane, n)
		served, most := make([]float64, n), make([]float64, n)
		for i := range lanes {
			lanes[i] = Lane{Queue: 1, Flow: string(rune('a' + i)), Weight: rapid.Float64Range(0.1, 10).Draw(t, "weight")}
		}
		for range rapid.IntRange(1, 300).Draw(t, "claims") {
			i := b.Rank(nil, lanes, 1, at(0))[0]
			estimate := rapid.Float64Range(0, 10).Draw(t, "cost")
			b.Charge(lanes[i], estimate, at(0))
			served[i] += estimate
			most[i] = max(most[i], estimate/lanes[i].Weight)
			for j := range lanes {
				gap := served[i]/lanes[i].Weight - served[j]/lanes[j].Weight
				if gap > most[i]+1e-6 {
					t.Fatalf("flow %d is %.3f ahead of %d, its largest charge is %.3f", i, gap, j, most[i])
				}
			}
		}
	})
}

// Nothing starves: whatever the priorities, weights and costs, each lane with work is served
// again within five times as many claims as its least guaranteed share demands.
func TestUnracedNothingStarves(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := New(Config{Seed: 1})
		lanes := make([]Lane, rapid.IntRange(2, 6).Draw(t, "lanes"))
		total := 0.0
		for i := range lanes {
			lanes[i] = Lane{
				Queue: rapid.Int32Range(1, 3).Draw(t, "queue"), Priority: rapid.Int16Range(0, 2).Draw(t, "priority"),
				Flow: string(rune('a' + i)), Weight: rapid.Float64Range(1, 2).Draw(t, "weight"),
			}
			lanes[i].QueueWeight = float64(lanes[i].Queue)
			total += lanes[i].Weight
		}
		cost := rapid.Float64Range(0.01, 10).Draw(t, "cost")
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		patience := func(l Lane) int { return int(5 / (0.05 * l.QueueWeight / 6 * l.Weight / total)) }
		last := make([]int, len(lanes))
		var dst []int
		for claim := range 10_000 {
			now := at(0.01 * float64(claim))
			dst = b.Rank(dst[:0], lanes, 1, now)
			i := dst[0]
			last[i] = claim
			b.Charge(lanes[i], cost, now)
			b.Correct(lanes[i], cost, cost*(0.5+1.5*random.Float64()), now)
			for j, l := range lanes {
				if claim-last[j] > patience(l) {
					t.Fatalf("%+v was not served for %d claims", l, claim-last[j])
				}
			}
		}
	})
}

// However the book is used, its numbers stay finite and every lane is ranked exactly once.
func TestRankIsAlwaysAPermutation(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := New(Config{HalfLife: time.Second}) // so that the epoch moves within the test
		now := 0.0
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now += rapid.Float64Range(0, 400).Draw(t, "pause")
			lanes := rapid.SliceOfNDistinct(rapid.Custom(drawLane), 0, 20, func(l Lane) Key { return l.key() }).Draw(t, "lanes")
			limit := rapid.IntRange(0, 25).Draw(t, "limit")
			order := b.Rank(nil, lanes, limit, at(now))
			want := len(lanes)
			if limit > 0 {
				want = min(limit, want)
			}
			seen := map[int]bool{}
			for _, i := range order {
				seen[i] = true
			}
			if len(order) != want || len(seen) != want {
				t.Fatalf("order %v of %d lanes with limit %d", order, len(lanes), limit)
			}
			for _, i := range order {
				b.Charge(lanes[i], rapid.Float64().Draw(t, "estimate"), at(now))
				b.Correct(lanes[i], rapid.Float64().Draw(t, "estimate"), rapid.Float64().Draw(t, "actual"), at(now))
			}
			switch rapid.IntRange(0, 3).Draw(t, "exchange") {
			case 1:
				b.Adopt(b.Report(at(now)), rapid.IntRange(-1, 50).Draw(t, "nodes"), at(now))
			case 2:
				b.Adopt(nil, 1, at(now))
			}
			for key, f := range b.flows {
				if v := f.virtual(f.queue.nodes); math.IsNaN(v) || math.IsInf(v, 0) {
					t.Fatalf("%+v is at %v", key, v)
				}
			}
		}
	})
}

func drawLane(t *rapid.T) Lane {
	return Lane{
		Queue: rapid.Int32Range(1, 3).Draw(t, "queue"), Priority: rapid.Int16Range(-1, 9).Draw(t, "priority"),
		Flow:      rapid.SampledFrom([]string{"", "a", "b", "c", "d"}).Draw(t, "flow"),
		Algorithm: Algorithm(rapid.IntRange(0, 1).Draw(t, "algorithm")),
		Weight:    rapid.Float64Range(-1, 4).Draw(t, "weight"), QueueWeight: rapid.Float64Range(-1, 4).Draw(t, "queue weight"),
		HeadAge: time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "age")),
	}
}

// A few of many are the same few that sorting all would put first.
func TestSelectingAFewAgreesWithSorting(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sortKeys := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) SortKey {
			return SortKey{
				Due: float64(rapid.IntRange(0, 2).Draw(t, "due")), Priority: rapid.Int16Range(0, 2).Draw(t, "priority"),
				QueueID: rapid.Int32Range(1, 3).Draw(t, "queue"), Flow: float64(rapid.IntRange(0, 3).Draw(t, "flow")),
				FlowTurn: rapid.Uint64Range(0, 3).Draw(t, "turn"),
			}
		}), 0, 60).Draw(t, "sortKeys")
		for i := range sortKeys {
			sortKeys[i].Index, sortKeys[i].Queue = i, float64(sortKeys[i].QueueID%2)
		}
		limit := rapid.IntRange(1, 16).Draw(t, "limit")
		all := Order(nil, slices.Clone(sortKeys), 0)
		few := Order(nil, slices.Clone(sortKeys), limit)
		if !slices.Equal(few, all[:min(limit, len(all))]) {
			t.Fatalf("a few %v, all %v", few, all)
		}
	})
}

// A report that got lost is told again; one that arrived is told once.
func TestReportsAreToldUntilAdopted(t *testing.T) {
	b := New(Config{})
	l := Lane{Queue: 1, Flow: "a"}
	sum := func() float64 {
		for _, u := range b.Report(at(0)) {
			if !u.Whole {
				return u.Service
			}
		}
		return 0
	}
	b.Charge(l, 3, at(0))
	if first, again := sum(), sum(); first != 3 || again != 3 {
		t.Fatalf("told %g and %g, want 3 and 3", first, again)
	}
	b.Charge(l, 2, at(0)) // after the report, before its answer
	b.Adopt([]AttainedService{{Key: l.key(), Service: 3}}, 1, at(0))
	if left := sum(); left != 2 {
		t.Errorf("told %g after the answer, want 2", left)
	}
}

func TestServiceIsHalvedByTheHalfLife(t *testing.T) {
	b := New(Config{HalfLife: time.Minute})
	l := Lane{Queue: 1, Flow: "a"}
	b.Charge(l, 8, at(0))
	for _, u := range b.Report(at(120)) {
		if math.Abs(u.Service-2) > 1e-9 {
			t.Errorf("%+v: %g after two half-lives, want 2", u.Key, u.Service)
		}
	}
	if d := Decay(8, 2*time.Minute, time.Minute); d != 2 {
		t.Errorf("Decay gives %g, want 2", d)
	}
}

func TestFoldAddsServiceAndKeepsTheLargestLift(t *testing.T) {
	got := Fold(AttainedService{Service: 8, Lift: 4}, AttainedService{Service: 1, Lift: 3}, time.Minute, time.Minute)
	if got.Service != 5 || got.Lift != 3 {
		t.Errorf("%+v, want service 5 and lift 3", got)
	}
	if got := Fold(AttainedService{Service: 1}, AttainedService{Service: -5}, 0, time.Minute); got.Service != 0 {
		t.Errorf("%+v, want service 0", got)
	}
}

func TestForgottenFlowsTakeNoMemory(t *testing.T) {
	b := New(Config{HalfLife: time.Minute})
	for i := range 1000 {
		l, estimate := Lane{Queue: 1, Flow: string(rune(i))}, 0.1+0.003*float64(i)
		b.Charge(l, estimate+estimate+estimate, at(0)) // of a claim of three locks, as a node adds them up
		for range 3 {
			b.Correct(l, estimate, estimate, at(0))
		}
	}
	kept := []Lane{{Queue: 1, Flow: string(rune(7))}}
	b.Rank(nil, kept, 0, at(0))
	b.Report(at(1))
	b.Adopt(nil, 1, at(1))
	b.Report(at(3600))
	b.Adopt(nil, 1, at(3600))
	if n := len(b.flows); n != 0 {
		t.Errorf("%d flows are remembered after an hour", n)
	}
	b.Rank(nil, kept, 0, at(3600)) // the caller still has a lane of a forgotten flow
	b.Charge(kept[0], 1, at(3600))
	if f := b.flows[kept[0].key()]; f == nil || f.running != 1 {
		t.Errorf("a charge after forgetting is lost: %+v", f)
	}
}

// Each exchange reads all queues that are known, and queues come and go.
func TestQueuesThatAreGoneAreForgotten(t *testing.T) {
	b := New(Config{HalfLife: time.Minute})
	for i := range int32(1000) {
		l := []Lane{{Queue: i, Weight: 1}}
		b.Rank(nil, l, 0, at(0))
		b.Charge(l[0], 1, at(0))
		b.Correct(l[0], 1, 1, at(0))
	}
	b.Charge(Lane{Queue: 7}, 1, at(1)) // still runs
	b.Report(at(1))
	b.Adopt(nil, 1, at(1))
	if n := len(b.queues); n != 1000 {
		t.Errorf("%d of 1000 queues are known while they were served a moment ago", n)
	}
	b.Report(at(3600))
	b.Adopt([]AttainedService{{Key: Key{Queue: 5, Whole: true}, Service: 1}}, 1, at(3600))
	if n := len(b.queues); n != 2 || b.queues[queueBand{id: 5}] == nil || b.queues[queueBand{id: 7}] == nil {
		t.Errorf("%d queues are known after an hour, want the one that another node serves and the one that runs", n)
	}
	b.Correct(Lane{Queue: 7}, 1, 1, at(3601))
	if q := b.queues[queueBand{id: 7}]; q.running != 0 {
		t.Errorf("the queue runs %v after its end", q.running)
	}
}

func TestRankAllocatesNothing(t *testing.T) {
	b := New(Config{})
	lanes := manyLanes(1000)
	dst := b.Rank(nil, lanes, 0, at(0))
	if n := testing.AllocsPerRun(20, func() { dst = b.Rank(dst[:0], lanes, 8, at(1)) }); n != 0 {
		t.Errorf("%.0f allocations, want 0", n)
	}
}

func manyLanes(n int) []Lane {
	lanes := make([]Lane, n)
	for i := range lanes {
		lanes[i] = Lane{Queue: int32(i % 5), Flow: "tenant-" + strconv.Itoa(i), Weight: 1}
	}
	return lanes
}

func BenchmarkRankAndCharge(b *testing.B) {
	for _, n := range []int{1, 10, 100, 1000} {
		b.Run(strconv.Itoa(n)+" lanes", func(b *testing.B) {
			book := New(Config{})
			lanes := manyLanes(n)
			var dst []int
			b.ReportAllocs()
			for b.Loop() {
				dst = book.Rank(dst[:0], lanes, 1, at(0))
				book.Charge(lanes[dst[0]], 1, at(0))
				book.Correct(lanes[dst[0]], 1, 1.1, at(0))
			}
		})
	}
}

// All methods may be called at once; the race detector is the judge.
func TestBookMayBeSharedByGoroutines(t *testing.T) {
	b := New(Config{HalfLife: time.Millisecond})
	var threads sync.WaitGroup
	for thread := range 4 {
		threads.Go(func() {
			lanes := manyLanes(20)
			for i := range 200 {
				now := at(float64(i) / 10)
				l := lanes[b.Rank(nil, lanes, 1, now)[0]]
				b.Charge(l, 1, now)
				b.Extend(l, 1, now)
				b.Correct(l, 2, 3, now)
				if thread == 0 && i%10 == 0 {
					b.Adopt(b.Report(now), 2, now)
				}
			}
		})
	}
	threads.Wait()
	for _, f := range b.flows {
		if f.running != 0 {
			t.Errorf("%+v: estimates of %g still run", f.key, f.running)
		}
	}
}

// A flow with groups is charged for whole groups when they are claimed, and gets most of it back when a group
// yields after one entry. A flow that comes meanwhile starts at the service that the other has attained, not at what its groups were
// estimated to cost: else it would wait for as much service of the other as was refunded.
func TestReturningFlowStartsAtServiceThatWasAttained(t *testing.T) {
	for _, nodes := range []float64{1, 2} {
		b := New(Config{Seed: 1})
		b.nodes = nodes
		noisy, quiet := Lane{Queue: 1, Flow: "noisy"}, Lane{Queue: 1, Flow: "quiet"}
		b.Rank(nil, []Lane{noisy}, 1, at(0))
		for range 4 { // slots
			b.Charge(noisy, 10, at(0)) // 50 entries of 0.2 s
		}
		now := 5.0
		b.Rank(nil, []Lane{noisy}, 1, at(now))
		for push := range 20 {
			now += 0.2
			if first := b.Rank(nil, []Lane{noisy, quiet}, 1, at(now))[0]; first != 1 {
				t.Fatalf("%v nodes, push %d: the noisy flow goes first", nodes, push)
			}
			// A group gives way to the quiet flow, and is claimed again afterwards.
			b.Correct(noisy, 10, 0.2, at(now))
			b.Charge(quiet, 0.25, at(now))
			now += 0.25
			b.Correct(quiet, 0.25, 0.25, at(now))
			b.Rank(nil, []Lane{noisy}, 1, at(now))
			b.Charge(noisy, 10, at(now))
		}
	}
}
