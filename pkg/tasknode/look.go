package tasknode

import (
	"sync"
	"time"
)

// look decides when the node asks the database which lanes have work: when a hint or the poll wants it, once a
// second under load, and never so often that it takes more than a tenth of the time; half of it where there are more lanes
// with work than one look lists.
type look struct {
	mu        sync.Mutex
	wanted    bool
	busy      bool
	last      time.Time
	notBefore time.Time
	cost      time.Duration
	cut       bool // the last look did not list all lanes
}

func (l *look) want() {
	l.mu.Lock()
	l.wanted = true
	l.mu.Unlock()
}

// start says whether to look now; end must follow.
func (l *look) start(now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.busy || now.Before(l.notBefore) || (!l.wanted && now.Sub(l.last) < time.Second) {
		return false
	}
	l.busy, l.wanted = true, false
	return true
}

// due says that nobody has looked for a while, or that few lanes are left of those that the last look listed.
func (l *look) due(now time.Time, left int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.busy && !now.Before(l.notBefore) && (now.Sub(l.last) >= time.Second || (l.cut && left < 2*lanesAtOnce))
}

func (l *look) end(now time.Time, took time.Duration, cut bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.busy, l.last, l.cost, l.cut = false, now, took, cut
	l.notBefore = now.Add(min(10*took, 5*time.Second))
	if cut {
		l.notBefore = now.Add(took)
	}
}

// wait is how long until a look that is wanted may begin.
func (l *look) wait(now time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.wanted {
		return time.Hour
	}
	return max(time.Millisecond, l.notBefore.Sub(now))
}

// every stretches the poll while the database is slow to answer.
func (l *look) every(poll time.Duration) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return max(poll, min(20*l.cost, 5*time.Second))
}
