package invalidation

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// flowsOf returns the entries of each flow of the queue.
func (b *bed) flowsOf() map[string]int {
	b.Helper()
	of := map[string]int{}
	var flow string
	var n int
	_, err := pgx.ForEachRow(postgres.Query(b.ctx, b.pool, `SELECT flow, count(*) FROM penstock.entry GROUP BY flow`),
		[]any{&flow, &n}, func() error { of[flow] = n; return nil })
	b.must(err)
	return of
}

func (b *bed) alter(options map[string]any) {
	b.Helper()
	q, err := Alter(b.ctx, b.pool, "work", options)
	b.must(err)
	b.q = q
}

// Whichever way a key comes from, and whichever function accepts it, its entries have one flow.
func TestAllEntriesOfAKeyAreInOneShard(t *testing.T) {
	b := newBed(t, Config{Shards: 5, Grouping: "key"})
	b.want(b.q.Config.Shards, 5)
	for i := range 40 {
		key := fmt.Sprint("key", i)
		payload := fmt.Sprintf(`{"key": %q}`, key)
		b.pushAll(b.pool, Push{LockKey: key}, Push{Payload: json.RawMessage(payload)})
		b.exec(b.pool, `SELECT penstock.push('work', $1, lock_key => $2)`, `{}`, key)
		b.exec(b.pool, `SELECT penstock.push_json('work', $1)`, "["+`{"payload": `+payload+"}]")
		b.pushAll(b.pool, Push{UniqueKey: key, UniquePolicy: OneRunningOneQueued}, Push{LockKey: "unique:" + key})
	}
	b.want(b.count(`SELECT count(DISTINCT lock_key) FROM penstock.entry`), 80)
	b.want(b.count(`SELECT count(*) FROM (SELECT FROM penstock.entry GROUP BY lock_key HAVING count(DISTINCT flow) > 1) k`), 0)
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE flow !~ '^shard-[0-4]$'`), 0)
}

func TestTheKeysOfANameAreSpreadOverShards(t *testing.T) {
	b := newBed(t, Config{Shards: 64, MaxConcurrentPerName: 8})
	for range 32 {
		b.pushNamed("acme")
	}
	b.want(b.count(`SELECT count(*) FROM (SELECT FROM penstock.entry GROUP BY lock_key HAVING count(DISTINCT flow) > 1) k`), 0)
	if n := len(b.flowsOf()); n < 3 {
		t.Errorf("8 keys of a name are in %d of 64 shards", n)
	}
}

func TestShardsGetLikeParts(t *testing.T) {
	for name, keyed := range map[string]bool{"solo": false, "keyed": true} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, Config{Shards: 4})
			pushes := make([]Push, 4000)
			for i := range pushes {
				if keyed {
					pushes[i].LockKey = fmt.Sprint("customer-", i)
				}
			}
			b.pushAll(b.pool, pushes...)
			of := b.flowsOf()
			for s := range 4 {
				// The standard deviation of a binomial distribution of 4,000 over four is 27.
				if n := of[fmt.Sprint("shard-", s)]; n < 850 || n > 1150 {
					t.Errorf("shard %d has %d of 4,000", s, n)
				}
			}
			b.want(len(of), 4)
		})
	}
}

// All queues draw ids from one sequence: a producer that pushes to two queues by turns gives one of them every other id.
func TestEntriesOfQueuesThatAreFedByTurnsAreSpreadOverShards(t *testing.T) {
	b := newBed(t, Config{Shards: 2})
	other, err := Create(b.ctx, b.pool, "other", Config{})
	b.must(err)
	for range 100 {
		b.push("")
		_, err = other.Push(b.ctx, Push{Payload: json.RawMessage(`{}`)})
		b.must(err)
	}
	b.want(b.count(`SELECT count(DISTINCT id % 2) FROM penstock.entry WHERE queue_id = $1`, b.q.ID), 1)
	of := b.flowsOf()
	// The standard deviation of a binomial distribution of 100 over two is 5.
	for _, shard := range []string{"shard-0", "shard-1"} {
		if n := of[shard]; n < 25 || n > 75 {
			t.Errorf("%s has %d of 100", shard, n)
		}
	}
}

func TestAPushThatNamesAFlowKeepsItBesideShards(t *testing.T) {
	b := newBed(t, Config{Shards: 4})
	b.pushAll(b.pool, Push{Flow: "acme", LockKey: "k"}, Push{Flow: "acme"}, Push{})
	b.exec(b.pool, `SELECT penstock.push('work', '{}', flow => '')`) // none
	of := b.flowsOf()
	b.want(of["acme"], 2)
	b.want(of[""], 0)
	b.alter(map[string]any{"shards": 1})
	b.pushAll(b.pool, Push{}, Push{LockKey: "k"})
	b.want(b.flowsOf()[""], 2)
}

// Entries keep the shard that they were pushed with, so that a key with a backlog is in several lanes when the number of
// shards has changed. Its entries run one at a time and in the order of acceptance even so, from whichever lane they are claimed.
func TestTheOrderOfAKeyHoldsWhenShardsChangeInTheMiddleOfItsBacklog(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			b := newBed(t, Config{QuantumCount: 2})
			dice := rand.New(rand.NewPCG(seed, 14))
			keys := []string{"a", "b", "c", "d", "e", "f"}
			accepted := map[string][]EntryID{}
			push := func() {
				for _, key := range keys {
					accepted[key] = append(accepted[key], b.push(key, key, key)...)
				}
			}
			for _, shards := range []int{1, 4, 2, 64, 3} {
				b.alter(map[string]any{"shards": shards})
				push()
			}
			if n := b.count(`SELECT max(n) FROM (SELECT count(DISTINCT flow) AS n FROM penstock.ready GROUP BY lock_key) k`); n < 3 {
				t.Fatalf("no key is in more than %d lanes: the test tells nothing", n)
			}
			ran := map[string][]EntryID{}
			var held []*Lock
			for left := 15 * len(keys); left > 0; {
				lanes, err := Lanes(b.ctx, b.pool, []int32{b.q.ID}, 100)
				b.must(err)
				heads := lanes[b.q.ID]
				if len(heads) > 0 {
					head := heads[dice.IntN(len(heads))]
					held = append(held, b.claimAs(ClaimRequest{Node: here, Lane: head.Lane, Limit: 1 + dice.IntN(3)}).Locks...)
				}
				wantOneHolder(t, held)
				if len(held) > 0 && (len(heads) == 0 || dice.IntN(3) > 0) {
					at := dice.IntN(len(held))
					lock := held[at]
					held = slices.Delete(held, at, at+1)
					ran[lock.Key] = append(ran[lock.Key], entryIDs(lock)...)
					left -= len(lock.Entries)
					b.settle(doneAll(lock)...)
				}
				if dice.IntN(10) == 0 {
					b.alter(map[string]any{"shards": 1 + dice.IntN(64)}) // entries that are there keep their lanes
				}
			}
			b.want(ran, accepted)
		})
	}
}

func wantOneHolder(t *testing.T, held []*Lock) {
	t.Helper()
	of := map[string]bool{}
	for _, l := range held {
		if of[l.Key] {
			t.Fatalf("lock key %s has two holders", l.Key)
		}
		of[l.Key] = true
	}
}

// An idempotency key is of the flow that the push named, not of a shard: it is found under another number of shards.
func TestAPushIsRepeatedAcrossAChangeOfShards(t *testing.T) {
	b := newBed(t, Config{})
	push := Push{LockKey: "k", IdempotencyKey: "once"}
	first := b.pushAll(b.pool, push)
	for _, shards := range []int{64, 3} {
		b.alter(map[string]any{"shards": shards})
		b.want(b.pushAll(b.pool, push), first)
	}
	b.want(b.count(`SELECT count(*) FROM penstock.entry`), 1)
}

func TestCapacityPerFlowBoundsEachShard(t *testing.T) {
	b := newBed(t, Config{Shards: 2, CapacityPerFlow: 3})
	var err error
	for n := 0; n < 7 && err == nil; n++ {
		_, err = b.q.Push(b.ctx, Push{Payload: json.RawMessage(`{}`)})
	}
	var full *FullError
	if !errors.As(err, &full) || full.Flow == nil || !strings.HasPrefix(*full.Flow, "shard-") {
		t.Fatalf("one of seven entries: %v, want a refusal that names its shard", err)
	}
	b.want(b.flowsOf()[*full.Flow], 3)
}

func TestANumberOfShardsOutOfRangeIsRefusedByName(t *testing.T) {
	b := newBed(t, Config{})
	for _, shards := range []any{0, -1, 65, "many", nil} {
		_, err := Alter(b.ctx, b.pool, "work", map[string]any{"shards": shards})
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "shards") && !strings.Contains(err.Error(), "many") {
			t.Errorf("shards %v: %v, want ErrInvalid that names the setting or the value", shards, err)
		}
	}
}

func TestExplainNamesTheShardOfAnEntry(t *testing.T) {
	b := newBed(t, Config{Shards: 2})
	b.push("k", "l", "m") // two of them share a shard
	var id EntryID
	var flow string
	b.must(b.pool.QueryRow(b.ctx, `
SELECT id, flow FROM penstock.entry_status e
 WHERE EXISTS (SELECT FROM penstock.entry o WHERE o.flow = e.flow AND o.id < e.id) LIMIT 1`).Scan(&id, &flow))
	e, err := explain(b.ctx, b.pool, id)
	b.must(err)
	if !slices.ContainsFunc(e.Reasons, func(r struct{ Code, Text string }) bool {
		return r.Code == "ahead_in_lane" && strings.Contains(r.Text, fmt.Sprintf("flow %q", flow))
	}) || !strings.HasPrefix(flow, "shard-") {
		t.Errorf("explained as %+v, want its place in the lane of its shard, %q", e, flow)
	}
}

// A pusher does not know the shards of its entries, so that nodes look for them.
func TestHintsOfAQueueWithShardsNameNoLane(t *testing.T) {
	q := Queue{Config: Config{EntryPriority: 1, Shards: 2}}
	if lanes := q.lanes([]Push{{Flow: "acme"}, {LockKey: "k"}}); lanes != nil {
		t.Errorf("hinted at %v", lanes)
	}
	if lanes := q.lanes([]Push{{Flow: "acme"}}); len(lanes) != 1 {
		t.Errorf("hinted at %v, want the lane of the flow", lanes)
	}
	if q.Config.takesPlain() {
		t.Error("a plain push gives entries no shard")
	}
}
