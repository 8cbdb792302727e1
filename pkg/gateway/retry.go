package gateway

import "sync"

// retryBudget bounds second attempts to a tenth of a pool's requests, so that retries do not add a second
// load to workers that break under the first. Each request earns a tenth of a retry, up to ten.
type retryBudget struct {
	mu     sync.Mutex
	tenths map[*gate]int
}

const (
	retryCost  = 10
	retryStock = 100
)

func (b *retryBudget) earn(g *gate) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tenths == nil {
		b.tenths = map[*gate]int{}
	}
	saved, known := b.tenths[g]
	if !known {
		saved = retryStock
	}
	b.tenths[g] = min(saved+1, retryStock)
}

func (b *retryBudget) allow(g *gate) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tenths[g] < retryCost {
		return false
	}
	b.tenths[g] -= retryCost
	return true
}
