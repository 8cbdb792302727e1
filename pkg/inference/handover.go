package inference

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/penstock/penstock/pkg/slot"
)

// wantedFor is how long after a hint slots that come idle are handed over.
const wantedFor = time.Second

// Wanted is called when gateways miss slots of a model: idle ones that no permits cover are handed over, and the runs
// that the database says are to be preempted are ended. It does not block.
func (p *SlotPool) Wanted(model string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	state := p.models[model]
	if state == nil {
		return
	}
	state.wanted = time.Now().Add(wantedFor)
	if state.ledger.sendIdleAway() {
		go p.sendGoing(model)
	}
	if p.hints++; p.hints == 1 {
		go p.followHints()
	}
}

// followHints takes the orders of preemption, which requests wait for, until there has been no hint since, and then
// reads the shares. While they are read, one more waits to read them, for all hints meanwhile.
func (p *SlotPool) followHints() {
	for over := false; !over; {
		p.mu.Lock()
		seen := p.hints
		p.mu.Unlock()
		p.ask("take preemptions", p.takePreemptions)
		p.mu.Lock()
		over = p.hints == seen
		if over {
			p.hints = 0
		}
		p.mu.Unlock()
	}
	p.mu.Lock()
	waits, most := p.sharesDue, min(sharesPause*p.sharesTook, sharesWithin)
	p.sharesDue = true
	p.mu.Unlock()
	if waits {
		return // they are read for this hint as well
	}
	time.Sleep(rand.N(most + 1))
	p.sharesTalk.Lock()
	defer p.sharesTalk.Unlock()
	p.mu.Lock()
	p.sharesDue = false
	p.mu.Unlock()
	p.ask("read shares", p.readShares)
}

// Bounds on the random time for which the shares wait after a hint. All nodes that know the model hear it at once, and
// reading them takes the longer the more of them go without.
const (
	sharesPause  = 20 // times what the last reading took, at most
	sharesWithin = 250 * time.Millisecond
)

// note takes note of the outcome of a statement about the slots of a model, see duty.Failing.
func (p *SlotPool) note(step, model string, err error) {
	p.failing.Note(context.Background(), p.log, slog.LevelWarn, step, step+"\x00"+model, err, "model", model)
}

// ask sends a statement that Renew sends as well, so that a failure is only logged.
func (p *SlotPool) ask(what string, statement func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), p.tuning.exchangeMax)
	defer cancel()
	p.failing.Note(ctx, p.log, slog.LevelWarn, what, what, statement(ctx))
}

// sendGoing hands over the slots of a model that go away.
func (p *SlotPool) sendGoing(model string) {
	ctx, done, err := p.exchange(context.Background())
	if err != nil {
		p.note("hand over slots", model, err)
		return // Renew gives them back
	}
	defer done()
	p.mu.Lock()
	out := p.stateOf(model).ledger.leaving.TakeBack()
	p.mu.Unlock()
	if len(out) == 0 {
		return // given back meanwhile
	}
	err = p.holder.HandOver(ctx, model, out)
	p.note("hand over slots", model, err)
	p.gaveBack(map[string][]slot.Held{model: out}, err == nil)
}

// gaveBack notes whether slots of models were given back.
func (p *SlotPool) gaveBack(out map[string][]slot.Held, answered bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for model, slots := range out {
		p.stateOf(model).ledger.leaving.GaveBack(time.Now(), answered, slots...)
	}
}

// sendIdleAway sends the idle slots without a permit away. It says whether any go.
func (l *slotLedger) sendIdleAway() bool {
	spare := l.idle() - l.covering()
	for _, s := range l.instances {
		for spare > 0 && s.Idle() > 0 {
			l.sendAway(s.First())
			spare--
		}
	}
	return l.leaving.Back() > 0
}
