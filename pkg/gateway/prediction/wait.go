package prediction

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// waits are the requests that wait for the end of an entry.
type waits struct {
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
	noticeEvery = 500 * time.Millisecond
	sweepEvery  = 10 * time.Minute
)

// Run tells requests about the end of their predictions, reads output for streams, and pushes deliveries of webhooks,
// until ctx ends.
func (s *Predictions) Run(ctx context.Context) error {
	var group sync.WaitGroup
	defer group.Wait()
	group.Go(func() { s.beats(ctx) })
	ticks := time.NewTicker(pollEvery)
	defer ticks.Stop()
	var noticed time.Time
	swept := time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
		}
		failed := s.did(ctx, "wait for predictions", s.waits.poll(ctx, s.db))
		if time.Since(noticed) > noticeEvery {
			noticed = time.Now()
			failed = s.did(ctx, "push webhooks", s.notify(ctx)) || failed
		}
		if time.Since(swept) > sweepEvery {
			swept = time.Now()
			_, err := s.db.Exec(ctx, sweepSQL)
			failed = s.did(ctx, "sweep predictions", err) || failed
		}
		if failed {
			ticks.Reset(time.Second)
		} else {
			ticks.Reset(pollEvery)
		}
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
