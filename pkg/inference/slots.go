package inference

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
)

// SlotPool holds the slots that this node has leased, and hands out permits before entries are
// claimed. A call costs no round trip to the database: slots are leased in small blocks, as many
// again as the node holds at most, and go back when they have been idle for a moment, or at once
// when other nodes have to go without.
//
// The node may rely on its slots only as long as its lease cannot have lapsed: each exchange with
// the database says how long that is, counted from before it was sent. After that nothing is handed
// out until it is renewed.
type SlotPool struct {
	tuning   tuning
	freed    func() // see ServiceConfig.Freed
	db       postgres.DB
	holder   slot.Holder
	registry *Registry
	log      *slog.Logger
	failing  duty.FailingEach

	talk talkLock // one exchange about slots at a time: what one changes, the other would misread

	sharesTalk sync.Mutex // one reading of shares after hints at a time

	idled       func(model string)       // called when a slot has come free
	preempt     func(token int64) bool   // ends a run whose slot is wanted for an online request; false: it is over
	unsupported func(worker.Model) error // why this node makes no calls of a model; nil: it does
	kick        chan struct{}            // holds one: there is something to give back at once

	mu         sync.Mutex
	models     map[string]*modelState
	hints      int           // that have come since followHints began to take preemptions; 0: it takes none
	sharesDue  bool          // a hint has come since the shares were read
	sharesTook time.Duration // the last reading of shares
	ceding     int           // runs that the last orders of preemption have ended, and whose slots have not come
	unsure     bool          // an answer about slots was lost: the node may hold some that it does not know of
	until      time.Time     // what is held may be relied on
	breaker    map[string]*breaker
	probing    map[int32]bool // instances that are being probed because of what calls said
}

// modelState is a model's ledger with what the pool must remember about leasing for it.
type modelState struct {
	ledger          *slotLedger
	nextLease       time.Time // no room at all was left: ask again then
	abandoned       int       // runs that no node follows, at the last poll
	wanted          time.Time // by gateways, until then: slots that come idle are handed over
	tally           Tally
	saidUnsupported bool // this node makes no calls of it, and has said so
}

// Tally has the counters of a node for a model since its start.
type Tally struct {
	Calls   int64 // to workers
	Entries int64 // carried by them: more than Calls where batches are made
	Swaps   int64 // calls for which a worker had to load another thing than it ran last
	Held    int   // slots leased just now
	Busy    int   // of these, the ones with a call
}

// Tallies returns the figures of every model that is or was registered: a sum over models is a counter, which never
// falls.
func (p *SlotPool) Tallies() map[string]Tally {
	p.mu.Lock()
	defer p.mu.Unlock()
	tallies := map[string]Tally{}
	for model := range p.registry.current.Load().models {
		p.stateOf(model)
	}
	for model, state := range p.models {
		t := state.tally
		t.Held = state.ledger.held()
		t.Busy = t.Held - state.ledger.idle()
		tallies[model] = t
	}
	return tallies
}

// blockMax is how many slots are leased at once.
const blockMax = 16

// exchange waits until no other exchange about slots goes on, and returns the context of this one, each for a bounded
// time; done ends it. While the database does not answer, those that wait give up together: if each had its turn, a
// renewal behind them would wait for all of them.
func (p *SlotPool) exchange(ctx context.Context) (limited context.Context, done func(), err error) {
	wait, cancel := context.WithTimeout(ctx, p.tuning.exchangeMax)
	defer cancel()
	if err := p.talk.lock(wait); err != nil {
		return nil, nil, err
	}
	limited, end := context.WithTimeout(ctx, p.tuning.exchangeMax)
	return limited, func() { end(); p.talk.Unlock() }, nil
}

// talkLock is a mutex for which a wait ends with its context. It has room for one.
type talkLock chan struct{}

func (l talkLock) lock(ctx context.Context) error {
	select {
	case l <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for another exchange about slots: %w", context.Cause(ctx))
	}
}

// TryLock takes the lock if it is free.
func (l talkLock) TryLock() bool {
	select {
	case l <- struct{}{}:
		return true
	default:
		return false
	}
}

// Unlock frees the lock.
func (l talkLock) Unlock() { <-l }

// newSlotPool returns an empty pool for the node that node names: its incarnation may change.
func newSlotPool(config ServiceConfig, t tuning, db postgres.DB, registry *Registry,
	node func() invalidation.NodeID,
) *SlotPool {
	freed := config.Freed
	if freed == nil {
		freed = func() {}
	}
	p := &SlotPool{
		tuning: t, freed: freed, db: db, holder: slot.Holder{DB: db, Node: node}, registry: registry,
		log: cmp.Or(config.Log, slog.Default()), talk: make(talkLock, 1),
		models: map[string]*modelState{}, breaker: map[string]*breaker{}, probing: map[int32]bool{},
		idled: func(string) {}, preempt: func(int64) bool { return false }, kick: make(chan struct{}, 1),
		unsupported: func(worker.Model) error { return nil },
	}
	registry.OnChange(p.changed)
	return p
}

// Take acquires up to want permits for entries of a queue. Each permit is given back once by release. Queues that are
// not for inference need none.
func (p *SlotPool) Take(queue string, want int) (allow int, release func(n int)) {
	model := p.registry.QueueModel(queue)
	if model == "" {
		return want, func(int) {}
	}
	if !p.makesCalls(model) {
		return 0, func(int) {}
	}
	release = func(n int) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.stateOf(model).ledger.endPermits(n)
	}
	allow = p.take(model, want)
	if allow > 0 || want <= 0 {
		return allow, release
	}
	if !p.withheld(model) && p.lease(model, want) {
		return p.take(model, want), release
	}
	return p.takeAbandoned(model, want), release
}

// makesCalls says whether this node calls workers of a model. Entries that it claimed otherwise would go
// to and fro, and others could run them. It says why not once.
func (p *SlotPool) makesCalls(model string) bool {
	m, known := p.registry.Model(model)
	if !known {
		return true // no slot is to be had
	}
	why := p.unsupported(m)
	p.mu.Lock()
	state := p.stateOf(model)
	told := state.saidUnsupported
	state.saidUnsupported = why != nil
	p.mu.Unlock()
	if why != nil && !told {
		p.log.Warn("this node takes no entries of the model", "model", model, "error", why)
	}
	return why == nil
}

// takeAbandoned acquires permits for entries whose runs go on at workers though their nodes are
// gone: each of them brings its slot along. Any other entry that is claimed by such a permit finds
// no slot, and goes back to its place.
func (p *SlotPool) takeAbandoned(model string, want int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	state := p.stateOf(model)
	n := min(want, state.abandoned)
	state.abandoned -= n
	state.ledger.unassigned += n
	return n
}

// withheld says whether the node has idle slots of every usable instance of a model, and keeps calls from them all for
// an entry that is to run alone: more slots would idle as well.
func (p *SlotPool) withheld(model string) (withheld bool) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	instances := p.stateOf(model).ledger.instances
	for _, e := range p.registry.Endpoints(model) {
		if e.Usable(now) {
			s := instances[e.ID]
			if withheld = s != nil && s.Idle() > 0 && !s.admits(together, now); !withheld {
				return false
			}
		}
	}
	return withheld
}

// await notes that entries with so many permits wait for a busy slot of an instance although another slot is idle.
// unawait forgets all such waits.
func (p *SlotPool) await(model string, instance int32, permits int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stateOf(model).ledger.await(instance, permits)
}

func (p *SlotPool) unawait(model string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stateOf(model).ledger.unawait()
}

func (p *SlotPool) take(model string, want int) int {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !now.Before(p.until) {
		return 0
	}
	l := p.stateOf(model).ledger
	l.perSlot = 1
	if m, known := p.registry.Model(model); known {
		l.perSlot = max(m.Batch.Items, 1)
	}
	return l.take(now, want, p.usable(model, now))
}

// Loaded implements tasknode.Affinity for models whose flows name what a worker loads: it returns
// those that instances with an idle slot ran last. Only calls of this node are known here.
func (p *SlotPool) Loaded(queue string) (flows []string, maxWait time.Duration) {
	name := p.registry.QueueModel(queue)
	model, known := p.registry.Model(name)
	if !known || model.AffinityField != worker.AffinityFlow || model.AffinityWait <= 0 {
		return nil, 0
	}
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	usable := p.usable(name, now)
	for id, s := range p.stateOf(name).ledger.instances {
		if s.Idle() > 0 && usable(id) {
			flows = append(flows, s.loaded)
		}
	}
	return flows, model.AffinityWait.Duration()
}

// stateOf is called with mu held, as are usable and breakerOf.
func (p *SlotPool) stateOf(model string) *modelState {
	state := p.models[model]
	if state == nil {
		state = &modelState{ledger: newSlotLedger()}
		p.models[model] = state
	}
	return state
}

func (p *SlotPool) usable(model string, now time.Time) func(int32) bool {
	b := p.breakerOf(model)
	return func(instance int32) bool {
		e := p.registry.Endpoint(instance)
		if e == nil || !e.Usable(now) {
			return false
		}
		_, _, open := b.Quarantine(now, e.Server)
		return !open
	}
}

// breakerOf keeps no breaker of a model that is not registered any more: nothing would forget it.
func (p *SlotPool) breakerOf(model string) *breaker {
	b := p.breaker[model]
	if b != nil {
		return b
	}
	b = newBreaker(p.tuning.quarantine)
	if _, registered := p.registry.Model(model); registered {
		p.breaker[model] = b
	}
	return b
}

// limit tells a ledger how many slots each instance has; called with mu held.
func (p *SlotPool) limit(model string, state *modelState) {
	for _, e := range p.registry.Endpoints(model) {
		if state.ledger.instances[e.ID] != nil {
			state.ledger.setLimit(e.ID, e.Slots)
		}
	}
}

// changed is called when models or instances have changed: there may be new slots to lease, or
// fewer to use.
func (p *SlotPool) changed() {
	p.mu.Lock()
	for model, state := range p.models {
		state.nextLease = time.Time{}
		p.limit(model, state)
	}
	for model, b := range p.breaker {
		registered := map[string]bool{}
		for _, e := range p.registry.Endpoints(model) {
			registered[e.Server] = true
		}
		if b.keep(registered); len(b.instances) == 0 {
			delete(p.breaker, model)
		}
	}
	p.mu.Unlock()
	p.freed()
}

// rely notes until when what is held is ours, as an answer of the database said; called with mu held.
func (p *SlotPool) rely(until time.Time) {
	if until.After(p.until) {
		p.until = until
	}
}

// Run keeps the pool in step with the database until ctx ends, and then gives back idle slots. End
// ctx only after the node's last run: slots that are busy then are left to recovery.
func (p *SlotPool) Run(ctx context.Context) error {
	ticks := time.NewTicker(p.tuning.renewEvery)
	defer ticks.Stop()
	var failing duty.Failing
	for {
		select {
		case <-ctx.Done():
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.tuning.exchangeMax)
			defer cancel()
			return p.close(ctx)
		case <-ticks.C:
		case <-p.kick:
		}
		failing.Note(ctx, p.log, slog.LevelWarn, "renew slots", p.Renew(ctx))
	}
}

// Renew marks slots in doubt, gives back slots that are not needed, and learns which ones the node
// still holds.
func (p *SlotPool) Renew(ctx context.Context) error {
	ctx, done, err := p.exchange(ctx)
	if err != nil {
		return err
	}
	defer done()
	if !p.holdsAny() {
		return nil
	}
	if err := p.markDoubts(ctx); err != nil {
		return err
	}
	if err := p.readShares(ctx); err != nil {
		return err
	}
	if err := p.takePreemptions(ctx); err != nil {
		return err
	}
	if err := p.readRelief(ctx); err != nil {
		return err
	}
	if err := p.returnSurplus(ctx, p.tuning.idleMax); err != nil {
		return err
	}
	return p.verify(ctx)
}

func (p *SlotPool) close(ctx context.Context) error {
	if err := p.talk.lock(ctx); err != nil {
		return err
	}
	defer p.talk.Unlock()
	p.mu.Lock()
	unsure := p.unsure
	p.mu.Unlock()
	var verified error
	if unsure {
		verified = p.verify(ctx)
	}
	return errors.Join(verified, p.markDoubts(ctx), p.returnSurplus(ctx, 0))
}

func (p *SlotPool) holdsAny() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.unsure {
		return true
	}
	for _, state := range p.models {
		if state.ledger.held() > 0 || state.ledger.leaving.Due() {
			return true
		}
	}
	return false
}
