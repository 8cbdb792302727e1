package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"mime"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/penstock/penstock/pkg/invalidation"
)

func (a *API) pushRoutes() {
	a.raw(route{
		method: "POST", path: "/v1/queues/{queue}/entries", id: "push",
		summary: "Accept one entry, a list of them (all or none), or a stream (line by line)",
		scope:   push, of: ofQueue, status: http.StatusCreated, bytesMax: math.MaxInt64, timeout: -1,
	}, a.describePush, a.push)
}

func (a *API) describePush(op *huma.Operation) {
	entry := a.schema(entryToPush{})
	one := a.schema(invalidation.Pushed{})
	op.Parameters = append(op.Parameters, queueParameter(),
		keyParameter("A request that is sent again under its key is answered with the entries of the first one."))
	op.RequestBody = &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{
		"application/json": {Schema: &huma.Schema{OneOf: []*huma.Schema{
			entry,
			{Type: huma.TypeArray, Items: entry},
		}}},
		"application/x-ndjson": {Schema: entry},
	}}
	for status, description := range map[string]string{
		"201": "Accepted: at least one entry is new. The answer has the shape of the body.",
		"200": "Every entry had been accepted before or was a duplicate; for a stream, what became of its lines.",
	} {
		op.Responses[status] = &huma.Response{Description: description, Content: map[string]*huma.MediaType{
			"application/json": {Schema: &huma.Schema{OneOf: []*huma.Schema{
				one, a.schema(pushedMany{}),
				a.schema(streamEnd{}),
			}}},
			"application/x-ndjson": {Schema: &huma.Schema{Description: "With Accept: application/x-ndjson a line " +
				"for each line, and last a summary."}},
		}}
	}
	op.Responses["201"].Headers = map[string]*huma.Header{
		"Location": textHeader("The address of the entry, where the body was one object."),
	}
	op.Responses["200"].Headers = map[string]*huma.Header{
		"Location": op.Responses["201"].Headers["Location"],
		"Idempotent-Replayed": textHeader("`true` where every entry had been accepted under its key before; not of " +
			"a stream."),
	}
}

// pushedMany is the answer to a push of a list.
type pushedMany struct {
	Entries []invalidation.Pushed `json:"entries" nullable:"false" doc:"In the order of the body."`
}

// push accepts a JSON object, or an array of them: all or none; or a stream of objects, a line each.
func (a *API) push(w http.ResponseWriter, r *http.Request) error {
	if r.URL.RawQuery != "" {
		return errNoParameters
	}
	mediaType, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return errMediaType
	}
	switch mediaType {
	case "application/json":
		return a.pushList(w, r)
	case "application/x-ndjson", "application/ndjson", "application/jsonl":
		return a.pushStream(w, r)
	}
	return errMediaType
}

// pushList accepts entries all or none. The answer has the shape of the body. Its status is 201 if any entry is new and
// 200 if all of them had been accepted before or were duplicates.
func (a *API) pushList(w http.ResponseWriter, r *http.Request) error {
	ctx, cancel := context.WithTimeout(r.Context(), a.cfg.Timeout)
	defer cancel()
	r = r.WithContext(ctx)
	body, give, err := a.readBody(w, r, callerOf(ctx).holder())
	defer give()
	if err != nil {
		return err
	}
	pushes, one, err := a.pushesOf(body, r)
	if err != nil {
		return err
	}
	leave, err := a.registerKey(r, flowsOf(pushes)...)
	if err != nil {
		return err
	}
	defer leave()
	queue, err := a.queues.Get(ctx, r.PathValue("queue"))
	if err != nil {
		return err
	}
	pushed, err := a.pushWithin(ctx, queue, pushes...)
	if err != nil {
		err = neverFits(inUse(err, pushes...), len(pushes))
		if len(pushes) == 1 {
			err = refusedOne{err}
		}
		return err
	}
	return answerPush(w, pushed, one)
}

func answerPush(w http.ResponseWriter, pushed []invalidation.Pushed, one bool) error {
	has := func(v invalidation.Verdict) bool {
		return slices.ContainsFunc(pushed, func(p invalidation.Pushed) bool { return p.Verdict == v })
	}
	status := http.StatusOK
	if has(invalidation.Inserted) {
		status = http.StatusCreated
	} else if has(invalidation.Replayed) {
		w.Header().Set("Idempotent-Replayed", "true")
	}
	if !one {
		writeJSON(w, "application/json", status, pushedMany{pushed})
		return nil
	}
	w.Header().Set("Location", "/v1/entries/"+strconv.FormatInt(int64(pushed[0].ID), 10))
	writeJSON(w, "application/json", status, pushed[0])
	return nil
}

// neverFits takes the time to come back from the refusal of a push that is larger than its queue.
func neverFits(err error, n int) error {
	var full *invalidation.FullError
	if errors.As(err, &full) && int64(n) > full.Capacity {
		full.RetryAfter = 0
		return fmt.Errorf("push fewer than %d entries at once: %w", n, err)
	}
	return err
}

// refusedOne is the error of a push of one entry, which does not say which entry of the push it is about.
type refusedOne struct{ error }

func (e refusedOne) Error() string { return aboutOne.Replace(e.error.Error()) }
func (e refusedOne) Unwrap() error { return e.error }

// readBody reads a body whole, within what all bodies together and those of the holder may take. The caller calls give
// when it needs the body no more, error or not.
func (a *API) readBody(w http.ResponseWriter, r *http.Request, holder string) (body []byte, give func(), err error) {
	// Beyond the time for the work: a read that runs into its deadline ends the whole request.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(a.cfg.Timeout + 5*time.Second))
	r.Body = http.MaxBytesReader(w, r.Body, a.cfg.BodyBytesMax)
	plain, err := inflated(r)
	if err != nil {
		return nil, func() {}, err
	}
	body, taken, err := a.bodies.readAll(holder, plain, a.cfg.BodyBytesMax)
	return body, func() { a.bodies.give(holder, taken) }, endedEarly(err)
}

// registerKey registers the request's Idempotency-Key, if it has one, in each of its flows for as long as the request
// is under way.
func (a *API) registerKey(r *http.Request, flows ...string) (leave func(), err error) {
	key, err := idempotencyKey(r.Header)
	if key == "" || err != nil {
		return func() {}, err
	}
	taken := make([]flight, len(flows))
	for i, flow := range flows {
		taken[i] = flight{r.PathValue("queue"), flow, key}
	}
	return a.flights.enter(r.Context(), taken...)
}

// flowsOf names each flow of pushes once, in order.
func flowsOf(pushes []invalidation.Push) []string {
	flows := make([]string, len(pushes))
	for i := range pushes {
		flows[i] = pushes[i].Flow
	}
	slices.Sort(flows)
	return slices.Compact(flows)
}

// pushesOf makes pushes of a body, and gives each the request's trace and its part of the Idempotency-Key.
func (a *API) pushesOf(body []byte, r *http.Request) (pushes []invalidation.Push, one bool, err error) {
	entries, one, err := decode(body, a.cfg.EntriesMax)
	if err != nil {
		return nil, one, err
	}
	key, err := idempotencyKey(r.Header)
	if err != nil {
		return nil, one, err
	}
	trace := r.Header.Get("Traceparent")
	if !invalidation.ValidTraceParent(trace) {
		trace = "" // the specification asks to ignore a header that it does not define
	}
	pushes = make([]invalidation.Push, len(entries))
	for i, e := range entries {
		number := i + 1
		if one {
			number = 0
		}
		if pushes[i], err = a.pushOf(callerOf(r.Context()), e, key, trace, int64(number)); err != nil {
			if !one {
				err = &entryError{number, err}
			}
			return nil, one, err
		}
	}
	err = setTimes(r.Context(), a.operator.Now, len(entries), func(i int) (delays, *invalidation.Push) {
		return entries[i].delays(), &pushes[i]
	})
	return pushes, one, err
}

// setTimes sets the times of n pushes that are durations from now on. The clock is read once, and only if there are
// some.
func setTimes(ctx context.Context, clock func(context.Context) (time.Time, error), n int,
	at func(i int) (delays, *invalidation.Push),
) error {
	var now time.Time
	for i := range n {
		d, p := at(i)
		if d == (delays{}) {
			continue
		}
		if now.IsZero() {
			var err error
			if now, err = clock(ctx); err != nil {
				return err
			}
		}
		d.from(now, p)
	}
	return nil
}

// pushOf makes a push of an entry. Number is its place in the request, 0 if it is alone there.
func (a *API) pushOf(c caller, e entryToPush, key, trace string, number int64) (invalidation.Push, error) {
	if err := e.storable(); err != nil {
		return invalidation.Push{}, err
	}
	if err := checkNumbers("payload", e.Payload); err != nil {
		return invalidation.Push{}, err
	}
	if e.Trace != "" && !invalidation.ValidTraceParent(e.Trace) {
		return invalidation.Push{}, flaw("trace", errTrace)
	}
	p := e.push()
	if err := c.grants(&p); err != nil {
		return invalidation.Push{}, err
	}
	p.Trace = cmp.Or(p.Trace, trace)
	if key != "" {
		if p.IdempotencyKey != "" {
			return p, fmt.Errorf(
				"%w: there is an idempotency_key, and the request has an Idempotency-Key; give one of them",
				errMalformed)
		}
		p.IdempotencyKey = key
		if number > 0 {
			p.IdempotencyKey += "/" + strconv.FormatInt(number, 10)
		}
	}
	return p, a.checkCallback(p.Callback)
}

// checkCallback refuses a callback that could not be made.
func (a *API) checkCallback(callback json.RawMessage) error {
	if callback == nil {
		return nil
	}
	var c struct {
		URL     string
		Context json.RawMessage
		Format  string
	}
	if err := decodeWhole(callback, []member{
		{"url", &c.URL},
		{"context", &c.Context},
		{"format", &c.Format},
	}); err != nil {
		return flaw("callback", fmt.Errorf("it is not an object with url and, if wanted, context and format: %w", err))
	}
	switch {
	case c.URL == "":
		return flaw("callback.url", errMissing)
	case len(c.URL) > callbackURLMax:
		return flaw("callback.url", fmt.Errorf("it is longer than %d bytes", callbackURLMax))
	case len(c.Context) > callbackContextMax:
		return flaw("callback.context", fmt.Errorf("it has %d bytes, want at most %d; store the data elsewhere and "+
			"give a reference to it: %w",
			len(c.Context), callbackContextMax, invalidation.ErrPayloadTooLarge))
	}
	if err := checkNumbers("callback.context", c.Context); err != nil {
		return err
	}
	if c.Format != "" && c.Format != "job" {
		return flaw("callback.format", errors.New(`it is not "job"; leave it out for the body of Standard Webhooks`))
	}
	if a.cfg.CheckCallback != nil {
		if err := a.cfg.CheckCallback(c.URL); err != nil {
			return flaw("callback.url", err)
		}
	}
	return nil
}

// Limits of a callback, which every claim of its entry reads beside the payload, in bytes. They are those of
// the schema.
const (
	callbackURLMax     = 2048
	callbackContextMax = 64 << 10
)

var errTrace = errors.New(
	"it is not a W3C traceparent, such as 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")

// checkNumbers refuses numbers in a JSON text that are long when Postgres writes them. The push checks that as well;
// here the error names the field, and a line of a stream is refused before other lines are pushed with it.
func checkNumbers(field string, text json.RawMessage) error {
	if len(text) == 0 {
		return nil
	}
	if err := invalidation.CheckNumbers(text); err != nil {
		return flaw(field, err)
	}
	return nil
}

// entryError is what is wrong with one entry of a list.
type entryError struct {
	number int // from 1
	err    error
}

func (e *entryError) Error() string { return fmt.Sprintf("entry %d: %v", e.number, e.err) }

func (e *entryError) Unwrap() error { return e.err }

// fieldError is a field of a body, or a name in an address, that is not valid. It matches errInvalid, or what its own
// error says of the size.
type fieldError struct {
	field  string
	err    error
	inPath bool
}

func flaw(field string, err error) error { return &fieldError{field: field, err: err} }

func (f *fieldError) Error() string { return f.field + ": " + f.err.Error() }

// Unwrap returns the error of the field and the class of the answer.
func (f *fieldError) Unwrap() []error {
	if errors.Is(f.err, invalidation.ErrPayloadTooLarge) {
		return []error{f.err}
	}
	return []error{f.err, errInvalid}
}

// message is the text of the field's error without the words of its class.
func (f *fieldError) message() string {
	text := strings.TrimSuffix(f.err.Error(), ": "+invalidation.ErrInvalid.Error())
	return strings.TrimSuffix(text, ": "+invalidation.ErrPayloadTooLarge.Error())
}
