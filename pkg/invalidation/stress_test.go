package invalidation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

// crowd is everybody at once: pushers, nodes that end runs in every way, a leader that promotes, expires and takes
// locks away, operators that cancel, disable and compact. It keeps what must hold whatever they do.
type crowd struct {
	*bed
	over context.Context // when it ends, no more is pushed and disturbed

	mu       sync.Mutex
	accepted map[EntryID]string // and its key
	started  map[string][]start // of each key
}

// start is an entry that a node started to run under a token.
type start struct {
	token Token
	id    EntryID
}

const (
	crowdKeys    = 6
	crowdFlows   = 3
	crowdEntries = 100
)

func (c *crowd) size() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.accepted)
}

// act repeats something until the disturbance is over.
func (c *crowd) act(wg *sync.WaitGroup, pause time.Duration, fn func(*rand.Rand) error) {
	wg.Go(func() {
		random := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1)) //nolint:gosec // any seed will do
		for c.over.Err() == nil {
			if err := fn(random); err != nil && !errors.Is(err, ErrEntryNotFound) && !errors.Is(err, ErrState) {
				c.Error(err)
				return
			}
			if pause > 0 {
				time.Sleep(time.Duration(random.Int64N(int64(pause))))
			}
		}
	})
}

// push has one pusher for each key, so that the order of acceptance is known; some of its transactions roll back.
func (c *crowd) push(key string) func(*rand.Rand) error {
	return func(random *rand.Rand) error {
		pushes := make([]Push, 1+random.IntN(3))
		for i := range pushes {
			pushes[i] = withPayload(Push{LockKey: key, Flow: fmt.Sprint(random.IntN(crowdFlows))})
			if key == "" && random.IntN(5) == 0 {
				pushes[i].DueAt = time.Now().Add(20 * time.Millisecond)
			}
			if key == "" && random.IntN(20) == 0 {
				pushes[i].StartBy = time.Now().Add(time.Second)
			}
		}
		back := random.IntN(5) == 0
		err := postgres.InTx(c.ctx, c.pool, func(tx pgx.Tx) error {
			pushed, err := c.q.WithTx(tx).Push(c.ctx, pushes...)
			if err != nil {
				return err
			}
			if back {
				return errRollBack
			}
			time.Sleep(time.Duration(random.IntN(3)) * time.Millisecond) // the ready row that it relies on is held meanwhile
			c.mu.Lock()
			defer c.mu.Unlock()
			for _, p := range pushed {
				c.accepted[p.ID] = key
			}
			return nil
		})
		if errors.Is(err, errRollBack) {
			return nil
		}
		return err
	}
}

var errRollBack = errors.New("thought better of it")

// node claims from some lanes in one go, one or several, and ends what it runs in every way.
func (c *crowd) node(id NodeID, q *Queue) func(*rand.Rand) error {
	claims := int32(0)
	return func(random *rand.Rand) error {
		claims++
		var lanes []ClaimLane
		for _, flow := range random.Perm(crowdFlows)[:1+random.IntN(crowdFlows)] {
			from := int64(random.IntN(2))
			lanes = append(lanes, ClaimLane{Lane{Priority: 1, Flow: fmt.Sprint(flow)}, from, from == 0})
		}
		claimed, err := q.ClaimLanes(c.ctx, LanesRequest{Node: id, ClaimID: claims, Limit: 1 + random.IntN(8), Lanes: lanes})
		if err != nil {
			return err
		}
		if random.IntN(8) == 0 { // the machine looks elsewhere, and its locks may be taken away before anything starts
			time.Sleep(time.Duration(random.IntN(80)) * time.Millisecond)
		}
		for i, got := range claimed {
			for _, l := range got.Locks {
				if l.Lane != lanes[i].Lane {
					c.Errorf("a lock of %v is returned among those of %v", l.Lane, lanes[i].Lane)
				}
				if err := c.run(q, id, l, random); err != nil {
					return err
				}
			}
			if got.Skipped > 0 {
				if _, err := q.Sweep(c.ctx, lanes[i].Lane, 0, got.LowWater); err != nil {
					return err
				}
			}
		}
		return nil
	}
}

func (c *crowd) run(q *Queue, node NodeID, l *Lock, random *rand.Rand) error {
	for i, e := range l.Entries {
		c.start(l, e.ID)
		endings := []func() Ending{
			func() Ending { return Done(l, e.ID, nil, 0) },
			func() Ending { return Retry(l, e.ID, Failure{Error: "x"}, 5*time.Millisecond, 0) },
			func() Ending { return Fail(l, e.ID, Failure{Error: "x"}, 0) },
			func() Ending { return last(Release(l, e.ID, 0)) },
			func() Ending { return Postpone(l, e.ID, 5*time.Millisecond) },
			func() Ending { return Yield(l, e.ID) },
		}
		ending := endings[0]()
		if c.over.Err() == nil && random.IntN(3) == 0 {
			ending = endings[random.IntN(len(endings))]()
		}
		ending.Last = ending.Last || i == len(l.Entries)-1
		if _, err := q.Settle(c.ctx, node, []Ending{ending}); err != nil {
			return err
		}
		if ending.Last {
			return nil
		}
	}
	return nil
}

func (c *crowd) start(l *Lock, id EntryID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.started[l.Key] = append(c.started[l.Key], start{l.Token, id})
}

// firsts are the entries of a key in the order in which they first started: that of the tokens, since a node whose lock
// was taken away before it came to start what it had claimed does so late, and under a token that is dead.
func firsts(starts []start) []EntryID {
	slices.SortStableFunc(starts, func(a, b start) int { return cmp.Compare(a.token, b.token) })
	var ids []EntryID
	for _, s := range starts {
		if !slices.Contains(ids, s.id) {
			ids = append(ids, s.id)
		}
	}
	return ids
}

// any is an entry that was accepted, solo or not, ended or not.
func (c *crowd) any(random *rand.Rand, solo bool) EntryID {
	c.mu.Lock()
	defer c.mu.Unlock()
	skip := random.IntN(1 + len(c.accepted))
	for id, key := range c.accepted { // the order of a map is random too
		if skip--; skip <= 0 && (!solo || key == "") {
			return id
		}
	}
	return 0
}

// takeAway frees some locks as the leader does for a node that lost them, while the node goes on.
func (c *crowd) takeAway(random *rand.Rand) error {
	held, err := HeldLocks(c.ctx, c.pool)
	if err != nil || len(held) == 0 {
		return err
	}
	_, err = c.q.Recover(c.ctx, refs(held)[:1+random.IntN(len(held))], nil, false)
	return err
}

func (c *crowd) disturb(wg *sync.WaitGroup) {
	c.act(wg, 10*time.Millisecond, func(random *rand.Rand) error {
		_, err := cancelEntry(c.ctx, c.pool, c.any(random, false), ann)
		return err
	})
	c.act(wg, 30*time.Millisecond, func(random *rand.Rand) error {
		id := c.any(random, true)
		if err := disableEntry(c.ctx, c.pool, id, ann); err != nil {
			return err
		}
		return enableEntry(c.ctx, c.pool, id, ann)
	})
	c.act(wg, 20*time.Millisecond, c.takeAway)
	c.act(wg, 20*time.Millisecond, func(*rand.Rand) error { _, err := c.q.SettleCancelRequests(c.ctx, 100); return err })
	c.act(wg, 20*time.Millisecond, func(*rand.Rand) error { _, err := c.q.Expire(c.ctx, 100); return err })
}

// watch looks at the invariants in the midst of it all: they hold in every snapshot. A claim that came too late for the
// entries of a key holds a lock without any for a moment.
func (c *crowd) watch(*rand.Rand) error {
	var broken []string
	err := c.pool.QueryRow(c.ctx, `SELECT array_agg(invariant || ': ' || detail) FROM penstock.check_invariants('10 seconds')`).Scan(&broken)
	for _, what := range broken {
		c.Errorf("broken: %s", what)
	}
	return err
}

func TestLongNothingIsLostOrOvertakenInACrowd(t *testing.T) {
	b := newBed(t, Config{QuantumCount: 4})
	over, stop := context.WithCancel(b.ctx)
	defer stop()
	c := &crowd{bed: b, over: over, accepted: map[EntryID]string{}, started: map[string][]start{}}
	b.exec(b.pool, `INSERT INTO penstock.node (id, name, application) SELECT 100 + i, 'crowd ' || i, 'default' FROM generate_series(0, 4) i`)
	var wg sync.WaitGroup
	c.act(&wg, 10*time.Millisecond, c.push(""))
	for k := range crowdKeys {
		c.act(&wg, 20*time.Millisecond, c.push(fmt.Sprint("key ", k)))
	}
	c.act(&wg, 10*time.Millisecond, func(*rand.Rand) error { _, err := c.q.Promote(c.ctx, 100); return err })
	for n := range 4 {
		c.act(&wg, 5*time.Millisecond, c.node(NodeID(100+n), b.q))
	}
	c.disturb(&wg)
	c.act(&wg, 0, c.watch)
	began := time.Now()
	c.act(&wg, 100*time.Millisecond, func(*rand.Rand) error { // however busy the machine is, it must be a crowd
		if passed := time.Since(began); passed > time.Minute || passed > pgtest.Long(time.Second, 3*time.Second) && c.size() >= crowdEntries {
			stop()
		}
		return nil
	})
	wg.Wait()
	c.finish()
}

// finish lets one node end what is left, and looks at the whole.
func (c *crowd) finish() {
	c.Helper()
	random := rand.New(rand.NewPCG(1, 1)) //nolint:gosec // a test
	if err := c.takeAllAway(); err != nil {
		c.Fatal(err)
	}
	node := c.node(104, c.q)
	deadline := time.Now().Add(time.Minute)
	for c.count(`SELECT count(*) FROM penstock.entry`) > 0 {
		if _, err := c.q.SettleCancelRequests(c.ctx, 1000); err != nil {
			c.Fatal(err)
		}
		if _, err := c.q.Promote(c.ctx, 1000); err != nil {
			c.Fatal(err)
		}
		if err := node(random); err != nil {
			c.Fatal(err)
		}
		if time.Now().After(deadline) {
			c.Fatalf("%d entries never end", c.count(`SELECT count(*) FROM penstock.entry`))
		}
	}
	rows, err := c.pool.Query(c.ctx, `SELECT entry_id FROM penstock.result UNION ALL SELECT entry_id FROM penstock.failure`)
	if err != nil {
		c.Fatal(err)
	}
	ended, err := pgx.CollectRows(rows, pgx.RowTo[EntryID])
	if err != nil {
		c.Fatal(err)
	}
	outcomes := map[EntryID]int{}
	for _, id := range ended {
		outcomes[id]++
	}
	for id := range c.accepted {
		if outcomes[id] != 1 {
			c.Errorf("entry %d of %q has %d outcomes", id, c.accepted[id], outcomes[id])
		}
	}
	if len(outcomes) != len(c.accepted) {
		c.Errorf("%d entries ended, %d were accepted", len(outcomes), len(c.accepted))
	}
	for key, starts := range c.started {
		if ids := firsts(starts); !slices.IsSorted(ids) {
			c.Errorf("entries of %s started as %v", key, ids)
		}
	}
	c.Logf("%d entries, %d keys", len(c.accepted), len(c.started))
	if len(c.accepted) < crowdEntries {
		c.Errorf("only %d entries were accepted: this was no crowd", len(c.accepted))
	}
}

func (c *crowd) takeAllAway() error {
	held, err := HeldLocks(c.ctx, c.pool)
	if err == nil && len(held) > 0 {
		_, err = c.q.Recover(c.ctx, refs(held), nil, false)
	}
	return err
}
