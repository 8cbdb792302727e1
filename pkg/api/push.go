package api

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"mime"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// entryToPush is one entry in the body of a push. Only payload is needed; the options are those of penstock.push.
type entryToPush struct {
	Payload        json.RawMessage           `json:"payload"`
	LockKey        string                    `json:"lock_key"`
	Flow           string                    `json:"flow"`
	Priority       *int16                    `json:"priority"`
	DueAt          time.Time                 `json:"due_at"`
	StartBy        time.Time                 `json:"start_by"`
	FinishBy       time.Time                 `json:"finish_by"`
	Cost           float64                   `json:"cost"`
	Name           string                    `json:"name"`
	IdempotencyKey string                    `json:"idempotency_key"`
	UniqueKey      string                    `json:"unique_key"`
	UniquePolicy   invalidation.UniquePolicy `json:"unique_policy"`
	Trace          string                    `json:"trace"`
	Callback       json.RawMessage           `json:"callback"`
}

func (a *API) pushRoutes() {
	a.raw(route{
		method: "POST", path: "/v1/queues/{queue}/entries", id: "push", summary: "Accept one entry, a list of them (all or none), or a stream (line by line)",
		scope: push, of: ofQueue, status: http.StatusCreated, bytesMax: math.MaxInt64, timeout: -1,
	}, nil, a.push)
}

// push accepts a JSON object, or an array of them: all or none; or a stream of objects, a line each.
func (a *API) push(w http.ResponseWriter, r *http.Request) error {
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
	// Beyond the time for the work: a read that runs into its deadline ends the whole request.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(a.cfg.Timeout + 5*time.Second))
	body, taken, err := a.readBody(w, r)
	defer a.bodies.give(taken)
	if err != nil {
		return err
	}
	pushes, one, err := a.pushesOf(body, r)
	if err != nil {
		return err
	}
	leave, err := a.take(r)
	if err != nil {
		return err
	}
	defer leave()
	queue, err := a.queue(ctx, r.PathValue("queue"))
	if err != nil {
		return err
	}
	pushed, err := queue.Push(ctx, pushes...)
	if err != nil {
		return neverFits(inUse(err, pushes...), len(pushes))
	}
	return answerPush(w, pushed, one)
}

func answerPush(w http.ResponseWriter, pushed []invalidation.Pushed, one bool) error {
	status, is := http.StatusOK, func(v invalidation.Verdict) func(invalidation.Pushed) bool {
		return func(p invalidation.Pushed) bool { return p.Verdict == v }
	}
	if slices.ContainsFunc(pushed, is(invalidation.Inserted)) {
		status = http.StatusCreated
	} else if slices.ContainsFunc(pushed, is(invalidation.Replayed)) {
		w.Header().Set("Idempotent-Replayed", "true")
	}
	if !one {
		writeJSON(w, "application/json", status, map[string]any{"entries": pushed})
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

// readBody reads a body whole, within what all bodies together may take, which the caller gives back.
func (a *API) readBody(w http.ResponseWriter, r *http.Request) (body []byte, taken int64, err error) {
	r.Body = http.MaxBytesReader(w, r.Body, a.cfg.BodyBytesMax)
	plain, err := inflated(r)
	if err != nil {
		return nil, 0, err
	}
	body, taken, err = a.bodies.readAll(plain, a.cfg.BodyBytesMax)
	return body, taken, endedEarly(err)
}

// take registers the request's Idempotency-Key, if it has one, for as long as it is under way.
func (a *API) take(r *http.Request) (leave func(), err error) {
	key, err := idempotencyKey(r.Header)
	if key == "" || err != nil {
		return func() {}, err
	}
	return a.flights.enter(r.Context(), r.PathValue("queue")+" "+key)
}

// pushesOf makes pushes of a body, and gives each the request's trace and its part of the Idempotency-Key.
func (a *API) pushesOf(body []byte, r *http.Request) (pushes []invalidation.Push, one bool, err error) {
	entries, one, err := decode(body)
	if err != nil {
		return nil, one, err
	}
	if len(entries) > a.cfg.EntriesMax {
		return nil, one, fmt.Errorf("%w: %d, at most %d", errTooMany, len(entries), a.cfg.EntriesMax)
	}
	key, err := idempotencyKey(r.Header)
	if err != nil {
		return nil, one, err
	}
	trace := r.Header.Get("Traceparent")
	pushes = make([]invalidation.Push, len(entries))
	for i, e := range entries {
		number := i + 1
		if one {
			number = 0
		}
		if pushes[i], err = a.pushOf(e, key, trace, int64(number)); err != nil {
			if !one {
				err = fmt.Errorf("entry %d: %w", number, err)
			}
			return nil, one, err
		}
	}
	return pushes, one, nil
}

// pushOf makes a push of an entry. Number is its place in the request, 0 if it is alone there.
func (a *API) pushOf(e entryToPush, key, trace string, number int64) (invalidation.Push, error) {
	p := e.push()
	p.Trace = cmp.Or(p.Trace, trace)
	if key != "" {
		if p.IdempotencyKey != "" {
			return p, fmt.Errorf("%w: there is an idempotency_key, and the request has an Idempotency-Key; give one of them", errMalformed)
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
		URL     string          `json:"url"`
		Context json.RawMessage `json:"context"`
	}
	if err := strict(callback, &c); err != nil {
		return flaw("callback", fmt.Errorf("it is not an object with url and, if wanted, context: %w", err))
	}
	if c.URL == "" {
		return flaw("callback.url", errors.New("it is missing"))
	}
	if a.cfg.CheckCallback != nil {
		if err := a.cfg.CheckCallback(c.URL); err != nil {
			return flaw("callback.url", err)
		}
	}
	return nil
}

// fieldError says which field of a body is not valid.
type fieldError struct {
	field string
	err   error
}

func flaw(field string, err error) error { return &fieldError{field, err} }

func (f *fieldError) Error() string   { return f.field + ": " + f.err.Error() }
func (f *fieldError) Unwrap() []error { return []error{f.err, errInvalid} }

// wanted says what fields of an entry must be, by their type. The one small integer is the priority.
var wanted = map[reflect.Kind]string{reflect.String: "a text", reflect.Int16: "a whole number from 0 to 9", reflect.Float64: "a number"}

// strict reads one JSON value and nothing after it. A field that does not exist is an error: a misspelt option would be
// lost in silence.
func strict(text []byte, into any) error {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	var mismatch *json.UnmarshalTypeError
	switch err := decoder.Decode(into); {
	case errors.Is(err, io.EOF):
		return errors.New("the body is empty")
	case errors.As(err, &mismatch):
		return fmt.Errorf("%s: got %s, want %s", cmp.Or(mismatch.Field, "the value"), mismatch.Value,
			cmp.Or(wanted[mismatch.Type.Kind()], "an object, or a list of them"))
	case err != nil:
		return err
	}
	if _, end := decoder.Token(); !errors.Is(end, io.EOF) {
		return errors.New("there is something after the JSON value")
	}
	return nil
}

// decode reads one object or an array of objects.
func decode(body []byte) (entries []entryToPush, one bool, err error) {
	if trimmed := bytes.TrimLeft(body, " \t\r\n"); len(trimmed) > 0 && trimmed[0] == '[' {
		err = strict(body, &entries)
	} else {
		one, entries = true, make([]entryToPush, 1)
		err = strict(body, &entries[0])
	}
	if err != nil {
		return nil, one, fmt.Errorf("%w: %w", errMalformed, err)
	}
	for i, e := range entries {
		if e.Payload == nil {
			return nil, one, fmt.Errorf("%w: entry %d has no payload", errMalformed, i+1)
		}
	}
	return entries, one, nil
}

func (e entryToPush) push() invalidation.Push {
	if bytes.Equal(e.Callback, []byte("null")) {
		e.Callback = nil
	}
	return invalidation.Push(e)
}
