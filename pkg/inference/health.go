package inference

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/slot"
)

// Prober is the duty that probes every instance, and frees slots that no node answers for
// any more. Any number of processes may run it: each probe of an instance is claimed by moving the
// time of its next one.
type Prober struct {
	tuning   tuning
	db       postgres.DB
	registry *Registry
	log      *slog.Logger
	wake     chan struct{} // holds one
	starts   chan struct{} // a place for each start that is watched
	sweeper  *sweeper      // has a pass after each claim of probes
	claiming duty.Failing
	renewing duty.Failing
	failing  duty.FailingEach // by instance

	mu       sync.Mutex
	running  map[int32]struct{} // instances that are being probed here, and starts that are watched
	asked    time.Time          // when the statement was sent that the database answered last
	answered time.Time          // when that answer came
	clock    time.Time          // and the time of the database's clock in it
	returned time.Time          // when it answered after a time without an answer, or with a clock that stepped ahead
	lease    time.Duration      // the longest one of a node, which beats three times in it at least
}

// probesMax is how many instances are probed at once.
const probesMax = 32

// newProber returns the duty.
func newProber(t tuning, db postgres.DB, registry *Registry, log *slog.Logger) *Prober {
	log = cmp.Or(log, slog.Default())
	return &Prober{
		tuning: t, db: db, registry: registry, log: log, running: map[int32]struct{}{},
		wake: make(chan struct{}, 1), starts: make(chan struct{}, startsMax),
		sweeper: newSweeper(t, db, registry, log),
	}
}

// Wake makes Run probe the instances that are due now: one was announced. It does not block.
func (p *Prober) Wake() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Run probes instances until ctx ends.
func (p *Prober) Run(ctx context.Context) error {
	var probes sync.WaitGroup
	defer probes.Wait()
	probing := make(chan struct{}, probesMax)
	ticks := time.NewTicker(p.tuning.probeEvery / 5)
	defer ticks.Stop()
	p.sweeper.sweep(ctx) // the first makes the partitions that runs write to
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
		case <-p.wake:
		}
		p.renewClaims(ctx)
		due, err := p.claimDue(ctx, probesMax-len(probing))
		p.claiming.Note(ctx, p.log, slog.LevelError, "claim probes at instances", err)
		p.begin(ctx, due, &probes, probing)
		if runs := p.sweeper.pass(ctx, len(due)); len(runs) > 0 {
			probes.Go(func() { p.stopRuns(ctx, runs) })
		}
	}
}

// begin carries out the probes that were claimed, each in a place of probing. Those that still run here were claimed
// because the database took longer to renew their claims than these last, and are not begun again.
func (p *Prober) begin(ctx context.Context, due []int32, probes *sync.WaitGroup, probing chan struct{}) {
	for _, id := range due {
		if p.mark(id) {
			probing <- struct{}{}
			probes.Go(func() { p.serve(ctx, id, probing) })
		}
	}
}

// serve carries out a probe that was claimed, and gives back its place in probing. A start is watched after
// that.
func (p *Prober) serve(ctx context.Context, id int32, probing <-chan struct{}) {
	defer p.unmark(id)
	h, err := p.probe(ctx, id)
	<-probing
	if err == nil && isStarting(h) {
		err = p.watch(ctx, id, h)
	}
	p.failing.Note(ctx, p.log, slog.LevelWarn, "probe an instance", strconv.Itoa(int(id)), err, "instance", id)
}

// mark notes that an instance is being probed. It returns false where it is so already.
func (p *Prober) mark(id int32) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, runs := p.running[id]
	p.running[id] = struct{}{}
	return !runs
}

func (p *Prober) unmark(id int32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.running, id)
}

// claimDueSQL claims up to $2 probes that are due, and that of an instance at once whose slots a node
// has left behind, for which it waits no longer than $3 after the node's lease. The next one is due after $1 unless the
// claim is renewed: its holder may die. A probe that was claimed since is due between $1 after that time and $1 from
// now, and is not claimed again.
// Two at once do no harm, as slots are freed by their tokens. A probe that is due after more than $4, longer than any
// pause, and one of a time to come, are from before the clock was set back. It also reads the clock, see heard.
const claimDueSQL = `
WITH due AS (
    SELECT id FROM penstock.instance
     WHERE next_check_at <= clock_timestamp() OR next_check_at > clock_timestamp() + $4::interval
     UNION
    SELECT i.id
      FROM penstock.slot s
      JOIN penstock.instance i ON i.id = s.instance_id
      JOIN penstock.node n ON n.id = s.node_id
     WHERE s.doubt_at IS NULL
       AND n.beat_at + n.lease BETWEEN clock_timestamp() - interval '1 minute' AND clock_timestamp() - $3::interval
       AND (coalesce(i.checked_at, '-infinity') < n.beat_at + n.lease + $3::interval
            OR i.checked_at > clock_timestamp())
       AND (i.next_check_at > clock_timestamp() + $1::interval
            OR i.next_check_at < n.beat_at + n.lease + $3::interval + $1::interval)
), claimed AS (
    UPDATE penstock.instance
       SET next_check_at = clock_timestamp() + $1::interval
     WHERE id = ANY (ARRAY(
           SELECT i.id FROM penstock.instance i WHERE i.id IN (SELECT id FROM due)
            ORDER BY i.next_check_at LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED))
    RETURNING id
)
SELECT ARRAY(SELECT id FROM claimed), clock_timestamp(),
       (SELECT coalesce(max(n.lease), interval '0') FROM penstock.node n)`

// renewProbesSQL keeps the claims on probes $1 that still run.
const renewProbesSQL = `
UPDATE penstock.instance SET next_check_at = clock_timestamp() + $2::interval WHERE id = ANY ($1)`

func (p *Prober) claimDue(ctx context.Context, most int) (due []int32, err error) {
	sent := time.Now()
	var clock time.Time
	var lease time.Duration
	err = p.db.QueryRow(ctx, claimDueSQL, p.claimFor(), max(most, 0), deadGrace, 2*p.tuning.probeEvery).
		Scan(&due, &clock, &lease)
	if err != nil {
		return nil, err
	}
	p.heard(sent, time.Now(), clock)
	p.mu.Lock()
	p.lease = lease
	p.mu.Unlock()
	return due, nil
}

// claimFor is how long a claim on a probe counts without renewal.
func (p *Prober) claimFor() time.Duration { return 3 * p.tuning.probeEvery / 5 }

// renewClaims keeps other processes from the probes that run here.
func (p *Prober) renewClaims(ctx context.Context) {
	p.mu.Lock()
	running := slices.Collect(maps.Keys(p.running))
	p.mu.Unlock()
	p.renew(ctx, running...)
}

// renew keeps the claims on some probes.
func (p *Prober) renew(ctx context.Context, running ...int32) {
	if len(running) == 0 {
		return
	}
	_, err := p.db.Exec(ctx, renewProbesSQL, running, p.claimFor())
	p.renewing.Note(ctx, p.log, slog.LevelWarn, "renew claims on probes", err)
}

// silentMax is for how long the database may be without an answer, where probes are not further apart, until leases
// that have lapsed may be those of nodes that live.
const silentMax = 3 * time.Second

// stepMax is how far the database's clock may go ahead of the time that has passed, as clocks that are slewed do.
const stepMax = 2 * time.Second

// heard notes that the database has answered a statement with the time of its clock. Of two readings at least the
// difference between their times less the time from the sending of the first to the answer to the second is a step.
func (p *Prober) heard(sent, came, clock time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	away := came.Sub(p.answered) > max(silentMax, p.claimFor())
	stepped := clock.Sub(p.clock)-came.Sub(p.asked) > stepMax
	if !p.answered.IsZero() && (away || stepped) {
		p.returned = came
	}
	p.asked, p.answered, p.clock = sent, came, clock
}

const foundSQL = `
UPDATE penstock.instance i
   SET draining_at = CASE WHEN i.drain_by = 'recycle' AND $2 NOT IN ('ready', 'busy') THEN NULL ELSE i.draining_at END,
       drain_by = CASE WHEN i.drain_by = 'recycle' AND $2 NOT IN ('ready', 'busy') THEN NULL ELSE i.drain_by END,
       drain_reason = CASE WHEN i.drain_by = 'recycle' AND $2 NOT IN ('ready', 'busy') THEN NULL
                      ELSE i.drain_reason END,
       state = $2, reason = nullif($3, ''), active = $4, capacity = $5, queued = $6, kv_usage = $7,
       checked_at = clock_timestamp(), next_check_at = clock_timestamp() + $8::interval
 WHERE id = $1
RETURNING clock_timestamp()`

// probe asks one instance for its health, stores it, and frees slots that are stale. It returns the finding
// that it stored; none where the instance was removed, or is not usable, which the registry reports.
func (p *Prober) probe(ctx context.Context, instance int32) (found, error) {
	e, err := p.endpoint(ctx, instance)
	if e == nil || err != nil {
		return found{}, err
	}
	// Before the probe: what was orphaned after the worker counted is not for this count to judge.
	orphans, err := slot.Orphans(ctx, p.db, instance)
	if err != nil {
		return found{}, err
	}
	asked := time.Now()
	h := e.adapter.Probe(ctx)
	if mayPass(e, h, time.Since(asked)) {
		pause(ctx, watchStepMax)
		h = e.adapter.Probe(ctx)
	}
	if ctx.Err() != nil {
		return found{}, ctx.Err()
	}
	f := found{Health: h, before: e}
	next := time.Duration(float64(p.tuning.probeEvery) * (0.75 + 0.5*rand.Float64()))
	if isStarting(f) {
		next = min(next, startingInterval) // requests may wait for it
	}
	for _, o := range orphans {
		if young := graceOf(o, p.tuning.probeGrace) - o.Age; young > 0 {
			next = min(next, young) // it may be free then
		}
	}
	if err := p.store(ctx, f, next); err != nil {
		return found{}, err
	}
	stale := staleOrphans(p.trusted(orphans, time.Now()), h, e, p.tuning.probeGrace)
	if len(stale) == 0 {
		return f, nil
	}
	freed, err := slot.Free(ctx, p.db, instance, stale)
	if err != nil {
		return f, err
	}
	p.log.Info("stale slots freed", "model", e.Model.Name, "server", e.Server, "freed", freed, "state", h.State)
	return f, nil
}

// endpoint is a registered instance. One that is not known here may have been announced since the registry was
// read.
func (p *Prober) endpoint(ctx context.Context, instance int32) (*Endpoint, error) {
	if e := p.registry.Endpoint(instance); e != nil {
		return e, nil
	}
	if err := p.registry.Refresh(ctx); err != nil {
		return nil, err
	}
	return p.registry.Endpoint(instance), nil
}

// store writes what a probe found, and after how long the next one is due. It reads the clock behind the orphans, so
// that a step by which their leases lapsed is known before they are judged.
func (p *Prober) store(ctx context.Context, f found, next time.Duration) error {
	h, e := f.Health, f.before
	sent := time.Now()
	var clock time.Time
	err := p.db.QueryRow(ctx, foundSQL, e.ID, h.State, h.Reason, h.Active, h.Capacity, h.Queued, h.KVUsage,
		next).Scan(&clock)
	switch {
	case errors.Is(err, pgx.ErrNoRows): // the instance was removed
	case err != nil:
		return fmt.Errorf("write down health: %w", err)
	default:
		p.heard(sent, time.Now(), clock)
	}
	// The registry does not read a change between ready and busy.
	if h.State != e.State && (!h.State.Serving() || !e.State.Serving()) {
		p.log.Info("instance changed", "model", e.Model.Name, "server", e.Server, "from", e.State, "to", h.State,
			"reason", h.Reason)
	}
	return nil
}
