package duty

import "sync"

// Tally is the counters of a duty: the duty adds, other goroutines read.
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

// Read returns a copy of the tally, whose maps are shared: see Add.
func (t *Tally[S]) Read() (sum S) {
	t.Add(func(s *S) { sum = *s })
	return sum
}
