package invalidation

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// weighing is the naive model of limits: the weights of entries as they were pushed, and the units of locks from the answer of
// the claim until their ending is sent. It knows nothing of tokens, headroom or lanes that wait.
type weighing struct {
	*bed
	limit   int // units over all flows
	perFlow int // of the queue with weights
	claims  int // whose locks a node has at once
	weights map[EntryID]int
	mu      sync.Mutex
	held    map[Token]int
	flows   map[Token]string // of locks under perFlow
	used    int
	most    int
	// how claims without locks ended
	limited, contended int
	dead               sync.Map
}

// taken records the locks of a claim. A group runs one entry after another.
func (w *weighing) taken(q *Queue, c Claimed) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case c.Limited:
		w.limited++
	case c.TryLater:
		w.contended++
	}
	for _, l := range c.Locks {
		units := 0
		for _, e := range l.Entries {
			units = max(units, w.weights[e.ID])
		}
		w.held[l.Token] = units
		w.used += units
		if q.Name != "light" {
			w.flows[l.Token] = l.Lane.Flow
		}
	}
	w.most = max(w.most, w.used)
	flows := map[string]int{}
	for token, flow := range w.flows {
		flows[flow] += w.held[token]
	}
	for flow, units := range flows {
		if units > w.perFlow {
			w.Errorf("%d units of flow %q are in use, limit %d", units, flow, w.perFlow)
		}
	}
	if w.used > w.limit {
		w.Errorf("%d units are in use, limit %d", w.used, w.limit)
	}
}

// given records that a lock is about to end.
func (w *weighing) given(l *Lock) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.used -= w.held[l.Token]
	delete(w.held, l.Token)
	delete(w.flows, l.Token)
}

// node claims from lanes as they come, and dies with its locks now and then. over ends it.
func (w *weighing) node(over context.Context, queues []*Queue, ids *atomic.Int64, random *rand.Rand) error {
	id := NodeID(100_000 + ids.Add(1))
	defer w.dead.Store(id, true)
	var running []claimedFrom
	for claim := int32(1); over.Err() == nil; claim++ {
		q := queues[random.IntN(len(queues))]
		c, err := q.Claim(w.ctx, ClaimRequest{
			Node: id, ClaimID: claim, Lane: Lane{Priority: 1, Flow: fmt.Sprint(random.IntN(3))}, Limit: 1 + random.IntN(4),
		})
		if err != nil {
			return err
		}
		w.taken(q, c)
		if len(c.Locks) > 0 {
			running = append(running, claimedFrom{q, c.Locks})
		} else {
			time.Sleep(time.Millisecond) // others have the processor
		}
		if len(running) == 0 || (len(c.Locks) > 0 || c.TryLater) && len(running) < w.claims {
			continue
		}
		dies := random.IntN(20) == 0
		for _, r := range running {
			for _, l := range r.locks {
				w.given(l) // before recovery, which may come at any time
				if dies {
					continue
				}
				if _, err := r.q.Settle(w.ctx, id, endingsOf(l, random)); err != nil {
					return err
				}
			}
		}
		if dies {
			return nil
		}
		running = nil
	}
	return nil
}

type claimedFrom struct {
	q     *Queue
	locks []*Lock
}

// endingsOf ends the entries of a lock; the first may be released, with what is behind it.
func endingsOf(l *Lock, random *rand.Rand) []Ending {
	if random.IntN(5) == 0 {
		return []Ending{last(Release(l, l.Entries[0].ID, 0))}
	}
	var endings []Ending
	for _, e := range l.Entries {
		endings = append(endings, Done(l, e.ID, nil, 0))
	}
	endings[len(endings)-1].Last = true
	return endings
}

// recoverDead gives the locks of dead nodes back, as the elected leader does.
func (w *weighing) recoverDead(queues []*Queue) error {
	all, err := HeldLocks(w.ctx, w.pool)
	if err != nil {
		return err
	}
	for _, q := range queues {
		var gone []LockRef
		for _, l := range all {
			if _, dead := w.dead.Load(l.Node); dead && l.QueueID == q.ID {
				gone = append(gone, l.LockRef)
			}
		}
		if _, err := q.Recover(w.ctx, gone, nil, false); err != nil {
			return err
		}
	}
	return nil
}

// TestLongWeightsKeepEveryLimitAndEveryEntryEnds runs claimers that die against two limits, with random weights in solo lanes and
// in groups beside entries without, until no entry is left.
func TestLongWeightsKeepEveryLimitAndEveryEntryEnds(t *testing.T) {
	t.Run("near", func(t *testing.T) { raceWeights(t, &weighing{limit: 8, perFlow: 6, claims: 1}, 6, 60) })
	t.Run("distant", func(t *testing.T) { raceWeights(t, &weighing{limit: 200, perFlow: 160, claims: 20}, 10, 150) }) // some claims are not counted, and locks are held for longer
}

func raceWeights(t *testing.T, w *weighing, heaviest, entries int) {
	random := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1)) //nolint:gosec // any seed will do
	w.bed = newBed(t, Config{})
	w.weights, w.held, w.flows = map[EntryID]int{}, map[Token]int{}, map[Token]string{}
	var queues []*Queue
	for _, name := range []string{"solo", "group", "light"} {
		c := Config{ResultRetention: -time.Second, CrashLimit: 30000, QuantumCount: 3}
		if name != "light" {
			c.MaxWeight = heaviest
		}
		_, err := Create(w.ctx, w.pool, name, c)
		w.must(err)
	}
	w.under("flow", limitOptions{MaxUnits: &w.perFlow, PerFlow: true}, map[string]int{"solo": 1, "group": 1})
	for _, q := range w.under("all", limitOptions{MaxUnits: &w.limit}, map[string]int{"solo": 1, "group": 1, "light": 1}) {
		queues = append(queues, q)
		var pushes []Push
		for i := range entries {
			p := withPayload(Push{Flow: fmt.Sprint(i % 3)})
			if q.Name != "light" {
				p.Weight = 1 + random.Int32N(int32(heaviest)) //nolint:gosec // a small number
			}
			if q.Name == "group" {
				p.LockKey = fmt.Sprint(i%3, "-", random.IntN(4))
			}
			pushes = append(pushes, p)
		}
		pushed, err := q.Push(w.ctx, pushes...)
		w.must(err)
		for i, p := range pushed {
			w.weights[p.ID] = max(1, int(pushes[i].Weight))
		}
	}
	over, stop := context.WithTimeout(w.ctx, 2*time.Minute)
	defer stop()
	var ids atomic.Int64
	var wg sync.WaitGroup
	for n := range 6 {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), uint64(n))) //nolint:gosec // any seed will do
			for over.Err() == nil {
				if err := w.node(over, queues, &ids, random); err != nil {
					t.Error(err)
					stop()
				}
			}
		})
	}
	for over.Err() == nil {
		w.must(w.recoverDead(queues))
		w.want(w.count(`SELECT count(*) FROM (SELECT FROM penstock.lock HAVING sum(weight) > $1) l`, w.limit), 0)
		if w.count(`SELECT count(*) FROM penstock.entry`) == 0 {
			stop()
		}
	}
	wg.Wait()
	w.must(w.recoverDead(queues)) // locks without entries, of nodes that died last
	t.Logf("%d nodes, at most %d units in use, %d claims limited, %d contended", ids.Load(), w.most, w.limited, w.contended)
	if left := w.count(`SELECT count(*) FROM penstock.entry`); left > 0 {
		t.Errorf("%d entries are left", left)
	}
	if w.limited == 0 {
		t.Error("no claim met a limit")
	}
}
