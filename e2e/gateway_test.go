package e2e_test

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// judge is a worker that counts the calls that it runs at once, by itself.
type judge struct {
	*httptest.Server
	running, most, calls atomic.Int64
}

func startJudge(t *testing.T) *judge {
	t.Helper()
	j := &judge{}
	j.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			return // the probe
		}
		_, _ = io.Copy(io.Discard, r.Body)
		j.calls.Add(1)
		n := j.running.Add(1)
		defer j.running.Add(-1)
		for most := j.most.Load(); n > most && !j.most.CompareAndSwap(most, n); most = j.most.Load() {
		}
		select {
		case <-time.After(time.Duration(20+rand.IntN(180)) * time.Millisecond):
		case <-r.Context().Done():
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}`)
	}))
	t.Cleanup(j.Close)
	return j
}

// gatewayProcess is a running cmd/gateway.
type gatewayProcess struct {
	*program
	url string
}

func (p *plant) startGateway(name string) *gatewayProcess {
	p.t.Helper()
	g := &gatewayProcess{program: start(p.t, "gateway", name, "--name", name, "--listen", "127.0.0.1:0", "--debug-listen", "127.0.0.1:0",
		"--database-url", p.dsn, "--open", "--lease", "5s")}
	line := g.says("gateway started")
	_, rest, _ := strings.Cut(line, "listen=")
	address, _, _ := strings.Cut(rest, " ")
	g.url = "http://" + address
	return g
}

// registerModel registers the model m with one instance, and returns the name of its queue.
func (p *plant) registerModel(address string, slots int) (queue string) {
	p.t.Helper()
	by := inference.By{Reason: "test"}
	m := worker.Model{Name: "m", Protocol: worker.ProtocolOpenAI}
	queue, err := inference.RegisterModel(p.t.Context(), p.pool, m, by)
	p.must(err)
	_, err = inference.RegisterInstance(p.t.Context(), p.pool, "m", "gpu-1", address, slots, nil, by)
	p.must(err)
	return queue
}

// kills is how many gateways are killed; KILLS=100 is the long form.
func kills(t *testing.T) int {
	t.Helper()
	n, err := strconv.Atoi(cmp.Or(os.Getenv("KILLS"), "3"))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// The worker never gets more calls than it has slots, whatever dies in which moment.
func TestKilledGatewaysNeverExceedTheSlots(t *testing.T) {
	const slots, entries = 8, 100
	p := &plant{site: newSite(t, 1)}
	p.elected(0)
	j := startJudge(t)
	name := p.registerModel(j.URL, slots)
	var err error
	p.queue, err = invalidation.Open(t.Context(), p.pool, name)
	p.must(err)
	p.startNode("n1")
	for range entries {
		_, err := p.queue.Push(t.Context(), invalidation.Push{Payload: json.RawMessage(`{"messages":[]}`)})
		p.must(err)
	}
	var fleet struct {
		sync.Mutex
		list []*gatewayProcess
	}
	for _, name := range []string{"g1", "g2", "g3"} {
		fleet.list = append(fleet.list, p.startGateway(name))
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var served atomic.Int64
	var clients sync.WaitGroup
	for range 12 {
		clients.Go(func() {
			for ctx.Err() == nil {
				fleet.Lock()
				g := fleet.list[rand.IntN(len(fleet.list))]
				fleet.Unlock()
				if askModel(ctx, g.url) == http.StatusOK {
					served.Add(1)
				}
			}
		})
	}
	for n := range kills(t) {
		before := served.Load()
		eventually(t, time.Minute, "online requests are served", func() bool { return served.Load() > before+20 })
		at := rand.IntN(3)
		fleet.list[at].signal(syscall.SIGKILL)
		fleet.list[at].exit()
		fresh := p.startGateway("g" + strconv.Itoa(4+n))
		fleet.Lock()
		fleet.list[at] = fresh
		fleet.Unlock()
	}
	before := served.Load()
	eventually(t, time.Minute, "online requests are served after the last kill", func() bool { return served.Load() > before+20 })
	eventually(t, 3*time.Minute, "every entry is done", func() bool {
		return p.query(`SELECT count(*) FROM penstock.result WHERE queue_id = $1 AND outcome = 'done'`, p.queue.ID) == entries
	})
	if n := served.Load() - before; n > 10*entries { // twelve clients ask for more than the slots all the time
		t.Errorf("%d online requests were served behind the last kill before %d entries were done: the queue was left without its share",
			n, entries)
	}
	stop()
	clients.Wait()
	if most := j.most.Load(); most > slots {
		t.Errorf("%d calls at once on %d slots", most, slots)
	}
	t.Logf("%d online requests and %d entries in %d calls, %d at once at most", served.Load(), entries, j.calls.Load(), j.most.Load())
	eventually(t, time.Minute, "the slots of the dead are free", func() bool {
		return p.query(`SELECT count(*) FROM penstock.slot s WHERE NOT penstock.node_lives(s.node_id)`) == 0
	})
}

// stopped is for how long a gateway is stopped: longer than its lease of 5 s; STOPPED=60s is the long form.
func stopped(t *testing.T) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(cmp.Or(os.Getenv("STOPPED"), "10s"))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// A gateway that was stopped for longer than its lease, and goes on, uses no slot that others have got, and loses no
// request that waits in it.
func TestGatewayThatWasStoppedUsesNoSlotOfOthers(t *testing.T) {
	t.Parallel()
	const slots = 8
	p := &plant{site: newSite(t, 1)}
	p.elected(0)
	j := startJudge(t)
	p.registerModel(j.URL, slots)
	ttl := stopped(t) + time.Minute // requests whose wait ends during the stop are refused, as they should be
	p.exec(fmt.Sprintf(`SELECT penstock.set_gateway_policy('m', '{"queue_ttl": %g}', 'test', 'test')`, ttl.Seconds()))
	frozen, other := p.startGateway("g1"), p.startGateway("g2")
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var served [2]atomic.Int64
	var clients sync.WaitGroup
	for i, g := range []*gatewayProcess{frozen, other} {
		for range 2 * slots {
			clients.Go(func() {
				for ctx.Err() == nil {
					switch status := askModel(context.WithoutCancel(ctx), g.url); status {
					case http.StatusOK:
						served[i].Add(1)
					default:
						t.Errorf("a request of gateway %d was answered with %d", i+1, status)
						return
					}
				}
			})
		}
	}
	both := func(what string) {
		t.Helper()
		before := [2]int64{served[0].Load(), served[1].Load()}
		eventually(t, time.Minute, what, func() bool {
			return served[0].Load() > before[0]+20 && served[1].Load() > before[1]+20
		})
	}
	both("both gateways serve")
	frozen.signal(syscall.SIGSTOP)
	time.Sleep(stopped(t))
	frozen.signal(syscall.SIGCONT)
	both("both gateways serve after the stop")
	stop()
	clients.Wait()
	if most := j.most.Load(); most > slots {
		t.Errorf("%d calls at once on %d slots", most, slots)
	}
	t.Logf("%d and %d requests, %d calls at once at most", served[0].Load(), served[1].Load(), j.most.Load())
}

// An ordered drain is a way to stop, as a signal is: what is in flight is answered, slots and row are given back, and the
// program ends.
func TestAGatewayThatIsOrderedToDrainEnds(t *testing.T) {
	t.Parallel()
	var holds atomic.Bool
	held, release := make(chan struct{}), make(chan struct{})
	w := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.Method == http.MethodPost && holds.CompareAndSwap(true, false) {
			close(held)
			select {
			case <-release:
			case <-r.Context().Done():
			}
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{}`)
	}))
	t.Cleanup(w.Close)
	p := &plant{site: newSite(t, 1)}
	p.elected(0)
	p.registerModel(w.URL, 2)
	g := p.startGateway("g1")
	eventually(t, time.Minute, "the gateway serves", func() bool { return askModel(t.Context(), g.url) == http.StatusOK })
	holds.Store(true)
	answered := make(chan int, 1)
	go func() { answered <- askModel(context.WithoutCancel(t.Context()), g.url) }()
	<-held
	p.exec(`SELECT penstock.drain_node(id, 'test') FROM penstock.node WHERE name = 'g1'`)
	g.says("drain ordered")
	if status := askModel(t.Context(), g.url); status != http.StatusServiceUnavailable {
		t.Errorf("a request behind the order was answered with %d, want 503", status)
	}
	close(release)
	if status := <-answered; status != http.StatusOK {
		t.Errorf("a request in flight was answered with %d", status)
	}
	if status := g.exit(); status != 0 {
		t.Errorf("the gateway ended with status %d", status)
	}
	if n := p.query(`SELECT (SELECT count(*) FROM penstock.slot) + (SELECT count(*) FROM penstock.node WHERE name = 'g1')`); n != 0 {
		t.Errorf("%d slots and rows of the gateway are left", n)
	}
}

// askModel sends one request and returns its status, 0 without an answer.
func askModel(ctx context.Context, url string) int {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", strings.NewReader(`{"model":"m","messages":[]}`))
	if err != nil {
		return 0
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0
	}
	defer answer.Body.Close()
	_, _ = io.Copy(io.Discard, answer.Body)
	return answer.StatusCode
}
