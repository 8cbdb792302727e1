package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Load of the scenario overload.
const (
	overloadSlots = 16
	overloadMean  = 100 * time.Millisecond // of a call: 50 to 150 ms, evenly
	overloadTTL   = 2 * time.Second        // how long a request may wait
)

// offered is the requests of one criticality.
type offered struct {
	name string
	part float64 // of the capacity

	sent, served, refused int
	inVain                int             // refused at the end of their wait
	refusals              []time.Duration // from the request to the end of its refusal
}

// overload offers twice the capacity in three criticalities, over HTTP, as Poisson processes. Counted are the time that
// the worker spent on calls, of the time of all slots, and the requests that arrived, while the load was on and its
// first waits were over: the queue fills then, and empties when the load ends.
func overload(r *run) error {
	var from, until atomic.Int64 // of what is counted, in nanoseconds of the clock; 0: not known yet
	var spent atomic.Int64
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		began := time.Now()
		_, _ = io.Copy(io.Discard, r.Body)
		time.Sleep(overloadMean/2 + time.Duration(rand.Int64N(int64(overloadMean))))
		_, _ = io.WriteString(w, "{}")
		counted := min(time.Now().UnixNano(), until.Load()) - max(began.UnixNano(), from.Load())
		spent.Add(max(counted, 0))
	}))
	defer worker.Close()
	front, err := r.startStatic(worker.URL, overloadSlots)
	if err != nil {
		return err
	}
	defer front.stop()
	criticalities := []*offered{
		{name: "critical", part: 0.3}, {name: "default", part: 0.9}, {name: "sheddable", part: 0.8},
	}
	rate := overloadSlots / overloadMean.Seconds()
	start := time.Now().Add(overloadTTL)
	end := start.Add(r.lasts)
	from.Store(start.UnixNano())
	until.Store(end.UnixNano())
	offer(r.ctx, front.url, criticalities, rate, start, end)
	var refusals []time.Duration
	for _, c := range criticalities {
		fmt.Printf("overload: %-9s %5d sent, %5d served, %5d refused, %d of them at the end of their wait\n", c.name,
			c.sent, c.served, c.refused, c.inVain)
		refusals = append(refusals, c.refusals...)
	}
	capacity := overloadSlots * r.lasts
	r.table.least("overload", "time spent on calls, of that of the slots", 0.98,
		float64(spent.Load())/float64(capacity), "")
	r.table.most("overload", "p50 until a refusal", 5, quantile(refusals, 0.5), "ms")
	r.table.most("overload", "p99 until a refusal", 5, quantile(refusals, 0.99), "ms")
	r.table.most("overload", "critical requests refused", 0, float64(criticalities[0].refused), "")
	return nil
}

// offer sends requests of each criticality at their parts of a rate until a time, counts the requests that are sent
// from start on, and returns when all are answered.
func offer(ctx context.Context, url string, criticalities []*offered, rate float64, start, end time.Time) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 4096}}
	defer client.CloseIdleConnections()
	var mu sync.Mutex
	var group, senders sync.WaitGroup
	for _, c := range criticalities {
		senders.Go(func() {
			due := time.Now()
			for n := 0; ; n++ {
				due = due.Add(time.Duration(rand.ExpFloat64() / (c.part * rate) * float64(time.Second)))
				if due.After(end) || ctx.Err() != nil {
					return
				}
				time.Sleep(time.Until(due))
				counted := !due.Before(start)
				group.Go(func() {
					status, took := sendRequest(ctx, client, url, c.name, n%20)
					if !counted {
						return
					}
					mu.Lock()
					defer mu.Unlock()
					c.sent++
					if status == http.StatusOK {
						c.served++
						return
					}
					c.refused++
					if took >= overloadTTL {
						c.inVain++
					}
					c.refusals = append(c.refusals, took)
				})
			}
		})
	}
	senders.Wait()
	group.Wait()
}

// sendRequest sends one request, and returns its status, 0 for none, and how long its answer took.
func sendRequest(ctx context.Context, client *http.Client, url, criticality string, flow int) (int, time.Duration) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions",
		strings.NewReader(`{"model":"m","messages":[]}`))
	if err != nil {
		return 0, 0
	}
	request.Header.Set("X-Penstock-Criticality", criticality)
	request.Header.Set("X-Penstock-Flow", criticality+strconv.Itoa(flow))
	request.Header.Set("X-Penstock-Queue-Ttl-Ms", strconv.FormatInt(overloadTTL.Milliseconds(), 10))
	began := time.Now()
	answer, err := client.Do(request)
	if err != nil {
		return 0, time.Since(began)
	}
	defer answer.Body.Close()
	_, _ = io.Copy(io.Discard, answer.Body)
	return answer.StatusCode, time.Since(began)
}

var perOperation = regexp.MustCompile(`BenchmarkPoolWithTenThousandWaiting\S*\s+\d+\s+([\d.]+) ns/op`)

// waiting runs the pool's own benchmark: two arrivals, an end with its dispatch and a cancel beside 10,000 waiting
// requests of 1,000 flows.
func waiting(r *run) error {
	cmd := exec.CommandContext(r.ctx, "go", "test", "./pkg/gateway", "-run", "^$", "-bench", "TenThousandWaiting",
		"-benchtime", "200000x", "-count", "1")
	cmd.Dir = ".."
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("go test: %w\n%s", err, out)
	}
	found := perOperation.FindSubmatch(out)
	if found == nil {
		return fmt.Errorf("the benchmark printed no figure:\n%s", out)
	}
	ns, err := strconv.ParseFloat(string(found[1]), 64)
	if err != nil {
		return err
	}
	const operations = 4
	r.table.most("waiting", "push, dispatch or cancel beside 10,000 waiting", 5, ns/1000/operations, "us")
	return nil
}
