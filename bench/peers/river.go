package peers

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// River measures riverqueue/river: InsertManyFast (COPY), one client, its batching completer.
// Finished rows are kept (state completed), as River does. It has no ordered groups outside its paid edition.
type River struct {
	pool    *pgxpool.Pool
	payload Payload
}

type riverArgs struct {
	N   int    `json:"n"`
	Pad string `json:"pad"`
}

func (riverArgs) Kind() string { return "bench" }

type riverWorker struct {
	river.WorkerDefaults[riverArgs]
	handle func(n int)
}

func (w *riverWorker) Work(_ context.Context, job *river.Job[riverArgs]) error {
	w.handle(job.Args.N)
	return nil
}

type riverClient = river.Client[pgx.Tx]

// riverFast was the best of MaxWorkers 500 to 10,000 and FetchCooldown 1 and 5 ms.
// River fetches at most MaxWorkers at once, so for handlers that do nothing it is the batch size.
var riverFast = river.Config{
	FetchCooldown:     time.Millisecond,
	FetchPollInterval: 10 * time.Millisecond,
	Queues:            map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 1000}},
}

// riverDefaults leaves everything unset but the queue, which River wants named.
var riverDefaults = river.Config{
	Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 100}},
}

func (r *River) Setup(ctx context.Context, dsn string, payload Payload) error {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return fmt.Errorf("parse dsn: %w", err)
	}
	config.MaxConns, config.MinConns = 20, 4
	r.payload = payload
	if r.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	migrator, err := rivermigrate.New(riverpgxv5.New(r.pool),
		&rivermigrate.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return fmt.Errorf("prepare migration: %w", err)
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	return nil
}

func (r *River) Close() { r.pool.Close() }

func (r *River) BulkPush(ctx context.Context, n, groupSize int) (Work, error) {
	if groupSize > 1 {
		return Work{}, ErrUnsupported
	}
	client, err := r.client(river.Config{}, nil)
	if err != nil {
		return Work{}, err
	}
	return bulk(ctx, n, r.pushBatch(client))
}

func (r *River) SinglePush(ctx context.Context, conns, n int, _ Settings) (Work, error) {
	client, err := r.client(river.Config{}, nil)
	if err != nil {
		return Work{}, err
	}
	return single(ctx, conns, n, r.pushOne(client))
}

func (r *River) DrainSolo(ctx context.Context, tally *Tally) (Work, error) {
	client, err := r.client(riverFast, func(int) { tally.Add(1) })
	if err != nil {
		return Work{}, err
	}
	start := time.Now()
	if err := client.Start(ctx); err != nil {
		return Work{}, fmt.Errorf("start: %w", err)
	}
	<-tally.Over()
	// Stop flushes the completer: without it the last batch would wait for a tick.
	if err := client.Stop(ctx); err != nil {
		return Work{}, fmt.Errorf("stop: %w", err)
	}
	return Work{Entries: tally.Handled(), Seconds: time.Since(start).Seconds()}, nil
}

func (r *River) DrainGroups(context.Context, *Tally) (Work, error) { return Work{}, ErrUnsupported }

func (r *River) Sustained(ctx context.Context, d time.Duration, tally *Tally) (Work, error) {
	client, err := r.client(riverFast, func(int) { tally.Add(1) })
	if err != nil {
		return Work{}, err
	}
	start := time.Now()
	if err := client.Start(ctx); err != nil {
		return Work{}, fmt.Errorf("start: %w", err)
	}
	if err := ahead(ctx, d, tally, r.pushBatch(client)); err != nil {
		return Work{}, err
	}
	<-tally.Over()
	if err := client.Stop(ctx); err != nil {
		return Work{}, fmt.Errorf("stop: %w", err)
	}
	return Work{Entries: tally.Handled(), Seconds: time.Since(start).Seconds()}, nil
}

func (r *River) PickupLatency(ctx context.Context, n int, s Settings) (Work, error) {
	config := riverDefaults
	switch s {
	case Tuned:
		config = riverFast
	case HintsOff:
		config.PollOnly = true
	}
	arrived := newArrivals(n)
	client, err := r.client(config, arrived.note)
	if err != nil {
		return Work{}, err
	}
	if err := client.Start(ctx); err != nil {
		return Work{}, fmt.Errorf("start: %w", err)
	}
	work, err := pickUp(ctx, n, r.pushOne(client), arrived.wait)
	if err != nil {
		return Work{}, err
	}
	return work, client.Stop(ctx)
}

func (r *River) Left(ctx context.Context) (int, error) {
	var n int
	err := r.pool.QueryRow(ctx, `SELECT count(*) FROM river_job WHERE state <> 'completed'`).Scan(&n)
	return n, err
}

func (r *River) client(config river.Config, handle func(n int)) (*riverClient, error) {
	config.Logger = slog.New(slog.DiscardHandler)
	config.Workers = river.NewWorkers()
	river.AddWorker(config.Workers, &riverWorker{handle: handle})
	client, err := river.NewClient(riverpgxv5.New(r.pool), &config)
	if err != nil {
		return nil, fmt.Errorf("make client: %w", err)
	}
	return client, nil
}

func (r *River) pushBatch(client *riverClient) func(ctx context.Context, first, last int) error {
	return func(ctx context.Context, first, last int) error {
		params := make([]river.InsertManyParams, 0, last-first)
		for i := first; i < last; i++ {
			params = append(params, river.InsertManyParams{Args: riverArgs{N: i, Pad: r.payload.pad}})
		}
		_, err := client.InsertManyFast(ctx, params)
		return err
	}
}

func (r *River) pushOne(client *riverClient) func(ctx context.Context, i int) error {
	return func(ctx context.Context, i int) error {
		_, err := client.Insert(ctx, riverArgs{N: i, Pad: r.payload.pad}, nil)
		return err
	}
}
