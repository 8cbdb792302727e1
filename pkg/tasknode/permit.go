package tasknode

import "sync"

// permits bound how many locks the node holds. One is taken before a claim and put back when the lock's last
// ending is recorded, or at once if the claim brought less.
type permits struct {
	mu      sync.Mutex
	threads int
	used    int
	onFree  func()
}

// take takes up to want permits; spare is how many beyond the processing threads there may be.
func (p *permits) take(want, spare int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := max(0, min(want, p.threads+spare-p.used))
	p.used += n
	return n
}

func (p *permits) put(n int) {
	if n == 0 {
		return
	}
	p.back(n)
	p.onFree()
}

// back is put without a word to anybody.
func (p *permits) back(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used -= n
}

func (p *permits) held() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used
}
