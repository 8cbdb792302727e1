package scale

import (
	"context"
	"fmt"
	"time"
)

// Pass reads the inputs of all models, decides, and stores what changed within the term.
func (s *Duty) Pass(ctx context.Context) error { return s.pass(ctx, nil) }

// pass is Pass for some models, or for all where models is nil. Some models are decided in a time that does not grow
// with the number of all.
func (s *Duty) pass(ctx context.Context, models []string) error {
	s.hints.begin(models)
	r, err := s.read(ctx, models)
	if err != nil {
		return err
	}
	if r.ofAll() {
		return s.pass(ctx, nil)
	}
	return s.conclude(ctx, r, nil)
}

// passBesideWakeups is Pass, beside which models that are woken are decided: they wait for no pass over all. What it
// read of these is older than their decisions, and has no effect.
func (s *Duty) passBesideWakeups(ctx context.Context, woken *pace) error {
	s.hints.beginBeside()
	s.fresher = map[string]bool{}
	defer func() { s.fresher = nil }()
	var r *reading
	var failed error
	done := make(chan struct{})
	go func() {
		defer close(done)
		r, failed = s.read(ctx, nil)
	}()
	err := serve(ctx, s, done, woken)
	<-done
	if failed != nil {
		return failed
	}
	if err != nil {
		return err
	}
	return s.conclude(ctx, r, woken)
}

// serve decides for models that are woken until end sends or is closed, or a pass over all has to decide for them.
func serve[T any](ctx context.Context, s *Duty, end <-chan T, woken *pace) error {
	some := s.hints.some
	var paused <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-end:
			return nil
		case <-some:
			if _, due := s.hints.take(); due {
				some, paused = nil, time.After(woken.wait(time.Now()))
			}
		case <-paused:
			some, paused = s.hints.some, nil
			if all, err := s.passWoken(ctx); all || err != nil {
				return err
			}
		}
	}
}

// passWoken decides for the models that are due, but where a pass over all has to.
func (s *Duty) passWoken(ctx context.Context) (all bool, err error) {
	models, due := s.hints.take()
	if !due {
		return false, nil
	}
	if models == nil {
		s.hints.signal()
		return true, nil
	}
	s.count(func(st *DutyStatus) { st.Woken++ })
	s.hints.begin(models)
	r, err := s.read(ctx, models)
	if err != nil {
		return false, err
	}
	if r.ofAll() {
		s.hints.end(nil, nil)
		for _, m := range models {
			s.hints.now(m)
		}
		return true, nil
	}
	return false, s.conclude(ctx, r, nil)
}

// reading is what a pass has read.
type reading struct {
	models []string // nil for all
	began  time.Time
	idle   []wanted
	shares map[string][]share
	inputs []input
}

// ofAll says whether models cannot be decided alone: the numbers of all deployments share the budget.
func (r *reading) ofAll() bool { return r.models != nil && len(r.inputs) > 0 && r.inputs[0].Budget > 0 }

// read reads for models, nil for all. It makes the deployments of those that have a template alone and for which
// something waits. It may run beside a pass over other models.
func (s *Duty) read(ctx context.Context, models []string) (*reading, error) {
	r := &reading{models: models, began: time.Now()}
	var err error
	if r.idle, err = s.makeWanted(ctx, models); err != nil {
		return nil, err
	}
	if r.shares, err = s.shares(ctx, models); err != nil {
		return nil, err
	}
	r.inputs, err = readModels[input](ctx, s.db, inputSQL, inputOfSQL, models)
	if err != nil {
		return nil, fmt.Errorf("read inputs of scaling: %w", err)
	}
	return r, nil
}

// conclude decides from what was read, and stores what changed. With woken it decides for woken models in between.
func (s *Duty) conclude(ctx context.Context, r *reading, woken *pace) error {
	all := make([]*verdict, 0, len(r.inputs))
	for _, in := range r.inputs {
		if s.isOld(r, in.Model) {
			continue
		}
		v, err := s.decide(in, r.shares[in.Model])
		if err != nil {
			s.cfg.Log.ErrorContext(ctx, "cannot decide for a model", "model", in.Model, "error", err)
			continue
		}
		if v != nil {
			all = append(all, v)
		}
	}
	limitByBudget(all)
	for _, v := range all {
		s.past[v.in.Model] = past{state: v.next, arrived: v.in.Arrived, counters: v.in.counters()}
	}
	if r.models != nil && s.fresher != nil {
		for _, m := range r.models {
			s.fresher[m] = true
		}
	}
	s.publish(r.models, all, r.idle)
	if err := s.storeInSlices(ctx, r, all, woken); err != nil {
		return err
	}
	s.count(func(st *DutyStatus) {
		st.Passes++
		if r.models == nil {
			st.Took = time.Since(r.began)
		}
	})
	return nil
}

// isOld says whether a model was decided since a pass over all read.
func (s *Duty) isOld(r *reading, model string) bool { return r.models == nil && s.fresher[model] }

// sliceMax is how many states are stored in a transaction: a wake-up waits for it, and for the locks of its rows.
const sliceMax = 100

// storeInSlices stores first what changed, in one transaction, and then states that are due to be stored. Between these
// it decides for models that are woken.
func (s *Duty) storeInSlices(ctx context.Context, r *reading, all []*verdict, woken *pace) error {
	var changed, kept []*verdict
	for _, v := range all {
		switch {
		case s.changes(v):
			changed = append(changed, v)
		case s.isDue(v):
			kept = append(kept, v)
		}
	}
	if err := s.store(ctx, changed); err != nil {
		return err
	}
	for len(kept) > 0 {
		if woken != nil && woken.passes(time.Now()) {
			if _, err := s.passWoken(ctx); err != nil {
				return err
			}
		}
		var slice []*verdict
		for len(kept) > 0 && len(slice) < sliceMax {
			if v := kept[0]; !s.isOld(r, v.in.Model) {
				slice = append(slice, v)
			}
			kept = kept[1:]
		}
		if err := s.store(ctx, slice); err != nil {
			return err
		}
	}
	return nil
}
