// Command dispatch measures what it costs to send an entry to a worker: a task node with an inference queue,
// and a worker in the same process that answers at once. For 8, 64 and 512 slots it prints calls a second and
// how long an entry was on its way, beside what the same worker takes when it is called without a queue. With
// -batch it measures how entries that arrive one by one are put together into calls: see batch.go.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/bench/database"
	"github.com/penstock/penstock/bench/meter"
	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
	"github.com/penstock/penstock/pkg/worker"
)

func main() {
	n := flag.Int("n", 20_000, "calls of each round")
	dsn := flag.String("dsn", "", "database to use; a private durable one if empty")
	batches := flag.Bool("batch", false, "measure batches at four rates of arrival instead")
	lasts := flag.Duration("for", 5*time.Second, "of each rate of arrival")
	flag.Parse()
	err := run(context.Background(), *dsn, func(ctx context.Context, pool *pgxpool.Pool) error {
		if *batches {
			return measureBatches(ctx, pool, *lasts)
		}
		return measureCalls(ctx, pool, *n)
	})
	if err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, dsn string, measure func(ctx context.Context, pool *pgxpool.Pool) error) error {
	pool, closeAll, err := database.Open(ctx, dsn, 16)
	if err != nil {
		return err
	}
	defer closeAll()
	return measure(ctx, pool)
}

func measureCalls(ctx context.Context, pool *pgxpool.Pool, n int) error {
	w, err := newWorker(ctx)
	if err != nil {
		return err
	}
	defer w.server.Close()
	fmt.Printf("%6s %10s %10s %12s   %-24s %-24s\n", "slots", "calls", "calls/s", "bare calls/s",
		"claim to worker p50/p99", "thread to worker p50/p99")
	for _, slots := range []int{8, 64, 512} {
		bare, err := w.bare(slots, n)
		if err != nil {
			return err
		}
		r, err := w.queued(ctx, pool, slots, n)
		if err != nil {
			return fmt.Errorf("%d slots: %w", slots, err)
		}
		fmt.Printf("%6d %10d %10.0f %12.0f   %-24s %-24s\n", slots, n, r.perSecond, bare, quantiles(r.claim),
			quantiles(r.thread))
	}
	return nil
}

// fakeWorker answers at once and remembers when each entry arrived.
type fakeWorker struct {
	server  *http.Server
	url     string
	arrived sync.Map // entry id to time.Time
	calls   atomic.Int64
}

func newWorker(ctx context.Context) (*fakeWorker, error) {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	w := &fakeWorker{url: "http://" + listener.Addr().String() + "/run"}
	w.server = &http.Server{Handler: w, ReadHeaderTimeout: 10 * time.Second}
	go w.server.Serve(listener) //nolint:errcheck // it ends with Close
	return w, nil
}

func (w *fakeWorker) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/run" {
		w.arrived.Store(r.Header.Get("Penstock-Entry"), time.Now())
		w.calls.Add(1)
	}
	_, _ = io.Copy(io.Discard, r.Body)
	_, _ = io.WriteString(rw, `{"status":"success","result":{"ok":true},"active_jobs":0}`)
}

// bare calls the worker by the same adapter without a queue, with as many calls at once as there are slots.
func (w *fakeWorker) bare(slots, n int) (perSecond float64, err error) {
	adapter, err := worker.New(worker.Model{Name: "bare", Protocol: worker.ProtocolGeneric},
		worker.Instance{Endpoint: w.url, Slots: slots}, worker.Config{})
	if err != nil {
		return 0, err
	}
	var next atomic.Int64
	var callers sync.WaitGroup
	start := time.Now()
	for range slots {
		callers.Go(func() {
			for i := next.Add(1); i <= int64(n); i = next.Add(1) {
				call := worker.Call{
					RunRef:  worker.RunRef{Entry: strconv.FormatInt(-i, 10), Token: i, Attempt: 1},
					Payload: json.RawMessage(`{}`),
				}
				if o := adapter.Submit(context.Background(), call); o.Kind != worker.Done {
					log.Fatalf("bare call: %s %s", o.Kind, o.Reason)
				}
			}
		})
	}
	callers.Wait()
	return float64(n) / time.Since(start).Seconds(), nil
}

// round is what one round came to.
type round struct {
	perSecond     float64
	claim, thread []time.Duration
}

// timed is the dispatcher with a stopwatch: it remembers when a thread took each entry up, and its claim began.
type timed struct {
	invalidation.Handler
	mu      sync.Mutex
	claimed map[string]time.Time
	taken   map[string]time.Time
}

func (t *timed) Handle(ctx context.Context, r *invalidation.Run) (json.RawMessage, error) {
	id := strconv.FormatInt(int64(r.Entry.ID), 10)
	now := time.Now()
	t.mu.Lock()
	t.claimed[id], t.taken[id] = r.Lock.ClaimedAt, now
	t.mu.Unlock()
	return t.Handler.Handle(ctx, r)
}

// queued pushes n entries and runs them through a node.
func (w *fakeWorker) queued(ctx context.Context, pool *pgxpool.Pool, slots, n int) (round, error) {
	model := worker.Model{Name: fmt.Sprintf("instant-%d", slots), Protocol: worker.ProtocolGeneric}
	name, err := inference.RegisterModel(ctx, pool, model, inference.By{Actor: "bench"})
	if err != nil {
		return round{}, err
	}
	if _, err := inference.RegisterInstance(ctx, pool, model.Name, "here", w.url, slots, nil,
		inference.By{Actor: "bench"}); err != nil {
		return round{}, err
	}
	queue, err := invalidation.Open(ctx, pool, name)
	if err != nil {
		return round{}, err
	}
	pushes := make([]invalidation.Push, n)
	for i := range pushes {
		pushes[i].Payload = json.RawMessage(`{}`)
	}
	for part := range slices.Chunk(pushes, 1000) {
		if _, err := queue.Push(ctx, part...); err != nil {
			return round{}, err
		}
	}
	t := &timed{claimed: make(map[string]time.Time, n), taken: make(map[string]time.Time, n)}
	start := time.Now()
	wrap := func(h invalidation.Handler) invalidation.Handler { t.Handler = h; return t }
	if err := serve(ctx, pool, queue, slots, n, wrap); err != nil {
		return round{}, err
	}
	r := round{perSecond: float64(n) / time.Since(start).Seconds()}
	for id, at := range t.claimed {
		value, _ := w.arrived.Load(id)
		arrived, ok := value.(time.Time)
		if !ok {
			return round{}, fmt.Errorf("entry %s never arrived at the worker", id)
		}
		r.claim = append(r.claim, arrived.Sub(at))
		r.thread = append(r.thread, arrived.Sub(t.taken[id]))
	}
	return r, nil
}

// serve runs a node until n entries have ended.
func serve(ctx context.Context, pool *pgxpool.Pool, queue *invalidation.Queue, threads, n int,
	wrap func(invalidation.Handler) invalidation.Handler,
) error {
	ctx, stop := context.WithTimeout(ctx, 5*time.Minute)
	defer stop()
	var node *tasknode.Node
	quiet := slog.New(slog.DiscardHandler)
	service := inference.NewService(inference.ServiceConfig{
		Log: quiet, Freed: func() { node.TryAgain() },
	}, pool, func() invalidation.NodeID { return node.ID() })
	node = tasknode.New(tasknode.Config{
		Name: "bench", Threads: threads, Gates: []tasknode.Gate{service.Pool},
		Log: quiet,
	}, pool, pool)
	node.Handle(queue.Name, wrap(service.Dispatcher))
	if err := service.Registry.Refresh(ctx); err != nil {
		return err
	}
	var duties sync.WaitGroup
	slotsEnd, endSlots := context.WithCancel(context.WithoutCancel(ctx))
	duties.Go(func() { _ = service.Pool.Run(slotsEnd) })
	duties.Go(func() { _ = service.Registry.Run(ctx) })
	hints := invalidation.NewListener(invalidation.ListenConfig{
		Conn: pool.Config().ConnConfig.Copy(), Wake: node.Wake,
		Log: quiet,
	})
	duties.Go(func() { _ = hints.Run(ctx) })
	ran := make(chan error, 1)
	go func() { ran <- node.Run(ctx) }()
	for ctx.Err() == nil && node.Stats().Settled.Load() < int64(n) {
		time.Sleep(time.Millisecond)
	}
	failed := ctx.Err()
	stop()
	err := <-ran
	endSlots()
	duties.Wait()
	if failed != nil {
		return fmt.Errorf("queue is not empty after five minutes: %w", failed)
	}
	return err
}

func quantiles(d []time.Duration) string {
	return fmt.Sprintf("%s / %s", quantile(d, 0.5), quantile(d, 0.99))
}

func quantile(d []time.Duration, q float64) time.Duration {
	return meter.Quantile(d, q).Round(10 * time.Microsecond)
}
