package sim

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// side is one of the two databases, used through the product's own functions.
type side struct {
	db     postgres.DB
	queues map[string]*invalidation.Queue
	held   map[string]*invalidation.Lock // by queue and key; also those that were lost since
	push   func(queue, key string) error
	silent func(node int64) error                                               // the node's heartbeat was an hour ago
	hold   func(l *invalidation.Lock, queue string) (release func(), err error) // by another transaction
	state  func() (string, error)
}

// twins are the two databases, on which the same operations are run.
type twins struct {
	t       *testing.T
	random  *rand.Rand
	sides   [2]*side
	history []string
	claims  int32
}

func (w *twins) both(what string, do func(s *side) (string, error)) {
	w.t.Helper()
	var answers [2]string
	for i, s := range w.sides {
		answer, err := do(s)
		if err != nil {
			answer = "error: " + postgres.Code(err)
			if postgres.Code(err) == "" {
				w.t.Fatalf("%s: %v", what, err)
			}
		}
		state, err := s.state()
		if err != nil {
			w.t.Fatal(err)
		}
		answers[i] = answer + "\n" + state
	}
	w.history = append(w.history, what)
	if answers[0] != answers[1] {
		w.t.Fatalf(
			"after\n%s\nPostgres answers\n%s\nthe store answers\n%s",
			strings.Join(w.history, "\n"),
			answers[0],
			answers[1],
		)
	}
}

// defaultPriority is that of entries of a queue whose settings name none.
const defaultPriority = 1

var queueNames = []string{"solo", "keyed"}

// The store of the simulation and Postgres answer the same random operations in the same way, and hold
// the same rows afterwards.
func TestStoreAgreesWithPostgres(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			w := &twins{t: t, random: rand.New(rand.NewPCG(seed, 4))}
			w.sides = [2]*side{onPostgres(t), inMemory(t)}
			for range 120 {
				w.operation()
			}
		})
	}
}

func onPostgres(t *testing.T) *side {
	pool := pgtest.New(t)
	for _, name := range queueNames {
		config := invalidation.Config{QuantumCount: quantum, CrashLimit: 1000}
		if _, err := invalidation.Create(t.Context(), pool, name, config); err != nil {
			t.Fatal(err)
		}
	}
	s := newSide(t, pool)
	s.push = func(queue, key string) error {
		_, err := s.queues[queue].Push(t.Context(), invalidation.Push{Payload: []byte(`{}`), LockKey: key})
		return err
	}
	s.silent = func(node int64) error {
		_, err := pool.Exec(
			t.Context(),
			`UPDATE penstock.node SET beat_at = beat_at - interval '1 hour' WHERE id = $1`,
			node,
		)
		return err
	}
	s.hold = func(l *invalidation.Lock, queue string) (func(), error) {
		tx, err := pool.Begin(t.Context())
		if err != nil {
			return nil, err
		}
		const sql = `SELECT FROM penstock.lock WHERE queue_id = $1 AND lock_key = $2 AND token = $3 FOR UPDATE`
		_, err = tx.Exec(t.Context(), sql, s.queues[queue].ID, l.Key, l.Token)
		return func() { _ = tx.Rollback(context.Background()) }, err
	}
	s.state = func() (string, error) {
		const sql = `
SELECT format('entry %s of %s: key %s, %s, %s attempts, %s crashes, may have run: %s, due later: %s', e.id, q.name,
              coalesce(e.lock_key, ''), e.status, e.attempt, e.crashes, CASE WHEN e.may_have_run THEN 'true' ELSE 'false' END,
              CASE WHEN e.status = 'initial' AND e.due_at > clock_timestamp() THEN 'true' ELSE 'false' END)
  FROM penstock.entry e JOIN penstock.queue q ON q.id = e.queue_id
UNION ALL
SELECT format('ready at %s of %s: key %s, entry %s, delayed: %s', r.pos, q.name, coalesce(r.lock_key, ''),
              coalesce(r.entry_id, 0), CASE WHEN r.not_before IS NOT NULL THEN 'true' ELSE 'false' END)
  FROM penstock.ready r JOIN penstock.queue q ON q.id = r.queue_id
UNION ALL
SELECT format('lock of %s of %s: to %s, %s entries, from %s, node %s', l.lock_key, q.name, l.last_entry_id, l.entry_count, l.pos, l.node_id)
  FROM penstock.lock l JOIN penstock.queue q ON q.id = l.queue_id
UNION ALL
SELECT format('node %s: %s beats, %s crashed', id, beat, cardinality(crashed_entries)) FROM penstock.node
UNION ALL
SELECT format('ended: %s %s', entry_id, outcome) FROM penstock.result
UNION ALL
SELECT format('ended: %s failed', entry_id) FROM penstock.failure`
		rows, err := pool.Query(t.Context(), sql)
		if err != nil {
			return "", err
		}
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		slices.Sort(lines)
		return strings.Join(lines, "\n"), err
	}
	return s
}

// unhindered is a gate that lets everything pass at once.
type unhindered struct{}

func (unhindered) enter(context.Context, string, func() string) (fate, time.Duration, error) {
	return pass, 0, nil
}

func inMemory(t *testing.T) *side {
	store := newStore(queueNames...)
	s := newSide(t, connect(store, unhindered{}))
	s.push = func(queue, key string) error {
		store.tables.push(s.queues[queue].ID, key, time.Now())
		return nil
	}
	s.silent = func(id int64) error {
		if n := store.tables.nodes[id]; n != nil {
			n.beatAt = n.beatAt.Add(-time.Hour)
		}
		return nil
	}
	s.hold = func(l *invalidation.Lock, _ string) (func(), error) {
		store.tables.heldUntil[int64(l.Token)] = time.Now().Add(time.Hour)
		return func() { clear(store.tables.heldUntil) }, nil
	}
	s.state = func() (string, error) { return store.tables.describe(), nil }
	return s
}

func newSide(t *testing.T, db postgres.DB) *side {
	s := &side{db: db, queues: map[string]*invalidation.Queue{}, held: map[string]*invalidation.Lock{}}
	list, err := invalidation.List(t.Context(), db)
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range list {
		s.queues[q.Name] = q
	}
	for node := range int64(3) {
		err := invalidation.Register(t.Context(), db, invalidation.Node{
			ID: invalidation.NodeID(node + 1), Name: "n", Application: "default", Lease: time.Minute, Threads: 4,
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// describe lists the rows in the words of onPostgres.
func (t *tables) describe() string {
	var lines []string
	say := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	name := func(queue int32) string { return t.queues[queue-1].name }
	for _, e := range t.entries {
		status := map[bool]string{true: "initial", false: "pending"}[e.initial]
		say(
			"entry %d of %s: key %s, %s, %d attempts, %d crashes, may have run: %t, due later: %t",
			e.id,
			name(e.queue),
			e.key,
			status,
			e.attempt,
			e.crashes,
			e.mayHaveRun,
			e.initial && e.due.After(time.Now()),
		)
	}
	for _, r := range t.ready {
		say("ready at %d of %s: key %s, entry %d, delayed: %t", r.pos, name(r.queue), r.key, r.entry,
			!r.notBefore.IsZero())
	}
	for _, l := range t.locks {
		say(
			"lock of %s of %s: to %d, %d entries, from %d, node %d",
			l.key,
			name(l.queue),
			l.last,
			l.count,
			l.pos,
			l.node,
		)
	}
	for _, n := range t.nodes {
		say("node %d: %d beats, %d crashed", n.id, n.beats, len(n.crashed))
	}
	for _, e := range t.events {
		if e.what == "ended" {
			say("ended: %d %s", e.entry, e.how)
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// operation runs one random operation on both.
func (w *twins) operation() {
	queue := queueNames[w.random.IntN(2)]
	node := int64(1 + w.random.IntN(3))
	switch roll := w.random.IntN(100); {
	case roll < 25:
		key := ""
		if queue == "keyed" {
			key = fmt.Sprint("k", w.random.IntN(3))
		}
		w.both(
			fmt.Sprintf("push %q to %s", key, queue),
			func(s *side) (string, error) { return "", s.push(queue, key) },
		)
	case roll < 50:
		w.claim(queue, node, 1+w.random.IntN(3))
	case roll < 75:
		w.settle(node)
	case roll < 80:
		w.both("promote "+queue, func(s *side) (string, error) {
			n, err := s.queues[queue].Promote(context.Background(), 1)
			return fmt.Sprint(n), err
		})
	case roll < 85:
		w.beat(node)
	case roll < 93:
		w.recover(queue, w.random.IntN(2) == 0, node)
	case roll < 96:
		claim := int32(1 + w.random.IntN(int(w.claims)+1))
		w.both(fmt.Sprintf("reclaim %d of node %d from %s", claim, node, queue), func(s *side) (string, error) {
			found, err := s.queues[queue].Reclaim(context.Background(), invalidation.NodeID(node), claim)
			return s.describe(queue, found.Locks), err
		})
	case roll < 97:
		w.both("first unlocked row of "+queue, func(s *side) (string, error) {
			pos, err := s.queues[queue].Unlocked(context.Background(), invalidation.Lane{Priority: defaultPriority}, 0)
			return fmt.Sprint(pos), err
		})
	case roll < 98:
		w.both("sweep "+queue, func(s *side) (string, error) {
			n, err := s.queues[queue].Sweep(
				context.Background(),
				invalidation.Lane{Priority: defaultPriority},
				0,
				1<<40,
			)
			return fmt.Sprint(n), err
		})
	default:
		w.both(fmt.Sprintf("take back crashes of node %d", node), func(s *side) (string, error) {
			var n int64
			err := s.db.QueryRow(context.Background(), `SELECT penstock.take_back_crashes($1)`, node).Scan(&n)
			return fmt.Sprint(n), err
		})
	}
}

func (w *twins) claim(queue string, node int64, limit int) {
	w.claims++
	request := invalidation.LanesRequest{
		Node: invalidation.NodeID(node), ClaimID: w.claims, Limit: limit,
		Lanes: []invalidation.ClaimLane{{
			Lane: invalidation.Lane{Priority: defaultPriority}, IgnoreRowLocks: true,
		}},
	}
	w.both(fmt.Sprintf("claim %d of %s for node %d", limit, queue, node), func(s *side) (string, error) {
		claimed, err := s.queues[queue].ClaimLanes(context.Background(), request)
		var answer []string
		for _, c := range claimed {
			answer = append(
				answer,
				s.describe(queue, c.Locks),
				fmt.Sprintf("contended %v, limited %v, to %d, scanned %d, skipped %d, "+
					"drained %v", c.TryLater, c.Limited, c.LowWater, c.Scanned, c.Skipped, c.Drained),
			)
		}
		return strings.Join(answer, "\n"), err
	})
}

// describe names the locks and their entries, without tokens: Postgres may draw those of one claim in
// another order. It keeps the locks.
func (s *side) describe(queue string, locks []*invalidation.Lock) string {
	var lines []string
	for _, l := range locks {
		s.held[queue+" "+l.Key] = l
		line := l.Key + ":"
		for _, e := range l.Entries {
			line += fmt.Sprintf(" %d (%d attempts, %d crashes)", e.ID, e.Attempt, e.Crashes)
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// someLocks draws locks of one queue that were handed out at some time, by their keys.
func (w *twins) someLocks() (queue string, keys []string) {
	queue = queueNames[w.random.IntN(2)]
	for key := range w.sides[0].held {
		if name, rest, _ := strings.Cut(key, " "); name == queue {
			keys = append(keys, rest)
		}
	}
	slices.Sort(keys)
	w.random.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
	return queue, keys[:min(len(keys), 1+w.random.IntN(3))]
}

// settle ends locks, also those that were ended or lost before. In one case of three it does not wait for rows, and
// another transaction has locked the record of the first lock.
func (w *twins) settle(node int64) {
	queue, keys := w.someLocks()
	verbs, delays := make([]int, len(keys)), make([]time.Duration, len(keys))
	for i := range verbs {
		verbs[i], delays[i] = w.random.IntN(8), time.Duration(w.random.IntN(4)/3)*time.Hour
	}
	if len(keys) == 0 {
		return
	}
	free := w.random.IntN(3) == 0
	what := fmt.Sprintf("settle %v of %s as %v after %v, the first is held: %v", keys, queue, verbs, delays, free)
	w.both(what, func(s *side) (string, error) {
		var endings []invalidation.Ending
		for i, key := range keys {
			endings = append(endings, endingsOf(s.held[queue+" "+key], verbs[i], delays[i])...)
		}
		if !free {
			tokens, err := s.queues[queue].Settle(context.Background(), invalidation.NodeID(node), endings)
			return fmt.Sprint(s.keysOf(queue, keys, tokens), s.requeued(queue, keys)), err
		}
		release, err := s.hold(s.held[queue+" "+keys[0]], queue)
		if err != nil {
			return "", err
		}
		defer release()
		ours, held, err := s.queues[queue].SettleFree(context.Background(), invalidation.NodeID(node), endings, false)
		return fmt.Sprint(s.keysOf(queue, keys, ours), s.keysOf(queue, keys, held), s.requeued(queue, keys)), err
	})
}

// requeued are the positions at which locks of the keys left them in line, as their nodes know them.
func (s *side) requeued(queue string, keys []string) (list []string) {
	for _, key := range keys {
		if head := s.held[queue+" "+key].Requeued; head != nil {
			list = append(list, fmt.Sprintf("%s at %d", key, head.Position))
		}
	}
	return list
}

// keysOf are those of the keys whose locks have one of the tokens.
func (s *side) keysOf(queue string, keys []string, tokens []invalidation.Token) (list []string) {
	for _, key := range keys {
		if slices.Contains(tokens, s.held[queue+" "+key].Token) {
			list = append(list, key)
		}
	}
	return list
}

// endingsOf ends the entries of a lock in one of eight ways. Those that come back do so after a delay.
func endingsOf(l *invalidation.Lock, verb int, delay time.Duration) (endings []invalidation.Ending) {
	for i, e := range l.Entries {
		last := i == len(l.Entries)-1
		var one invalidation.Ending
		switch verb {
		case 0, 1, 2, 3:
			one = invalidation.Done(l, e.ID, []byte(`{}`), time.Millisecond)
		case 4:
			one = invalidation.Retry(l, e.ID, invalidation.Failure{Error: "e"}, delay, time.Millisecond)
		case 5:
			one = invalidation.Fail(l, e.ID, invalidation.Failure{Error: "e"}, time.Millisecond)
		case 6:
			one, last = invalidation.Release(l, e.ID, delay), true
		default:
			if i == 0 {
				one = invalidation.Done(l, e.ID, nil, time.Millisecond)
			} else {
				one, last = invalidation.Yield(l, e.ID), true
			}
		}
		one.Last = last
		endings = append(endings, one)
		if last {
			break
		}
	}
	return endings
}

// beat renews a node that lists some of the locks, some of these as running, or lets it have been silent for an hour.
func (w *twins) beat(node int64) {
	if w.random.IntN(3) == 0 {
		w.both(fmt.Sprintf("node %d is silent", node), func(s *side) (string, error) { return "", s.silent(node) })
		return
	}
	queue, keys := w.someLocks()
	running := make([]int, len(keys)) // which entry of the lock runs; -1: none
	for i := range running {
		running[i] = w.random.IntN(4) - 1
	}
	what := fmt.Sprintf("node %d lists %v of %s, of which %v run", node, keys, queue, running)
	w.both(what, func(s *side) (string, error) {
		var tokens, begun []invalidation.Token
		var entries []invalidation.EntryID
		for i, key := range keys {
			l := s.held[queue+" "+key]
			tokens = append(tokens, l.Token)
			if running[i] >= 0 && running[i] < len(l.Entries) {
				begun, entries = append(begun, l.Token), append(entries, l.Entries[running[i]].ID)
			}
		}
		orders, err := invalidation.Renew(
			context.Background(),
			s.db,
			invalidation.NodeID(node),
			invalidation.Beat{Tokens: tokens, Running: begun, RunningEntries: entries},
		)
		return fmt.Sprint(orders.Draining, orders.Paused), err
	})
}

// recover frees the locks that a node holds in a queue, as far as the conditions of recovery allow.
func (w *twins) recover(queue string, crashed bool, node int64) {
	w.both(
		fmt.Sprintf("recover locks of node %d of %s, crashed %v", node, queue, crashed),
		func(s *side) (string, error) {
			all, err := invalidation.HeldLocks(context.Background(), s.db)
			if err != nil {
				return "", err
			}
			keys := map[invalidation.Token]string{}
			var locks []invalidation.LockRef
			for _, l := range all {
				if l.Node == invalidation.NodeID(node) && l.QueueID == s.queues[queue].ID {
					keys[l.Token], locks = l.Key, append(locks, l.LockRef)
				}
			}
			slices.SortFunc(locks, func(a, b invalidation.LockRef) int { return cmp.Compare(a.Key, b.Key) })
			r, err := s.queues[queue].Recover(context.Background(), locks, nil, crashed)
			var freed []string
			for _, token := range r.Freed {
				freed = append(freed, keys[token])
			}
			slices.Sort(freed)
			return fmt.Sprint(freed, len(r.DeadLettered)), err
		},
	)
}
