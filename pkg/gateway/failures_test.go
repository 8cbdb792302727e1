package gateway

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"

	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// The tests of this file are the failures of workers, clients and the registry that the documentation lists, as far as
// no other file has them.

// Every test that the table of failures in docs/gateway.md names is there.
func TestFailuresOfTheDocumentationHaveTests(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/gateway.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "\n## Failures\n")
	table, _, _ = strings.Cut(table, "\n## ")
	rows := regexp.MustCompile("`(pkg/gateway|cmd/gateway|e2e)/(\\w+_test.go)` \\| `(Test\\w+)`").FindAllStringSubmatch(table, -1)
	if len(rows) < 9 {
		t.Fatalf("%d rows are in the table, want 9 or more", len(rows))
	}
	for _, row := range rows {
		source, err := os.ReadFile("../../" + row[1] + "/" + row[2])
		if err != nil || !strings.Contains(string(source), "\nfunc "+row[3]+"(") {
			t.Errorf("%s/%s has no %s: %v", row[1], row[2], row[3], err)
		}
	}
}

// An instance that sends the head of a whole answer, or half of its body, and nothing more holds its slot for the limit
// of silence at most, and its client does not take the part for the whole.
func TestInstanceThatHangsBehindItsHeadIsGivenUp(t *testing.T) {
	t.Parallel()
	for name, begin := range map[string]string{"no byte": "", "half a body": `{"choices":[`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := startTestbed(t, func(_ *Config, m *ModelState) {
				m.Policy.SilenceMax = worker.Seconds(100 * time.Millisecond)
			}, func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				w.Header().Set("Content-Length", "1000")
				w.WriteHeader(http.StatusOK)
				_, _ = io.WriteString(w, begin)
				_ = http.NewResponseController(w).Flush()
				<-r.Context().Done()
			})
			answer, err := http.DefaultClient.Do(p.request(t.Context(), http.MethodPost, chat, `{"model":"m"}`))
			if err == nil {
				defer answer.Body.Close()
				if body, err := io.ReadAll(answer.Body); err == nil {
					t.Errorf("got %q without an error", body)
				}
			}
			workertest.WaitFor(t, func() bool { s := p.state(); return s.InFlight == 0 && s.Idle == 4 })
		})
	}
}

// late is a transport whose answers have their heads when the limit of the first byte is over, and no byte behind them.
type late struct{ by time.Duration }

func (l late) RoundTrip(r *http.Request) (*http.Response, error) {
	_ = r.Body.Close()
	time.Sleep(l.by)
	body, end := io.Pipe()
	context.AfterFunc(r.Context(), func() { _ = end.CloseWithError(context.Cause(r.Context())) })
	return &http.Response{
		StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"text/event-stream"}}, ContentLength: -1, Body: body,
	}, nil
}

// A head that comes in the moment in which its limit ends the call is late, and no silence behind a head.
func TestHeadAtItsLimitIsLate(t *testing.T) {
	t.Parallel()
	for range 200 { // the order of the two is chance
		synctest.Test(t, func(t *testing.T) {
			const limit = time.Second
			policy := DefaultPolicy()
			policy.FirstByteMax, policy.SilenceMax = worker.Seconds(limit), worker.Seconds(limit)
			g := New(Config{Open: true})
			g.transport = late{limit}
			g.SetModels([]ModelState{{
				Name: "m", Remote: "m", Protocol: worker.ProtocolOpenAI, AbortStops: new(true), Policy: policy,
				Instances: []InstanceState{{ID: 1, Address: "http://worker", Slots: 1, Usable: true}},
			}})
			g.Fixed()
			w, began := httptest.NewRecorder(), time.Now()
			r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, chat, strings.NewReader(`{"model":"m"}`))
			g.ServeHTTP(w, r)
			inTime := time.Since(began) > limit // its silence has ended it
			if !inTime && (w.Code != http.StatusBadGateway || !strings.Contains(w.Body.String(), errFirstByte.Error())) {
				t.Errorf("got %d %s", w.Code, w.Body.String())
			}
		})
	}
}

// What follows [DONE] passes as it came, on both ways of a stream, and does not hide the token counts.
func TestBytesBehindDonePass(t *testing.T) {
	t.Parallel()
	usage := "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":9}}\n\n"
	for _, garbage := range []string{"garbage", "\n\n\n", "data: {\"choices\":[", "\x00\xff\n\n", "data: [DONE]\n\n"} {
		stream := strings.Replace(plainStream, "data: [DONE]", usage+"data: [DONE]", 1) + garbage
		p := startTestbed(t, nil, streamer(stream))
		if got := p.post(chat, `{"model":"m","stream":true,"stream_options":{"include_usage":true}}`).body; got != stream {
			t.Errorf("%q: got %q", garbage, got)
		}
		if got := p.post(chat, `{"model":"m","stream":true}`).body; got != plainStream+garbage {
			t.Errorf("%q, without the counts: got %q", garbage, got)
		}
		workertest.WaitFor(t, func() bool { s := p.state(); return s.InFlight == 0 && s.Idle == 4 })
		for i, e := range p.gateway.ring.last {
			if e.In != 7 || e.Out != 9 || e.Error != "" {
				t.Errorf("%q, request %d: counted %d and %d tokens, error %q", garbage, i, e.In, e.Out, e.Error)
			}
		}
	}
}

// Readings that are all 0, or older than 5 s, neither lower the limit of an instance nor draw all requests to it.
func TestReadingsThatSayNothingDecideNothing(t *testing.T) {
	t.Parallel()
	for name, age := range map[string]time.Duration{"all 0": 0, "stale": time.Minute, "from the future": -time.Hour} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			now := time.Unix(1_700_000_000, 0)
			p := NewPool(DefaultPolicy(), &byteBudget{most: 1 << 30})
			queued, kv, used := 0, 0.0, 0.8
			if age > 0 {
				queued, kv = 50, 1 // signs of overload, an hour old
			}
			calls := map[int32]int{}
			for n := range 120 {
				now = now.Add(100 * time.Millisecond)
				p.SetInstances(now, []InstanceState{
					{ID: 1, Slots: 100, Usable: true, At: now.Add(-age), Queued: &queued, KV: &kv},
					{ID: 2, Slots: 100, Usable: true, At: now, KV: &used},
				})
				if n == 0 {
					for k := range int32(200) {
						p.Grant(now, []slot.Held{{Instance: k%2 + 1, Number: k / 2, Token: 1}})
					}
				}
				r := &Request{Criticality: Critical}
				if inFlight, refused := p.Arrive(now, r); !inFlight {
					t.Fatalf("request %d does not go: %v", n, refused)
				}
				calls[r.slot.Instance]++
			}
			if s := p.view(now, "m"); s.Instances[0].Limit != 100 {
				t.Errorf("the limit is %d of 100", s.Instances[0].Limit)
			}
			if calls[1] < 40 || calls[1] > 85 {
				t.Errorf("the instance got %d of 120 calls", calls[1])
			}
		})
	}
}

// goaway is a worker of HTTP/2 that ends each connection with GOAWAY after a number of requests, and answers no stream
// behind the last one that it names.
type goaway struct {
	answers int // before GOAWAY
	ran     atomic.Int64
	conns   atomic.Int64
}

// serve is one connection.
func (g *goaway) serve(conn net.Conn) {
	defer conn.Close()
	g.conns.Add(1)
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(conn, preface); err != nil {
		return
	}
	framer := http2.NewFramer(conn, conn)
	_ = framer.WriteSettings()
	answered, last, gone := 0, uint32(0), false
	for {
		frame, err := framer.ReadFrame()
		if err != nil {
			return
		}
		switch f := frame.(type) {
		case *http2.SettingsFrame:
			if !f.IsAck() {
				_ = framer.WriteSettingsAck()
			}
		case *http2.DataFrame:
			if !f.StreamEnded() || (gone && f.StreamID > last) {
				continue
			}
			if !gone && answered >= g.answers && f.StreamID > last { // the client closes the connection
				gone = true
				_ = framer.WriteGoAway(last, http2.ErrCodeNo, nil)
				continue
			}
			answered++
			last = max(last, f.StreamID)
			g.ran.Add(1)
			// ":status: 200" is field 8 of HPACK's static table (RFC 7541, appendix A).
			_ = framer.WriteHeaders(http2.HeadersFrameParam{StreamID: f.StreamID, BlockFragment: []byte{0x88}, EndHeaders: true})
			_ = framer.WriteData(f.StreamID, true, []byte("{}"))
		}
	}
}

// A worker that ends its connections with GOAWAY, as servers do that are rolled over, loses no request, and runs none
// twice: what came behind the last stream that it names is sent again on a new connection.
func TestGoAwayOfAWorkerLosesNoRequest(t *testing.T) {
	t.Parallel()
	g := &goaway{answers: 3}
	idle := httptest.NewTLSServer(nil)
	defer idle.Close() // only its certificate is used
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		Certificates: idle.TLS.Certificates, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS12,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go g.serve(conn)
		}
	}()
	p := startTestbed(t, func(_ *Config, m *ModelState) {
		m.Instances[0].Address, m.Instances[0].Slots = "https://"+listener.Addr().String(), 8
	}, nil)
	ways, is := p.gateway.transport.(*direct)
	if !is {
		t.Fatal("the transport is of another type")
	}
	transport, is := ways.other.(*http.Transport)
	if !is {
		t.Fatal("the transport is of another type")
	}
	transport.TLSClientConfig = idle.Client().Transport.(*http.Transport).TLSClientConfig //nolint:errcheck,forcetypeassert // it is
	const requests = 60
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			for range requests / 4 {
				if answer := p.post(chat, `{"model":"m"}`); answer.StatusCode != 200 || answer.body != "{}" {
					t.Errorf("got %d %s", answer.StatusCode, answer.body)
				}
			}
		})
	}
	group.Wait()
	if ran := g.ran.Load(); ran != requests {
		t.Errorf("%d requests ran, want %d", ran, requests)
	}
	if conns := g.conns.Load(); conns < requests/4/2 {
		t.Errorf("%d connections: none was ended", conns)
	}
	workertest.WaitFor(t, func() bool { s := p.state(); return s.InFlight == 0 && s.Idle == 8 })
}

// A call keeps its slot while its instance is not in the registry for a moment: the slot that the instance has when it
// comes back is not idle.
func TestCallKeepsItsSlotWhileItsInstanceIsGone(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	p := NewPool(DefaultPolicy(), &byteBudget{most: 1 << 30})
	list := []InstanceState{{ID: 1, Slots: 1, Usable: true}}
	slot := []slot.Held{{Instance: 1, Number: 1, Token: 1}}
	p.SetInstances(now, list)
	p.Grant(now, slot)
	first, second := &Request{Criticality: Critical}, &Request{Criticality: Critical}
	if inFlight, refused := p.Arrive(now, first); !inFlight {
		t.Fatal(refused)
	}
	p.SetInstances(now, nil)
	p.SetInstances(now, list)
	p.Grant(now, slot) // as a comparison with the database does
	if inFlight, _ := p.Arrive(now, second); inFlight {
		t.Error("two calls are on one slot")
	}
	p.End(now, first, CallEnd{Took: time.Second})
	if second.state != stateInFlight {
		t.Error("the slot is not idle after the end of its call")
	}
	p.SetInstances(now, nil)
	p.End(now, second, CallEnd{Took: time.Second})
	p.SetInstances(now, nil)
	if s := p.view(now, "m"); s.InFlight != 0 || s.Held != 0 || len(s.Instances) != 0 {
		t.Errorf("an instance that is gone is kept: %+v", s)
	}
}

// Two thousand versions of the registry while requests run: instances come, go, are stopped and go on, with other numbers
// of slots. No request is lost, and no instance gets more calls than the gateway has slots for.
func TestRegistryStormLosesNoRequest(t *testing.T) {
	t.Parallel()
	const versions, clients = 2000, 16
	workers := make([]struct{ running, most atomic.Int64 }, 2)
	count := func(at int) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			n := workers[at].running.Add(1)
			defer workers[at].running.Add(-1)
			for m := workers[at].most.Load(); n > m && !workers[at].most.CompareAndSwap(m, n); m = workers[at].most.Load() {
			}
			_, _ = io.WriteString(w, "{}")
		}
	}
	p := startTestbed(t, nil, count(0), count(1))
	ctx, stop := context.WithCancel(t.Context())
	var group sync.WaitGroup
	var served atomic.Int64
	for range clients {
		group.Go(func() {
			for ctx.Err() == nil {
				if answer := p.post(chat, `{"model":"m"}`); answer.StatusCode != 200 {
					t.Errorf("got %d %s", answer.StatusCode, answer.body)
					return
				}
				served.Add(1)
			}
		})
	}
	for n := range versions {
		if n%20 == 0 { // requests are served all along
			before := served.Load()
			workertest.WaitFor(t, func() bool { return served.Load() > before || t.Failed() })
		}
		p.gateway.SetModels(stormVersion(p.model, n, n == versions-1))
	}
	stop()
	group.Wait()
	for i := range workers {
		if most := workers[i].most.Load(); most > 4 {
			t.Errorf("instance %d: %d calls at once on 4 slots", i+1, most)
		}
	}
	workertest.WaitFor(t, func() bool { s := p.gateway.models.route("m").pool.view(); return s.InFlight == 0 && s.Idle == 8 })
}

// stormVersion is a version of the registry: of the two instances with slots one may be stopped, those without are others
// each time, and so is another model.
func stormVersion(model ModelState, n int, last bool) []ModelState {
	list := slices.Clone(model.Instances)
	if at := n % 3; at < len(list) && !last {
		list[at].Usable = false
	}
	for id := range n % 7 {
		list = append(list, InstanceState{
			ID: int32(100 - (n+id)%50), Address: "http://127.0.0.1:1", Slots: 1 + id, Usable: true, //nolint:gosec // small
		})
	}
	model.Instances = list
	model.Policy.FlowTotal = 100 + n%3
	other := ModelState{Name: fmt.Sprint("other-", n%9), Protocol: worker.ProtocolOpenAI, Policy: DefaultPolicy()}
	return []ModelState{model, other}
}

// What explain and metrics have of a request is what became of it: half an answer has the status that its client got and
// an error, a client that left 499.
func TestRecordsSayWhatBecameOfARequest(t *testing.T) {
	t.Parallel()
	record := func(p *testbed) (e RequestRecord) {
		workertest.WaitFor(t, func() (known bool) { e, known = p.gateway.Explain("r"); return known })
		return e
	}
	p := startTestbed(t, nil, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Length", "100000")
		_, _ = io.WriteString(w, strings.Repeat("x", 50_000))
		panic(http.ErrAbortHandler)
	})
	answer, err := http.DefaultClient.Do(p.request(t.Context(), http.MethodPost, chat, `{"model":"m"}`, "X-Request-Id", "r"))
	if err == nil {
		_, err = io.ReadAll(answer.Body)
		answer.Body.Close()
	}
	if err == nil {
		t.Error("half an answer passes for a whole one")
	}
	if e := record(p); e.Status != http.StatusOK || e.Error == "" || e.Fault != "cut" {
		t.Errorf("half an answer: status %d, error %q, fault %q", e.Status, e.Error, e.Fault)
	}

	p = startTestbed(t, nil, func(w http.ResponseWriter, r *http.Request) {
		streamer("data: {}\n\n")(w, r)
		<-r.Context().Done()
	})
	ctx, leave := context.WithCancel(t.Context())
	answer, err = http.DefaultClient.Do(p.request(ctx, http.MethodPost, chat, `{"model":"m","stream":true}`, "X-Request-Id", "r"))
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	_, _ = answer.Body.Read(make([]byte, 1))
	leave()
	if e := record(p); e.Status != statusLeft || e.Error == "" || e.Fault != "" {
		t.Errorf("a client that left a stream: status %d, error %q, fault %q", e.Status, e.Error, e.Fault)
	}

	p = startTestbed(t, nil, func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "CUDA error", http.StatusInternalServerError)
	})
	answer, err = http.DefaultClient.Do(p.request(t.Context(), http.MethodPost, chat, `{"model":"m"}`, "X-Request-Id", "r"))
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	if e := record(p); e.Status != http.StatusInternalServerError || e.Fault != "status" {
		t.Errorf("a worker that answers 500: status %d, fault %q", e.Status, e.Fault)
	}
}

// Requests that are refused at arrival have not expired: they have not waited.
func TestRequestsThatWereRefusedHaveNotExpired(t *testing.T) {
	t.Parallel()
	g := open(DefaultPolicy())
	if err := g.await(t.Context(), &Request{}); err != nil {
		t.Fatal(err)
	}
	if err := g.await(t.Context(), &Request{Deadline: time.Now().Add(-time.Second)}); dropped(err) != DropDeadline {
		t.Errorf("got %v", err)
	}
	if err := g.await(t.Context(), &Request{TTL: time.Millisecond}); dropped(err) != DropTimeout {
		t.Errorf("got %v", err)
	}
	if n := g.view().Counters().Expired; n != 1 {
		t.Errorf("%d requests have expired, want the one that waited", n)
	}
}
