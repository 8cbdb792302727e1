package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/penstock/penstock/chaos/judge"
)

// The model of the gateways has two instances, whose slots entries of its queue use as well. There are more clients
// than slots, so that all of these are in use.
const (
	onlineQueue   = "online"
	onlineSlots   = 2 // of each instance
	onlineClients = 6
	// gatewayLease is the shortest that a gateway takes.
	gatewayLease = 5 * time.Second
	// askMax is for how long a client waits. A worker that hangs is given up before.
	askMax = time.Minute
)

var onlineServers = []string{"online-1", "online-2"}

// startGateways starts the gateways, each with a way of its own to the database, as other programs have.
func (s *site) startGateways(ctx context.Context) error {
	for i := range s.cfg.gateways {
		listen, err := freeAddress(ctx)
		if err != nil {
			return err
		}
		g, err := s.add(ctx, "gateway", fmt.Sprintf("g%d", i+1), func(incarnation, database string) []string {
			return []string{
				"--name", incarnation, "--listen", listen, "--debug-listen", "127.0.0.1:0", "--open",
				"--database-url", database, "--database-max-conns", "6",
				"--lease", gatewayLease.String(), "--grace", "5s",
			}
		})
		if err != nil {
			return err
		}
		s.gateways = append(s.gateways, g)
		s.fronts = append(s.fronts, "http://"+listen)
	}
	return nil
}

// setUpOnline makes the model of the gateways.
func setUpOnline(ctx context.Context, db *database, w *recorder) error {
	config := fmt.Sprintf(`{"protocol": "openai", "max_retries": 60, "on_unknown": "at_least_once",
	    "timeouts": {"connect": 1, "run": %v, "control": 2, "probe": 2}}`, runMax.Seconds())
	if err := db.exec(ctx, `SELECT penstock.register_model($1, $2)`, onlineQueue, config); err != nil {
		return fmt.Errorf("register model %s: %w", onlineQueue, err)
	}
	for _, server := range onlineServers {
		const sql = `SELECT penstock.register_instance($1, $2, $3, $4)`
		if err := db.exec(ctx, sql, onlineQueue, server, w.addr+"/online/"+server, onlineSlots); err != nil {
			return fmt.Errorf("register instance: %w", err)
		}
	}
	return nil
}

// askOnline is the clients of the gateways: each sends one request after the other until ctx ends.
func (s *site) askOnline(ctx context.Context) {
	ended := make(chan struct{})
	for n := range onlineClients {
		go func() {
			defer func() { ended <- struct{}{} }()
			random := rand.New(rand.NewPCG(s.cfg.seed, uint64(100+n)))
			for ctx.Err() == nil {
				at := random.IntN(len(s.gateways))
				one := judge.Request{Op: s.load.ops.Add(1), Process: s.incarnationOf(s.gateways[at].name)}
				in := payload{Op: one.Op, MS: 50 + random.IntN(350)}
				s.load.online(ctx, s.fronts[at], &one, in, random.IntN(2) == 0)
				if one.How != judge.AnsweredWhole {
					time.Sleep(200 * time.Millisecond) // the gateway is away, or busy
				}
			}
		}()
	}
	for range onlineClients {
		<-ended
	}
}

// online sends a request and records how it was answered. The end of the load ends no request.
func (l *load) online(ctx context.Context, gateway string, one *judge.Request, in payload, stream bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askMax)
	defer cancel()
	in.Via, in.Stream, in.Model, in.Messages = one.Process, stream, onlineQueue, []string{}
	one.Begin = time.Now()
	one.How, one.Nonce = l.exchange(ctx, gateway, in)
	one.End = time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.requests = append(l.requests, *one)
}

func (l *load) exchange(ctx context.Context, gateway string, in payload) (how, nonce string) {
	text, err := json.Marshal(in)
	if err != nil {
		return judge.AnsweredPart, ""
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, gateway+"/v1/chat/completions", bytes.NewReader(text))
	if err != nil {
		return judge.AnsweredPart, ""
	}
	r.Header.Set("Content-Type", "application/json")
	answer, err := l.fresh.Do(r)
	var dial *net.OpError
	switch {
	case errors.As(err, &dial) && dial.Op == "dial":
		return judge.AnsweredError, "" // no gateway is there: the client knows that nothing was sent
	case err != nil:
		return judge.AnsweredNot, ""
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	switch {
	case err != nil:
		return judge.AnsweredPart, ""
	case answer.StatusCode/100 != 2:
		return howError(body), ""
	case in.Stream:
		return howStream(string(body))
	}
	var whole struct{ Nonce string }
	if json.Unmarshal(body, &whole) != nil || whole.Nonce == "" {
		return judge.AnsweredPart, ""
	}
	return judge.AnsweredWhole, whole.Nonce
}

// howError reads the body of a refusal, which has the form of OpenAI's errors.
func howError(body []byte) string {
	var refusal struct{ Error json.RawMessage }
	if json.Unmarshal(body, &refusal) != nil || len(refusal.Error) == 0 {
		return judge.AnsweredPart
	}
	return judge.AnsweredError
}

// howStream reads the events of a stream: it ends with [DONE] after all of its parts, or with an error and without it.
func howStream(body string) (how, nonce string) {
	parts := 0
	for line := range strings.Lines(body) {
		data, is := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		if !is {
			continue
		}
		if data == "[DONE]" {
			if parts != streamParts || nonce == "" {
				return judge.AnsweredPart, nonce
			}
			return judge.AnsweredWhole, nonce
		}
		var event struct {
			Error json.RawMessage
			Nonce string
		}
		if json.Unmarshal([]byte(data), &event) != nil {
			return judge.AnsweredPart, ""
		}
		if len(event.Error) > 0 {
			return judge.AnsweredError, ""
		}
		parts++
		nonce = event.Nonce
	}
	return judge.AnsweredPart, nonce
}

// streamParts is how many events a worker streams before the last one.
const streamParts = 4

// online is the worker of the model of the gateways. It is called for requests by gateways, and for entries by nodes.
func (w *recorder) online(rw http.ResponseWriter, r *http.Request) {
	var in payload
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	_, _ = io.Copy(io.Discard, r.Body)
	c := w.called(r, in, onlineQueue)
	c.Instance, c.Via = instanceOf(onlineQueue, r.PathValue("server")), in.Via
	w.begin(c)
	w.active.Add(1)
	defer w.active.Add(-1)
	m := w.modeOf()
	if m != honest && m != late && m != lying && (m != dying || !in.Stream) {
		w.answer(rw, r, c, m, 0, false)
		return
	}
	run := time.Duration(in.MS) * time.Millisecond
	if !in.Stream {
		w.answer(rw, r, c, m, run, false)
		return
	}
	w.stream(rw, r, c, run, m == dying)
}

// stream answers in parts, of which the last names the call. One that dies breaks the connection after the second.
func (w *recorder) stream(rw http.ResponseWriter, r *http.Request, c *judge.Call, run time.Duration, dies bool) {
	rw.Header().Set("Content-Type", "text/event-stream")
	nonce := strconv.FormatUint(rand.Uint64(), 36)
	for part := range streamParts {
		select {
		case <-time.After(run / streamParts):
		case <-r.Context().Done():
			w.closed(c, "none", "")
			return
		}
		if dies && part == 2 {
			w.closed(c, "died", "")
			panic(http.ErrAbortHandler)
		}
		named := ""
		if part == streamParts-1 {
			named = nonce
		}
		const event = `data: {"choices": [{"index": 0, "delta": {"content": "%d"}}], "nonce": %q}` + "\n\n"
		fmt.Fprintf(rw, event, part, named)
		_ = http.NewResponseController(rw).Flush()
	}
	w.closed(c, "ok", nonce)
	fmt.Fprint(rw, "data: [DONE]\n\n")
}

// serves asks each gateway after the faults until it answers, for a while.
func (s *site) serves(ctx context.Context) (left []string) {
	for i, front := range s.fronts {
		for began := time.Now(); ; time.Sleep(100 * time.Millisecond) {
			one := judge.Request{Op: s.load.ops.Add(1), Process: s.incarnationOf(s.gateways[i].name)}
			s.load.online(ctx, front, &one, payload{Op: one.Op, MS: 5}, false)
			if one.How == judge.AnsweredWhole {
				break
			}
			if time.Since(began) > probeMax {
				left = append(left, fmt.Sprintf("%s serves no request %v after the faults", one.Process, probeMax))
				break
			}
		}
	}
	return left
}

// gatewaySteps are the faults that aim at gateways.
var gatewaySteps = []step{
	{8, (*plan).killGateway},
	{5, (*plan).freezeGateway},
	{3, (*plan).drainGateway},
	{10, (*plan).hinderGateway},
	{8, (*plan).breakAnswers},
}

// breakAnswers lets workers die within their answers, which gateways have passed on in part by then.
func (p *plan) breakAnswers() string { return p.spoil(dying) }

func (p *plan) killGateway() string {
	g, back := pick(p, p.site.gateways), p.between(0, 4*time.Second)
	if !g.kill() {
		return ""
	}
	p.site.startLater(g, back)
	return "kill -9 of a gateway"
}

func (p *plan) freezeGateway() string {
	lasts := time.Duration((0.3 + 2*p.random.Float64()) * float64(gatewayLease))
	if !pick(p, p.site.gateways).freeze(lasts, 0) {
		return ""
	}
	return "SIGSTOP for 0.3 to 2.3 leases of a gateway"
}

func (p *plan) drainGateway() string {
	g := pick(p, p.site.gateways)
	go func() {
		g.drain()
		p.site.startLater(g, 0)
	}()
	return "SIGTERM of a gateway"
}

// hinderGateway keeps a gateway from the database for a while.
func (p *plan) hinderGateway() string {
	g, way := pick(p, p.site.gateways), p.random.IntN(3)
	lasts := time.Duration((0.1 + 1.9*p.random.Float64()) * float64(gatewayLease))
	switch way {
	case 0:
		g.link.Refuse(true)
		g.link.Cut()
		time.AfterFunc(lasts, func() { g.link.Refuse(false) })
	case 1:
		g.link.Delay(p.between(20*time.Millisecond, 700*time.Millisecond))
		time.AfterFunc(lasts, func() { g.link.Delay(0) })
	default:
		g.link.Blackhole(true, true)
		time.AfterFunc(lasts, func() {
			g.link.Blackhole(false, false)
			g.link.Cut()
		})
	}
	return "connections of a gateway " + []string{"cut and refused", "slow", "black-holed"}[way] + " for a while"
}
