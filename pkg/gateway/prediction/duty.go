package prediction

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/duty"
)

// bell tells a duty that there is work again; one that has none waits for it without a clock.
type bell struct {
	once sync.Once
	rung chan struct{} // holds one
}

func (b *bell) heard() <-chan struct{} {
	b.once.Do(func() { b.rung = make(chan struct{}, 1) })
	return b.rung
}

func (b *bell) ring() {
	b.heard()
	select {
	case b.rung <- struct{}{}:
	default:
	}
}

// Times of the service's duty.
const (
	noticeEvery = 500 * time.Millisecond // while a webhook is owed, at most
	noticeIdle  = 5 * time.Second        // while none is: those of a gateway that died are found so
	sweepEvery  = 10 * time.Minute
	failedPause = time.Second // after a statement that failed
)

// Run reads output for streams, and pushes deliveries of webhooks, until ctx ends.
func (s *Predictions) Run(ctx context.Context) error {
	var group sync.WaitGroup
	defer group.Wait()
	group.Go(func() { s.beats(ctx) })
	s.notices(ctx)
	return nil
}

// repeated is a statement that is made again and again while requests need it.
type repeated struct {
	name   string
	bell   *bell // rung when a request begins to need it
	every  time.Duration
	wanted func() bool
	do     func() error
}

// whileWanted makes a statement until ctx ends. While no request needs it, there is no statement and no clock.
func (s *Predictions) whileWanted(ctx context.Context, d repeated) {
	var failing duty.Failing
	for heard(ctx, d.bell) {
		for pause := d.every; d.wanted() && passed(ctx, pause); {
			pause = d.every
			err := d.do()
			failing.Note(ctx, s.log, slog.LevelError, d.name, err)
			if err != nil {
				pause = failedPause
			}
		}
	}
}

// heard waits until a bell is rung; it is false when ctx has ended.
func heard(ctx context.Context, b *bell) bool {
	select {
	case <-ctx.Done():
		return false
	case <-b.heard():
		return true
	}
}

// passed waits for a while; it is false when ctx has ended.
func passed(ctx context.Context, d time.Duration) bool {
	clock := time.NewTimer(d)
	defer clock.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-clock.C:
		return true
	}
}
