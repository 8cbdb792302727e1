package tasknode

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/pkg/invalidation"
)

// lanePoll decides when the node asks the database which lanes have work: when a hint or the timer wants it,
// once a second under load, and never so often that it takes more than a tenth of the time; half of it where
// there are more lanes with work than one poll lists.
type lanePoll struct {
	mu        sync.Mutex
	wanted    bool
	polling   bool
	last      time.Time
	notBefore time.Time
	cost      time.Duration
	cut       bool // the last poll did not list all lanes
	failing   duty.Failing
	// the last lane listed of each queue with more lanes than lanesMax: the next poll goes on behind it. Only the
	// thread that polls uses it
	beyond map[int32]invalidation.Lane
}

func (p *lanePoll) want() {
	p.mu.Lock()
	p.wanted = true
	p.mu.Unlock()
}

// start says whether to poll now; end must follow.
func (p *lanePoll) start(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.polling || now.Before(p.notBefore) || (!p.wanted && now.Sub(p.last) < time.Second) {
		return false
	}
	p.polling, p.wanted = true, false
	return true
}

// due says that the last poll is a while ago, or that few lanes are left of those that it listed.
func (p *lanePoll) due(now time.Time, left int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.polling && !now.Before(p.notBefore) && (now.Sub(p.last) >= time.Second || (p.cut && left < 2*lanesAtOnce))
}

func (p *lanePoll) end(now time.Time, took time.Duration, cut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.polling, p.last, p.cost, p.cut = false, now, took, cut
	p.notBefore = now.Add(min(10*took, 5*time.Second))
	if cut {
		p.notBefore = now.Add(took)
	}
}

// wait is how long until a poll that is wanted may begin: an hour if none is, and while one is in progress. The thread
// that polls sees then that another poll is wanted.
func (p *lanePoll) wait(now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.wanted || p.polling {
		return time.Hour
	}
	return max(time.Millisecond, p.notBefore.Sub(now))
}

// every stretches the time between polls while the database is slow to answer.
func (p *lanePoll) every(usual time.Duration) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return max(usual, min(20*p.cost, 5*time.Second))
}

// discover asks which lanes have work, if that was not asked just now. It says whether any has.
func (n *Node) discover(ctx context.Context) bool {
	if !n.poll.start(time.Now()) {
		return false
	}
	start := time.Now()
	ctx, end := n.bound(ctx)
	defer end()
	found, err := invalidation.Lanes(ctx, n.db, n.lanes.served(), lanesMax)
	for queue, heads := range found {
		n.lanes.found(queue, heads)
	}
	if err == nil {
		err = n.pollFurther(ctx, found)
	}
	n.poll.end(time.Now(), time.Since(start), len(n.poll.beyond) > 0)
	n.poll.failing.Note(ctx, n.cfg.Log, slog.LevelWarn, "poll for lanes with work", err)
	return len(found) > 0
}

// lanesMax bounds how many lanes of a queue one poll lists.
const lanesMax = 1000

// pollFurther lists lanes of the queues that have more than found shows. Each poll goes on where the one before it
// ended, so that all lanes are met in turn, however many there are.
func (n *Node) pollFurther(ctx context.Context, found map[int32][]invalidation.LaneHead) error {
	after := map[int32]invalidation.Lane{}
	for queue, heads := range found {
		if len(heads) == lanesMax {
			after[queue] = heads[lanesMax-1].Lane
			if last, begun := n.poll.beyond[queue]; begun {
				after[queue] = last
			}
		}
	}
	clear(n.poll.beyond)
	if len(after) == 0 {
		return nil
	}
	more, err := invalidation.LanesAfter(ctx, n.db, after, lanesMax)
	if err != nil {
		return err
	}
	for queue, heads := range more {
		n.lanes.found(queue, heads)
		if len(heads) == lanesMax {
			n.poll.beyond[queue] = heads[lanesMax-1].Lane
		}
	}
	return nil
}
