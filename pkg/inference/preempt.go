package inference

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// errPreempted ends a run whose slot is wanted for a request that a client waits for.
var errPreempted = errors.New("preempted: its slot serves an online request")

// runs knows the runs of the node by their tokens, so that one of them can be preempted.
type runs struct {
	mu      sync.Mutex
	byToken map[int64]preemptible
}

// preemptible is a run that can be preempted if it stops: if its call is known to end with its connection.
type preemptible struct {
	end   context.CancelCauseFunc
	stops func() bool
}

// begin returns the context of a run; done must follow.
func (r *runs) begin(ctx context.Context, token int64, stops func() bool) (run context.Context, done func()) {
	run, end := context.WithCancelCause(ctx)
	r.mu.Lock()
	if r.byToken == nil {
		r.byToken = map[int64]preemptible{}
	}
	r.byToken[token] = preemptible{end, stops}
	r.mu.Unlock()
	return run, func() {
		r.mu.Lock()
		delete(r.byToken, token)
		r.mu.Unlock()
		end(nil)
	}
}

// preempt ends a run. It is false if the run is not there any more, or would go on without its connection: the order
// goes by the model, and the call may have another operation. Its slot would be in doubt, of use to no gateway.
func (r *runs) preempt(token int64) bool {
	r.mu.Lock()
	run, there := r.byToken[token]
	r.mu.Unlock()
	if !there || !run.stops() {
		return false
	}
	run.end(errPreempted)
	return true
}

// preempted puts the entry of a run that was preempted back at its position, without an attempt spent. A
// run that ended before it was stopped keeps its result, and one that must not run twice its failure.
func preempted(ctx context.Context, err error) error {
	if err == nil || !errors.Is(context.Cause(ctx), errPreempted) || !errors.Is(err, errPreempted) {
		return err
	}
	return invalidation.NoCapacity(0, err)
}

func (p *SlotPool) takePreemptions(ctx context.Context) error {
	tokens, err := p.holder.TakePreemptions(ctx)
	if err != nil || len(tokens) == 0 {
		return err
	}
	p.mu.Lock()
	p.ceding = len(tokens)
	p.mu.Unlock()
	for _, token := range tokens {
		if !p.preempt(token) {
			p.mu.Lock()
			p.ceding--
			p.mu.Unlock()
		}
	}
	return nil
}

// cedeGather is how long the slot of a run that was preempted waits for those of the other runs that were ended at the
// same time, so that one statement hands them over: each waits for the disk.
const cedeGather = 5 * time.Millisecond

// ceded notes that a run that was preempted has ended, and returns how long its slot waits for the slots of others;
// called with mu held. A run whose result came first cedes nothing: the others then wait in vain.
func (p *SlotPool) ceded() time.Duration {
	p.ceding--
	if p.ceding > 0 {
		return cedeGather
	}
	return 0
}
