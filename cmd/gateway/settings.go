package main

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// settingsDuty keeps the gateway's models, tokens and settings as the database has them.
type settingsDuty struct {
	pool     *pgxpool.Pool
	gateway  *gateway.Gateway
	registry *inference.Registry
	node     func() invalidation.NodeID // the gateway's incarnation
	file     string                     // of the snapshot; empty: none is written
	log      *slog.Logger
	ready    chan struct{} // holds one: an instance may have become ready for requests that wait
	// known says that the instances were read: before, the models are those of the snapshot. Only the goroutine of the
	// start, and then that of Run, uses it.
	known               bool
	reading, refreshing duty.Failing

	mu      sync.Mutex
	current gateway.Settings
	started time.Time
}

// settingsEvery is the time between two readings of the settings.
const settingsEvery = time.Second

// refreshGap is the least time between two readings of the instances that requests wait for: each change of
// the registry asks for one.
const refreshGap = 50 * time.Millisecond

// snapshotEvery is the time between two writings of the snapshot.
const snapshotEvery = 30 * time.Second

// noticed is called when slots of a model were asked for, or an instance of it became ready. It does not block.
func (d *settingsDuty) noticed(model string) {
	if !d.gateway.Cold(model) {
		return
	}
	select {
	case d.ready <- struct{}{}:
	default:
	}
}

// Run reads the settings until ctx ends.
func (d *settingsDuty) Run(ctx context.Context) error {
	ticks := time.NewTicker(settingsEvery)
	defer ticks.Stop()
	var written, refreshed time.Time
	var failing, writing duty.Failing
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-d.ready:
			time.Sleep(refreshGap - time.Since(refreshed))
			d.refresh(ctx)
			refreshed = time.Now()
			continue
		case <-ticks.C:
		}
		err := d.next(ctx)
		failing.Note(ctx, d.log, slog.LevelError, "read settings", err)
		if err != nil {
			continue // they stay as they are
		}
		if d.file != "" && time.Since(written) > snapshotEvery {
			written = time.Now()
			writing.Note(ctx, d.log, slog.LevelWarn, "write snapshot", d.snapshot().Write(d.file))
		}
	}
}

// refresh reads the instances before the registry's own turn. It publishes what has changed.
func (d *settingsDuty) refresh(ctx context.Context) {
	d.refreshing.Note(ctx, d.log, slog.LevelWarn, "read the instances", d.registry.Refresh(ctx))
}

// next reads and publishes the settings. A gateway that started from its snapshot publishes no settings before it has
// read the models that they are of.
func (d *settingsDuty) next(ctx context.Context) error {
	if !d.known {
		return d.read(ctx)
	}
	if err := d.readSettings(ctx); err != nil {
		return err
	}
	d.publish()
	return nil
}

// read reads everything for the first time.
func (d *settingsDuty) read(ctx context.Context) error {
	if err := d.readSettings(ctx); err != nil {
		return err
	}
	if err := d.registry.Refresh(ctx); err != nil {
		return err
	}
	d.known = true
	d.publish()
	return nil
}

func (d *settingsDuty) readSettings(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	d.mu.Lock()
	old := d.current
	d.mu.Unlock()
	fresh, wrong, err := gateway.ReadSettings(ctx, d.pool, old)
	if err != nil {
		return err
	}
	// Those that are not valid stay as they were before.
	d.reading.Note(ctx, d.log, slog.LevelError, "take over settings", errors.Join(wrong...))
	counts, err := gateway.ReadTokenCounts(ctx, d.pool, d.node())
	if err != nil {
		return err
	}
	d.gateway.SetTokenCounts(counts)
	d.mu.Lock()
	fresh.SetBudgets(d.current.Budgets) // they may have been read meanwhile
	d.current = fresh
	d.mu.Unlock()
	return nil
}

// Times of the readings of budgets.
const (
	budgetsEvery = 5 * time.Second
	budgetsMax   = 10 * time.Second
)

// RunBudgets reads the budgets of tokens until ctx ends, on a connection of its own: other settings do not wait for it.
func (d *settingsDuty) RunBudgets(ctx context.Context) error {
	ticks := time.NewTicker(budgetsEvery)
	defer ticks.Stop()
	var failing duty.Failing
	for {
		failing.Note(ctx, d.log, slog.LevelError, "read budgets of tokens", d.readBudgets(ctx))
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
		}
	}
}

// readBudgets reads and publishes the budgets of tokens. If that fails, they stay as they are.
func (d *settingsDuty) readBudgets(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, budgetsMax)
	defer cancel()
	budgets, err := gateway.ReadBudgets(bounded, d.pool)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.current.SetBudgets(budgets)
	d.gateway.SetTokens(d.current.Tokens)
	return nil
}

// publish tells the gateway what is known.
func (d *settingsDuty) publish() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.gateway.SetTokens(d.current.Tokens)
	d.gateway.SetFlows(d.current.Flows)
	d.gateway.SetModels(d.models())
}

// models are the registered models with their settings and instances; called with mu held.
func (d *settingsDuty) models() []gateway.ModelState {
	if d.started.IsZero() {
		d.started = time.Now()
	}
	now := time.Now()
	var list []gateway.ModelState
	for name, m := range d.registry.Models() {
		policy, known := d.current.Policies[name]
		if !known {
			policy = gateway.DefaultPolicy()
		}
		state := gateway.ModelState{
			Name: name, Queue: d.registry.ModelQueue(name), Protocol: m.Protocol, Remote: m.RemoteName,
			Adapters: m.RemoteNames, Version: m.Version, Headers: m.Headers, Statuses: m.Statuses,
			Template: string(m.Body), Operation: m.Operation, Stream: m.Stream,
			AbortStops: m.AbortStops,
			Async:      m.Type == worker.TypeAsync, RunMax: m.Timeouts.Run.Duration(), Policy: policy,
			ChoicesMax: m.ChoicesMax,
			Paused:     d.current.Paused[name], Created: d.started, Starts: d.current.Starts[name],
		}
		for _, e := range d.registry.Endpoints(name) {
			state.Instances = append(state.Instances, d.instance(e, now))
		}
		list = append(list, state)
	}
	return list
}

func (d *settingsDuty) instance(e *inference.Endpoint, now time.Time) gateway.InstanceState {
	s := d.current.Readings[e.ID]
	s.ID, s.Server, s.Address, s.Slots, s.Usable = e.ID, e.Server, e.Address, e.Slots, e.Usable(now)
	s.GPUs = e.GPUs()
	return s
}

func (d *settingsDuty) snapshot() gateway.SavedState {
	d.mu.Lock()
	defer d.mu.Unlock()
	return gateway.SavedState{At: time.Now(), Models: d.models(), Settings: d.current}
}

// restore takes models and settings from the snapshot, if there is one that is fresh enough and the
// database does not answer.
func (d *settingsDuty) restore() bool {
	if d.file == "" {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	if d.pool.Ping(ctx) == nil {
		return false
	}
	s, err := gateway.ReadSavedState(d.file, time.Now())
	if err != nil {
		d.log.Warn("database is away, and there is no snapshot to start from", "error", err)
		return false
	}
	d.log.Warn("database is away: models, settings and tokens are those of the snapshot", "at", s.At)
	d.current = s.Settings
	d.gateway.SetTokens(s.Settings.Tokens)
	d.gateway.SetFlows(s.Settings.Flows)
	d.gateway.SetModels(s.Models)
	return true
}
