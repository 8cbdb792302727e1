package api

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
)

// route is an address, the scope that it needs, and the bounds of a call.
type route struct {
	method, path string // as http.ServeMux writes them
	id           string // verb and noun, stable: generated clients name their functions by it
	summary      string
	scope        scope // that a token needs; empty: no token is needed
	// lets in a token of scope push, too, that sends the Idempotency-Key under which it pushed the entry
	own      bool
	of       object        // whose queue and application a limited token must be good for
	status   int           // of success; 0: 200
	changes  bool          // something, although it is a GET
	mayBeNil bool          // it answers with 204 where there is nothing to say
	bytesMax int64         // of the body; 0: 64 KiB
	timeout  time.Duration // 0: that of Config; negative: none, for what streams
}

const (
	defaultBytesMax = 64 << 10
	routeKey        = "route" // in the metadata of operations
)

// add registers an address whose bodies are described by types: a field that does not exist is refused, and an error
// becomes a problem document.
func add[I, O any](a *API, r route, answer func(context.Context, *I) (*O, error)) {
	op := a.operation(r)
	op.Middlewares = huma.Middlewares{a.plainBody}
	huma.Register(a.huma, *op, func(ctx context.Context, in *I) (*O, error) {
		var out *O
		err := storableInput(in)
		if err == nil && r.costly() {
			var leave func()
			if leave, err = a.lists.enter(ctx, callerOf(ctx).holder()); err == nil {
				defer leave()
			}
		}
		if err == nil {
			out, err = answer(ctx, in)
		}
		if err != nil {
			return nil, a.problemOf(ctx, err)
		}
		return out, nil
	})
}

// plainBody refuses a body that is encoded, which the addresses of add do not decode.
func (a *API) plainBody(ctx huma.Context, next func(huma.Context)) {
	request, w := humago.Unwrap(ctx)
	encoding := ctx.Header("Content-Encoding")
	if encoding == "" || encoding == "identity" || request.ContentLength == 0 {
		next(ctx)
		return
	}
	a.report(w, request, errEncoded)
}

// raw registers an address that reads and writes by itself. Its operation can be described further; whatever is said of
// a body there is documentation alone.
func (a *API) raw(r route, describe func(*huma.Operation), answer func(http.ResponseWriter, *http.Request) error) {
	op := a.operation(r)
	if describe != nil {
		describe(op)
	}
	if !op.Hidden {
		a.huma.OpenAPI().AddOperation(op)
	}
	a.huma.Adapter().Handle(op, a.huma.Middlewares().Handler(func(ctx huma.Context) {
		request, w := humago.Unwrap(ctx)
		request = request.WithContext(ctx.Context())
		request.Body = http.MaxBytesReader(w, request.Body, op.MaxBodyBytes)
		if err := answer(w, request); err != nil {
			a.report(w, request, err)
		}
	}))
}

func (a *API) operation(r route) *huma.Operation {
	r.bytesMax = cmp.Or(r.bytesMax, defaultBytesMax)
	r.timeout = cmp.Or(r.timeout, a.cfg.Timeout)
	r.status = cmp.Or(r.status, http.StatusOK)
	a.routes = append(a.routes, r)
	op := &huma.Operation{
		Method: r.method, Path: r.path, OperationID: r.id, Summary: r.summary, DefaultStatus: r.status,
		Hidden: r.id == "", MaxBodyBytes: r.bytesMax,
		// Beyond the time for the work: a read that runs into its deadline ends the whole request.
		BodyReadTimeout: max(r.timeout, 0) + 5*time.Second,
		Metadata:        map[string]any{routeKey: r},
		Responses: map[string]*huma.Response{"default": {
			Description: "A problem",
			Headers: map[string]*huma.Header{
				"Retry-After":      {Ref: "#/components/headers/Retry-After"},
				"WWW-Authenticate": {Ref: "#/components/headers/WWW-Authenticate"},
			},
			Content: map[string]*huma.MediaType{"application/problem+json": {Schema: a.schema(Problem{})}},
		}},
		Security: []map[string][]string{}, // none
	}
	if r.mayBeNil {
		op.Responses["204"] = &huma.Response{Description: http.StatusText(http.StatusNoContent)}
	}
	if r.scope != "" {
		op.Security = []map[string][]string{{"token": {}}}
		op.Description = "Needs scope `" + string(r.scope) + "`."
		if r.own {
			op.Description += " `push` is enough with the Idempotency-Key of the push of this entry (and `flow`, if " +
				"it had one)."
		}
	}
	if noun := strings.Split(r.path, "/"); len(noun) > 2 {
		op.Tags = []string{noun[2]}
	}
	return op
}

// problemHeaders describes the headers of Problem.GetHeaders.
var problemHeaders = map[string]*huma.Header{
	"Retry-After": {
		Description: "Seconds after which the same request can succeed; absent if that cannot be expected.",
		Schema:      &huma.Schema{Type: huma.TypeInteger},
	},
	"WWW-Authenticate": {
		Description: "Of status 401: that a bearer token is needed.",
		Schema:      &huma.Schema{Type: huma.TypeString},
	},
}

// schema describes a type, and adds it to the components of the document.
func (a *API) schema(of any) *huma.Schema {
	return a.huma.OpenAPI().Components.Schemas.Schema(reflect.TypeOf(of), true, "")
}

// guard runs before every handler: it bounds the time, finds the caller, and checks its rights.
func (a *API) guard(ctx huma.Context, next func(huma.Context)) {
	r, _ := ctx.Operation().Metadata[routeKey].(route) // operation puts it there
	request, w := humago.Unwrap(ctx)
	within := request.Context()
	if r.timeout > 0 {
		var cancel context.CancelFunc
		within, cancel = context.WithTimeout(within, r.timeout)
		defer cancel()
	}
	admission, cancel := context.WithTimeout(within, a.cfg.Timeout)
	from, err := a.admit(admission, ctx, r)
	cancel()
	if err == nil {
		if err := r.addressablePath(request); err != nil {
			a.report(w, request.WithContext(within), err)
			return
		}
	}
	if err != nil {
		a.logRefusal(within, r, request.RemoteAddr, from, err)
		a.report(w, request.WithContext(within), err)
		return
	}
	w.Header().Set("Cache-Control", "no-store")
	next(huma.WithContext(ctx, context.WithValue(within, callerKey{}, from)))
}

// reads reports whether requests for the route change nothing.
func (r route) reads() bool { return r.scope == read || r.method == http.MethodGet && !r.changes }

// Reads reports whether a request changes nothing, as the route that takes it says. It is true of one that none takes.
func (a *API) Reads(r *http.Request) bool {
	_, pattern := a.mux.Handler(r)
	i := slices.IndexFunc(a.routes, func(x route) bool { return x.method+" "+x.path == pattern })
	return i < 0 || a.routes[i].reads()
}

var (
	errNoRoute  = errors.New("there is nothing at this address")
	errNoMethod = errors.New("this address does not take this method")
)

// finish gives each path an answer to the methods that it does not take, and everything else one as well.
func (a *API) finish() {
	methods := map[string][]string{}
	for _, r := range a.routes {
		methods[r.path] = append(methods[r.path], r.method)
	}
	for path, allowed := range methods {
		if slices.Contains(allowed, http.MethodGet) {
			allowed = append(allowed, http.MethodHead)
		}
		slices.Sort(allowed)
		// Method by method: a pattern for all of them may clash with one of fewer methods and more paths.
		for _, method := range []string{"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"} {
			if slices.Contains(allowed, method) {
				continue
			}
			a.mux.HandleFunc(method+" "+path, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Allow", strings.Join(allowed, ", "))
				a.report(w, r, errNoMethod)
			})
		}
	}
	a.mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { a.report(w, r, errNoRoute) })
}
