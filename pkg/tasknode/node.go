package tasknode

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/fairness"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Node is one task node. Make it with New, give it handlers, then Run it once.
type Node struct {
	cfg      Config
	db       postgres.DB // claims and endings
	beats    postgres.DB // heartbeats, on a connection that nothing else can hold up
	handlers map[string]invalidation.Handler
	kinds    map[invalidation.Kind]invalidation.Handler
	declared func(*invalidation.Queue) invalidation.Handler

	incarnation atomic.Int64
	claims      atomic.Int32     // the id of the last claim
	ownRanker   *fairness.Ranker // nil: the ranker is the caller's, which runs it
	lanes       *laneTable
	poll        lanePoll
	permits     *permits
	processors  sync.WaitGroup
	threads     atomic.Int64 // processing threads that there are, but for the spare one
	holdings    *holdings
	waiting     *waiting
	jobs        *jobs
	settler     *settler
	lease       lease
	stats       Stats
	handedBack  handedBack
	failing     duty.FailingEach // steps that the database refuses, by queue

	// of the heartbeat, and of the start before it
	registry      int64        // the version of the registry of queues that was read last
	registerAgain bool         // the node's row does not have the queues that it serves yet
	beatLost      bool         // the orders of the last heartbeat did not arrive
	reading       duty.Failing // readings of the queues after heartbeats

	wake         chan struct{}   // holds as many as there are scheduling threads
	beatSoon     chan struct{}   // holds one: the next heartbeat is wanted at once
	runs         context.Context // of all runs; ends with ErrDraining when the grace is over
	drainOrdered chan struct{}
	draining     atomic.Bool // claim nothing more
	paused       atomic.Bool // claim nothing until this node is resumed
	handingBack  atomic.Bool // start nothing more
	leaseOver    atomic.Bool // claim and start nothing until the lease is renewed
	suspectRuns  atomic.Bool // an entry runs that one more crash makes poison
}

// New returns a node that claims and settles through db, and renews its lease through beats.
func New(cfg Config, db, beats postgres.DB) *Node {
	cfg = cfg.withDefaults()
	var ownRanker *fairness.Ranker
	if cfg.Ranker == nil {
		ownRanker = fairness.NewRanker(fairness.RankerConfig{Application: cfg.Application, Log: cfg.Log}, db)
		cfg.Ranker = ownRanker
	}
	n := &Node{
		cfg: cfg, db: db, beats: beats, ownRanker: ownRanker, handlers: map[string]invalidation.Handler{},
		kinds: map[invalidation.Kind]invalidation.Handler{}, lanes: newLaneTable(cfg.Ranker),
		poll: lanePoll{beyond: map[int32]invalidation.Lane{}}, permits: &permits{threads: cfg.Threads},
		holdings: newHoldings(), waiting: newWaiting(cfg.Threads), jobs: newJobs(), settler: newSettler(),
		wake:         make(chan struct{}, cfg.SchedulingThreads),
		beatSoon:     make(chan struct{}, 1),
		drainOrdered: make(chan struct{}),
	}
	n.incarnation.Store(newIncarnation())
	n.threads.Store(int64(cfg.Threads))
	return n
}

// Handle sets the handler of a queue. Queues without one are left alone. Call it before Run.
func (n *Node) Handle(queue string, h invalidation.Handler) { n.handlers[queue] = h }

// HandleKind sets the handler of all queues of a kind that have none of their own, those to come as well.
func (n *Node) HandleKind(kind invalidation.Kind, h invalidation.Handler) { n.kinds[kind] = h }

// HandleStatements sets the function that makes the handler of a queue that declares statements and
// has none of its own. Call it before Run.
func (n *Node) HandleStatements(handler func(*invalidation.Queue) invalidation.Handler) {
	n.declared = handler
}

// ID is the node's incarnation. It changes if the leader gives the node up while it still runs.
func (n *Node) ID() invalidation.NodeID { return invalidation.NodeID(n.incarnation.Load()) }

// newIncarnation is a random positive number. 63 bits make it certain enough that no two starts share one.
func newIncarnation() int64 {
	var b [8]byte
	rand.Read(b[:]) // never returns an error
	return int64(binary.BigEndian.Uint64(b[:])>>1) | 1
}

// Wake hints that a queue may have new entries, and in which lane if that is known; else the node looks for itself.
// It never blocks, and nothing depends on it.
func (n *Node) Wake(queue int32, lane *invalidation.Lane) {
	n.lanes.hint(queue, lane)
	if lane == nil {
		n.poll.want()
	}
	n.signal()
}

func (n *Node) signal() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// TryAgain lets claims be tried again that a permit, a gate or the locks of others refused. Lanes that
// wait for a rate wait on. It never blocks.
func (n *Node) TryAgain() {
	n.lanes.nextEpoch()
	n.signal()
}

// tryLimited lets claims be tried again that anything refused, a rate or a throttling as well.
func (n *Node) tryLimited() {
	n.lanes.limitsChanged()
	n.signal()
}

// Run registers the node and serves its queues until ctx ends or a drain is ordered. Then it claims
// nothing more, waits up to the grace for running entries, hands back the others without spending
// attempts, and returns nil. It returns an error if the node could not be registered, or if its Config cannot hold. A
// node that has run does not run again: Run then returns an error.
func (n *Node) Run(ctx context.Context) error {
	if n.draining.Load() {
		return fmt.Errorf("run node %q: it has run; make another one with New", n.cfg.Name)
	}
	if err := n.cfg.check(); err != nil {
		return err
	}
	alive, die := context.WithCancel(context.WithoutCancel(ctx))
	defer die()
	runs, endRuns := context.WithCancelCause(alive)
	defer endRuns(nil)
	n.runs = runs

	if entered, err := n.enter(ctx); !entered {
		return err
	}

	claiming, stopClaiming := context.WithCancel(ctx)
	defer stopClaiming()
	var schedulers, settlers, keepers sync.WaitGroup
	keepers.Go(func() { n.heartbeat(alive) })
	keepers.Go(func() { n.leaseKeeper(alive) })
	if n.ownRanker != nil {
		keepers.Go(func() { _ = n.ownRanker.Run(alive) }) // it logs its errors, and returns none
	}
	for range 2 {
		settlers.Go(func() { n.settle(alive) })
	}
	for range n.cfg.Threads {
		n.processors.Go(n.thread)
	}
	if n.cfg.Threads > 1 {
		n.processors.Go(n.spareThread)
	}
	if n.cfg.ThreadsFor != nil {
		// it ends before the processing threads are waited for
		schedulers.Go(func() { n.growLoop(claiming) })
	}
	schedulers.Go(func() { n.handBackLoop(claiming) })
	for range n.cfg.SchedulingThreads {
		schedulers.Go(func() { n.scheduler(claiming) })
	}

	select {
	case <-ctx.Done():
	case <-n.drainOrdered:
	}
	n.draining.Store(true)
	n.handingBack.Store(true)
	began := time.Now()
	stopClaiming()
	schedulers.Wait() // for claims on their way: up to a heartbeat and two leases without answers of the database
	n.waiting.close()
	n.drain(began, endRuns)
	n.settler.close()
	n.finishSettling(die, &settlers)
	die()
	keepers.Wait()
	n.deregister(ctx)
	return nil
}

// answerMin is how long handlers have at least to answer the end of their context.
const answerMin = time.Second

// drain waits for the processing threads. What has not begun is handed back at once; what runs has the grace since
// the drain began, and then half as much again, or answerMin, to answer the end of its context.
func (n *Node) drain(began time.Time, endRuns context.CancelCauseFunc) {
	done := make(chan struct{})
	go func() { n.processors.Wait(); close(done) }()
	select {
	case <-done:
		return
	case <-time.After(n.cfg.Grace - time.Since(began)):
	}
	if held := n.permits.held(); held > 0 {
		n.cfg.Log.Warn("grace is over, ending runs", "node", n.cfg.Name, "locks", held)
	}
	endRuns(invalidation.ErrDraining)
	select {
	case <-done:
	case <-time.After(max(n.cfg.Grace/2, answerMin)):
		n.cfg.Log.Error("handlers ignore the end of their context; their entries are left to recovery", "locks",
			n.permits.held())
	}
}

// finishSettling gives the endings a lease's time to be recorded.
func (n *Node) finishSettling(giveUp func(), settlers *sync.WaitGroup) {
	done := make(chan struct{})
	go func() { settlers.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(n.cfg.Lease):
		giveUp()
		<-done
	}
}
