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
)

// class is a part of the requests that are offered.
type class struct {
	name string
	part float64 // of the capacity

	sent, served, refused int
	refusals              []time.Duration // from the request to the end of its refusal
}

// overload offers twice the capacity in three classes, over HTTP, as Poisson processes. The capacity is the rate that
// the slots can serve at the mean time that the worker took.
func overload(r *run) error {
	var spent, calls atomic.Int64
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		began := time.Now()
		_, _ = io.Copy(io.Discard, r.Body)
		time.Sleep(overloadMean/2 + time.Duration(rand.Int64N(int64(overloadMean))))
		_, _ = io.WriteString(w, "{}")
		spent.Add(int64(time.Since(began)))
		calls.Add(1)
	}))
	defer worker.Close()
	front, err := r.startStatic(worker.URL, overloadSlots)
	if err != nil {
		return err
	}
	defer front.stop()
	classes := []*class{{name: "critical", part: 0.3}, {name: "default", part: 0.9}, {name: "sheddable", part: 0.8}}
	rate := overloadSlots / overloadMean.Seconds()
	offer(r.ctx, front.url, classes, rate, r.lasts/2) // the expected waits are learned
	for _, c := range classes {
		*c = class{name: c.name, part: c.part}
	}
	spent.Store(0)
	calls.Store(0)
	began := time.Now()
	offer(r.ctx, front.url, classes, rate, r.lasts)
	took := time.Since(began)
	var refusals []time.Duration
	for _, c := range classes {
		fmt.Printf("overload: %-9s %5d sent, %5d served, %5d refused\n", c.name, c.sent, c.served, c.refused)
		refusals = append(refusals, c.refusals...)
	}
	mean := float64(spent.Load()) / float64(max(calls.Load(), 1))
	capacity := overloadSlots * took.Seconds() / (mean / float64(time.Second))
	r.table.least("overload", "calls that ended, of the capacity", 0.98, float64(calls.Load())/capacity, "")
	r.table.most("overload", "p50 until a refusal", 5, quantile(refusals, 0.5), "ms")
	r.table.most("overload", "p99 until a refusal", 5, quantile(refusals, 0.99), "ms")
	r.table.most("overload", "critical requests refused", 0, float64(classes[0].refused), "")
	return nil
}

// offer sends the classes at their parts of a rate for a while, and returns when all are answered.
func offer(ctx context.Context, url string, classes []*class, rate float64, lasts time.Duration) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 4096}}
	defer client.CloseIdleConnections()
	var mu sync.Mutex
	var group, senders sync.WaitGroup
	end := time.Now().Add(lasts)
	for _, c := range classes {
		senders.Go(func() {
			due := time.Now()
			for n := 0; ; n++ {
				due = due.Add(time.Duration(rand.ExpFloat64() / (c.part * rate) * float64(time.Second)))
				if due.After(end) || ctx.Err() != nil {
					return
				}
				time.Sleep(time.Until(due))
				group.Go(func() {
					status, took := sendClass(ctx, client, url, c.name, n%20)
					mu.Lock()
					defer mu.Unlock()
					c.sent++
					if status == http.StatusOK {
						c.served++
						return
					}
					c.refused++
					c.refusals = append(c.refusals, took)
				})
			}
		})
	}
	senders.Wait()
	group.Wait()
}

// sendClass sends one request, and returns its status, 0 for none, and how long its answer took.
func sendClass(ctx context.Context, client *http.Client, url, class string, flow int) (int, time.Duration) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions",
		strings.NewReader(`{"model":"m","messages":[]}`))
	if err != nil {
		return 0, 0
	}
	request.Header.Set("X-Penstock-Class", class)
	request.Header.Set("X-Penstock-Flow", class+strconv.Itoa(flow))
	request.Header.Set("X-Penstock-Queue-Ttl-Ms", "2000")
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
