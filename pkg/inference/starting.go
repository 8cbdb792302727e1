package inference

import (
	"context"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// found is what a probe found of an instance that was known as before.
type found struct {
	worker.Health
	before *Endpoint
}

// isStarting says whether requests may wait for the instance to become ready.
func isStarting(f found) bool {
	switch f.State {
	case worker.StateStarting:
		return true
	case worker.StateUnhealthy: // nothing listens yet
		return f.before.Starts || f.before.State == worker.StateStarting
	}
	return false
}

// mayPass says whether an instance that served until now may only have been too busy for a probe: another one decides
// then, since it may be the only one that takes calls. A host that refuses the connection has no server, and one that
// does not answer for the whole time of a probe has been waited for long enough.
func mayPass(before *Endpoint, h worker.Health, took time.Duration) bool {
	return before.State.Serving() && h.State == worker.StateUnhealthy && !h.Gone &&
		took < before.Model.Timeouts.Probe.Duration()
}

// Limits of the watch of starts.
const (
	startingInterval = 500 * time.Millisecond // between probes of a start that is not watched
	startsMax        = 256                    // watched at once by a process
	watchMax         = 30 * time.Minute       // of one start
	watchStepMin     = 100 * time.Millisecond // between probes of a start that is watched
	watchStepMax     = 250 * time.Millisecond
)

// watchStep is the time between two probes of a start that is watched for so long: a fiftieth, so that a
// short start is not made longer by much, and a long one costs few probes.
func watchStep(watched time.Duration) time.Duration {
	return min(max(watched/50, watchStepMin), watchStepMax)
}

// watch probes a start in short steps until it ends, and stores what changes. The claim on its probe is renewed
// meanwhile: no other process probes it, so that the ordinary probe takes place here when it is due. That one frees
// orphaned slots, and decides by what the database holds of the instance whether it still starts. Where too many
// are watched it returns, and the start is probed when that is due.
func (p *Prober) watch(ctx context.Context, id int32, last found) error {
	select {
	case p.starts <- struct{}{}:
	default:
		return nil
	}
	defer func() { <-p.starts }()
	p.renew(ctx, id)
	began := time.Now()
	for probed := began; time.Since(began) < watchMax; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(watchStep(time.Since(began))):
		}
		if time.Since(probed) >= p.tuning.probeEvery {
			var err error
			if last, err = p.probe(ctx, id); err != nil || !isStarting(last) {
				return err
			}
			p.renew(ctx, id)
			probed = time.Now()
			continue
		}
		e := p.registry.Endpoint(id)
		if e == nil {
			return nil
		}
		h := e.adapter.Probe(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if h.State == last.State && h.Reason == last.Reason {
			continue
		}
		before := *e
		before.Starts, before.State = last.before.Starts, last.State
		next := found{Health: h, before: &before}
		if err := p.store(ctx, next, p.claimFor()); err != nil {
			return err
		}
		if !isStarting(next) {
			return nil
		}
		last = next
	}
	return nil
}
