package api

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// pushWithin pushes entries, all or none, within the rate and the budget of GPU time of the caller's token. Those that
// were accepted before cost nothing, and are answered also where the limits let in no more: a client that lost the
// first answer would take the refusal for that of its entries.
func (a *API) pushWithin(
	ctx context.Context, queue pusher, pushes ...invalidation.Push,
) ([]invalidation.Pushed, error) {
	c := callerOf(ctx)
	refused := a.budgets.check(ctx, a.operator, c)
	if refused == nil {
		refused = a.rates.take(c, len(pushes))
	}
	if refused != nil {
		if n, err := acceptedBefore(ctx, queue, pushes, refused); err != nil || n < len(pushes) {
			return nil, cmp.Or(err, refused)
		}
	}
	pushed, err := queue.Push(ctx, pushes...)
	if refused == nil {
		a.rates.giveBack(c, replayed(pushed))
	}
	return pushed, err
}

// acceptedBefore returns how many of pushes, from the first one on, a refusal by the limits of a token does not
// concern, since they were accepted before; of another refusal none. Where a key is swept between this and the push,
// its entry is inserted once more: the first push of it has paid, a day ago or longer.
func acceptedBefore(ctx context.Context, queue pusher, pushes []invalidation.Push, refused error) (int, error) {
	if !errors.Is(refused, errRate) {
		return 0, nil
	}
	return queue.AcceptedBefore(ctx, pushes...)
}

// replayed counts the answers of entries that were accepted before.
func replayed(pushed []invalidation.Pushed) (n int) {
	for _, p := range pushed {
		if p.Verdict == invalidation.Replayed {
			n++
		}
	}
	return n
}

// gpuTimeBudgets bound the GPU time that the calls of a token's flows, and of flows below them, take in an hour or a
// day.
// Nodes and gateways record a call within seconds of its end, in that hour: what runs and waits when
// the budget is spent goes beyond it.
type gpuTimeBudgets struct {
	mu sync.Mutex
	of map[string]spending // by the name of the token
}

// spending is what the flows of a token had taken at a time.
type spending struct {
	at   time.Time
	ms   int64
	ends time.Time // of the period, by this process's clock
}

// spendingKept is for how long a spending that is within its budget is not read again.
const spendingKept = 2 * time.Second

// check returns an error with the time until the next period if the budget of the caller's token is spent.
func (b *gpuTimeBudgets) check(ctx context.Context, db *operator.Database, c caller) error {
	if c.GPUMS == nil || c.GPUPeriod == nil {
		return nil
	}
	s, err := b.spent(ctx, db, c)
	if err != nil {
		return err
	}
	if s.ms < *c.GPUMS {
		return nil
	}
	return &rateError{
		text: fmt.Sprintf("the calls of its flows have taken %d of %d GPU milliseconds of this %s; try again in the "+
			"next one", s.ms, *c.GPUMS, *c.GPUPeriod),
		wait: max(time.Second, time.Until(s.ends)),
	}
}

func (b *gpuTimeBudgets) spent(ctx context.Context, db *operator.Database, c caller) (spending, error) {
	b.mu.Lock()
	s, found := b.of[c.Name]
	b.mu.Unlock()
	now := time.Now()
	if found && now.Before(s.ends) && now.Sub(s.at) < spendingKept {
		return s, nil
	}
	ms, endsIn, err := db.GPUSpent(ctx, c.Flows, *c.GPUPeriod)
	if err != nil {
		return s, fmt.Errorf("check the budget of token %q: %w", c.Name, err)
	}
	// From now on: the statement may have waited before it read the clock.
	s = spending{at: now, ms: ms, ends: time.Now().Add(endsIn)}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.of == nil || len(b.of) >= bucketsMax {
		b.of = map[string]spending{}
	}
	b.of[c.Name] = s
	return s, nil
}
