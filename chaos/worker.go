package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/chaos/judge"
)

// mode is how workers behave for a while.
type mode string

// The ways in which workers misbehave.
const (
	honest  mode = "honest"
	hanging mode = "hangs"                       // answers nothing until the connection ends
	busy    mode = "says busy while idle"        // refuses with 503
	dying   mode = "dies in mid-stream"          // breaks the connection within the answer
	late    mode = "works on after the node"     // ends its work although the connection has ended
	aborts  mode = "aborts before an answer"     // resets the connection, as the end of its process does
	lying   mode = "reports no call in its load" // its health says that nothing runs
)

var modes = []mode{hanging, busy, dying, aborts, late, lying}

// payload is what the harness pushes: how long the run takes, how many calls fail first.
type payload struct {
	Op   int64 `json:"op"`
	MS   int   `json:"ms"`
	Fail int   `json:"fail,omitempty"`

	// For the model of the gateways, which speaks OpenAI's protocol.
	Via      string   `json:"via,omitempty"` // the gateway that the client asked
	Stream   bool     `json:"stream,omitempty"`
	Model    string   `json:"model,omitempty"`
	Messages []string `json:"messages,omitempty"`
}

// recorder is the inference worker of all models, and the receiver of webhooks. It records every
// call.
type recorder struct {
	server *http.Server
	addr   string
	mode   atomic.Value // mode
	share  atomic.Int64 // of calls that the mode is for, in percent
	active atomic.Int64

	mu         sync.Mutex
	calls      []*judge.Call
	failed     map[int64]int // errors that were answered, by operation
	deliveries []judge.Delivery
	refused    int // deliveries that were answered with an error
}

func newRecorder() (*recorder, error) {
	listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	w := &recorder{addr: "http://" + listener.Addr().String(), failed: map[int64]int{}}
	w.behave(honest, 0)
	mux := http.NewServeMux()
	mux.HandleFunc("POST /run/{queue}/{server}", w.run)
	mux.HandleFunc("POST /online/{server}/v1/chat/completions", w.online)
	mux.HandleFunc("POST /hook", w.hook)
	mux.HandleFunc("/", w.health)
	w.server = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = w.server.Serve(listener) }()
	return w, nil
}

func (w *recorder) behave(m mode, percent int64) {
	w.mode.Store(m)
	w.share.Store(percent)
}

func (w *recorder) health(rw http.ResponseWriter, _ *http.Request) {
	active := w.active.Load()
	if w.mode.Load() == lying {
		active = 0
	}
	rw.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(rw, `{"status": "ok", "active_jobs": %d, "max_jobs": 64}`, active)
}

func (w *recorder) run(rw http.ResponseWriter, r *http.Request) {
	var in payload
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	_, _ = io.Copy(io.Discard, r.Body) // so that the end of the connection is noticed
	c := w.called(r, in, r.PathValue("queue"))
	c.Instance = instanceOf(c.Queue, r.PathValue("server"))
	w.begin(c)
	w.mu.Lock()
	fails := w.failed[in.Op] < in.Fail
	w.mu.Unlock()
	w.active.Add(1)
	defer w.active.Add(-1)
	w.answer(rw, r, c, w.modeOf(), time.Duration(in.MS)*time.Millisecond, fails)
}

// called is the record of a call.
func (w *recorder) called(r *http.Request, in payload, queue string) *judge.Call {
	number := func(name string) int64 { n, _ := strconv.ParseInt(r.Header.Get(name), 10, 64); return n }
	return &judge.Call{
		Entry: number("Penstock-Entry"), Token: number("Penstock-Token"), Op: in.Op, Queue: queue, Begin: time.Now(),
		Answer: "none",
	}
}

func (w *recorder) begin(c *judge.Call) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls = append(w.calls, c)
}

// modeOf is how one call is answered.
func (w *recorder) modeOf() mode {
	m, _ := w.mode.Load().(mode)
	if rand.Int64N(100) >= w.share.Load() {
		m = honest
	}
	return m
}

func (w *recorder) answer(
	rw http.ResponseWriter,
	r *http.Request,
	c *judge.Call,
	m mode,
	run time.Duration,
	fails bool,
) {
	rw.Header().Set("Content-Type", "application/json")
	switch m {
	case busy:
		w.closed(c, "busy", "")
		rw.Header().Set("Retry-After", "1")
		rw.WriteHeader(http.StatusServiceUnavailable)
		return
	case hanging:
		select {
		case <-r.Context().Done():
		case <-time.After(20 * time.Second):
		}
		w.closed(c, "none", "")
		return
	case aborts:
		w.closed(c, "died", "")
		reset(rw)
		return
	case dying:
		w.closed(c, "died", "")
		rw.Header().Set("Content-Length", "1000")
		_, _ = io.WriteString(rw, `{"status": "succ`)
		panic(http.ErrAbortHandler)
	}
	select {
	case <-time.After(run):
	case <-r.Context().Done():
		w.closed(c, "none", "")
		if m == late {
			time.Sleep(run) // nobody hears the answer
		}
		return
	}
	if fails {
		w.mu.Lock()
		w.failed[c.Op]++
		w.mu.Unlock()
		w.closed(c, "error", "")
		_, _ = io.WriteString(rw, `{"status": "failed", "error": "scripted", "error_class": "transient"}`)
		return
	}
	nonce := strconv.FormatUint(rand.Uint64(), 36)
	w.closed(c, "ok", nonce)
	if c.Queue == onlineQueue {
		const answer = `{"nonce": %q, "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}}]}`
		fmt.Fprintf(rw, answer, nonce)
		return
	}
	fmt.Fprintf(rw, `{"status": "success", "result": {"nonce": %q}}`, nonce)
}

// reset ends the connection of a call by a TCP reset, without a byte of an answer.
func reset(rw http.ResponseWriter) {
	hijacker, able := rw.(http.Hijacker)
	if !able {
		panic(http.ErrAbortHandler)
	}
	conn, _, err := hijacker.Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	conn.Close()
}

// closed notes how a call ended, before the answer is sent.
func (w *recorder) closed(c *judge.Call, answer, nonce string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c.Closed, c.Answer, c.Nonce = time.Now(), answer, nonce
}

// callbackWaits are those of the schedule of callbacks after their first refusals, with all jitter.
var callbackWaits = []time.Duration{6 * time.Second, 6 * time.Minute}

// hook receives webhooks. One in ten is refused, so that deliveries are repeated. Of these one in two is refused with
// the status of a receiver that is up: five in a row of the others would have a node try none for half a minute.
func (w *recorder) hook(rw http.ResponseWriter, r *http.Request) {
	var body struct {
		Data struct {
			ID      int64  `json:"id"`
			Outcome string `json:"outcome"`
		} `json:"data"`
	}
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	accepted := rand.IntN(10) > 0
	w.deliveries = append(w.deliveries, judge.Delivery{
		ID: r.Header.Get("Webhook-Id"), Entry: body.Data.ID, Outcome: body.Data.Outcome,
		At: time.Now(), Accepted: accepted,
	})
	if accepted {
		return
	}
	if w.refused++; w.refused%2 == 0 {
		rw.WriteHeader(http.StatusConflict)
		return
	}
	rw.Header().Set("Retry-After", "1")
	rw.WriteHeader(http.StatusServiceUnavailable)
}

// owed says that a callback was refused once, which was due again at a moment and has not come since.
func (w *recorder) owed(at time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	got, settled := map[int64]int{}, map[int64]bool{}
	for _, d := range w.deliveries {
		got[d.Entry]++
		settled[d.Entry] = settled[d.Entry] || d.Accepted || d.At.Add(callbackWaits[0]).After(at)
	}
	for entry, n := range got {
		if n == 1 && !settled[entry] {
			return true
		}
	}
	return false
}

// awaitCallbacks waits for callbacks that were refused once and are due again, for as long as a judge needs to see that
// one does not come. It returns since when nothing else was left to do.
func (s *site) awaitCallbacks() (quiet time.Time) {
	quiet = time.Now()
	for s.recorder.owed(quiet) && time.Since(quiet) < 2*judge.CallbackMax(s.cfg.lease, s.tolerance()) {
		time.Sleep(100 * time.Millisecond)
	}
	return quiet
}
