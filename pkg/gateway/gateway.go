package gateway

import (
	"cmp"
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
)

// Config of a Gateway. The zero value works, and refuses all requests before tokens are set.
type Config struct {
	Open       bool  // requests need no token
	BodyMax    int64 // bytes of a request: 32 MiB
	BodiesMax  int64 // bytes of the bodies of all requests, of those in flight too: 1 GiB
	WaitingMax int64 // bytes of all requests that wait: 256 MiB
	Remember   int   // requests that explain knows: 10,000; negative: none
	Log        *slog.Logger
	Secrets    worker.SecretStore // that headers of models may refer to

	Push     Pusher          // for requests that prefer respond-async; nil: they are refused
	Charge   Charger         // for the use of calls; may be nil
	Observer RequestObserver // may be nil
}

// Pusher makes a request a durable entry.
type Pusher interface {
	// Push puts the body into the queue of a model, with a priority by criticality, and returns the id of the
	// entry and the address of its state. The body is that of the request for as long as Push runs, and no longer.
	Push(ctx context.Context, d Durable) (id, location string, err error)
	// AcceptedBefore says whether Push would return the entry of an earlier request, by the key.
	AcceptedBefore(ctx context.Context, d Durable) (bool, error)
	// Await returns the outcome of an entry of a queue once it has ended. ended is false if ctx
	// ended first.
	Await(ctx context.Context, queue, id string) (o DurableOutcome, ended bool, err error)
}

// DurableOutcome is the outcome of an entry that has ended.
type DurableOutcome struct {
	Outcome string          // done, failed, expired, cancelled or another word for an end without a result
	Result  json.RawMessage // of one that is done
	Reason  string          // of any other
}

// Durable is a request on its way into a queue.
type Durable struct {
	Model, Queue, Flow string
	Criticality        Criticality
	Body               []byte        // as the client sent it, of the OpenAI protocol with the operation of its path
	Within             time.Duration // in which its answer is of use; 0: there is no such bound
	Key                string        // idempotency key of the client, unique to its token; empty: none
	Token              string        // name of the token
	PriorityMax        *int16        // that its token may ask for; nil: any
	Trace              string        // traceparent; empty: none
}

// Charger books the measured use of calls, and the demand that found no slot.
type Charger interface {
	Charge(c Charge)
	// Refuse counts a request of a model that was refused for want of room when it arrived.
	Refuse(model string)
}

// Charge is what a flow pays for one call.
type Charge struct {
	Model, Queue, Flow string
	Took               time.Duration // that a slot was busy
	GPU                time.Duration // that, times the GPUs of the instance and the sequences that were asked for
	Wasted             bool          // the answer did not reach the client whole
	TokensIn           int64
	TokensOut          int64
	Separate           bool // it must not count in the order of durable entries
}

// RequestObserver is told of every request that ended.
type RequestObserver interface {
	Ended(e RequestRecord, dropped Dropped, own time.Duration)
	// Answered tells of a request of a mounted route, such as "GET /v1/batches/{id}".
	Answered(route string, status int)
}

// Gateway serves online requests. It is an http.Handler; slots, models and tokens are set from outside.
type Gateway struct {
	config    Config
	log       *slog.Logger
	transport http.RoundTripper
	mux       *http.ServeMux
	models    models
	tokens    tokenTable
	others    tokenReports
	flows     atomic.Pointer[map[string]FlowState]
	budget    byteBudget
	bodies    bodyBudget
	ring      *ring
	leases    *Leases // nil: slots are fixed
	ready     atomic.Bool
	draining  atomic.Bool
	setting   sync.Mutex // held by SetModels: two calls that overlap do not mix their versions
}

// FlowState has the settings of a flow, for all models.
type FlowState struct {
	Criticality Criticality // of its requests that name none, and the highest that they may name
	Set         bool        // Criticality is set
	Weight      float64     // 0 is taken as 1
	Paused      PauseState  // of all its requests
}

// New returns a gateway that knows no model yet.
func New(config Config) *Gateway {
	config.BodyMax = cmp.Or(config.BodyMax, 32<<20)
	config.BodiesMax = cmp.Or(config.BodiesMax, 1<<30)
	config.WaitingMax = cmp.Or(config.WaitingMax, 256<<20)
	config.Remember = max(0, cmp.Or(config.Remember, 10_000))
	config.Log = cmp.Or(config.Log, slog.Default())
	g := &Gateway{
		config: config, log: config.Log, transport: newTransport(),
		ring: newRing(config.Remember), budget: byteBudget{
			most: config.WaitingMax, each: eachOf(config.WaitingMax, config.BodyMax),
		},
		bodies: bodyBudget{most: config.BodiesMax, each: eachOf(config.BodiesMax, config.BodyMax)},
	}
	g.mux = g.routes()
	return g
}

// SetModels replaces the models, their settings and instances. The gateway is ready after the first call.
func (g *Gateway) SetModels(list []ModelState) {
	g.setting.Lock()
	defer g.setting.Unlock()
	g.models.set(list, g.config, func(name string, policy PoolPolicy) *sharedPool {
		return newSharedPool(name, policy, &g.budget, g.need, g.spare)
	})
	g.ready.Store(true)
	g.dropPaused()
	if g.leases != nil {
		g.leases.wakeWanting() // requests may have waited for a new instance
	}
}

// Cold says whether requests of a model wait for an instance to start.
func (g *Gateway) Cold(model string) bool {
	r := g.models.route(model)
	return r != nil && r.pool.cold()
}

// SetTokens replaces the tokens that may call models.
func (g *Gateway) SetTokens(list []TokenState) { g.tokens.set(list) }

// SetFlows replaces the settings of flows.
func (g *Gateway) SetFlows(flows map[string]FlowState) {
	g.flows.Store(&flows)
	g.dropPaused()
}

// Fixed gives every instance all of its slots, for a gateway without a database: no other caller of the
// workers is counted.
func (g *Gateway) Fixed() {
	for _, r := range g.models.all() {
		r.pool.do(func(now time.Time, p *Pool) {
			for _, s := range r.model.Instances {
				var slots []slot.Held
				for n := range s.Slots {
					//nolint:gosec // at most a few thousand
					key := slot.Held{Instance: s.ID, Number: int32(n), Token: int64(n) + 1}
					slots = append(slots, key)
				}
				p.Grant(now, slots)
			}
		})
	}
}

// need is called by a pool that wants slots, under its lock.
func (g *Gateway) need(pool *sharedPool) {
	if g.leases != nil {
		g.leases.need(pool.model)
	}
}

// spare is called by a pool whose slots came idle while other nodes miss some, under its lock.
func (g *Gateway) spare(pool *sharedPool) {
	if g.leases != nil {
		g.leases.OfferIdle(pool.model)
	}
}

// Drain makes the gateway refuse new requests; those that wait or are in flight go on.
func (g *Gateway) Drain() {
	g.draining.Store(true)
	for _, r := range g.models.all() {
		r.pool.do(func(_ time.Time, p *Pool) { p.Drain() })
	}
}

// Ready says why no requests should be sent here; nil: they may be.
func (g *Gateway) Ready(context.Context) error {
	switch {
	case g.draining.Load():
		return &Rejection{Reason: DropShutdown, Detail: "this gateway drains"}
	case !g.ready.Load():
		return &Rejection{Reason: DropNoEndpoints, Detail: "models and instances have not been read yet"}
	}
	return nil
}

// States returns the state of every pool, by model.
func (g *Gateway) States() []PoolState {
	states, _ := g.AllStates()
	return states
}

// AllStates returns the states of the pools, by model, and those of the pools whose models are not registered any more:
// a sum over models is a counter, which never falls. Each pool is in one of the two.
func (g *Gateway) AllStates() (registered, former []PoolState) {
	c := g.models.current.Load()
	if c == nil {
		return nil, nil
	}
	for _, r := range c.models {
		registered = append(registered, r.pool.view())
	}
	for _, pool := range c.former {
		former = append(former, pool.view())
	}
	return registered, former
}

// Explain returns the record of one of the last requests.
func (g *Gateway) Explain(id string) (RequestRecord, bool) { return g.ring.find(id) }

// ServeHTTP implements http.Handler.
func (g *Gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Body == nil || r.Body == http.NoBody {
		g.mux.ServeHTTP(w, r)
		return
	}
	a, r := arriving(w, r)
	g.mux.ServeHTTP(a, r)
	a.answer() // an answer without a body has not begun yet
}

// share returns the flow whose share of a pool the requests of a flow take: the granted one, or the longest name below
// it that has a criticality or a weight of its own. Else a client would have a share for each name that it thinks of.
func (g *Gateway) share(name, granted string) string {
	flows := g.flows.Load()
	for name != granted {
		if flows != nil {
			if of := (*flows)[name]; of.Set || of.Weight > 0 {
				return name
			}
		}
		name = name[:strings.LastIndexByte(name, '/')]
	}
	return name
}

// flow returns what is set about a flow. What is not set about a name holds as for the name above it, which a slash
// divides from it; a pause holds for all names below.
func (g *Gateway) flow(name string) (set FlowState) {
	flows := g.flows.Load()
	if flows == nil {
		return set
	}
	for {
		of := (*flows)[name]
		if !set.Set {
			set.Criticality, set.Set = of.Criticality, of.Set
		}
		set.Weight, set.Paused = cmp.Or(set.Weight, of.Weight), set.Paused.longer(of.Paused)
		end := strings.LastIndexByte(name, '/')
		if end < 0 {
			return set
		}
		name = name[:end]
	}
}
