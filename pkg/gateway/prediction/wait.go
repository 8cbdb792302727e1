package prediction

import (
	"context"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
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

// duty is a statement that is made again and again while requests need it.
type duty struct {
	name   string
	bell   *bell // rung when a request begins to need it
	every  time.Duration
	wanted func() bool
	do     func() error
}

// whileWanted does a duty until ctx ends. While no request needs it, there is no statement and no clock.
func (s *Predictions) whileWanted(ctx context.Context, d duty) {
	for heard(ctx, d.bell) {
		for pause := d.every; d.wanted() && passed(ctx, pause); {
			pause = d.every
			if s.did(ctx, d.name, d.do()) {
				pause = failedPause
			}
		}
	}
}

// notices pushes deliveries of webhooks until ctx ends, and forgets old predictions.
func (s *Predictions) notices(ctx context.Context) {
	swept := time.Now()
	for {
		pause := noticeIdle
		owed, err := s.owesNotices(ctx)
		if owed {
			pause, err = s.notify(ctx)
		}
		if s.did(ctx, "push webhooks", err) {
			pause = failedPause
		}
		if time.Since(swept) > sweepEvery {
			swept = time.Now()
			s.did(ctx, "sweep predictions", s.sweep(ctx))
		}
		clock, rung := time.NewTimer(pause), s.owed.heard()
		if owed {
			rung = nil // a look follows in any case
		}
		select {
		case <-ctx.Done():
			clock.Stop()
			return
		case <-rung:
			clock.Stop()
		case <-clock.C:
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

// did logs the error of a step, if there is one, and says whether there is.
func (s *Predictions) did(ctx context.Context, step string, err error) (failed bool) {
	if err != nil && ctx.Err() == nil {
		s.log.Error("predictions", "step", step, "error", err)
	}
	return err != nil
}

// Await returns when an entry has ended, or ctx has. All that wait share one poll of the database.
func (s *Predictions) Await(ctx context.Context, queue int32, entry int64) {
	w, err := s.watch.Wait(queue, invalidation.EntryID(entry), "")
	if err != nil {
		return // never: their number is not bounded here, but by the gateway's connections
	}
	defer w.Leave()
	for !w.News().Ended {
		select {
		case <-w.Changed:
		case <-ctx.Done():
			return
		}
	}
}
