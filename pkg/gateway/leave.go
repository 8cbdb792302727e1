package gateway

import (
	"context"
	"fmt"
	"sync"
	"time"
)

func (l *Leases) giveBackAll(ctx context.Context) {
	var group sync.WaitGroup
	for _, r := range l.gateway.models.all() {
		l.mu.Lock()
		leaser := l.leaser(r.model.Name)
		l.mu.Unlock()
		r.pool.do(func(now time.Time, p *Pool) {
			_, idle := p.fleet.held()
			leaser.giveBackSoon(append(p.surrender(), p.Retire(now, idle)...))
		})
		group.Go(func() {
			leaser.sendDoubts(ctx)
			leaser.giveBack(ctx)
		})
	}
	group.Wait()
}

// leaveTries is how often the gateway tries to leave, each time for LeasesConfig.timeout at most.
const leaveTries = 3

// leave removes the gateway's row together with what the database has as its slots: a lease whose answer was lost may
// have brought some that no pool knows, and may still run. Slots of calls that have not ended stay, and those of doubts
// that the database has not heard of: instances are asked about both, as about the slots of a dead node.
func (l *Leases) leave(ctx context.Context) {
	var models []string
	busy := []int64{} // not null
	for _, r := range l.gateway.models.all() {
		r.pool.do(func(_ time.Time, p *Pool) { busy = append(busy, p.fleet.busyTokens()...) })
	}
	l.mu.Lock()
	for model, leaser := range l.leasers {
		models = append(models, model)
		for _, d := range leaser.leaving.Doubts() {
			busy = append(busy, d.Token)
		}
	}
	l.mu.Unlock()
	for range leaveTries {
		bounded, cancel := context.WithTimeout(ctx, l.config.timeout)
		left := l.note(l.removeGateway(bounded, models, busy), "leave")
		if !left {
			<-bounded.Done() // the database may be back by then
		}
		cancel()
		if left {
			return
		}
	}
}

const leaveSQL = `SELECT penstock.leave_gateway($1, $2, $3)`

// removeGateway removes the gateway's row and frees its slots, apart from those that are busy, by their tokens. No
// lease of the models and no hand-over to the gateway that is under way takes effect behind it.
func (l *Leases) removeGateway(ctx context.Context, models []string, busy []int64) error {
	if _, err := l.holder.DB.Exec(ctx, leaveSQL, l.holder.Node(), models, busy); err != nil {
		return fmt.Errorf("leave: %w", err)
	}
	return nil
}
