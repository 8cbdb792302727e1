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

// wantedFor is how long after a hint slots that come idle are handed over.
const wantedFor = time.Second

// Wanted is called when gateways miss slots of a model: idle ones are handed over, and the runs that the
// database says are to be preempted are ended. It does not block.
func (p *SlotPool) Wanted(model string) {
	p.mu.Lock()
	known := p.models[model] != nil
	asking := known && p.hints > 0
	if known {
		p.models[model].wanted = time.Now().Add(wantedFor)
		p.hints++
	}
	p.mu.Unlock()
	if !known {
		return
	}
	p.HandOver(model)
	if !asking {
		go p.followHints()
	}
}

// followHints takes the orders of preemption, which requests wait for, and then reads the shares, until there has been
// no hint since.
func (p *SlotPool) followHints() {
	for {
		p.mu.Lock()
		seen := p.hints
		p.mu.Unlock()
		ctx, cancel := context.WithTimeout(context.Background(), exchangeMax)
		if err := errors.Join(p.takePreemptions(ctx), p.readShares(ctx)); err != nil {
			p.log.Warn("take preemptions", "error", err) // Renew asks again
		}
		cancel()
		p.mu.Lock()
		over := p.hints == seen
		if over {
			p.hints = 0
		}
		p.mu.Unlock()
		if over {
			return
		}
	}
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

// HandOver gives the idle slots of a model, but for those that permits cover, to the gateways that
// miss some. It does not block.
func (p *SlotPool) HandOver(model string) {
	p.mu.Lock()
	leaving := p.stateOf(model).ledger.releaseIdle()
	p.mu.Unlock()
	if leaving {
		go p.sendLeaving(model)
	}
}

// sendLeaving hands over the slots of a model that leave this node.
func (p *SlotPool) sendLeaving(model string) {
	p.talk.Lock()
	defer p.talk.Unlock()
	p.mu.Lock()
	out := p.stateOf(model).ledger.takeLeaving()
	p.mu.Unlock()
	if len(out) == 0 {
		return // given back meanwhile
	}
	ctx, cancel := context.WithTimeout(context.Background(), exchangeMax)
	defer cancel()
	if err := p.holder.HandOver(ctx, model, namesOf(out)); err != nil {
		p.log.Warn("hand over slots", "model", model, "slots", len(out), "error", err)
		p.leaveAgain(map[string][]*heldSlot{model: out})
	}
}

// leaveAgain lets slots leave once more whose statement has no answer: it may be carried out at any later time, so that
// they are not used again. Under the same tokens another one changes nothing where they are gone.
func (p *SlotPool) leaveAgain(out map[string][]*heldSlot) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for model, slots := range out {
		l := p.stateOf(model).ledger
		l.leaving = append(l.leaving, slots...)
	}
}

// releaseIdle lets the idle slots without a permit leave. It says whether there are any.
func (l *slotLedger) releaseIdle() bool {
	spare := -(max(l.unassigned, 0) + l.perSlot - 1) / l.perSlot
	for _, s := range l.instances {
		spare += len(s.idle)
	}
	for _, s := range l.instances {
		for spare > 0 && len(s.idle) > 0 {
			l.depart(s.idle[0])
			spare--
		}
	}
	return len(l.leaving) > 0
}
