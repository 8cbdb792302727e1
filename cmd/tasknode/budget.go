package main

import (
	"maps"
	"sync"
)

// budget bounds how many processing threads work for some of the queues at once, so that what is slow there leaves the
// others theirs. It is a gate of the task node.
type budget struct {
	mu     sync.Mutex
	queues map[string]bool
	free   int
}

func newBudget(threads int) *budget { return &budget{queues: map[string]bool{}, free: threads} }

// add puts a queue under the budget.
func (b *budget) add(queue string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.queues[queue] = true
}

// keep takes all other queues out of the budget.
func (b *budget) keep(queues map[string]bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	maps.DeleteFunc(b.queues, func(name string, _ bool) bool { return !queues[name] })
}

// Take implements tasknode.Gate.
func (b *budget) Take(queue string, want int) (int, func(n int)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.queues[queue] {
		return want, func(int) {}
	}
	n := min(want, b.free)
	b.free -= n
	return n, func(k int) {
		b.mu.Lock()
		b.free += k
		b.mu.Unlock()
	}
}
