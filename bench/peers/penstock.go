package peers

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/penstock/penstock/bench/node"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/migrations"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Penstock measures this project: a task node with its default settings.
// Finished entries are deleted and no results kept, as graphile-worker does; KeepResults keeps them, as River does.
// With Inference the queue is one of a model, and the handler of an entry is a call to a worker, of this process or at
// WorkerURL: see inference.go.
type Penstock struct {
	KeepResults, Inference bool
	WorkerURL              string // of a worker that answers /arrivals; empty: one of this process

	dsn     string
	pushes  *pgxpool.Pool
	queue   *invalidation.Queue
	payload Payload
	worker  *instantWorker // nil unless Inference, and with WorkerURL
}

type penstockPayload struct {
	N   int    `json:"n"`
	Pad string `json:"pad"`
}

func (p *Penstock) Setup(ctx context.Context, dsn string, payload Payload) (err error) {
	p.dsn, p.payload = dsn, payload
	if p.pushes, err = postgres.Open(ctx, postgres.Config{DSN: dsn, MaxConns: 16}); err != nil {
		return err
	}
	if _, err := migrations.Up(ctx, p.pushes.Config().ConnConfig); err != nil {
		return err
	}
	if p.Inference {
		return p.setupInference(ctx)
	}
	if p.queue, err = invalidation.Open(ctx, p.pushes, "bench"); err == nil {
		return nil
	}
	retention := -time.Second
	if p.KeepResults {
		retention = time.Hour
	}
	p.queue, err = invalidation.Create(ctx, p.pushes, "bench", invalidation.Config{ResultRetention: retention})
	return err
}

func (p *Penstock) Close() {
	p.pushes.Close()
	if p.worker != nil {
		p.worker.server.Close()
	}
}

func (p *Penstock) BulkPush(ctx context.Context, n, groupSize int) (Work, error) {
	defer p.hint(ctx)()
	return bulk(ctx, n, p.pushBatch(n, groupSize))
}

func (p *Penstock) SinglePush(ctx context.Context, conns, n int, s Settings) (Work, error) {
	defer p.hint(ctx)()
	if s == Apart {
		p.queue = p.queue.WithTx(p.pushes)
	}
	return single(ctx, conns, n, p.pushOne())
}

func (p *Penstock) DrainSolo(ctx context.Context, tally *Tally) (Work, error) {
	start := time.Now()
	stop, err := p.start(ctx, Defaults, func(int) { tally.Add(1) })
	if err != nil {
		return Work{}, err
	}
	<-tally.Over()
	// The node stops when every ending is recorded.
	err = stop()
	return Work{Entries: tally.Handled(), Seconds: time.Since(start).Seconds()}, err
}

func (p *Penstock) DrainGroups(ctx context.Context, tally *Tally) (Work, error) {
	return p.DrainSolo(ctx, tally)
}

func (p *Penstock) Sustained(ctx context.Context, d time.Duration, tally *Tally) (Work, error) {
	start := time.Now()
	stop, err := p.start(ctx, Defaults, func(int) { tally.Add(1) })
	if err != nil {
		return Work{}, err
	}
	if err := ahead(ctx, d, tally, p.pushBatch(0, 0)); err != nil {
		return Work{}, err
	}
	<-tally.Over()
	err = stop()
	return Work{Entries: tally.Handled(), Seconds: time.Since(start).Seconds()}, err
}

func (p *Penstock) PickupLatency(ctx context.Context, n int, s Settings) (Work, error) {
	arrived := newArrivals(n)
	wait := arrived.wait
	if p.WorkerURL != "" {
		wait = func(ctx context.Context) ([]time.Duration, error) { return arrivalsAt(ctx, p.WorkerURL) }
	}
	stop, err := p.start(ctx, s, arrived.note)
	if err != nil {
		return Work{}, err
	}
	work, err := pickUp(ctx, n, p.pushOne(), wait)
	if err != nil {
		return Work{}, err
	}
	return work, stop()
}

func (p *Penstock) Left(ctx context.Context) (n int, err error) {
	err = p.pushes.QueryRow(ctx, `SELECT count(*) FROM penstock.entry`).Scan(&n)
	return n, err
}

// hint lets pushes hint at themselves, as in cmd/leader, until the returned function is called.
func (p *Penstock) hint(ctx context.Context) (stop func()) {
	hinter := invalidation.NewHinter(p.pushes, 0)
	p.queue = p.queue.Hinting(hinter)
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { _ = hinter.Run(ctx); close(done) }() // it returns nil, and only when ctx has ended
	return func() { cancel(); <-done }
}

// start runs a node, and returns what stops it and waits until it is done.
func (p *Penstock) start(ctx context.Context, s Settings, handle func(n int)) (stop func() error, err error) {
	config, hintEvery := node.Config{DSN: p.dsn, NoHints: s == HintsOff, Inference: p.Inference}, time.Duration(0)
	if s == Tuned {
		config.Task.Poll, hintEvery = 10*time.Millisecond, time.Millisecond
	}
	if p.worker != nil {
		p.worker.handle.Store(&handle)
	}
	if p.Inference {
		config.Task.Threads = inferenceSlots
	}
	node, err := node.New(ctx, config)
	if err != nil {
		return nil, err
	}
	if !p.Inference {
		node.Handle("bench", invalidation.HandlerFunc(func(_ context.Context, r *invalidation.Run) (json.RawMessage,
			error,
		) {
			var payload penstockPayload
			if err := json.Unmarshal(r.Entry.Payload, &payload); err != nil {
				return nil, err
			}
			handle(payload.N)
			return nil, nil
		}))
	}
	ctx, cancel := context.WithCancel(ctx)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return node.Run(ctx) })
	if s != HintsOff {
		hinter := invalidation.NewHinter(p.pushes, hintEvery)
		p.queue = p.queue.Hinting(hinter)
		group.Go(func() error { return hinter.Run(ctx) })
	}
	return func() error {
		cancel()
		defer node.Close()
		return group.Wait()
	}, nil
}

func (p *Penstock) body(i int) json.RawMessage {
	body, _ := json.Marshal(penstockPayload{N: i, Pad: p.payload.pad}) //nolint:errchkjson // two plain fields
	return body
}

func (p *Penstock) pushBatch(n, groupSize int) func(ctx context.Context, first, last int) error {
	return func(ctx context.Context, first, last int) error {
		batch := make([]invalidation.Push, last-first)
		for i := range batch {
			batch[i].Payload = p.body(first + i)
			if groupSize > 1 {
				batch[i].LockKey = fmt.Sprint("group-", (first+i)%(n/groupSize))
			}
		}
		_, err := p.queue.Push(ctx, batch...)
		return err
	}
}

func (p *Penstock) pushOne() func(ctx context.Context, i int) error {
	return func(ctx context.Context, i int) error {
		_, err := p.queue.Push(ctx, invalidation.Push{Payload: p.body(i)})
		return err
	}
}
