package invalidation

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

// bound is a limit with everybody at it at once: nodes that come, die with their locks and are recovered, claims that commit
// late, are rolled back or killed, others that draw tokens, and an operator who lowers and raises it all the while.
type bound struct {
	*bed
	over   context.Context
	queues []*Queue // one takes 1 unit a lock, one 2, and one is put under the limit and taken out again
	nodes  atomic.Int64
	dead   sync.Map // nodes that nobody runs any more
	claims atomic.Int32
	looks, reached, uncounted,
	counted int // what the checker has seen
}

// boundSQL is what the limit has in use in the flow that has most, what it may, whether any of that was taken since it was
// changed last, and whether locks are counted. All are of one snapshot. Whoever changed the limit wrote the token down, alone.
const boundSQL = `
SELECT coalesce(max(f.used), 0)::int, g.max_units, coalesce(max(f.used) FILTER (WHERE f.newest > c.token), 0)::int,
       g.uncounted_to > (SELECT last_value FROM penstock.token_seq)
  FROM penstock."limit" g CROSS JOIN public.change c
  LEFT JOIN (SELECT CASE WHEN $1::boolean THEN l.flow ELSE '' END AS flow, sum(u.units) AS used, max(l.token) AS newest
               FROM penstock.lock l JOIN penstock.limit_use u ON u.queue_id = l.queue_id GROUP BY 1) f ON true
 WHERE g.name = 'gpu' GROUP BY g.max_units, g.uncounted_to`

func (c *bound) act(wg *sync.WaitGroup, fn func(*rand.Rand) error) {
	wg.Go(func() {
		random := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 7)) //nolint:gosec // any seed will do
		for c.over.Err() == nil {
			if err := fn(random); err != nil {
				c.Error(err)
				return
			}
		}
	})
}

// change sets the limit. It never lets go of what it was before the others have been told.
func (c *bound) change(random *rand.Rand) error {
	most := []int{6, 40, 150, 400, 2000}[random.IntN(5)]
	err := postgres.InTx(c.ctx, c.pool, func(tx pgx.Tx) error {
		if err := setLimit(c.ctx, tx, "gpu", limitOptions{MaxUnits: &most}); err != nil {
			return err
		}
		_, err := tx.Exec(c.ctx, `UPDATE public.change SET token = (SELECT last_value FROM penstock.token_seq)`)
		return err
	})
	time.Sleep(time.Duration(20+random.IntN(200)) * time.Millisecond)
	return err
}

// join puts a queue under the limit in the midst of its claims, some time after it took it out.
func (c *bound) join(random *rand.Rand) error {
	if err := useLimit(c.ctx, c.pool, "joiner", "gpu", 0); err != nil {
		return err
	}
	time.Sleep(time.Duration(5+random.IntN(30)) * time.Millisecond)
	err := postgres.InTx(c.ctx, c.pool, func(tx pgx.Tx) error {
		if err := useLimit(c.ctx, tx, "joiner", "gpu", 1); err != nil {
			return err
		}
		_, err := tx.Exec(c.ctx, `UPDATE public.change SET token = (SELECT last_value FROM penstock.token_seq)`)
		return err
	})
	time.Sleep(time.Duration(20+random.IntN(80)) * time.Millisecond)
	if errors.Is(err, ErrState) { // a claim has been under way for three seconds
		return nil
	}
	return err
}

// node is one that lives for a while: it claims in transactions that take their time, and holds what it got for some more.
func (c *bound) node(random *rand.Rand) error {
	id := NodeID(1000 + c.nodes.Add(1))
	for range 5 + random.IntN(20) {
		q := c.queues[random.IntN(3)]
		if q.Name == "joiner" {
			var err error
			if q, err = Open(c.ctx, c.pool, q.Name); err != nil {
				return err
			}
		}
		locks, err := c.claim(q, id, random)
		if err != nil {
			return err
		}
		if random.IntN(12) == 0 {
			break // dies with what it has
		}
		time.Sleep(time.Duration(random.IntN(8)) * time.Millisecond)
		var endings []Ending
		for _, l := range locks {
			ending := Release(l, l.Entries[0].ID, 0)
			if random.IntN(3) == 0 {
				ending = Done(l, l.Entries[0].ID, nil, 0)
			}
			endings = append(endings, last(ending))
		}
		if len(endings) == 0 {
			continue
		}
		if _, err := q.Settle(c.ctx, id, endings); err != nil {
			return err
		}
	}
	c.dead.Store(id, true)
	return nil
}

func (c *bound) claim(q *Queue, node NodeID, random *rand.Rand) ([]*Lock, error) {
	tx, err := c.pool.Begin(c.ctx)
	if err != nil {
		return nil, err
	}
	defer tx.Rollback(c.ctx) // after the commit there is nothing to roll back
	r := ClaimRequest{Node: node, ClaimID: c.claims.Add(1), Lane: Lane{Priority: 1, Flow: fmt.Sprint(random.IntN(3))}, Limit: 1 + random.IntN(20)}
	got, err := q.WithTx(tx).Claim(c.ctx, r)
	if postgres.Code(err) == "25P02" {
		// A row was locked for longer than the first statement waits. Nodes claim in no transaction of their own, in which
		// the second one could not follow.
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if random.IntN(3) == 0 {
		time.Sleep(time.Duration(random.IntN(15)) * time.Millisecond)
	}
	switch random.IntN(20) {
	case 0:
		return nil, nil
	case 1:
		_, err := c.pool.Exec(c.ctx, `SELECT pg_terminate_backend($1)`, tx.Conn().PgConn().PID())
		return nil, err
	}
	if tx.Commit(c.ctx) != nil { // the claim has taken itself back
		return nil, nil
	}
	return got.Locks, nil
}

// recover takes their locks away from nodes that are dead.
func (c *bound) recover(*rand.Rand) error {
	time.Sleep(20 * time.Millisecond)
	all, err := HeldLocks(c.ctx, c.pool)
	if err != nil {
		return err
	}
	for _, q := range c.queues {
		var gone []LockRef
		for _, l := range all {
			if _, dead := c.dead.Load(l.Node); dead && l.QueueID == q.ID {
				gone = append(gone, l.LockRef)
			}
		}
		if _, err := q.Recover(c.ctx, gone, nil, false); err != nil {
			return err
		}
	}
	return nil
}

// look checks one committed state: what is above the limit was there when it was set.
func (c *bound) look(perFlow bool) func(*rand.Rand) error {
	return func(*rand.Rand) error {
		var used, most, grown int
		var uncounted bool
		if err := c.pool.QueryRow(c.ctx, boundSQL, perFlow).Scan(&used, &most, &grown, &uncounted); err != nil {
			return err
		}
		if grown > most {
			c.Errorf("%d units in use, limit %d, and some came since it was set", grown, most)
		}
		c.looks++
		if used >= most-1 {
			c.reached++
		}
		if uncounted {
			c.uncounted++
		} else {
			c.counted++
		}
		return nil
	}
}

// seenAll is true once the limit was reached, and locks both counted and not.
func (c *bound) seenAll() bool { return c.reached > 0 && c.uncounted > 0 && c.counted > 0 }

func (c *bound) draw(random *rand.Rand) error {
	_, err := c.pool.Exec(c.ctx, `SELECT max(nextval('penstock.token_seq')) FROM generate_series(1, $1)`, 1+random.IntN(30))
	time.Sleep(time.Duration(random.IntN(10)) * time.Millisecond)
	return err
}

func TestLongNoCommittedStateIsBeyondALimit(t *testing.T) {
	for name, perFlow := range map[string]bool{"over all": false, "for each flow": true} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, Config{})
			c := &bound{bed: b}
			for _, name := range []string{"light", "heavy", "joiner"} {
				q, err := Create(b.ctx, b.pool, name, Config{ResultRetention: -time.Second})
				if err != nil {
					t.Fatal(err)
				}
				for i := range 3 {
					b.must(pushFlow(b.ctx, q, 1500, fmt.Sprint(i)))
				}
			}
			forty := 40
			under := b.under("gpu", limitOptions{MaxUnits: &forty, PerFlow: perFlow}, map[string]int{"light": 1, "heavy": 2, "joiner": 1})
			c.queues = []*Queue{under["light"], under["heavy"], under["joiner"]}
			b.exec(b.pool, `CREATE TABLE public.change AS SELECT 0::bigint AS token`)
			over, stop := context.WithTimeout(b.ctx, time.Minute)
			defer stop()
			c.over = over
			var wg sync.WaitGroup
			for range 7 {
				c.act(&wg, c.node)
			}
			c.act(&wg, c.change)
			c.act(&wg, c.join)
			c.act(&wg, c.recover)
			c.act(&wg, c.draw)
			look, least := c.look(perFlow), pgtest.Long(time.Second, 4*time.Second)
			began := time.Now()
			c.act(&wg, func(random *rand.Rand) error {
				err := look(random)
				if time.Since(began) > least && c.seenAll() { // however busy the machine is
					stop()
				}
				return err
			})
			wg.Wait()
			t.Logf("%d nodes, %d claims, %d looks: %d at the limit, %d while locks went uncounted", c.nodes.Load(), c.claims.Load(), c.looks, c.reached, c.uncounted)
			if !c.seenAll() {
				t.Error("the limit was never reached, or one of the ways to keep it was not taken")
			}
			b.exec(b.pool, `TRUNCATE penstock.entry_light, penstock.entry_heavy, penstock.entry_joiner, penstock.ready, penstock.lock`)
		})
	}
}

func pushFlow(ctx context.Context, q *Queue, n int, flow string) error {
	pushes := make([]Push, n)
	for i := range pushes {
		pushes[i] = withPayload(Push{Flow: flow})
	}
	_, err := q.Push(ctx, pushes...)
	return err
}
