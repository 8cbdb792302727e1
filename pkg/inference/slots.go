package inference

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// SlotPool holds the slots that this node has leased, and hands out permits before entries are claimed. A call costs no
// round trip to the database: slots are leased in blocks that double while they are used up, and go back when they have
// been idle for a while or when other nodes have to go without.
//
// What is held is known to be ours only as long as the node's lease cannot have lapsed: each exchange with the database
// says how long that is, counted from before it was sent. After that nothing is handed out until it is renewed.
type SlotPool struct {
	config   PoolConfig
	db       postgres.DB
	registry *Registry
	node     func() invalidation.NodeID
	log      *slog.Logger

	talk sync.Mutex // one exchange about slots at a time: what one changes, the other would misread

	idled func(model string) // called when a slot has come free

	mu      sync.Mutex
	models  map[string]*account
	until   time.Time // what is held may be relied on
	breaker map[string]*Breaker
}

// account is a model's ledger with what the pool must remember about leasing for it.
type account struct {
	ledger    *ledger
	nextLease time.Time // no room at all was left: ask again then
	doubts    []doubtful
	abandoned int // runs that nobody follows, at the last look
	tally     Tally
}

// Tally counts what a node has done for a model since it started.
type Tally struct {
	Calls   int64 // to workers
	Entries int64 // carried by them: more than Calls where batches are made
	Swaps   int64 // calls for which a worker had to load another thing than it ran last
	Held    int   // slots leased just now
	Busy    int   // of these, the ones with a call
}

// Tallies returns the figures of every model that the node has run.
func (p *SlotPool) Tallies() map[string]Tally {
	p.mu.Lock()
	defer p.mu.Unlock()
	tallies := make(map[string]Tally, len(p.models))
	for model, a := range p.models {
		t := a.tally
		t.Held = len(a.ledger.held)
		for _, s := range a.ledger.instances {
			t.Busy += s.busy
		}
		tallies[model] = t
	}
	return tallies
}

// doubtful is a slot in doubt that the database does not know about yet.
type doubtful struct {
	slot   *heldSlot
	queue  int32
	entry  invalidation.EntryID
	reason string
}

// PoolConfig of a SlotPool. The zero value works.
type PoolConfig struct {
	BlockMax  int           // slots leased at once: 64
	IdleMax   time.Duration // before an idle slot goes back: 5 s
	Every     time.Duration // between renewals: 1 s
	HungerGap time.Duration // between attempts when there is nothing to lease: 250 ms
	Freed     func()        // called when slots came free by themselves: the scheduling threads may try again
	Breaker   BreakerConfig
}

func (c PoolConfig) withDefaults() PoolConfig {
	setDefault(&c.BlockMax, 64)
	setDefault(&c.IdleMax, 5*time.Second)
	setDefault(&c.Every, time.Second)
	setDefault(&c.HungerGap, 250*time.Millisecond)
	if c.Freed == nil {
		c.Freed = func() {}
	}
	return c
}

// exchangeMax bounds one round trip about slots, so that a scheduling thread is not held up by a slow database.
const exchangeMax = 2 * time.Second

// NewSlotPool returns an empty pool for the node that node names: its incarnation may change.
func NewSlotPool(config PoolConfig, db postgres.DB, registry *Registry, node func() invalidation.NodeID, log *slog.Logger) *SlotPool {
	if log == nil {
		log = slog.Default()
	}
	p := &SlotPool{
		config: config.withDefaults(), db: db, registry: registry, node: node, log: log,
		models: map[string]*account{}, breaker: map[string]*Breaker{}, idled: func(string) {},
	}
	registry.onChange(p.changed)
	return p
}

// Take acquires up to want permits for entries of a queue, with free processing threads for them. Each permit is given
// back once by release. Queues that are not for inference need none.
func (p *SlotPool) Take(queue string, free, want int) (allow int, release func(n int)) {
	model := p.registry.QueueModel(queue)
	if model == "" {
		return min(free, want), func(int) {}
	}
	release = func(n int) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.account(model).ledger.giveBack(n)
	}
	want = min(free, want)
	if allow = p.take(model, want); allow > 0 || want <= 0 {
		return allow, release
	}
	if p.lease(model) {
		return p.take(model, want), release
	}
	return p.takeAbandoned(model, want), release
}

// takeAbandoned acquires permits for entries whose runs go on at workers though their nodes are gone: each of them
// brings its slot along. Any other entry that is claimed by such a permit finds no slot, and goes back to its place.
func (p *SlotPool) takeAbandoned(model string, want int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.account(model)
	n := min(want, a.abandoned)
	a.abandoned -= n
	a.ledger.unassigned += n
	return n
}

// await and unawait tell the ledger who waits for a busy slot though another is idle, and that nobody does.
func (p *SlotPool) await(model string, instance int32, permits int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.account(model).ledger.await(instance, permits)
}

func (p *SlotPool) unawait(model string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.account(model).ledger.unawait()
}

func (p *SlotPool) take(model string, want int) int {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !now.Before(p.until) {
		return 0
	}
	l := p.account(model).ledger
	l.seats = 1
	if m, known := p.registry.Model(model); known {
		l.seats = max(m.Batch.Items, 1)
	}
	return l.take(now, want, p.usable(model, now))
}

// account is called with mu held, as are usable and breakerOf.
func (p *SlotPool) account(model string) *account {
	a := p.models[model]
	if a == nil {
		a = &account{ledger: newLedger()}
		p.models[model] = a
	}
	return a
}

func (p *SlotPool) usable(model string, now time.Time) func(int32) bool {
	b := p.breakerOf(model)
	return func(instance int32) bool {
		e := p.registry.Endpoint(instance)
		if e == nil || !e.usable(now) {
			return false
		}
		_, _, open := b.Quarantine(now, e.Server)
		return !open
	}
}

func (p *SlotPool) breakerOf(model string) *Breaker {
	b := p.breaker[model]
	if b == nil {
		b = NewBreaker(p.config.Breaker)
		p.breaker[model] = b
	}
	return b
}

const leaseSlotsSQL = `SELECT instance, slot_number, slot_token, valid_ms FROM penstock.lease_slots($1, $2, $3)`

// abandonedSQL counts the runs of a model that nobody follows, and whose entries can be claimed.
const abandonedSQL = `
SELECT count(*)
  FROM penstock.remote_run r
  JOIN penstock.instance i ON i.id = r.instance_id AND i.model = $1
  JOIN penstock.slot s ON s.instance_id = r.instance_id AND s.number = r.slot_number AND s.token = r.slot_token
  JOIN penstock.entry e ON e.queue_id = r.queue_id AND e.id = r.entry_id
 WHERE e.status = 'pending' AND (s.doubt_at IS NOT NULL OR NOT penstock.node_lives(s.node_id))
   AND NOT EXISTS (SELECT FROM penstock.lock l WHERE l.queue_id = r.queue_id AND l.lock_key = coalesce(e.lock_key, '#' || e.id))`

func (p *SlotPool) countAbandoned(ctx context.Context, model string) {
	var n int
	if err := p.db.QueryRow(ctx, abandonedSQL, model).Scan(&n); err != nil {
		p.log.Warn("count abandoned runs", "model", model, "error", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.account(model).abandoned = n
}

type leasedSlot struct {
	Instance, Number int32
	Token            int64
	ValidMS          int64
}

// lease asks for as many slots again as the node holds, one at least. It says whether there are any new ones.
func (p *SlotPool) lease(model string) bool {
	if !p.talk.TryLock() {
		return false // somebody else is at it
	}
	defer p.talk.Unlock()
	start := time.Now()
	p.mu.Lock()
	a := p.account(model)
	hungry := start.Before(a.nextLease)
	block := min(max(len(a.ledger.held), 1), p.config.BlockMax)
	p.mu.Unlock()
	if hungry || len(p.registry.Endpoints(model)) == 0 {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), exchangeMax)
	defer cancel()
	rows, err := p.db.Query(ctx, leaseSlotsSQL, model, p.node(), block)
	if err == nil {
		var got []leasedSlot
		if got, err = pgx.CollectRows(rows, pgx.RowToStructByPos[leasedSlot]); err == nil {
			if len(got) == 0 {
				p.countAbandoned(ctx, model)
			}
			return p.leased(model, got, start)
		}
	}
	p.log.Warn("lease slots", "model", model, "error", err)
	p.leased(model, nil, start)
	return false
}

func (p *SlotPool) leased(model string, got []leasedSlot, start time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.account(model)
	if len(got) == 0 {
		a.nextLease = time.Now().Add(p.config.HungerGap)
		return false
	}
	a.nextLease = time.Time{}
	for _, s := range got {
		a.ledger.add(slotKey{s.Instance, s.Number}, s.Token, time.Now())
		p.rely(start, s.ValidMS)
	}
	p.limit(model, a)
	return true
}

// limit tells a ledger how many slots each instance has; called with mu held.
func (p *SlotPool) limit(model string, a *account) {
	for _, e := range p.registry.Endpoints(model) {
		if a.ledger.instances[e.ID] != nil {
			a.ledger.setLimit(e.ID, e.Slots)
		}
	}
}

// changed is called when models or instances have changed: there may be new slots to lease, or fewer to use.
func (p *SlotPool) changed() {
	p.mu.Lock()
	for model, a := range p.models {
		a.nextLease = time.Time{}
		p.limit(model, a)
	}
	p.mu.Unlock()
	p.config.Freed()
}

// rely notes for how long what is held is ours: the answer to a question sent at start said so.
func (p *SlotPool) rely(start time.Time, validMS int64) {
	if until := start.Add(time.Duration(validMS) * time.Millisecond); until.After(p.until) {
		p.until = until
	}
}

// Run keeps the pool in step with the database until ctx ends, and then gives back what is idle. End ctx only after the
// node's last run: what is busy then is left to recovery.
func (p *SlotPool) Run(ctx context.Context) error {
	ticks := time.NewTicker(p.config.Every)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), exchangeMax)
			defer cancel()
			return p.close(ctx)
		case <-ticks.C:
		}
		if err := p.Renew(ctx); err != nil && ctx.Err() == nil {
			p.log.Warn("renew slots", "error", err)
		}
	}
}

// Renew marks slots in doubt, gives back what is not needed, and learns what is still ours.
func (p *SlotPool) Renew(ctx context.Context) error {
	p.talk.Lock()
	defer p.talk.Unlock()
	ctx, cancel := context.WithTimeout(ctx, exchangeMax)
	defer cancel()
	if !p.holdsAny() {
		return nil
	}
	if err := p.markDoubts(ctx); err != nil {
		return err
	}
	if err := p.readShares(ctx); err != nil {
		return err
	}
	if err := p.giveBack(ctx, p.config.IdleMax); err != nil {
		return err
	}
	return p.verify(ctx)
}

func (p *SlotPool) close(ctx context.Context) error {
	p.talk.Lock()
	defer p.talk.Unlock()
	return errors.Join(p.markDoubts(ctx), p.giveBack(ctx, 0))
}

func (p *SlotPool) holdsAny() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.models {
		if len(a.ledger.held) > 0 || len(a.doubts) > 0 || len(a.ledger.leaving) > 0 {
			return true
		}
	}
	return false
}

// doubtSQL tells everybody that slots $1 to $3 have no caller any more, though their calls may still run.
const doubtSQL = `
UPDATE penstock.slot s
   SET doubt_at = clock_timestamp(), doubt = k.reason, queue_id = k.queue_id, entry_id = k.entry_id
  FROM unnest($1::int[], $2::int[], $3::bigint[], $4::text[], $5::int[], $6::bigint[]) k(instance_id, number, token, reason, queue_id, entry_id)
 WHERE s.instance_id = k.instance_id AND s.number = k.number AND s.token = k.token`

func (p *SlotPool) markDoubts(ctx context.Context) error {
	p.mu.Lock()
	var all []doubtful
	for _, a := range p.models {
		all = append(all, a.doubts...)
		a.doubts = nil
	}
	p.mu.Unlock()
	if len(all) == 0 {
		return nil
	}
	instances, numbers, tokens := columnsOf(all, func(d doubtful) *heldSlot { return d.slot })
	reasons, queues, entries := make([]string, len(all)), make([]int32, len(all)), make([]int64, len(all))
	for i, d := range all {
		reasons[i], queues[i], entries[i] = d.reason, d.queue, int64(d.entry)
	}
	_, err := p.db.Exec(ctx, doubtSQL, instances, numbers, tokens, reasons, queues, entries)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range all {
		a := p.models[p.modelOf(d.slot)]
		switch {
		case a == nil: // lost meanwhile
		case err != nil:
			a.doubts = append(a.doubts, d)
		default:
			a.ledger.lose(d.slot)
		}
	}
	if err != nil {
		return fmt.Errorf("mark %d slots in doubt: %w", len(all), err)
	}
	return nil
}

// modelOf finds the ledger that knows a slot; called with mu held.
func (p *SlotPool) modelOf(h *heldSlot) string {
	for model, a := range p.models {
		if a.ledger.held[h.slotKey] == h {
			return model
		}
	}
	return ""
}

const returnSlotsSQL = `
DELETE FROM penstock.slot s
 USING unnest($1::int[], $2::int[], $3::bigint[]) k(instance_id, number, token)
 WHERE s.instance_id = k.instance_id AND s.number = k.number AND s.token = k.token AND s.node_id = $4`

// giveBack returns what the node has no use for. If the answer is lost, verify finds out what is still ours.
func (p *SlotPool) giveBack(ctx context.Context, idleMax time.Duration) error {
	now := time.Now()
	p.mu.Lock()
	var out []*heldSlot
	for model, a := range p.models {
		out = append(out, a.ledger.surplus(now, idleMax, p.usable(model, now))...)
	}
	p.mu.Unlock()
	if len(out) == 0 {
		return nil
	}
	instances, numbers, tokens := columnsOf(out, func(h *heldSlot) *heldSlot { return h })
	if _, err := p.db.Exec(ctx, returnSlotsSQL, instances, numbers, tokens, p.node()); err != nil {
		return fmt.Errorf("give back %d slots: %w", len(out), err)
	}
	return nil
}

func columnsOf[T any](list []T, slot func(T) *heldSlot) (instances, numbers []int32, tokens []int64) {
	for _, item := range list {
		h := slot(item)
		instances, numbers, tokens = append(instances, h.instance), append(numbers, h.number), append(tokens, h.token)
	}
	return instances, numbers, tokens
}

const sharesSQL = `SELECT name, coalesce(penstock.slot_share(name, $2), -1) FROM unnest($1::text[]) m(name)`

// readShares learns how much the node may hold of each model: everything, unless others go without.
func (p *SlotPool) readShares(ctx context.Context) error {
	var names []string
	p.mu.Lock()
	for model, a := range p.models {
		if len(a.ledger.held) > 0 {
			names = append(names, model)
		}
	}
	p.mu.Unlock()
	rows, err := p.db.Query(ctx, sharesSQL, names, p.node())
	if err != nil {
		return fmt.Errorf("read shares of slots: %w", err)
	}
	var name string
	var share int
	_, err = pgx.ForEachRow(rows, []any{&name, &share}, func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.account(name).ledger.share = share
		return nil
	})
	if err != nil {
		return fmt.Errorf("read shares of slots: %w", err)
	}
	return nil
}

const heldSlotsSQL = `SELECT instance, slot_number, slot_token, in_doubt, valid_ms FROM penstock.held_slots($1)`

type heldRow struct {
	Instance, Number *int32
	Token            *int64
	Doubt            bool
	ValidMS          int64
}

// verify learns which slots are ours: those that were freed meanwhile are dropped, those whose lease we never heard the
// answer to are taken in.
func (p *SlotPool) verify(ctx context.Context) error {
	start := time.Now()
	rows, err := p.db.Query(ctx, heldSlotsSQL, p.node())
	if err != nil {
		return fmt.Errorf("read held slots: %w", err)
	}
	held, err := pgx.CollectRows(rows, pgx.RowToStructByPos[heldRow])
	if err != nil {
		return fmt.Errorf("read held slots: %w", err)
	}
	p.mu.Lock()
	came := p.reconcile(held, start)
	p.mu.Unlock()
	if came {
		p.config.Freed()
	}
	return nil
}

// reconcile is called with mu held. It says whether slots came in.
func (p *SlotPool) reconcile(held []heldRow, start time.Time) (came bool) {
	ours := map[slotKey]int64{}
	for _, r := range held {
		p.rely(start, r.ValidMS)
		if r.Instance != nil && !r.Doubt {
			ours[slotKey{*r.Instance, *r.Number}] = *r.Token
		}
	}
	for _, a := range p.models {
		for key, h := range a.ledger.held {
			if ours[key] != h.token {
				a.ledger.lose(h)
			} else {
				delete(ours, key)
			}
		}
	}
	for key, token := range ours {
		if e := p.registry.Endpoint(key.instance); e != nil {
			a := p.account(e.Model.Name)
			a.ledger.add(key, token, time.Now())
			p.limit(e.Model.Name, a)
			came = true
		}
	}
	return came
}
