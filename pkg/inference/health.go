package inference

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/worker"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// Prober is the duty that asks every instance how it is, and frees slots that nobody answers for
// any more. Any number of processes may run it: each probe of an instance is claimed by moving the
// time of its next one.
type Prober struct {
	config   ProberConfig
	db       postgres.DB
	registry *Registry
	log      *slog.Logger
}

// ProberConfig of a Prober. The zero value works.
type ProberConfig struct {
	Interval time.Duration // between probes of an instance, jittered by a quarter: 5 s
	AtOnce   int           // instances probed at once: 32

	// Grace is how old an orphaned slot must be before a probe may free it: the call that it was
	// taken for may still have been on its way when the worker counted. 10 s.
	Grace time.Duration

	// DoubtMax frees an orphaned slot whatever the worker says, or does not say; 0: the model's own
	// limit on a run.
	DoubtMax time.Duration
}

func (c ProberConfig) withDefaults() ProberConfig {
	c.Interval = cmp.Or(c.Interval, 5*time.Second)
	c.AtOnce = cmp.Or(c.AtOnce, 32)
	c.Grace = cmp.Or(c.Grace, 10*time.Second)
	return c
}

// NewProber returns the duty.
func NewProber(config ProberConfig, db postgres.DB, registry *Registry, log *slog.Logger) *Prober {
	log = cmp.Or(log, slog.Default())
	return &Prober{config: config.withDefaults(), db: db, registry: registry, log: log}
}

// Run probes instances until ctx ends.
func (p *Prober) Run(ctx context.Context) error {
	var probes sync.WaitGroup
	defer probes.Wait()
	room := make(chan struct{}, p.config.AtOnce)
	ticks := time.NewTicker(p.config.Interval / 5)
	defer ticks.Stop()
	swept := time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
		}
		due, err := p.claimDue(ctx, p.config.AtOnce-len(room))
		if err != nil && ctx.Err() == nil {
			p.log.Warn("claim probes at instances", "error", err)
		}
		for _, id := range due {
			room <- struct{}{}
			probes.Go(func() {
				defer func() { <-room }()
				if err := p.probe(ctx, id); err != nil && ctx.Err() == nil {
					p.log.Warn("probe instance", "instance", id, "error", err)
				}
			})
		}
		if time.Since(swept) > time.Minute {
			swept = time.Now()
			p.sweep(ctx)
		}
	}
}

// claimDueSQL claims up to $2 probes that are due. The next one is due after $1 even if this one
// never ends: whoever claimed it may die. Two at once do no harm, as slots are freed by their
// tokens.
const claimDueSQL = `
UPDATE penstock.instance
   SET next_check_at = clock_timestamp() + $1::interval
 WHERE id = ANY (ARRAY(
       SELECT id FROM penstock.instance WHERE next_check_at <= clock_timestamp()
        ORDER BY next_check_at LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED))
RETURNING id`

func (p *Prober) claimDue(ctx context.Context, most int) ([]int32, error) {
	if most <= 0 {
		return nil, nil
	}
	return pgx.CollectRows(postgres.Query(ctx, p.db, claimDueSQL, p.config.Interval+10*time.Second, most),
		pgx.RowTo[int32])
}

const orphansSQL = `SELECT slot_token, age FROM penstock.orphan_slots($1)`

type orphan struct {
	Token int64
	Age   time.Duration
}

const foundSQL = `
UPDATE penstock.instance
   SET state = $2, reason = nullif($3, ''), active = $4, capacity = $5, queued = $6, kv_usage = $7,
       checked_at = clock_timestamp(), next_check_at = clock_timestamp() + $8::interval
 WHERE id = $1`

const freeSQL = `SELECT penstock.free_slots($1, $2)`

// probe asks one instance for its health, stores it, and frees slots that are stale.
func (p *Prober) probe(ctx context.Context, instance int32) error {
	e := p.registry.Endpoint(instance)
	if e == nil {
		return nil // just removed, or not usable, which the registry reports
	}
	// Before the probe: what was orphaned after the worker counted is not for this count to judge.
	orphans, err := pgx.CollectRows(postgres.Query(ctx, p.db, orphansSQL, instance), pgx.RowToStructByPos[orphan])
	if err != nil {
		return fmt.Errorf("read orphaned slots: %w", err)
	}
	h := e.adapter.Probe(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	next := time.Duration(float64(p.config.Interval) * (0.75 + 0.5*rand.Float64()))
	if _, err := p.db.Exec(ctx, foundSQL, instance, h.State, h.Reason, h.Active, h.Capacity, h.Queued, h.KVUsage,
		next); err != nil {
		return fmt.Errorf("write down health: %w", err)
	}
	if h.State != e.State {
		p.log.Info("instance changed", "model", e.Model.Name, "server", e.Server, "from", e.State, "to", h.State,
			"reason", h.Reason)
	}
	stale := staleOrphans(orphans, h, e, p.config)
	if len(stale) == 0 {
		return nil
	}
	var freed int
	if err := p.db.QueryRow(ctx, freeSQL, instance, stale).Scan(&freed); err != nil {
		return fmt.Errorf("free stale slots: %w", err)
	}
	p.log.Info("stale slots freed", "model", e.Model.Name, "server", e.Server, "freed", freed, "state", h.State)
	return nil
}

// staleOrphans returns the tokens of the slots that may be freed. It is pure.
//
// Slots that living nodes answer for are no orphans, and their calls may be part of the reported
// count: so at most as many orphans as the worker reports calls can really be running, and the
// others are not. One younger than the grace is never stale, nor does it use up the report: between
// the moment when a node takes a slot and the moment when the worker counts the call there is a
// request on its way, and a probe that overtakes it would free a slot in use. Of the others the
// oldest go first: which slot an anonymous count belongs to cannot be known, but how many are in
// use can.
func staleOrphans(orphans []orphan, h worker.Health, e *Endpoint, c ProberConfig) (stale []int64) {
	doubtMax := c.DoubtMax
	doubtMax = cmp.Or(doubtMax,
		max(e.Model.Timeouts.Run.Duration(), e.Model.MaxPollTime.Duration()+e.Model.Timeouts.Start.Duration()))
	active := h.Active
	switch {
	case h.State == worker.StateUnhealthy || h.State == worker.StateDefunct || h.State == worker.StateStarting:
		active = new(int) // nobody is there to run anything, or it has only just come up
	case active == nil && e.Model.Protocol == worker.ProtocolCog && h.State == worker.StateReady && h.Idle(e.Slots):
		active = new(int)
	}
	var settled []orphan
	for _, o := range slices.SortedFunc(slices.Values(orphans),
		func(a, b orphan) int { return cmp.Compare(b.Age, a.Age) }) {
		switch {
		case o.Age >= doubtMax:
			stale = append(stale, o.Token)
		case o.Age >= c.Grace && active != nil:
			settled = append(settled, o)
		}
	}
	for i := 0; active != nil && i < len(settled)-max(*active, 0); i++ {
		stale = append(stale, settled[i].Token)
	}
	return stale
}

const sweepOutputSQL = `SELECT penstock.sweep_output(10000)`

const sweepDemandSQL = `DELETE FROM penstock.slot_demand WHERE wanted_at < clock_timestamp() - interval '1 minute'`

// sweep drops what outlived its use.
func (p *Prober) sweep(ctx context.Context) {
	for _, sql := range []string{sweepRunsSQL, sweepDemandSQL, sweepOutputSQL} {
		if _, err := p.db.Exec(ctx, sql); err != nil && ctx.Err() == nil {
			p.log.Warn("sweep", "error", err)
		}
	}
}
