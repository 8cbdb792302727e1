package main

import (
	"context"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/worker"
)

// catalog keeps the gateway's models, tokens and settings as the database has them.
type catalog struct {
	*server
	mu       sync.Mutex
	settings gateway.Settings
	started  time.Time
	known    bool          // the instances were read: before, the models are those of the snapshot
	ready    chan struct{} // holds one: an instance may have become ready for requests that wait
}

// settingsEvery is the time between two readings of the settings.
const settingsEvery = time.Second

// refreshGap is the least time between two readings of the instances that requests wait for: each change of
// the registry asks for one.
const refreshGap = 50 * time.Millisecond

// snapshotEvery is the time between two writings of the snapshot.
const snapshotEvery = 30 * time.Second

// noticed is called when slots of a model were asked for, or an instance of it became ready. It does not block.
func (c *catalog) noticed(model string) {
	if !c.gateway.Cold(model) {
		return
	}
	select {
	case c.ready <- struct{}{}:
	default:
	}
}

// Run reads the settings until ctx ends.
func (c *catalog) Run(ctx context.Context) error {
	ticks := time.NewTicker(settingsEvery)
	defer ticks.Stop()
	var written, refreshed time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-c.ready:
			time.Sleep(refreshGap - time.Since(refreshed))
			c.refresh(ctx)
			refreshed = time.Now()
			continue
		case <-ticks.C:
		}
		if err := c.next(ctx); err != nil {
			if ctx.Err() == nil {
				c.log.Warn("settings stay as they are", "error", err)
			}
			continue
		}
		if c.cfg.Gateway.Snapshot != "" && time.Since(written) > snapshotEvery {
			written = time.Now()
			if err := c.snapshot().Write(c.cfg.Gateway.Snapshot); err != nil {
				c.log.Warn("snapshot", "error", err)
			}
		}
	}
}

// refresh reads the instances before the registry's own turn. It publishes what has changed.
func (c *catalog) refresh(ctx context.Context) {
	if err := c.registry.Refresh(ctx); err != nil && ctx.Err() == nil {
		c.log.Warn("instances stay as they are", "error", err)
	}
}

// next reads and publishes the settings. A gateway that started from its snapshot publishes no settings before it has
// read the models that they are of.
func (c *catalog) next(ctx context.Context) error {
	if !c.known {
		return c.read(ctx)
	}
	if err := c.readSettings(ctx); err != nil {
		return err
	}
	c.publish()
	return nil
}

// read reads everything for the first time.
func (c *catalog) read(ctx context.Context) error {
	if err := c.readSettings(ctx); err != nil {
		return err
	}
	if err := c.registry.Refresh(ctx); err != nil {
		return err
	}
	c.known = true
	c.publish()
	return nil
}

func (c *catalog) readSettings(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	c.mu.Lock()
	old := c.settings
	c.mu.Unlock()
	fresh, wrong, err := gateway.ReadSettings(ctx, c.pool, old)
	if err != nil {
		return err
	}
	for _, w := range wrong {
		c.log.Error("setting is not valid, the one before stays", "error", w)
	}
	counts, err := gateway.ReadTokenCounts(ctx, c.pool, c.member.ID())
	if err != nil {
		return err
	}
	c.gateway.SetTokenCounts(counts)
	c.mu.Lock()
	fresh.SetBudgets(c.settings.Budgets) // they may have been read meanwhile
	c.settings = fresh
	c.mu.Unlock()
	return nil
}

// Times of the readings of budgets.
const (
	budgetsEvery = 5 * time.Second
	budgetsMax   = 10 * time.Second
)

// RunBudgets reads the budgets of tokens until ctx ends, on a connection of its own: other settings do not wait for it.
func (c *catalog) RunBudgets(ctx context.Context) error {
	ticks := time.NewTicker(budgetsEvery)
	defer ticks.Stop()
	for {
		c.readBudgets(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
		}
	}
}

// readBudgets reads and publishes the budgets of tokens. If that fails, they stay as they are.
func (c *catalog) readBudgets(ctx context.Context) {
	bounded, cancel := context.WithTimeout(ctx, budgetsMax)
	defer cancel()
	budgets, err := gateway.ReadBudgets(bounded, c.pool)
	if err != nil {
		if ctx.Err() == nil {
			c.log.Warn("budgets of tokens stay as they are", "error", err)
		}
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.settings.SetBudgets(budgets)
	c.gateway.SetTokens(c.settings.Tokens)
}

// publish tells the gateway what is known.
func (c *catalog) publish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gateway.SetTokens(c.settings.Tokens)
	c.gateway.SetFlows(c.settings.Flows)
	c.gateway.SetModels(c.models())
}

// models are the registered models with their settings and instances; called with mu held.
func (c *catalog) models() []gateway.ModelState {
	if c.started.IsZero() {
		c.started = time.Now()
	}
	now := time.Now()
	var list []gateway.ModelState
	for name, m := range c.registry.Models() {
		policy, known := c.settings.Policies[name]
		if !known {
			policy = gateway.DefaultPolicy()
		}
		state := gateway.ModelState{
			Name: name, Queue: c.registry.ModelQueue(name), Protocol: m.Protocol, Remote: m.RemoteName,
			Adapters: m.RemoteNames, Version: m.Version, Headers: m.Headers, Statuses: m.Statuses,
			AbortStops: m.AbortStops != nil && *m.AbortStops,
			Async:      m.Type == worker.TypeAsync, RunMax: m.Timeouts.Run.Duration(), Policy: policy,
			Paused: c.settings.Paused[name], Created: c.started, Starts: c.settings.Starts[name],
		}
		for _, e := range c.registry.Endpoints(name) {
			state.Instances = append(state.Instances, c.instance(e, now))
		}
		list = append(list, state)
	}
	return list
}

func (c *catalog) instance(e *inference.Endpoint, now time.Time) gateway.InstanceState {
	s := c.settings.Readings[e.ID]
	s.ID, s.Server, s.Address, s.Slots, s.Usable = e.ID, e.Server, e.Address, e.Slots, e.Usable(now)
	return s
}

func (c *catalog) snapshot() gateway.SavedState {
	c.mu.Lock()
	defer c.mu.Unlock()
	return gateway.SavedState{At: time.Now(), Models: c.models(), Settings: c.settings}
}

// restore takes models and settings from the snapshot, if there is one that is fresh enough and the
// database does not answer.
func (c *catalog) restore() bool {
	path := c.cfg.Gateway.Snapshot
	if path == "" {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	if c.pool.Ping(ctx) == nil {
		return false
	}
	s, err := gateway.ReadSavedState(path, time.Now())
	if err != nil {
		c.log.Warn("database is away, and there is no snapshot to start from", "error", err)
		return false
	}
	c.log.Warn("database is away: models, settings and tokens are those of the snapshot", "at", s.At)
	c.settings = s.Settings
	c.gateway.SetTokens(s.Settings.Tokens)
	c.gateway.SetFlows(s.Settings.Flows)
	c.gateway.SetModels(s.Models)
	return true
}
