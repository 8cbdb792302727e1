package gateway

import "sync"

// retryBudget bounds second attempts to a tenth of a pool's requests, so that retries do not add a second
// load to workers that break under the first. Each request earns a tenth of a retry, up to ten.
type retryBudget struct {
	mu     sync.Mutex
	tenths map[*sharedPool]int
}

const (
	retryCost = 10  // tenths
	retryMost = 100 // that are saved up
)

func (b *retryBudget) earn(pool *sharedPool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tenths == nil {
		b.tenths = map[*sharedPool]int{}
	}
	saved, known := b.tenths[pool]
	if !known {
		saved = retryMost
	}
	b.tenths[pool] = min(saved+1, retryMost)
}

func (b *retryBudget) allow(pool *sharedPool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tenths[pool] < retryCost {
		return false
	}
	b.tenths[pool] -= retryCost
	return true
}
