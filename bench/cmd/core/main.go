// Command core measures the queue by itself, without nodes: bulk push, single push, drain of solo entries and of
// groups, with the WAL each writes for an entry.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/bench/database"
	"github.com/penstock/penstock/bench/meter"
	"github.com/penstock/penstock/pkg/invalidation"
)

func main() {
	n := flag.Int("n", 200_000, "entries of each scenario")
	batch := flag.Int("batch", 500, "locks a claim")
	dsn := flag.String("dsn", "", "database to use; a private durable one if empty")
	keep := flag.Bool("results", false, "keep results")
	limits := flag.Bool("limits", false, "instead: drains without limits and with limits that do not bind, in "+
		"turns, at 1, 100 and 100,000 lock keys")
	flows := flag.Int("flows", 0,
		"instead: drains of so many flows of two entries, lane by lane and many lanes at a time")
	rounds := flag.Int("rounds", 5, "of -limits and -flows")
	only := flag.String("only", "", "the one kind of -limits to measure, as it is printed; all if empty")
	flag.Parse()
	b := &bench{n: *n, rounds: *rounds, only: *only}
	if err := b.run(context.Background(), *dsn, *batch, *keep, *limits, *flows); err != nil {
		log.Fatal(err)
	}
}

type bench struct {
	pool   *pgxpool.Pool
	meter  *meter.Meter // of -limits
	n      int
	rounds int
	only   string
}

func (b *bench) run(ctx context.Context, dsn string, batch int, keep, limits bool, flows int) error {
	n := b.n
	pool, closeAll, err := database.Open(ctx, dsn, 24)
	if err != nil {
		return err
	}
	defer closeAll()
	b.pool = pool
	retention := -time.Second
	if keep {
		retention = time.Hour
	}
	_ = invalidation.Drop(ctx, pool, "bench", true, invalidation.By{})
	q, err := invalidation.Create(ctx, pool, "bench", invalidation.Config{ResultRetention: retention})
	if err != nil {
		return err
	}
	if limits {
		return b.compareLimits(ctx, batch)
	}
	if flows > 0 {
		return b.compareLanes(ctx, flows)
	}
	fmt.Printf("%-22s %12s %10s %12s\n", "scenario", "entries", "seconds", "entries/s   WAL B/entry")
	if err := b.measure(ctx, "push bulk of 1000", n, func() error { return b.pushBulk(ctx, q, n, 0) }); err != nil {
		return err
	}
	if err := b.measure(ctx, "drain solo", n, func() error { return b.drain(ctx, q, n, batch) }); err != nil {
		return err
	}
	if err := b.measure(ctx, "push groups of 50", n, func() error { return b.pushBulk(ctx, q, n, 50) }); err != nil {
		return err
	}
	if err := b.measure(ctx, "drain groups of 50", n, func() error { return b.drain(ctx, q, n, 40) }); err != nil {
		return err
	}
	single := n / 5
	if err := b.measure(ctx, "push single x16", single,
		func() error { return b.pushSingle(ctx, q, single) }); err != nil {
		return err
	}
	return b.measure(ctx, "drain solo (2)", single, func() error { return b.drain(ctx, q, single, batch) })
}

func (b *bench) measure(ctx context.Context, name string, n int, fn func() error) error {
	wal := func() (lsn float64, err error) {
		err = b.pool.QueryRow(ctx, `SELECT pg_current_wal_insert_lsn() - '0/0'`).Scan(&lsn)
		return lsn, err
	}
	before, err := wal()
	if err != nil {
		return err
	}
	start := time.Now()
	if err := fn(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	took := time.Since(start)
	after, err := wal()
	if err != nil {
		return err
	}
	fmt.Printf("%-22s %12d %10.2f %12.0f %10.0f\n", name, n, took.Seconds(), float64(n)/took.Seconds(),
		(after-before)/float64(n))
	return nil
}

func (b *bench) pushBulk(ctx context.Context, q *invalidation.Queue, n, group int) error {
	return each(2, func(w int) error {
		for i := w * 1000; i < n; i += 2000 {
			pushes := make([]invalidation.Push, min(1000, n-i))
			for j := range pushes {
				pushes[j].Payload = json.RawMessage(fmt.Sprintf(`{"n": %d}`, i+j))
				if group > 0 {
					pushes[j].LockKey = fmt.Sprintf("key-%d", (i+j)/group)
				}
			}
			if _, err := q.Push(ctx, pushes...); err != nil {
				return err
			}
		}
		return nil
	})
}

func (b *bench) pushSingle(ctx context.Context, q *invalidation.Queue, n int) error {
	return each(16, func(w int) error {
		for i := w; i < n; i += 16 {
			if _, err := q.Push(ctx, invalidation.Push{Payload: json.RawMessage(`{"n": 1}`)}); err != nil {
				return err
			}
		}
		return nil
	})
}

// drain claims with one goroutine and finishes with two.
func (b *bench) drain(ctx context.Context, q *invalidation.Queue, n, batch int) error {
	claimed := make(chan []*invalidation.Lock, 4)
	var done atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, 3)
	for range 2 {
		wg.Go(func() {
			for locks := range claimed {
				endings := doneAll(locks)
				ours, err := q.Settle(ctx, 1, endings)
				if err != nil || len(ours) != len(locks) {
					errs <- fmt.Errorf("settled %d of %d: %w", len(ours), len(locks), err)
					return
				}
				done.Add(int64(len(endings)))
			}
		})
	}
	var total int
	var mark int64
	for id := int32(1); total < n; id++ {
		c, err := q.Claim(ctx, invalidation.ClaimRequest{
			Node: 1, ClaimID: id, Lane: invalidation.Lane{Priority: 1},
			From: mark, Limit: batch,
		})
		if err != nil {
			return err
		}
		mark = c.LowWater
		for _, l := range c.Locks {
			total += len(l.Entries)
		}
		if c.Scanned == 0 {
			return fmt.Errorf("drained %d of %d", total, n)
		}
		select {
		case claimed <- c.Locks:
		case err := <-errs:
			return err
		}
	}
	close(claimed)
	wg.Wait()
	if done.Load() != int64(n) {
		return fmt.Errorf("finished %d of %d", done.Load(), n)
	}
	return nil
}

// doneAll has an ending for each entry of the locks.
func doneAll(locks []*invalidation.Lock) (endings []invalidation.Ending) {
	for _, l := range locks {
		for i, e := range l.Entries {
			done := invalidation.Done(l, e.ID, nil, 0)
			done.Last = i == len(l.Entries)-1
			endings = append(endings, done)
		}
	}
	return endings
}

func each(workers int, fn func(w int) error) error {
	errs := make(chan error, workers)
	for w := range workers {
		go func() { errs <- fn(w) }()
	}
	var first error
	for range workers {
		if err := <-errs; err != nil && first == nil {
			first = err
		}
	}
	return first
}
