// Package sim runs task nodes and lock recovery, the product's own code, against a database in memory
// within one bubble of testing/synctest. A schedule that follows from a seed decides which call of the
// store goes on next, lets answers be lost, and lets processes crash or be cut off between any two
// calls. Time is that of the bubble: a second of the simulation takes milliseconds.
//
// The store answers the statements of the product, found by their texts, so that nothing in the
// product is made for the simulation. TestStoreAgreesWithPostgres runs the same random operations on
// the store and on Postgres and compares the answers.
package sim

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/pkg/fairness"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/recovery"
	"github.com/penstock/penstock/pkg/tasknode"
)

const (
	lease    = 3 * time.Second
	faulty   = 12 * time.Second // for which faults happen
	calmMax  = 40 * time.Second // after which all entries must have ended
	accepted = 24               // entries
)

// run is one run of an entry as the worker saw it.
type run struct {
	entry, token int64
	key          string
	process      *process
	began, ended time.Time
	well         bool // it ended without an error
	mayHaveRun   bool // it was told that the entry may have run before
}

// world is everything of one simulation.
type world struct {
	*schedule
	seed  uint64
	store *store
	log   *slog.Logger

	mu      sync.Mutex
	nodes   []*process
	runs    []*run
	told    map[int64]bool // entries whose acceptance the client was told of
	left    int            // entries that the client has not pushed yet
	next    int            // number of the next incarnation
	drained bool           // all entries ended after the faults
	ended   bool           // nothing is started any more
	tasks   sync.WaitGroup
}

// play runs one seed to its end. It is called within a bubble.
func play(seed uint64) *world {
	w := &world{
		schedule: newSchedule(seed),
		seed:     seed,
		store:    newStore("solo", "keyed"),
		told:     map[int64]bool{},
		left:     accepted,
		log:      slog.New(slog.DiscardHandler),
	}
	for range 3 {
		w.startNode()
	}
	w.startLeader()
	w.tasks.Go(w.client)
	scheduled := make(chan struct{})
	go func() {
		defer close(scheduled)
		w.steer(w.disturb)
	}()
	time.Sleep(faulty)
	w.heal()
	w.drained = w.drain()
	w.stop()
	close(w.over)
	w.tasks.Wait()
	time.Sleep(longestRun / 2) // a drain gives up waiting for stubborn runs; the end of a bubble needs them ended
	<-scheduled
	w.settle()
	slices.SortStableFunc(w.runs, func(a, b *run) int {
		return cmp.Or(a.began.Compare(b.began), cmp.Compare(a.token, b.token), cmp.Compare(a.entry, b.entry))
	})
	return w
}

func (w *world) startNode() {
	w.mu.Lock()
	w.next++
	name := fmt.Sprintf("node%d", w.next)
	w.mu.Unlock()
	ctx, stop := context.WithCancel(context.Background())
	p := &process{name: name, schedule: w.schedule, stop: stop}
	db := connect(w.store, p)
	ranking := fairness.RankerConfig{Log: w.log, Config: fairness.Config{Seed: 1}}
	node := tasknode.New(tasknode.Config{
		Name: name, Threads: 4, Lease: lease, Beat: lease / 6, Poll: 250 * time.Millisecond, Grace: lease, Log: w.log,
		Ranker: fairness.NewRanker(ranking, db), Random: func() float64 { return 0.5 },
	}, db, db)
	for _, queue := range []string{"solo", "keyed"} {
		node.Handle(
			queue,
			invalidation.HandlerFunc(func(ctx context.Context, r *invalidation.Run) (json.RawMessage, error) {
				return w.work(ctx, p, r)
			}),
		)
	}
	if !w.admit(p) {
		return
	}
	w.say("%s starts", name)
	w.tasks.Go(func() {
		if err := node.Run(ctx); err != nil {
			w.say("%s ended: %v", name, err)
		}
	})
}

// admit adds a process, unless the simulation has ended.
func (w *world) admit(p *process) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended {
		w.nodes = append(w.nodes, p)
	}
	return !w.ended
}

var errScripted = errors.New("scripted")

// longestRun bounds the time of a run. A stubborn one goes on after the end of its context for half of its time.
const longestRun = 5 * time.Second

// work is the worker: how long it takes and how it ends follows from the seed, the entry and the token.
func (w *world) work(ctx context.Context, p *process, r *invalidation.Run) (json.RawMessage, error) {
	if up, _ := p.alive(); !up {
		return nil, context.Canceled // what a dead process calls reaches nobody
	}
	h := fnv.New64a()
	fmt.Fprint(h, w.seed, r.Entry.ID, r.Lock.Token)
	roll := h.Sum64()
	one := &run{
		entry: int64(r.Entry.ID), token: int64(r.Lock.Token), key: r.Lock.Key, process: p, began: time.Now(),
		mayHaveRun: r.Entry.MayHaveRun,
	}
	w.mu.Lock()
	w.runs = append(w.runs, one)
	w.mu.Unlock()
	w.say("%-8s runs entry %d under token %d", p.name, one.entry, one.token)
	takes := time.Duration(5+roll%60) * time.Millisecond
	if roll/64%8 == 0 {
		// Often longer than a lease.
		takes = time.Duration(roll/512%uint64(longestRun/time.Millisecond)) * time.Millisecond
	}
	stubborn := roll/4096%10 == 0 // goes on although its context has ended
	select {
	case <-time.After(takes):
	case <-ctx.Done():
		if stubborn {
			time.Sleep(takes / 2)
		}
	}
	w.mu.Lock()
	one.ended = time.Now()
	one.well = ctx.Err() == nil && roll/65536%6 != 0
	w.mu.Unlock()
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case !one.well:
		return nil, errScripted
	}
	return nil, nil
}

// term is the fence of a leader: its transactions commit only while no newer leader was elected.
type term struct {
	number int64
	db     *connection
}

var errTermOver = errors.New("the term is over")

// InTx implements the fence of a duty.
func (f term) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	tx, err := f.db.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if f.db.store.tables.term != f.number {
		return errTermOver
	}
	if err := fn(tx); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// startLeader starts a leader with a new term: recovery of locks, and promotion of what is due.
func (w *world) startLeader() {
	number := w.store.tables.term
	ctx, stop := context.WithCancel(context.Background())
	p := &process{name: fmt.Sprintf("leader%d", number), schedule: w.schedule, stop: stop}
	db := connect(w.store, p)
	if !w.admit(p) {
		return
	}
	w.say("%s is elected", p.name)
	locks := recovery.NewLocks(db, term{number, db}, recovery.Config{
		Log: w.log, NodeRetention: lease, Random: func() float64 { return 0.5 },
	})
	w.tasks.Go(func() {
		for ctx.Err() == nil {
			_ = locks.Run(ctx) // a leader whose duty gave up is elected again
			time.Sleep(retryPause)
		}
	})
	w.tasks.Go(func() {
		var queues []*invalidation.Queue // none is added while the leader leads
		for ctx.Err() == nil {
			if len(queues) == 0 {
				queues, _ = invalidation.List(ctx, db)
			}
			for _, q := range queues {
				_, _ = q.Promote(ctx, 100)
			}
			time.Sleep(300 * time.Millisecond)
		}
	})
}

// client pushes entries, one after another, and asks nobody twice: what it was not told may or may
// not have been accepted.
func (w *world) client() {
	p := &process{name: "client", schedule: w.schedule, stop: func() {}}
	c := connect(w.store, p)
	for i := range accepted {
		queue, key := int32(1), ""
		if i%3 > 0 {
			queue, key = 2, fmt.Sprint("k", i%2)
		}
		var id int64
		err := c.call(context.Background(), "push", nothing, func(t *tables, now time.Time) error {
			id = t.push(queue, key, now)
			return nil
		})
		w.mu.Lock()
		w.told[id] = err == nil
		w.left--
		w.mu.Unlock()
		time.Sleep(time.Duration(i%5) * 100 * time.Millisecond)
	}
}

// Chances of a step, of ten thousand, to be followed by such a disturbance.
const (
	crashShare     = 36
	partitionShare = 47
	electShare     = 12
	holdShare      = 60
)

// disturb crashes a process, cuts one off, or elects another leader, now and then.
func (w *world) disturb() {
	w.schedule.mu.Lock()
	calm := w.calm
	w.schedule.mu.Unlock()
	if calm {
		return
	}
	roll, lasts := w.random.IntN(10_000), time.Duration((0.2+2.3*w.random.Float64())*float64(lease))
	victim := w.someNode()
	switch {
	case victim == nil:
	case roll < crashShare:
		w.say("%s crashes", victim.name)
		w.count("crash of a " + strings.TrimRight(victim.name, "0123456789"))
		victim.crash()
		if victim.name[0] == 'l' {
			w.elect()
		} else {
			w.plan(lasts/2, w.startNode)
		}
	case roll < crashShare+partitionShare:
		w.say("%s is cut off for %v", victim.name, lasts)
		w.count("partition")
		victim.mu.Lock()
		victim.cutUntil = time.Now().Add(lasts)
		victim.mu.Unlock()
	case roll < crashShare+partitionShare+electShare:
		w.count("election beside a leader")
		w.elect()
	case roll < crashShare+partitionShare+electShare+holdShare:
		w.holdRow(lasts)
	}
}

// holdRow lets another transaction keep the record of a lock locked for a while.
func (w *world) holdRow(lasts time.Duration) {
	t := w.store.tables
	locks := t.inOrder()
	if len(locks) == 0 {
		return
	}
	l := locks[w.random.IntN(len(locks))]
	w.say("the record of lock %s is held for %v", l.key, lasts)
	w.count("row held")
	t.heldUntil[l.token] = time.Now().Add(lasts)
}

// elect gives another leader the next term; the one before may go on until it notices.
func (w *world) elect() {
	w.store.tables.term++
	w.startLeader()
}

// someNode draws one of the processes that run.
func (w *world) someNode() *process {
	w.mu.Lock()
	defer w.mu.Unlock()
	var up []*process
	for _, p := range w.nodes {
		if alive, _ := p.alive(); alive {
			up = append(up, p)
		}
	}
	if len(up) == 0 {
		return nil
	}
	return up[w.random.IntN(len(up))]
}

func (w *world) heal() {
	w.say("no more faults")
	w.schedule.mu.Lock()
	w.calm = true
	w.schedule.mu.Unlock()
	clear(w.store.tables.heldUntil)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.nodes {
		p.mu.Lock()
		p.cutUntil = time.Time{}
		p.mu.Unlock()
	}
}

// drain waits until every entry has ended.
func (w *world) drain() bool {
	for began := time.Now(); time.Since(began) < calmMax; time.Sleep(50 * time.Millisecond) {
		<-w.store.turn
		left := len(w.store.tables.entries) + len(w.store.tables.locks)
		w.store.turn <- struct{}{}
		w.mu.Lock()
		left += w.left
		w.mu.Unlock()
		if left == 0 {
			return true
		}
	}
	return false
}

func (w *world) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
	for _, p := range w.nodes {
		p.stop()
	}
}
