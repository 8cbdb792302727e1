package fairness

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

func open(t *testing.T) (*pgxpool.Pool, *invalidation.Queue) {
	t.Helper()
	pool, err := postgres.Open(context.Background(), postgres.Config{DSN: pgtest.DSN(t), MaxConns: 8})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	q, err := invalidation.Create(t.Context(), pool, "work", invalidation.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return pool, q
}

// The statement that folds a delta into the table, and Fold, which the simulations use, are the same function.
func TestDatabaseFoldsAsTheSimulationDoes(t *testing.T) {
	pool, q := open(t)
	x := NewRanker(RankerConfig{}, pool).share
	random := skewed(10, 1)
	r := newCluster(3, 0, 0, 0, nil).random
	for i := range 50 {
		key := Key{Queue: q.ID, Priority: 1, Flow: fmt.Sprint(i)}
		old := AttainedService{key, random(r), random(r) * float64(i%2)}
		delta := AttainedService{key, random(r) - 15, random(r) * float64(i%3)}
		elapsed := time.Duration(r.Int64N(int64(30 * time.Minute)))
		if i == 0 {
			elapsed = 100 * 365 * 24 * time.Hour
		}
		if _, err := pool.Exec(t.Context(), `INSERT INTO penstock.usage (queue_id, priority, whole, flow, service, lift, at)
			VALUES ($1, 1, false, $2, $3, $4, clock_timestamp() - $5::interval)`, q.ID, key.Flow, old.Service, old.Lift, elapsed); err != nil {
			t.Fatal(err)
		}
		snapshot, _, err := x.swap(t.Context(), []AttainedService{delta})
		if err != nil {
			t.Fatal(err)
		}
		at := slices.IndexFunc(snapshot, func(u AttainedService) bool { return u.Key == key })
		want := Fold(old, delta, elapsed, x.HalfLife)
		if got := snapshot[at]; math.Abs(got.Service-want.Service) > 0.1 || math.Abs(got.Lift-want.Lift) > 0.1 {
			t.Errorf("after %v: %v and %v make %v, want %v", elapsed, old, delta, got, want)
		}
	}
	if _, err := pool.Exec(t.Context(), forgetSQL, x.HalfLife.Seconds()); err != nil {
		t.Fatal(err)
	}
}

// Nodes that tell of the same flows at the same time, in any order, wait for each other for a moment and lose nothing.
func TestNodesThatTellOfTheSameFlowsNeverDeadlock(t *testing.T) {
	pool, q := open(t)
	const nodes, flows, rounds = 4, 1000, 10
	var wg sync.WaitGroup
	for n := range nodes {
		wg.Go(func() {
			x := NewRanker(RankerConfig{}, pool).share
			for range rounds {
				var report []AttainedService
				for i := range flows {
					report = append(report, AttainedService{Key: Key{Queue: q.ID, Priority: 1, Flow: fmt.Sprint((i*[]int{1, 3, 7, 9}[n] + n) % flows)}, Service: 1})
				}
				// A node that had to wait too long tells the same again in its next round.
				for {
					_, _, err := x.swap(t.Context(), report)
					if err == nil {
						break
					}
					if code := postgres.Code(err); code != "55P03" {
						t.Errorf("swap: %v", err)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	var least, most float64
	if err := pool.QueryRow(t.Context(), `SELECT min(service), max(service) FROM penstock.usage`).Scan(&least, &most); err != nil {
		t.Fatal(err)
	}
	if want := float64(nodes * rounds); least < 0.9*want || most > want {
		t.Errorf("flows have %v to %v, want %v less what a few seconds forget", least, most, want)
	}
}

// first is the lane that a ranker puts first, -1 if none.
func first(r *Ranker, lanes []*Candidate, idle bool) int {
	for _, i := range r.Next(nil, lanes, 1, idle) {
		return i
	}
	return -1
}

// What one node gave, the other takes into account within a round.
func TestUsageOnOneNodeRanksTheLanesOfAnother(t *testing.T) {
	pool, q := open(t)
	a, b := NewRanker(RankerConfig{}, pool), NewRanker(RankerConfig{}, pool)
	candidates := func() []*Candidate {
		return []*Candidate{
			{Queue: q, Lane: invalidation.Lane{Priority: 1, Flow: "big"}, Since: time.Now()},
			{Queue: q, Lane: invalidation.Lane{Priority: 1, Flow: "small"}, Since: time.Now()},
		}
	}
	onA, onB := candidates(), candidates()
	for _, r := range []struct {
		*Ranker
		lanes []*Candidate
	}{{a, onA}, {b, onB}} {
		first(r.Ranker, r.lanes, true)
		r.Charge(*r.lanes[1], 1)
		if _, err := r.swap(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	first(b, onB, true) // or it would have no reason to ask
	a.Charge(*onA[0], 100)
	a.Correct(*onA[0], 100, 100)
	for _, r := range []*Ranker{a, b} {
		if _, err := r.swap(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if got := onB[first(b, onB, true)].Lane.Flow; got != "small" {
		t.Errorf("the other node serves %q, want the flow that has used less", got)
	}
}

// A thread that finds the first lane taken goes on to another one of its band, and to no lower band.
func TestSecondThreadStaysInTheBandOfTheFirst(t *testing.T) {
	pool, q := open(t)
	r := NewRanker(RankerConfig{}, pool)
	lane := func(priority int16, flow string) *Candidate {
		return &Candidate{Queue: q, Lane: invalidation.Lane{Priority: priority, Flow: flow}, Since: time.Now()}
	}
	high, low := lane(9, "high"), lane(0, "low")
	if got := first(r, nil, true); got != -1 {
		t.Errorf("of no lanes comes lane %d", got)
	}
	lanes := []*Candidate{low, high}
	for range 2 { // a low band takes one turn at first: nothing is owed to it yet
		r.Charge(*lanes[first(r, lanes, true)], 1)
	}
	high.Taken = true
	if got := first(r, lanes, true); got != -1 {
		t.Errorf("beside a claim of the high band comes lane %d, want none", got)
	}
	if got := first(r, append(lanes, lane(9, "other")), true); got != 2 {
		t.Errorf("beside a claim of the high band comes lane %d, want the other one of that band", got)
	}
}

// While all threads work, a second thread goes to another flow only if that one would be next after the claim under way.
func TestSecondThreadWaitsForTheFlowThatIsOwedMore(t *testing.T) {
	pool, q := open(t)
	r := NewRanker(RankerConfig{}, pool)
	behind := &Candidate{Queue: q, Lane: invalidation.Lane{Flow: "behind"}, Since: time.Now()}
	ahead := &Candidate{Queue: q, Lane: invalidation.Lane{Flow: "ahead"}, Since: time.Now()}
	lanes := []*Candidate{behind, ahead}
	first(r, lanes, false)
	for range 50 { // what each claim usually brings is 1
		r.Charge(*behind, 1)
		r.Charge(*ahead, 1)
	}
	r.Charge(*ahead, 0.5)
	behind.Taken = true
	if got := first(r, lanes, false); got != 1 {
		t.Errorf("beside a claim that evens it out comes lane %d, want the other one", got)
	}
	r.Charge(*ahead, 3)
	if got := first(r, lanes, false); got != -1 {
		t.Errorf("beside a claim of a flow that is owed three comes lane %d, want none", got)
	}
	if got := first(r, lanes, true); got != 1 {
		t.Errorf("where threads have nothing to do comes lane %d, want the other one", got)
	}
}

// Lanes that are claimed from in one go are those that would be next one after another, of the first one's queue and band.
func TestLanesOfOneClaimAreThoseThatAreNext(t *testing.T) {
	pool, q := open(t)
	r := NewRanker(RankerConfig{}, pool)
	lane := func(priority int16, flow string) *Candidate {
		return &Candidate{Queue: q, Lane: invalidation.Lane{Priority: priority, Flow: flow}, Since: time.Now()}
	}
	lanes := []*Candidate{lane(9, "c"), lane(9, "a"), lane(1, "low"), lane(9, "d"), lane(9, "b")}
	first(r, lanes, true)
	for i, used := range []float64{3, 1, 0, 4, 2} {
		r.Charge(*lanes[i], used)
	}
	r.Charge(*lanes[2], 1e6) // nothing is owed to the lower band
	if got := r.Next(nil, lanes, 3, true); !slices.Equal(got, []int{1, 4, 0}) {
		t.Errorf("claimed together: %v, want a, b and c", got)
	}
	if got := r.Next(nil, lanes, 100, true); !slices.Equal(got, []int{1, 4, 0, 3}) {
		t.Errorf("claimed together: %v, want the band", got)
	}
	lanes[4].Taken = true
	if got := r.Next(nil, lanes, 100, false); !slices.Equal(got, []int{1}) {
		t.Errorf("claimed together: %v, want none from behind b, which is claimed from just now", got)
	}
}

// Weights are rows: of a flow in all queues, and in one, which goes first.
func TestWeightOfAFlowIsReadWithItsQueue(t *testing.T) {
	pool, q := open(t)
	version := int64(0)
	setWeight := func(queue string, weight float64) error {
		const sql = `SELECT penstock.set_flow_weight('acme', nullif($1::real, 0), nullif($2::text, ''), 'gold')`
		_, err := pool.Exec(t.Context(), sql, weight, queue)
		return err
	}
	weight := func(flow string) float64 {
		again, err := invalidation.Open(t.Context(), pool, q.Name)
		if err != nil {
			t.Fatal(err)
		}
		before := version
		if err := pool.QueryRow(t.Context(), `SELECT sum(version)::bigint FROM penstock.queue`).Scan(&version); err != nil || version <= before {
			t.Errorf("version is %d after %d (%v): nodes would not read their queues again", version, before, err)
		}
		return again.FlowWeight(flow)
	}
	for _, set := range []struct {
		queue  string
		weight float64
		want   float64
	}{{"", 3, 3}, {"work", 5, 5}, {"", 2, 5}, {"work", 0, 2}, {"", 0, 1}} {
		if err := setWeight(set.queue, set.weight); err != nil {
			t.Fatal(err)
		}
		if got := weight("acme"); got != set.want {
			t.Errorf("after weight %v in queue %q flow has %v, want %v", set.weight, set.queue, got, set.want)
		}
	}
	if err := setWeight("", -1); err == nil {
		t.Error("a weight below zero is taken")
	}
}

// What it costs to choose one of many lanes, before each claim.
func BenchmarkNext(b *testing.B) {
	q := &invalidation.Queue{ID: 1}
	for _, n := range []int{1, 100, 3000, 20_000} {
		b.Run(fmt.Sprint(n, " lanes"), func(b *testing.B) {
			var next []int
			r := NewRanker(RankerConfig{}, nil)
			lanes := make([]*Candidate, n)
			for i := range lanes {
				lanes[i] = &Candidate{Queue: q, Lane: invalidation.Lane{Flow: fmt.Sprint(i)}, Since: time.Now()}
			}
			b.ReportAllocs()
			for b.Loop() {
				next = r.Next(next[:0], lanes, 100, true)
				for _, i := range next {
					r.Charge(*lanes[i], 1)
				}
			}
		})
	}
}

// The exchanges of many nodes take no more of the database together than those of twenty, up to the longest pause.
func TestExchangesOfManyNodesAreFurtherApart(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		took  time.Duration
		nodes int
		want  time.Duration
	}{
		{time.Millisecond, 2, shareEvery},
		{100 * time.Millisecond, 1, 2 * time.Second},
		{100 * time.Millisecond, 20, 2 * time.Second},
		{100 * time.Millisecond, 200, 20 * time.Second},
		{time.Second, 1000, time.Minute},
	} {
		if got := sharePause(c.took, c.nodes); got != c.want {
			t.Errorf("after an exchange of %s with %d nodes the pause is %s, want %s", c.took, c.nodes, got, c.want)
		}
	}
}

// What a flow's online calls have used counts once in what is shown of it, and in the order of its entries at each
// priority.
func TestUseOfOnlineCallsCountsOnceAtEachPriority(t *testing.T) {
	pool, q := open(t)
	x := NewRanker(RankerConfig{}, pool).share
	report := []AttainedService{
		{Key: Key{Queue: q.ID, Priority: 3, Flow: "both"}, Service: 10},
		{Key: Key{Queue: q.ID, Priority: 5, Flow: "both"}, Service: 20},
		{Key: Key{Queue: q.ID, Priority: 3, Flow: "entries"}, Service: 40},
		{Key: Key{Queue: q.ID, Priority: 3, Whole: true}, Service: 50},
	}
	if _, _, err := x.swap(t.Context(), report); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `
SELECT penstock.fold_online_gpu(1, 1, array_fill(date_trunc('hour', now(), 'UTC'), '{2}'), '{work,work}', '{m,m}',
       '{both,calls}', '{1,1}', '{100000,200000}', '{0,0}', '{0,0}', '{0,0}', '{0,0}', '{true,true}', '{}', '{}')`); err != nil {
		t.Fatal(err)
	}
	snapshot, _, err := x.swap(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, u := range snapshot {
		got[fmt.Sprint(u.Priority, u.Flow)] = u.Service
	}
	want := map[string]float64{"3both": 110, "5both": 120, "1both": 100, "3entries": 40, "1calls": 200, "3": 50}
	for key, service := range want {
		if math.Abs(got[key]/service-1) > 0.5 { // minutes may have passed
			t.Errorf("use %q is %v, want %v", key, got[key], service)
		}
	}
	if len(got) != len(want) {
		t.Errorf("use of %v, want that of %v", got, want)
	}
	var shown float64
	if err := pool.QueryRow(t.Context(), `SELECT slots / sum(slots) OVER () FROM penstock.usage_status
		ORDER BY flow = 'both' DESC LIMIT 1`).Scan(&shown); err != nil {
		t.Fatal(err)
	}
	if share := 130.0 / 370; math.Abs(shown/share-1) > 0.1 {
		t.Errorf("the share of the flow is shown as %v, want %v", shown, share)
	}
}
