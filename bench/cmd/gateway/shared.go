package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/bench/database"
	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// The scenarios of this file share slots between gateways and the queue: a private Postgres, the gateway and the task
// node as processes, and a worker in this one.

// timedWorker runs each call for as long as its payload says, and counts.
type timedWorker struct {
	*httptest.Server
	mu     sync.Mutex
	batch  int                // durable calls that run
	online int                // online calls that run
	most   int                // calls at once
	spent  map[string]float64 // seconds of ended calls, by flow
}

func startTimedWorker() *timedWorker {
	w := &timedWorker{spent: map[string]float64{}}
	w.Server = httptest.NewServer(w)
	return w
}

func (w *timedWorker) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	if r.Method == http.MethodGet {
		return // the probe
	}
	var call struct {
		MS    int    `json:"ms"`
		Batch bool   `json:"batch"`
		User  string `json:"user"`
	}
	_ = json.Unmarshal(body, &call)
	began := time.Now()
	w.count(call.Batch, 1)
	select {
	case <-time.After(time.Duration(call.MS) * time.Millisecond):
	case <-r.Context().Done():
	}
	w.count(call.Batch, -1)
	w.mu.Lock()
	w.spent[call.User] += time.Since(began).Seconds()
	w.mu.Unlock()
	rw.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(rw, `{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}]}`)
}

func (w *timedWorker) count(batch bool, by int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if batch {
		w.batch += by
	} else {
		w.online += by
	}
	w.most = max(w.most, w.batch+w.online)
}

func (w *timedWorker) runs() (batch, most int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.batch, w.most
}

// site is a database with the model m on one worker.
type site struct {
	*run
	pool     *pgxpool.Pool
	closeAll func()
	queue    *invalidation.Queue
	worker   *timedWorker
	programs []*process
}

func (r *run) newSite(slots int) (*site, error) {
	pool, closeAll, err := database.Open(r.ctx, "", 8)
	if err != nil {
		return nil, err
	}
	s := &site{run: r, pool: pool, closeAll: closeAll, worker: startTimedWorker()}
	if err := s.prepare(slots); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *site) prepare(slots int) (err error) {
	model := worker.Model{Name: "m", Protocol: worker.ProtocolOpenAI}
	name, err := inference.RegisterModel(s.ctx, s.pool, model, inference.By{Actor: "bench"})
	if err != nil {
		return err
	}
	if err := s.register("gpu-1", slots); err != nil {
		return err
	}
	s.queue, err = invalidation.Open(s.ctx, s.pool, name)
	return err
}

func (s *site) register(server string, slots int) error {
	_, err := inference.RegisterInstance(s.ctx, s.pool, "m", server, s.worker.URL, slots, nil,
		inference.By{Actor: "bench"})
	return err
}

func (s *site) close() {
	for _, p := range s.programs {
		p.stop()
	}
	s.worker.CloseClientConnections()
	s.worker.Close()
	s.closeAll()
}

func (s *site) startGateway(name string) (*process, error) {
	p, err := start(s.ctx, name, "listen=", s.program, "--open", "--listen", "127.0.0.1:0",
		"--debug-listen", "127.0.0.1:0", "--database-url", s.pool.Config().ConnString(), "--name", name)
	if err == nil {
		s.programs = append(s.programs, p)
	}
	return p, err
}

func (s *site) startNode(threads int) error {
	p, err := start(s.ctx, "node", "listen=", s.tasknode, "--name", "node", "--listen", "127.0.0.1:0",
		"--governor=false", "--database-url", s.pool.Config().ConnString(), "--threads", strconv.Itoa(threads))
	if err == nil {
		s.programs = append(s.programs, p)
	}
	return err
}

func (s *site) push(n int, payload, flow string) error {
	pushes := make([]invalidation.Push, n)
	for i := range pushes {
		pushes[i] = invalidation.Push{Payload: json.RawMessage(payload), Flow: flow}
	}
	_, err := s.queue.Push(s.ctx, pushes...)
	return err
}

// until waits for a condition, 30 s at most.
func (s *site) until(what string, condition func() bool) error {
	for end := time.Now().Add(30 * time.Second); !condition(); time.Sleep(time.Millisecond) {
		if s.ctx.Err() != nil || time.Now().After(end) {
			return fmt.Errorf("waited in vain until %s", what)
		}
	}
	return nil
}

// ask sends one request and returns how long it waited in the gateway, in whole milliseconds.
func ask(ctx context.Context, client *http.Client, url, body, flow string) (time.Duration, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions",
		strings.NewReader(body))
	if err != nil {
		return 0, err
	}
	request.Header.Set("X-Penstock-Flow", flow)
	answer, err := client.Do(request)
	if err != nil {
		return 0, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if answer.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("status %d: %s", answer.StatusCode, text)
	}
	ms, bad := strconv.Atoi(answer.Header.Get("X-Penstock-Queue-Ms"))
	if err == nil {
		err = bad
	}
	return time.Duration(ms) * time.Millisecond, err
}

// burst sends n requests at once and returns their waits.
func burst(ctx context.Context, url string, n int, body string) ([]time.Duration, error) {
	waits, errs := make([]time.Duration, n), make([]error, n)
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() { waits[i], errs[i] = ask(ctx, http.DefaultClient, url, body, "online") })
	}
	group.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	return waits, nil
}

// rounds of hand-overs and preemptions.
func (r *run) rounds(all int) int {
	if r.short {
		return max(2, all/4)
	}
	return all
}

// handOver sends bursts to two gateways in turn: the slots that one needs lie idle at the other.
func handOver(r *run) error {
	const slots, calls = 16, 12
	s, err := r.newSite(slots)
	if err != nil {
		return err
	}
	defer s.close()
	var gateways [2]*process
	for i := range gateways {
		if gateways[i], err = s.startGateway(fmt.Sprint("g", i+1)); err != nil {
			return err
		}
	}
	var all []time.Duration
	for n := range r.rounds(40) {
		waits, err := burst(s.ctx, gateways[n%2].url, calls, `{"model":"m","ms":50}`)
		if err != nil {
			return err
		}
		if n >= 2 { // before, the slots are leased for the first time
			all = append(all, waits...)
		}
	}
	fmt.Printf("handover: %d requests, waits p50 %.0f ms, p90 %.0f ms, longest %.0f ms\n", len(all), quantile(all, 0.5),
		quantile(all, 0.9), quantile(all, 1))
	r.table.most("handover", "p99 of waits for slots that lie idle elsewhere", 20, quantile(all, 0.99), "ms")
	_, most := s.worker.runs()
	r.table.most("handover", "calls at once on 16 slots", slots, float64(most), "")
	return nil
}

// preemption sends bursts of 32 requests beside 64 durable calls: 16 slots are kept for them, and 16 are taken from
// runs.
func preemption(r *run) error {
	const slots, batch, online = 80, 64, 32
	s, err := r.newSite(slots)
	if err != nil {
		return err
	}
	defer s.close()
	front, err := s.startGateway("g1")
	if err != nil {
		return err
	}
	if err := s.startNode(128); err != nil {
		return err
	}
	if err := s.push(slots, `{"messages":[],"batch":true,"ms":600000}`, "batch"); err != nil {
		return err
	}
	full := func() bool { batches, _ := s.worker.runs(); return batches >= batch }
	if err := s.until("64 durable calls run", full); err != nil {
		return err
	}
	var waits, back []time.Duration
	for range r.rounds(6) {
		list, err := burst(s.ctx, front.url, online, `{"model":"m","ms":500}`)
		if err != nil {
			return err
		}
		ended := time.Now()
		if err := s.until("the batch has its slots back", full); err != nil {
			return err
		}
		waits, back = append(waits, list...), append(back, time.Since(ended))
		time.Sleep(time.Second) // a quarter of the batch is preempted in a second at most
	}
	var spent, preempted int
	err = s.pool.QueryRow(s.ctx, `
SELECT count(*) FILTER (WHERE attempt > 0 OR crashes > 0), (SELECT count(*) FROM penstock.preemption)
  FROM penstock.entry`).Scan(&spent, &preempted)
	if err != nil {
		return err
	}
	fmt.Printf("preemption: %d requests, waits p50 %.0f ms, longest %.0f ms; %d runs preempted\n", len(waits),
		quantile(waits, 0.5), quantile(waits, 1), preempted)
	r.table.most("preemption", "p99 of waits of a burst of 32 beside 64 entries", 150, quantile(waits, 0.99), "ms")
	r.table.most("preemption", "longest time until the batch has its slots back", 3, quantile(back, 1)/1000, "s")
	r.table.most("preemption", "entries that spent an attempt", 0, float64(spent), "")
	_, most := s.worker.runs()
	r.table.most("preemption", "calls at once on 80 slots", slots, float64(most), "")
	return nil
}

// fairness lets ten flows have online requests and durable entries, one of them many times as many as the others, and
// compares the time that the worker spent on each.
func fairness(r *run) error {
	const slots, flows = 12, 10
	s, err := r.newSite(slots)
	if err != nil {
		return err
	}
	defer s.close()
	front, err := s.startGateway("g1")
	if err != nil {
		return err
	}
	name := func(flow int) string { return fmt.Sprint("flow-", flow) }
	for flow := range flows {
		n := 1000
		if flow == 0 {
			n = 10_000
		}
		payload := fmt.Sprintf(`{"messages":[],"batch":true,"ms":40,"user":%q}`, name(flow))
		if err := s.push(n, payload, name(flow)); err != nil {
			return err
		}
	}
	if err := s.startNode(32); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(s.ctx)
	defer stop()
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256}}
	var group sync.WaitGroup
	for flow := range flows {
		clients := 4 // more than its share of the slots
		if flow == 0 {
			clients = 100
		}
		body := fmt.Sprintf(`{"model":"m","ms":40,"user":%q}`, name(flow))
		for range clients {
			group.Go(func() {
				for ctx.Err() == nil {
					if _, err := ask(ctx, client, front.url, body, name(flow)); err != nil && ctx.Err() == nil {
						time.Sleep(100 * time.Millisecond) // refused: the flow has more than may wait
					}
				}
			})
		}
	}
	time.Sleep(r.lasts) // until the shares are settled
	before := s.worker.spentBy()
	time.Sleep(3 * r.lasts)
	after := s.worker.spentBy()
	stop()
	group.Wait()
	var mean, worst float64
	for flow := range flows {
		mean += (after[name(flow)] - before[name(flow)]) / flows
	}
	for flow := range flows {
		part := (after[name(flow)] - before[name(flow)]) / mean
		fmt.Printf("fairness: %s has %.3f of the mean\n", name(flow), part)
		worst = max(worst, math.Abs(part-1))
	}
	r.table.most("fairness", "worst flow's distance from the mean, online + durable", 0.05, worst, "")
	return nil
}

func (w *timedWorker) spentBy() map[string]float64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	copied := make(map[string]float64, len(w.spent))
	for flow, seconds := range w.spent {
		copied[flow] = seconds
	}
	return copied
}

// idle takes the CPU of a gateway that nobody calls, with 100 instances.
func idle(r *run) error {
	s, err := r.newSite(4)
	if err != nil {
		return err
	}
	defer s.close()
	for n := range 99 {
		if err := s.register(fmt.Sprint("gpu-", n+2), 4); err != nil {
			return err
		}
	}
	front, err := s.startGateway("g1")
	if err != nil {
		return err
	}
	time.Sleep(3 * time.Second) // its start is over
	began, before := time.Now(), front.cpu()
	time.Sleep(2 * r.lasts)
	part := (front.cpu() - before) / time.Since(began).Seconds()
	r.table.most("idle", "CPU with 100 instances, of a core", 0.5, 100*part, "%")
	return nil
}
