package prediction

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
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

// waits are the requests that wait for the end of an entry.
type waits struct {
	bell bell // rung when a request begins to wait
	mu   sync.Mutex
	open map[*wait]bool
}

type wait struct {
	queue int32
	entry int64
	ended chan struct{}
}

func (w *waits) add(queue int32, entry int64) *wait {
	one := &wait{queue: queue, entry: entry, ended: make(chan struct{})}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.open == nil {
		w.open = map[*wait]bool{}
	}
	w.open[one] = true
	w.bell.ring()
	return one
}

func (w *waits) remove(one *wait) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.open, one)
}

func (w *waits) list() []*wait {
	w.mu.Lock()
	defer w.mu.Unlock()
	list := make([]*wait, 0, len(w.open))
	for one := range w.open {
		list = append(list, one)
	}
	return list
}

// endedSQL numbers those of the entries that are not there any more.
const endedSQL = `
SELECT k.n FROM unnest($1::int[], $2::bigint[]) WITH ORDINALITY k(queue_id, entry_id, n)
 WHERE NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = k.queue_id AND e.id = k.entry_id)`

// poll tells those whose entries have ended, with one statement for all.
func (w *waits) poll(ctx context.Context, db postgres.DB) error {
	list := w.list()
	if len(list) == 0 {
		return nil
	}
	queues, entries := make([]int32, len(list)), make([]int64, len(list))
	for i, one := range list {
		queues[i], entries[i] = one.queue, one.entry
	}
	numbers, err := pgx.CollectRows(postgres.Query(ctx, db, endedSQL, queues, entries), pgx.RowTo[int])
	if err != nil {
		return err
	}
	for _, n := range numbers {
		w.remove(list[n-1])
		close(list[n-1].ended)
	}
	return nil
}

// Times of the service's duty.
const (
	pollEvery   = 50 * time.Millisecond
	noticeEvery = 500 * time.Millisecond // while a webhook is owed
	noticeIdle  = 5 * time.Second        // while none is: those of a gateway that died are found so
	sweepEvery  = 10 * time.Minute
	failedPause = time.Second // after a statement that failed
)

// Run tells requests about the end of their predictions, reads output for streams, and pushes deliveries of webhooks,
// until ctx ends.
func (s *Predictions) Run(ctx context.Context) error {
	var group sync.WaitGroup
	defer group.Wait()
	group.Go(func() { s.beats(ctx) })
	group.Go(func() { s.notices(ctx) })
	s.polls(ctx)
	return nil
}

// polls tells requests about the end of their predictions until ctx ends.
func (s *Predictions) polls(ctx context.Context) {
	s.whileWanted(ctx, duty{
		name: "wait for predictions", bell: &s.waits.bell, every: pollEvery,
		wanted: func() bool { return len(s.waits.list()) > 0 },
		do:     func() error { return s.waits.poll(ctx, s.db) },
	})
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
			pause, err = noticeEvery, s.notify(ctx)
		}
		if s.did(ctx, "push webhooks", err) {
			pause = failedPause
		}
		if time.Since(swept) > sweepEvery {
			swept = time.Now()
			_, err := s.db.Exec(ctx, sweepSQL)
			s.did(ctx, "sweep predictions", err)
		}
		clock := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			clock.Stop()
			return
		case <-s.owed.heard():
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

// did logs the error of a duty, if there is one, and says whether there is.
func (s *Predictions) did(ctx context.Context, duty string, err error) (failed bool) {
	if err != nil && ctx.Err() == nil {
		s.log.Warn("predictions", "duty", duty, "error", err)
	}
	return err != nil
}

// Await returns when an entry has ended, or ctx has. One statement each 50 ms serves all that wait.
func (s *Predictions) Await(ctx context.Context, queue int32, entry int64) {
	one := s.waits.add(queue, entry)
	defer s.waits.remove(one)
	select {
	case <-one.ended:
	case <-ctx.Done():
	}
}
