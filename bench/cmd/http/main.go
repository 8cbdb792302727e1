// Command http measures pushes through a leader's HTTP API: one by one, in lists and as a stream, with
// entries a second, p50 and p99 of requests, and the memory of the process that serves and pushes.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/bench/database"
	"github.com/penstock/penstock/bench/meter"
	"github.com/penstock/penstock/internal/httpserver"
	"github.com/penstock/penstock/pkg/api"
	"github.com/penstock/penstock/pkg/invalidation"
)

func main() {
	single := flag.Int("single", 20_000, "entries pushed one by one")
	many := flag.Int("many", 200_000, "entries pushed in lists and in streams")
	clients := flag.Int("clients", 16, "that push one by one")
	short := flag.Bool("short", false, "a tenth of all that")
	dsn := flag.String("dsn", "", "database to use; a private durable one if empty")
	flag.Parse()
	if *short {
		*single, *many = *single/10, *many/10
	}
	if err := run(context.Background(), *dsn, *single, *many, *clients); err != nil {
		log.Fatal(err)
	}
}

type bench struct {
	url    string
	client *http.Client
}

func run(ctx context.Context, dsn string, single, many, clients int) error {
	pool, closeAll, err := database.Open(ctx, dsn, 16)
	if err != nil {
		return err
	}
	defer closeAll()
	_ = invalidation.Drop(ctx, pool, "bench", true, invalidation.By{Reason: "a new run"})
	if _, err := invalidation.Create(ctx, pool, "bench", invalidation.Config{}); err != nil {
		return err
	}
	listener, err := httpserver.Listen(ctx, httpserver.Config{Address: "127.0.0.1:0"})
	if err != nil {
		return err
	}
	serving, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		handler := api.New(pool, api.Config{Open: true})
		ended <- httpserver.Serve(serving, listener, handler, slog.New(slog.DiscardHandler))
	}()
	b := &bench{
		url:    "http://" + listener.Addr().String() + "/v1/queues/bench/entries",
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}},
	}
	fmt.Printf("%-34s %9s %9s %11s %9s %9s %9s\n", "scenario", "entries", "seconds", "entries/s", "p50 ms", "p99 ms",
		"heap MiB")
	err = b.all(ctx, single, many, clients)
	stop()
	return errors.Join(err, <-ended)
}

const entry = `{"payload": {"prompt": "a sunset over the sea", "steps": 30}}`

func (b *bench) all(ctx context.Context, single, many, clients int) error {
	list := "[" + strings.TrimSuffix(strings.Repeat(entry+",", 1000), ",") + "]"
	for _, s := range []struct {
		name             string
		entries, each, c int
		push             func(i int) error
	}{
		{
			fmt.Sprintf("single x%d", clients), single, 1, clients,
			func(int) error { return b.post(ctx, "application/json", "", strings.NewReader(entry)) },
		},
		{fmt.Sprintf("single x%d, Idempotency-Key", clients), single, 1, clients, func(i int) error {
			return b.post(ctx, "application/json", fmt.Sprintf("%d-%d", time.Now().UnixNano(), i),
				strings.NewReader(entry))
		}},
		{"list of 1000 x4", many, 1000, 4, func(int) error {
			return b.post(ctx, "application/json", "",
				strings.NewReader(list))
		}},
		{"stream x1", many, many, 1, func(int) error {
			return b.post(ctx, "application/x-ndjson", "",
				repeated(many))
		}},
		{"stream x4", many, many / 4, 4, func(int) error {
			return b.post(ctx, "application/x-ndjson", "",
				repeated(many/4))
		}},
		{"stream x1, Idempotency-Key", many, many, 1, func(i int) error {
			return b.post(ctx, "application/x-ndjson", fmt.Sprintf("%d-%d", time.Now().UnixNano(), i), repeated(many))
		}},
	} {
		if err := measure(s.name, s.entries, s.entries/s.each, s.c, s.push); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

// repeated is a body of n lines that is never in memory.
func repeated(n int) io.Reader {
	block := bytes.Repeat([]byte(entry+"\n"), 100)
	in, out := io.Pipe()
	go func() {
		for left := n * len(entry+"\n"); left > 0; left -= len(block) {
			if _, err := out.Write(block[:min(left, len(block))]); err != nil {
				return
			}
		}
		_ = out.Close() // never fails
	}()
	return in
}

func (b *bench) post(ctx context.Context, media, key string, body io.Reader) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, b.url, body)
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", media)
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	answer, err := b.client.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if answer.StatusCode >= 300 || bytes.Contains(text, []byte(`"refused":1`)) {
		return fmt.Errorf("answered %d: %s", answer.StatusCode, text[:min(len(text), 300)])
	}
	return err
}

// measure prints how long requests take that clients send side by side.
func measure(name string, entries, requests, clients int, push func(i int) error) error {
	var next atomic.Int64
	var mu sync.Mutex
	var took []time.Duration
	var failed error
	var most uint64
	stop, watched := make(chan struct{}), make(chan struct{})
	runtime.GC()
	go func() {
		defer close(watched)
		for tick := time.NewTicker(50 * time.Millisecond); ; {
			select {
			case <-stop:
				return
			case <-tick.C:
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				most = max(most, m.HeapAlloc)
			}
		}
	}()
	start := time.Now()
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for i := next.Add(1); i <= int64(requests); i = next.Add(1) {
				begun := time.Now()
				err := push(int(i))
				mu.Lock()
				took = append(took, time.Since(begun))
				failed = errors.Join(failed, err)
				mu.Unlock()
				if err != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	seconds := time.Since(start).Seconds()
	close(stop)
	<-watched
	if failed != nil {
		return failed
	}
	ms := func(q float64) float64 { return meter.Quantile(took, q).Seconds() * 1000 }
	fmt.Printf("%-34s %9d %9.2f %11.0f %9.2f %9.2f %9d\n", name, entries, seconds, float64(entries)/seconds, ms(0.5),
		ms(0.99), most>>20)
	return nil
}
