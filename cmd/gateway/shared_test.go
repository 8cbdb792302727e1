package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
	"github.com/penstock/penstock/pkg/worker"
)

// gpu is a worker of the OpenAI protocol that counts the calls that it runs at once, by itself.
type gpu struct {
	*httptest.Server
	mu      sync.Mutex
	running int
	most    int
	begun   int
	holding int           // calls with "hold_online" that run
	slots   int           // 0: not known
	release chan struct{} // closed: calls with "hold" end
	online  chan struct{} // closed: calls with "hold_online" end
}

func startGPU(t *testing.T) *gpu {
	t.Helper()
	g := &gpu{release: make(chan struct{}), online: make(chan struct{})}
	g.Server = httptest.NewServer(g)
	t.Cleanup(g.Close)
	return g
}

// exclude counts the calls that run at once. The slot of a run that was broken off is free before the server has
// noticed that its connection is closed: while more calls run than there are slots, none goes on but those whose
// client is gone. If there is none, the call too many is real.
func (g *gpu) exclude(ctx context.Context) {
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		g.mu.Lock()
		waits := g.slots > 0 && g.running > g.slots && g.most <= g.slots && ctx.Err() == nil && time.Now().Before(end)
		if !waits && ctx.Err() == nil {
			g.most = max(g.most, g.running)
		}
		g.mu.Unlock()
		if !waits {
			return
		}
	}
}

// ServeHTTP runs a call: for as long as "ms" says, or, with "hold", until the test releases it.
func (g *gpu) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	if r.Method == http.MethodGet {
		return // the probe
	}
	var ask struct {
		Hold   bool `json:"hold"`
		Online bool `json:"hold_online"`
		MS     int  `json:"ms"`
		Fail   bool `json:"fail"`

		Chunks int  `json:"chunks"`
		Stream bool `json:"stream"`

		Tools   []any                 `json:"tools"`
		Input   []string              `json:"input"`
		Options map[string]any        `json:"stream_options"`
		Format  string                `json:"encoding_format"`
		Answer  struct{ Type string } `json:"response_format"`
	}
	_ = json.Unmarshal(body, &ask)
	g.mu.Lock()
	g.running++
	g.begun++
	g.mu.Unlock()
	g.exclude(r.Context())
	defer func() {
		g.exclude(r.Context())
		g.mu.Lock()
		g.running--
		g.mu.Unlock()
	}()
	if ask.Fail {
		http.Error(w, `{"error":{"message":"the prompt is not allowed"}}`, http.StatusBadRequest)
		return
	}
	if ask.Hold {
		select {
		case <-g.release:
		case <-r.Context().Done():
			return
		}
	}
	if ask.Online {
		g.mu.Lock()
		g.holding++
		g.mu.Unlock()
		select {
		case <-g.online:
		case <-r.Context().Done():
			return
		}
	}
	select {
	case <-time.After(time.Duration(ask.MS) * time.Millisecond):
	case <-r.Context().Done():
		return
	}
	if strings.HasSuffix(r.URL.Path, "/generate_stream") {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range max(ask.Chunks, 1) {
			_, _ = fmt.Fprintf(w, "data: {\"model_name\":\"g\",\"text_output\":\"t%d\"}\n\n", i)
			_ = http.NewResponseController(w).Flush()
		}
		return
	}
	if ask.Stream {
		w.Header().Set("Content-Type", "text/event-stream")
		if len(ask.Tools) > 0 {
			for i := range ask.Chunks {
				_, _ = fmt.Fprintf(w, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"t%d\"}}]}\n\n", i)
			}
			_, _ = io.WriteString(w, `data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"c1",`+
				`"type":"function","function":{"name":"weather","arguments":"{}"}}]},"finish_reason":"tool_calls"}]}`+
				"\n\ndata: [DONE]\n\n")
			return
		}
		for i := range max(ask.Chunks, 1) {
			_, _ = fmt.Fprintf(w, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"t%d\"}}]}\n\n", i)
			_ = http.NewResponseController(w).Flush()
		}
		_, _ = io.WriteString(w, "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n")
		if ask.Options["include_usage"] == true {
			_, _ = io.WriteString(w, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":3}}\n\n")
		}
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
		return
	}
	if strings.HasSuffix(r.URL.Path, "/embeddings") {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, embeddings(len(ask.Input), ask.Format))
		return
	}
	if media(w, r, body) {
		return
	}
	if ask.Answer.Type == "json_object" {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[{"message":{"content":"{\"a\":1}"},"finish_reason":"stop"}]}`)
		return
	}
	if len(ask.Tools) > 0 {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[{"index":0,"finish_reason":"tool_calls","message":{"role":"assistant","content":null,`+
			`"tool_calls":[{"id":"c1","type":"function","function":{"name":"weather","arguments":"{}"}}]}}]}`)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":2,"completion_tokens":3}}`)
}

// embeddings answers for n texts with vectors of one number, 0.5, as text or in base64.
func embeddings(n int, format string) string {
	vector := `[0.5]`
	if format == "base64" {
		vector = `"AAAAPw=="`
	}
	var list []string
	for i := range n {
		list = append(list, fmt.Sprintf(`{"object":"embedding","index":%d,"embedding":%s}`, i, vector))
	}
	return `{"object":"list","data":[` + strings.Join(list, ",") + `],"usage":{"prompt_tokens":2,"total_tokens":2}}`
}

func (g *gpu) counts() (running, most, begun int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.running, g.most, g.begun
}

// site is a database with one model on one worker, task nodes and gateways on it.
type site struct {
	*testing.T
	pool  *pgxpool.Pool
	dsn   string
	gpu   *gpu
	queue *invalidation.Queue

	changed func() // called after each reading of the registry by a gateway; may be nil
}

func newSite(t *testing.T, slots int) *site {
	t.Helper()
	dsn := pgtest.Prepared(t, "model", func(ctx context.Context, db *pgxpool.Pool) error {
		_, err := inference.RegisterModel(ctx, db, worker.Model{Name: "m", Protocol: worker.ProtocolOpenAI}, inference.By{Reason: "test"})
		return err
	})
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: dsn, MaxConns: 8})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	s := &site{T: t, pool: pool, dsn: dsn, gpu: startGPU(t)}
	s.gpu.slots = slots
	if _, err := inference.RegisterInstance(t.Context(), pool, "m", "gpu-1", s.gpu.URL, slots, nil, inference.By{Reason: "test"}); err != nil {
		t.Fatal(err)
	}
	var name string
	if err := pool.QueryRow(t.Context(), `SELECT penstock.model_queue('m')`).Scan(&name); err != nil {
		t.Fatal(err)
	}
	if s.queue, err = invalidation.Open(t.Context(), pool, name); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *site) log() *slog.Logger { return slog.New(slog.NewTextHandler(s.Output(), nil)) }

// connect opens connections of a process's own.
func (s *site) connect() *pgxpool.Pool {
	s.Helper()
	pool, err := postgres.Open(s.Context(), postgres.Config{DSN: s.dsn, MaxConns: 6})
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(pool.Close)
	return pool
}

// listen runs a listener of its own for hints.
func (s *site) conn() *pgx.ConnConfig {
	s.Helper()
	conn, err := postgres.ConnConfig(postgres.Config{DSN: s.dsn})
	if err != nil {
		s.Fatal(err)
	}
	return conn
}

// background runs duties until the test is over.
func (s *site) background(duties ...func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	for _, duty := range duties {
		group.Go(func() { _ = duty(ctx) })
	}
	s.Cleanup(func() {
		cancel()
		group.Wait()
	})
}

// startNode starts a task node with so many threads.
func (s *site) startNode(threads int) {
	s.Helper()
	pool := s.connect()
	var node *tasknode.Node
	service := inference.NewService(inference.ServiceConfig{
		Freed: func() { node.TryAgain() }, Log: s.log(),
	}, pool, func() invalidation.NodeID { return node.ID() })
	node = tasknode.New(tasknode.Config{
		Name: "node", Application: "default", Threads: threads, Poll: 50 * time.Millisecond, Grace: 100 * time.Millisecond,
		Gates: []tasknode.Gate{service.Pool}, Log: s.log(),
	}, pool, s.connect())
	node.HandleKind(invalidation.KindInference, service.Dispatcher)
	listener := invalidation.NewListener(invalidation.ListenConfig{
		Conn: s.conn(), Wake: node.Wake, Cancelled: node.Cancelled, Slots: service.Pool.Wanted, Log: s.log(),
	})
	if err := service.Registry.Refresh(s.Context()); err != nil {
		s.Fatal(err)
	}
	duties := []func(context.Context) error{node.Run, listener.Run}
	for _, duty := range service.Duties() {
		duties = append(duties, duty)
	}
	s.background(duties...)
	s.eventually("the node hears hints", func() bool { return listener.Status().Connected })
}

// front is a gateway of the test.
type front struct {
	*server
	url string
}

func (s *site) startGateway(change func(*Config)) *front {
	s.Helper()
	cfg := defaults()
	cfg.Database.URL, cfg.Gateway.Open, cfg.Gateway.Name = s.dsn, true, "gateway"
	if change != nil {
		change(&cfg)
	}
	x := &server{cfg: cfg, log: s.log(), observer: newObserver(), pool: s.connect()}
	listen, err := cfg.Database.Connect(0).ListenConn()
	if err != nil {
		s.Fatal(err)
	}
	if err := x.assemble(listen); err != nil {
		s.Fatal(err)
	}
	if err := x.settings.read(s.Context()); err != nil {
		s.Fatal(err)
	}
	if s.changed != nil {
		x.registry.OnChange(s.changed)
	}
	if err := x.member.Register(s.Context()); err != nil {
		s.Fatal(err)
	}
	s.background(slices.Collect(maps.Values(x.duties()))...)
	s.eventually("the gateway hears hints", func() bool { return x.listener.Status().Connected })
	web := httptest.NewServer(x.gateway)
	s.Cleanup(web.Close)
	return &front{x, web.URL}
}

func (s *site) eventually(what string, condition func() bool) {
	s.Helper()
	for end := time.Now().Add(2 * time.Minute); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			s.Fatalf("waited in vain until %s", what)
		}
	}
}

func (s *site) push(n int, payload, flow string) []invalidation.EntryID {
	s.Helper()
	var ids []invalidation.EntryID
	for range n {
		pushed, err := s.queue.Push(s.Context(), invalidation.Push{Payload: json.RawMessage(payload), Flow: flow})
		if err != nil {
			s.Fatal(err)
		}
		ids = append(ids, pushed[0].ID)
	}
	return ids
}

func (s *site) count(sql string, args ...any) (n int) {
	s.Helper()
	if err := s.pool.QueryRow(s.Context(), sql, args...).Scan(&n); err != nil {
		s.Fatal(err)
	}
	return n
}

// ask sends one online request and returns its status and how long it waited.
func (f *front) ask(ctx context.Context, body string, headers ...string) (status int, waited time.Duration, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		return 0, 0, err
	}
	for i := 0; i < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, 0, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if answer.StatusCode != 200 {
		err = fmt.Errorf("%d: %s", answer.StatusCode, bytes.TrimSpace(text))
	}
	ms, _ := time.ParseDuration(answer.Header.Get("X-Penstock-Queue-Ms") + "ms")
	return answer.StatusCode, ms, err
}

// burst sends n requests at once and returns their waits, shortest first.
func (f *front) burst(t *testing.T, n int, body string) []time.Duration {
	t.Helper()
	waits := make([]time.Duration, n)
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() {
			_, waited, err := f.ask(t.Context(), body)
			if err != nil {
				t.Error(err)
			}
			waits[i] = waited
		})
	}
	group.Wait()
	slices.Sort(waits)
	return waits
}

const (
	hold  = `{"model":"m","messages":[],"hold":true}`
	quick = `{"model":"m","messages":[],"ms":20}`
)

func TestOnlineAndDurableCallsShareTheSlots(t *testing.T) {
	t.Parallel()
	s := newSite(t, 10)
	f := s.startGateway(nil)
	s.startNode(32)
	ids := s.push(60, `{"messages":[],"ms":30}`, "batch")
	f.burst(t, 60, quick)
	s.eventually("the queue is empty", func() bool {
		return s.count(`SELECT count(*) FROM penstock.result WHERE queue_id = $1 AND outcome = 'done'`, s.queue.ID) == len(ids)
	})
	if _, most, _ := s.gpu.counts(); most > 10 {
		t.Errorf("%d calls at once on 10 slots", most)
	}
}

// While gateways live, durable entries leave a fifth of the slots to online calls, and those a tenth.
func TestReservedSharesAreKept(t *testing.T) {
	t.Parallel()
	s := newSite(t, 10)
	f := s.startGateway(func(c *Config) {})
	if _, err := s.pool.Exec(t.Context(), `SELECT penstock.set_gateway_policy('m', '{"preempt": false, "queue_ttl": 60}', 'test')`); err != nil {
		t.Fatal(err)
	}
	s.startNode(32)
	s.push(20, hold, "batch")
	s.eventually("durable calls have their part", func() bool { running, _, _ := s.gpu.counts(); return running == 8 })
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.burst(t, 6, hold)
	}()
	s.eventually("online calls have theirs", func() bool { running, _, _ := s.gpu.counts(); return running == 10 })
	time.Sleep(300 * time.Millisecond) // none may come on top
	if _, most, _ := s.gpu.counts(); most != 10 {
		t.Errorf("%d calls at once on 10 slots", most)
	}
	close(s.gpu.release)
	<-done
}

func TestPreemptedEntriesGoBackToTheirPlace(t *testing.T) {
	t.Parallel()
	s := newSite(t, 80)
	f := s.startGateway(nil)
	s.startNode(128)
	ids := s.push(80, hold, "batch")
	s.eventually("64 durable calls run", func() bool { running, _, _ := s.gpu.counts(); return running == 64 })
	before := s.positions(ids)
	done := make(chan []time.Duration)
	go func() { done <- f.burst(t, 32, `{"model":"m","messages":[],"hold_online":true}`) }()
	// 16 slots were kept for them, and 16 are taken from runs that would go on.
	s.eventually("all 32 online calls run at once", func() bool {
		s.gpu.mu.Lock()
		defer s.gpu.mu.Unlock()
		return s.gpu.holding == 32
	})
	close(s.gpu.online)
	waits := <-done
	t.Logf("waits of the burst: p50 %s, p99 %s", waits[len(waits)/2], waits[len(waits)-1])
	// 16 where each slot comes free for an online call at once; an entry that took one meanwhile is preempted as well.
	if n := s.count(`SELECT count(*) FROM penstock.preemption`); n == 0 || n > 32 {
		t.Errorf("%d entries were preempted, want some, 32 at most", n)
	}
	s.eventually("durable calls have their slots back", func() bool { running, _, _ := s.gpu.counts(); return running == 64 })
	if n := s.count(`SELECT count(*) FROM penstock.entry WHERE queue_id = $1 AND (attempt > 0 OR crashes > 0)`, s.queue.ID); n != 0 {
		t.Errorf("%d entries spent an attempt", n)
	}
	if after := s.positions(ids); !slices.Equal(before, after) {
		t.Errorf("the order of entries changed:\n%v\n%v", before, after)
	}
	close(s.gpu.release)
	s.eventually("every entry is done", func() bool {
		return s.count(`SELECT count(*) FROM penstock.result WHERE queue_id = $1 AND outcome = 'done'`, s.queue.ID) == len(ids)
	})
	if _, most, _ := s.gpu.counts(); most > 80 {
		t.Errorf("%d calls at once on 80 slots", most)
	}
	s.eventually("the preempted runs count as wasted", func() bool {
		return s.count(`SELECT coalesce(sum(wasted_ms), 0)::int FROM penstock.usage_hour WHERE flow = 'batch'`) > 0
	})
}

// What online calls take says nothing about how long entries usually run, nor does what preempted runs took: else a
// gateway with short calls could preempt no run that takes longer.
func TestRunsArePreemptedHoweverShortOnlineCallsAre(t *testing.T) {
	t.Parallel()
	s := newSite(t, 10)
	f := s.startGateway(nil)
	f.burst(t, 30, quick)
	s.eventually("the use is folded", func() bool {
		return s.count(`SELECT coalesce(sum(calls), 0)::int FROM penstock.usage_hour`) == 30
	})
	s.startNode(32)
	s.push(10, hold, "nightly")
	s.eventually("8 durable calls run", func() bool { running, _, _ := s.gpu.counts(); return running == 8 })
	s.eventually("they have run for longer than online calls take", func() bool {
		return s.count(`SELECT count(*) FROM penstock.lock WHERE claimed_at < clock_timestamp() - interval '1 second'`) == 8
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.burst(t, 4, `{"model":"m","messages":[],"hold_online":true}`)
	}()
	s.eventually("two of them gave their slots to online calls", func() bool {
		s.gpu.mu.Lock()
		defer s.gpu.mu.Unlock()
		return s.gpu.holding == 4
	})
	close(s.gpu.online)
	<-done
	close(s.gpu.release)
	s.eventually("every entry is done", func() bool {
		return s.count(`SELECT count(*) FROM penstock.result WHERE queue_id = $1 AND outcome = 'done'`, s.queue.ID) == 10
	})
	s.eventually("the runs whose answer was kept are counted", func() bool {
		return s.count(`SELECT coalesce(sum(runs), 0)::int FROM penstock.usage_hour WHERE run_ms > 0`) == 10
	})
}

// positions lists the entries in the order in which they are, or were, claimed.
func (s *site) positions(ids []invalidation.EntryID) []int64 {
	s.Helper()
	list, err := pgx.CollectRows(postgres.Query(s.Context(), s.pool, `
SELECT id FROM (SELECT r.entry_id AS id, r.pos FROM penstock.ready r WHERE r.queue_id = $1
                 UNION ALL SELECT l.last_entry_id, l.pos FROM penstock.lock l WHERE l.queue_id = $1) x
 WHERE id = ANY ($2) ORDER BY pos, id`, s.queue.ID, ids), pgx.RowTo[int64])
	if err != nil {
		s.Fatal(err)
	}
	return list
}

func TestOnlineUseCountsInTheOrderOfDurableEntries(t *testing.T) {
	t.Parallel()
	s := newSite(t, 4)
	f := s.startGateway(nil)
	for range 5 {
		if _, _, err := f.ask(t.Context(), quick, "X-Penstock-Flow", "tenant"); err != nil {
			t.Fatal(err)
		}
	}
	s.eventually("the use is folded, to the call", func() bool {
		return s.count(`SELECT coalesce(sum(calls), 0)::int FROM penstock.usage_hour WHERE flow = 'tenant'`) == 5
	})
	if n := s.count(`SELECT count(*) FROM penstock.usage WHERE flow = 'tenant' AND service > 0.05 AND queue_id = $1`, s.queue.ID); n != 1 {
		t.Errorf("%d rows of use by which durable entries are ordered", n)
	}
	if n := s.count(`SELECT sum(tokens_in * 100 + tokens_out)::int FROM penstock.usage_hour WHERE flow = 'tenant'`); n != 5*203 {
		t.Errorf("tokens add up to %d", n)
	}
}

// Where a pool keeps the two apart, what online calls take is counted, and does not count in the order of entries.
func TestOnlineUseMayBeKeptApart(t *testing.T) {
	t.Parallel()
	s := newSite(t, 4)
	s.exec(`SELECT penstock.set_gateway_policy('m', '{"fair_scope": "separate"}', 'test')`)
	f := s.startGateway(nil)
	for range 5 {
		if _, _, err := f.ask(t.Context(), quick, "X-Penstock-Flow", "tenant"); err != nil {
			t.Fatal(err)
		}
	}
	s.eventually("the use is folded", func() bool {
		return s.count(`SELECT coalesce(sum(calls), 0)::int FROM penstock.usage_hour WHERE flow = 'tenant'`) == 5
	})
	if n := s.count(`SELECT count(*) FROM penstock.usage WHERE flow = 'tenant'`); n != 0 {
		t.Errorf("%d rows of use order the entries of the flow", n)
	}
}

func TestAFoldIsCountedOnce(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	fold := func(seq int) (applied bool) {
		err := s.pool.QueryRow(t.Context(), `SELECT penstock.fold_online_gpu(7, $1, ARRAY[now()], ARRAY[$2::text], ARRAY['m'], ARRAY['f'],
			ARRAY[1::bigint], ARRAY[10::bigint], ARRAY[0::bigint], ARRAY[0::bigint], ARRAY[0::bigint], ARRAY[0::bigint], ARRAY[true], '{}', '{}')`, seq, s.queue.Name).Scan(&applied)
		if err != nil {
			t.Fatal(err)
		}
		return applied
	}
	if !fold(1) || fold(1) || !fold(2) {
		t.Error("a fold was applied twice, or not at all")
	}
	if n := s.count(`SELECT sum(calls)::int FROM penstock.usage_hour WHERE flow = 'f'`); n != 2 {
		t.Errorf("%d calls", n)
	}
}

func TestRespondAsyncRunsAsADurableEntry(t *testing.T) {
	t.Parallel()
	s := newSite(t, 4)
	f := s.startGateway(nil)
	s.startNode(4)
	status, _, _ := f.ask(t.Context(), quick, "Prefer", "respond-async", "X-Penstock-Flow", "t", "Idempotency-Key", "one")
	again, _, _ := f.ask(t.Context(), quick, "Prefer", "respond-async", "X-Penstock-Flow", "t", "Idempotency-Key", "one")
	if status != http.StatusAccepted || again != http.StatusAccepted {
		t.Errorf("got %d and %d", status, again)
	}
	other, _, _ := f.ask(t.Context(), hold, "Prefer", "respond-async", "X-Penstock-Flow", "t", "Idempotency-Key", "one")
	if other != http.StatusUnprocessableEntity {
		t.Errorf("another request with the key: got %d", other)
	}
	s.eventually("it ran, once", func() bool {
		return s.count(`SELECT count(*) FROM penstock.result WHERE queue_id = $1 AND outcome = 'done'`, s.queue.ID) == 1
	})
	if _, _, begun := s.gpu.counts(); begun != 1 {
		t.Errorf("%d calls", begun)
	}
}

// Services hand one request id through many calls: it makes no two requests one.
func TestRequestsWithOneIDAreTwoEntries(t *testing.T) {
	t.Parallel()
	s := newSite(t, 4)
	f := s.startGateway(nil)
	for range 2 {
		if status, _, _ := f.ask(t.Context(), quick, "Prefer", "respond-async", "X-Request-Id", "one"); status != http.StatusAccepted {
			t.Errorf("got %d", status)
		}
	}
	if n := s.count(`SELECT count(*) FROM penstock.entry WHERE queue_id = $1`, s.queue.ID); n != 2 {
		t.Errorf("%d entries, want 2", n)
	}
}

// Nodes are told at once of an entry that a gateway makes of a request: they need not poll.
func TestEntriesOfGatewaysAreHinted(t *testing.T) {
	t.Parallel()
	s := newSite(t, 4)
	f := s.startGateway(nil)
	conn, err := pgx.Connect(t.Context(), s.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	if _, err := conn.Exec(t.Context(), `LISTEN penstock`); err != nil {
		t.Fatal(err)
	}
	hinted := func(by string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		for {
			n, err := conn.WaitForNotification(ctx)
			if err != nil {
				t.Fatalf("%s: no hint: %v", by, err)
			}
			queue, _, _ := strings.Cut(n.Payload, " ")
			if queue == strconv.Itoa(int(s.queue.ID)) {
				return
			}
		}
	}
	if status, _, _ := f.ask(t.Context(), quick, "Prefer", "respond-async"); status != http.StatusAccepted {
		t.Errorf("got %d", status)
	}
	hinted("respond-async")
	if status, _ := f.predict(t, "/v1/predictions", `{"version":"m","input":{"prompt":"x"}}`); status != 201 {
		t.Errorf("got %d", status)
	}
	hinted("a prediction")
	file, _ := f.upload(t, func(w io.Writer) { _, _ = io.WriteString(w, line("a", `{"model":"m"}`)) })
	f.batch(t, file)
	hinted("a batch")
}

// An entry made of a request is called at the path of the request, whatever operation its model has.
func TestRespondAsyncKeepsTheOperation(t *testing.T) {
	t.Parallel()
	s := newSite(t, 2)
	f := s.startGateway(nil)
	s.startNode(2)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+"/v1/embeddings", strings.NewReader(`{"model":"m","input":["a"]}`))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Prefer", "respond-async")
	var accepted struct{ ID string }
	if status := f.do(t, request, &accepted); status != http.StatusAccepted {
		t.Fatalf("got %d", status)
	}
	s.eventually("it is done", func() bool { return s.count(`SELECT count(*) FROM penstock.result WHERE outcome = 'done'`) == 1 })
	if n := s.count(`SELECT count(*) FROM penstock.result WHERE result->'data'->0->>'object' = 'embedding'`); n != 1 {
		t.Error("the worker was asked for something else than embeddings")
	}
}

func TestPausedModelIsNotCalled(t *testing.T) {
	t.Parallel()
	s := newSite(t, 4)
	f := s.startGateway(nil)
	if _, err := s.pool.Exec(t.Context(), `SELECT penstock.pause('model', 'm', reason => 'test')`); err != nil {
		t.Fatal(err)
	}
	s.eventually("requests are refused", func() bool {
		status, _, _ := f.ask(t.Context(), quick)
		return status == http.StatusServiceUnavailable
	})
}

func TestADrainedGatewayLeavesNoSlotAndNoRow(t *testing.T) {
	t.Parallel()
	s := newSite(t, 8)
	t.Run("gateway", func(t *testing.T) {
		inner := &site{T: t, pool: s.pool, dsn: s.dsn, gpu: s.gpu, queue: s.queue}
		f := inner.startGateway(nil)
		f.burst(t, 8, quick)
		if n := s.count(`SELECT count(*) FROM penstock.slot`); n == 0 {
			t.Error("the gateway holds no slot")
		}
	})
	if n := s.count(`SELECT count(*) FROM penstock.slot`); n != 0 {
		t.Errorf("%d slots are left", n)
	}
	if n := s.count(`SELECT count(*) FROM penstock.node`); n != 0 {
		t.Error("the row of the gateway is left")
	}
}

// registered makes gateways known that hold no slots.
func (s *site) registered(ids ...int64) {
	s.Helper()
	for _, id := range ids {
		s.exec(`SELECT penstock.register_gateway($1, 'g' || $1::bigint, 'default', '1 minute')`, id)
	}
}

func (s *site) exec(sql string, args ...any) {
	s.Helper()
	if _, err := s.pool.Exec(s.Context(), sql, args...); err != nil {
		s.Fatal(err)
	}
}

// keepDemand has slots missed for an hour after they were asked for, instead of for three seconds.
func (s *site) keepDemand() {
	s.Helper()
	pgtest.Redefine(s, s.pool, "penstock.hungry_nodes", "interval '3 seconds'", "interval '1 hour'")
}

// handOver lets a node hand over all that it holds, and returns how many slots another node got and how many
// are free.
func (s *site) handOver(holder, other int64) (got, free int) {
	s.Helper()
	s.exec(`SELECT penstock.hand_over_slots('m', $1, array_agg(instance_id), array_agg(number), array_agg(token))
	          FROM penstock.slot WHERE node_id = $1`, holder)
	got = s.count(`SELECT count(*) FROM penstock.slot WHERE node_id = $1`, other)
	if left := s.count(`SELECT count(*) FROM penstock.slot WHERE node_id = $1`, holder); left != 0 {
		s.Errorf("the holder kept %d slots", left)
	}
	return got, s.count(`SELECT (SELECT slots FROM penstock.instance) - count(*) FROM penstock.slot`)
}

// A slot that its instance has no more, or that lies at one that drains, is freed and not handed over: else
// gateways would hand it to each other, and calls would go on to an instance that is to end.
func TestSlotsAreHandedOverOnlyWhereTheyMayBeLeased(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, change string
		got          int
	}{
		{"usable", `SELECT 1`, 8},
		{"drains", `UPDATE penstock.instance SET draining_at = now()`, 0},
		{"unhealthy", `UPDATE penstock.instance SET state = 'unhealthy'`, 0},
		{"shrunk", `UPDATE penstock.instance SET slots = 3`, 3},
		{"its device group shrunk", `UPDATE penstock.instance SET labels = '{"device_group": "g"}'; SELECT penstock.set_device_group('g', 3)`, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t, 8)
			s.keepDemand()
			s.registered(1, 2)
			s.exec(`SELECT penstock.set_gateway_policy('m', '{"batch_reserved": 0}', 'test')`)
			s.exec(`SELECT penstock.lease_slots('m', 1, 8)`)
			s.exec(`SELECT penstock.lease_slots('m', 2, 8)`)
			s.exec(c.change)
			if got, _ := s.handOver(1, 2); got != c.got {
				t.Errorf("%d slots were handed over, want %d", got, c.got)
			}
		})
	}
}

// Task nodes hand over no more than online calls may hold: a part of the slots is for durable entries alone.
func TestTaskNodesKeepTheSlotsThatAreForDurableEntries(t *testing.T) {
	t.Parallel()
	s := newSite(t, 10)
	s.keepDemand()
	s.exec(`INSERT INTO penstock.node (id, name, application, lease, threads, queue_ids) VALUES (1, 'n', 'default', '1 minute', 10, '{}')`)
	s.exec(`SELECT penstock.lease_slots('m', 1, 10)`)
	s.registered(2)
	s.exec(`SELECT penstock.set_gateway_policy('m', '{"batch_reserved": 0.3}', 'test')`)
	s.exec(`SELECT penstock.lease_slots('m', 2, 10)`)
	if got, free := s.handOver(1, 2); got != 7 || free != 3 {
		t.Errorf("%d slots were handed over and %d are free, want 7 and 3", got, free)
	}
}
