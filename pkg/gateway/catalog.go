package gateway

import (
	"errors"
	"iter"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// ModelState is a model as the registry knows it, with its settings and instances.
type ModelState struct {
	Name       string
	Queue      string // of its durable entries
	Protocol   worker.Protocol
	Remote     string            // its name at the server
	Adapters   []string          // other names that a request may choose, as those of LoRA adapters
	Version    string            // OIP
	Operation  string            // OIP: infer or generate
	Stream     bool              // OIP: generate answers with events
	Headers    map[string]string // sent to its workers; values may refer to secrets. No call begins without them
	Template   string            // JSON that the payloads of its entries fill; empty: none
	Statuses   worker.Statuses   // of the generic protocol: the words for how a run is doing
	Async      bool              // a call goes on behind its answer: it is for durable entries alone
	AbortStops *bool             // closing the connection of a call ends its run; nil: see stopsOnClose
	ChoicesMax int               // sequences that a generation may ask for; 0: any
	RunMax     time.Duration
	Policy     PoolPolicy
	Paused     PauseState
	Created    time.Time
	Starts     Starts
	Instances  []InstanceState

	headers http.Header // with the secrets in place
	unread  string      // the header that cannot be read, for clients; empty: all can
}

// unread returns the header that an error of worker.ResolveHeaders is of, for clients; empty: there is no error.
func unread(err error) string {
	var of *worker.HeaderError
	switch {
	case err == nil:
		return ""
	case errors.As(err, &of):
		return "the header " + of.Header
	}
	return "a header"
}

// route is a name by which a request may ask for a model.
type route struct {
	model   *ModelState
	remote  string
	adapter string // empty: the model itself
	pool    *sharedPool
}

// catalog is one version of all routes.
type catalog struct {
	routes map[string]*route // by requested name
	models []*route          // one for each model, by name
	former []*sharedPool     // of models that are no more
}

// models holds the newest catalog, and the pools, which outlive it.
type models struct {
	current atomic.Pointer[catalog]
	pools   map[string]*sharedPool // touched by set alone
}

// set replaces the models. Pools of models that stay keep their requests.
func (m *models) set(list []ModelState, config Config, open func(name string, policy PoolPolicy) *sharedPool) {
	fresh := &catalog{routes: map[string]*route{}}
	if m.pools == nil {
		m.pools = map[string]*sharedPool{}
	}
	seen := map[string]bool{}
	for i := range list {
		s := &list[i]
		pool := m.pools[s.Name]
		if pool == nil {
			pool = open(s.Name, s.Policy)
			m.pools[s.Name] = pool
		}
		seen[s.Name] = true
		pool.do(func(now time.Time, p *Pool) {
			p.SetPolicy(now, s.Policy)
			p.SetStarts(now, s.Starts)
			p.SetInstances(now, s.Instances)
		})
		headers, err := worker.ResolveHeaders(s.Headers, config.Secrets)
		if err != nil {
			config.Log.Error("a header of a model cannot be read: its requests are refused",
				"model", s.Name, "error", err)
		}
		s.headers, s.unread = headers, unread(err)
		own := &route{model: s, remote: s.Remote, pool: pool}
		fresh.routes[s.Name] = own
		fresh.models = append(fresh.models, own)
	}
	for _, r := range slices.Clone(fresh.models) {
		for _, name := range r.model.Adapters {
			if _, taken := fresh.routes[name]; !taken && name != "*" {
				fresh.routes[name] = &route{model: r.model, remote: name, adapter: name, pool: r.pool}
			}
		}
	}
	for name, pool := range m.pools {
		if !seen[name] {
			pool.do(func(now time.Time, p *Pool) { p.SetInstances(now, nil) })
			fresh.former = append(fresh.former, pool)
		}
	}
	slices.SortFunc(fresh.models, func(a, b *route) int { return strings.Compare(a.model.Name, b.model.Name) })
	m.current.Store(fresh)
}

func (m *models) route(name string) *route {
	if c := m.current.Load(); c != nil {
		return c.routes[name]
	}
	return nil
}

// named returns all routes by the names that a request may ask for.
func (m *models) named() map[string]*route {
	if c := m.current.Load(); c != nil {
		return c.routes
	}
	return nil
}

func (m *models) all() []*route {
	if c := m.current.Load(); c != nil {
		return c.models
	}
	return nil
}

// target returns the address at an instance for a path of the OpenAI API, or, for other protocols, where
// that protocol takes calls.
func (r *route) target(address, path string) (*url.URL, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, err
	}
	base := strings.TrimSuffix(u.Path, "/")
	switch r.model.Protocol {
	case worker.ProtocolOpenAI:
		if operation, known := Operation(path); known {
			path = worker.OperationPath(operation) // as of entries: pooling and classify are beside /v1
		}
		u.Path = strings.TrimSuffix(base, "/v1") + path
	case worker.ProtocolCog:
		u.Path = base + "/predictions"
	case worker.ProtocolOIP:
		names := []string{"v2", "models", r.model.Remote}
		if r.model.Version != "" {
			names = append(names, "versions", r.model.Version)
		}
		below(u, append(names, r.model.inference()))
	}
	return u, nil
}

// inference is the last segment of the address of a call in the Open Inference Protocol.
func (m *ModelState) inference() string {
	switch {
	case m.Operation != worker.OperationGenerate:
		return "infer"
	case m.Stream:
		return "generate_stream"
	}
	return "generate"
}

// generic reports whether a model's workers speak another protocol than OpenAI's.
func (r *route) generic() bool { return r.model.Protocol != worker.ProtocolOpenAI }

// stopsOnClose says whether closing the connection of a call to a path is known to end its run. The model decides where
// its config has abort_stops; else it is known of the OpenAI API by the path, and of others by the protocol.
func (r *route) stopsOnClose(path string) bool {
	switch {
	case r.model.AbortStops != nil:
		return *r.model.AbortStops
	case r.model.Protocol == worker.ProtocolOpenAI:
		return !operationOf(path).lasts
	}
	return worker.Model{Protocol: r.model.Protocol}.CloseEndsRun()
}

// below appends segments to the path of an address. A slash in a segment does not divide it.
func below(u *url.URL, segments []string) {
	path, raw := strings.TrimSuffix(u.Path, "/"), strings.TrimSuffix(u.EscapedPath(), "/")
	for _, s := range segments {
		path, raw = path+"/"+s, raw+"/"+url.PathEscape(s)
	}
	u.Path, u.RawPath = path, raw
}

// withQuery appends the query of a client to that of an instance, which may be a credential. A parameter whose name
// the query of the instance has is left out: many servers take the last value. A space, which HTTP/2 allows, would
// divide the first line of the call.
func withQuery(own, clients string) string {
	clients = strings.ReplaceAll(clients, " ", "%20")
	if own == "" || clients == "" {
		return own + clients
	}
	names := map[string]bool{}
	for name := range parameterNames(own) {
		names[name] = true
	}
	for parameter := range strings.SplitSeq(clients, "&") {
		taken := false
		for name := range parameterNames(parameter) {
			taken = taken || names[name]
		}
		if !taken {
			own += "&" + parameter
		}
	}
	return own
}

// parameterNames yields the names in a query without escapes and in lower case. Older servers divide a query at
// semicolons too, and some do not heed the case.
func parameterNames(query string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for part := range strings.FieldsFuncSeq(query, func(r rune) bool { return r == '&' || r == ';' }) {
			name, _, _ := strings.Cut(part, "=")
			if plain, err := url.QueryUnescape(name); err == nil {
				name = plain
			}
			if !yield(strings.ToLower(name)) {
				return
			}
		}
	}
}
