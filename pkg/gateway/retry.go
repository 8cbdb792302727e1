package gateway

import "sync"

// retryBudget bounds second attempts to a tenth of the requests of a pool, which has it, so that retries do not add a
// second load to workers that break under the first. Each request earns a tenth of a retry, up to ten; at first there
// are ten.
type retryBudget struct {
	mu    sync.Mutex
	spent int // tenths
}

const (
	retryCost     = 10  // tenths
	retrySavedMax = 100 // that are saved up
)

func (b *retryBudget) earn() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.spent = max(b.spent-1, 0)
}

func (b *retryBudget) allow() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.spent+retryCost > retrySavedMax {
		return false
	}
	b.spent += retryCost
	return true
}
