package duty

import "sync"

// Tally is what a duty has done, which it counts itself and others read.
type Tally[S any] struct {
	mu  sync.Mutex
	sum S
}

// Add changes the tally.
func (t *Tally[S]) Add(change func(*S)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	change(&t.sum)
}

// Read returns the tally as it stands. What its maps hold is shared: see Add.
func (t *Tally[S]) Read() (sum S) {
	t.Add(func(s *S) { sum = *s })
	return sum
}
