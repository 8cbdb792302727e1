package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// What a call costs the worker: as on a GPU, most of it whatever the number of items.
const (
	callTakes = 20 * time.Millisecond
	itemTakes = time.Millisecond
	batchMax  = 16
	slots     = 2
)

// batchWorker takes as long for a call as a GPU might, and remembers when each item came, and with how many others.
type batchWorker struct {
	mu    sync.Mutex
	calls int
	came  map[int]time.Time
}

func (w *batchWorker) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	now := time.Now()
	var payload struct {
		N     int `json:"n"`
		Items []struct {
			N int `json:"n"`
		} `json:"items"`
	}
	if r.URL.Path != "/run" || json.NewDecoder(r.Body).Decode(&payload) != nil {
		_, _ = io.WriteString(rw, `{"active_jobs":0}`)
		return
	}
	w.mu.Lock()
	w.calls++
	if len(payload.Items) == 0 {
		w.came[payload.N] = now
	}
	for _, item := range payload.Items {
		w.came[item.N] = now
	}
	w.mu.Unlock()
	n := len(payload.Items)
	time.Sleep(callTakes + time.Duration(max(n, 1))*itemTakes)
	if n == 0 {
		_, _ = io.WriteString(rw, `{"status":"success","result":1}`)
		return
	}
	_, _ = io.WriteString(rw, `{"status":"success","result":[`+strings.Repeat(`{"status":"success","result":1},`, n-1)+
		`{"status":"success","result":1}]}`)
}

// measureBatches lets entries arrive at random at four rates, and prints how many shared a call, and how long
// they waited from the commit of their push until the worker had them. The tail is that of pushes whose
// commits overtook each other: claims pass those by that came in behind the mark of their lane until they
// next look at its beginning, within a second. Without batches the worker's two slots take some 95 a second.
func measureBatches(ctx context.Context, pool *pgxpool.Pool, lasts time.Duration) error {
	fmt.Printf("up to %d items a call, %d slots, a call takes %s and %s an item\n", batchMax, slots, callTakes,
		itemTakes)
	fmt.Printf("%10s %8s %8s %10s %10s %10s\n", "arrivals/s", "entries", "calls", "occupancy", "wait p50", "wait p99")
	for _, rate := range []int{20, 100, 250, 450} {
		if err := measureRate(ctx, pool, rate, lasts); err != nil {
			return fmt.Errorf("%d arrivals a second: %w", rate, err)
		}
	}
	return nil
}

func measureRate(ctx context.Context, pool *pgxpool.Pool, rate int, lasts time.Duration) error {
	w := &batchWorker{came: map[int]time.Time{}}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := &http.Server{Handler: w, ReadHeaderTimeout: 10 * time.Second}
	defer server.Close()
	go server.Serve(listener) //nolint:errcheck // it ends with Close
	model := worker.Model{
		Name: fmt.Sprintf("batched-%d", rate), Protocol: worker.ProtocolGeneric,
		Batch: worker.BatchLimits{Items: batchMax},
	}
	by := inference.By{Actor: "bench"}
	name, err := inference.RegisterModel(ctx, pool, model, by)
	if err != nil {
		return err
	}
	if _, err := inference.RegisterInstance(ctx, pool, model.Name, "here", "http://"+listener.Addr().String()+"/run",
		slots, nil, by); err != nil {
		return err
	}
	queue, err := invalidation.Open(ctx, pool, name)
	if err != nil {
		return err
	}
	hinter := invalidation.NewHinter(pool, 0)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go hinter.Run(ctx) //nolint:errcheck // it ends with ctx
	queue = queue.Hinting(hinter)
	n := int(float64(rate) * lasts.Seconds())
	pushed := make([]time.Time, n)
	arrived := make(chan error, 1)
	go func() {
		time.Sleep(2 * time.Second) // the node is up by then
		arrived <- arrive(ctx, queue, rate, pushed)
	}()
	plain := func(h invalidation.Handler) invalidation.Handler { return h }
	if err := serve(ctx, pool, queue, 2*slots*batchMax, n, plain); err != nil {
		return err
	}
	if err := <-arrived; err != nil {
		return err
	}
	waits := make([]time.Duration, n)
	for i := range waits {
		waits[i] = w.came[i].Sub(pushed[i])
	}
	p50, p99 := quantile(waits, 0.5), quantile(waits, 0.99)
	fmt.Printf("%10d %8d %8d %10.1f %10s %10s\n", rate, n, w.calls, float64(n)/float64(w.calls), p50, p99)
	return nil
}

// arrive pushes entries one by one, at random times that no push waits for.
func arrive(ctx context.Context, queue *invalidation.Queue, rate int, pushed []time.Time) error {
	var pushers sync.WaitGroup
	failures := make(chan error, len(pushed))
	next := time.Now()
	for i := range pushed {
		next = next.Add(time.Duration(rand.ExpFloat64() / float64(rate) * float64(time.Second)))
		time.Sleep(time.Until(next))
		pushers.Go(func() {
			_, err := queue.Push(ctx, invalidation.Push{Payload: json.RawMessage(fmt.Sprintf(`{"n":%d}`, i))})
			pushed[i] = time.Now()
			if err != nil {
				failures <- err
			}
		})
	}
	pushers.Wait()
	close(failures)
	return <-failures
}
