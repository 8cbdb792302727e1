package inference

import (
	"context"
	"time"
)

// abortProbes is the time between two probes of an instance that gave a generation up.
const abortProbes = 250 * time.Millisecond

// wentAway reports whether the instance that gave the run up goes away within AbortWait: its server
// ends the generations that it has when it is stopped, and then the entry is not to blame. The entry's
// thread and its lock key are not free meanwhile, and its permit keeps an idle slot from others.
func (d *dispatch) wentAway(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, d.tuning.abortWait)
	defer cancel()
	if d.shared() || !d.blame.free(d.call.Entry, d.held.endpoint.ID) {
		return false
	}
	for ctx.Err() == nil {
		e := d.registry.Endpoint(d.held.endpoint.ID)
		if e == nil || e.Draining || e.Address != d.held.endpoint.Address {
			return true
		}
		if h := e.adapter.Probe(ctx); ctx.Err() == nil && !h.State.Serving() {
			return true
		}
		pause(ctx, abortProbes)
	}
	return false
}
