package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// entryToPush is one entry in the body of a push. Only payload is needed; the options are those of penstock.push.
type entryToPush struct {
	Payload        json.RawMessage `json:"payload"`
	LockKey        string          `json:"lock_key"`
	Flow           string          `json:"flow"`
	Priority       *int16          `json:"priority"`
	DueAt          time.Time       `json:"due_at"`
	StartBy        time.Time       `json:"start_by"`
	FinishBy       time.Time       `json:"finish_by"`
	Cost           float64         `json:"cost"`
	Name           string          `json:"name"`
	IdempotencyKey string          `json:"idempotency_key"`
	UniqueKey      string          `json:"unique_key"`
	UniquePolicy   string          `json:"unique_policy"`
	Trace          string          `json:"trace"`
	Callback       json.RawMessage `json:"callback"`
}

func (a *API) pushRoutes() {
	a.raw(route{
		method: "POST", path: "/v1/queues/{queue}/entries", id: "push", summary: "Accept one entry or many, all or none",
		scope: push, of: ofQueue, status: http.StatusCreated, bytesMax: a.cfg.BodyBytesMax,
	}, nil, a.push)
}

// push accepts a JSON object, or an array of them: all or none. The answer has the same shape. Its status is 201 if
// any entry is new and 200 if all of them had been accepted before or were duplicates.
func (a *API) push(w http.ResponseWriter, r *http.Request) error {
	pushes, one, err := a.readPushes(r)
	if err != nil {
		return err
	}
	queue, err := a.queue(r.Context(), r.PathValue("queue"))
	if err != nil {
		return err
	}
	pushed, err := queue.Push(r.Context(), pushes...)
	if err != nil {
		return err
	}
	status := http.StatusOK
	for _, p := range pushed {
		if p.Verdict == invalidation.Inserted {
			status = http.StatusCreated
		}
	}
	if !one {
		writeJSON(w, "application/json", status, map[string]any{"entries": pushed})
		return nil
	}
	w.Header().Set("Location", "/v1/entries/"+strconv.FormatInt(int64(pushed[0].ID), 10))
	writeJSON(w, "application/json", status, pushed[0])
	return nil
}

// readPushes reads the body, and gives each entry the request's trace and its part of the Idempotency-Key.
func (a *API) readPushes(r *http.Request) (pushes []invalidation.Push, one bool, err error) {
	if mediaType, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || mediaType != "application/json" {
		return nil, false, errMediaType
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		var tooLarge *http.MaxBytesError
		if errors.As(err, &tooLarge) {
			return nil, false, err
		}
		return nil, false, fmt.Errorf("%w: the body ended early: %w", errMalformed, err)
	}
	entries, one, err := decode(body)
	if err != nil {
		return nil, one, err
	}
	if len(entries) > a.cfg.EntriesMax {
		return nil, one, fmt.Errorf("%w: %d, at most %d", errTooMany, len(entries), a.cfg.EntriesMax)
	}
	pushes = make([]invalidation.Push, len(entries))
	key, trace := idempotencyKey(r), r.Header.Get("Traceparent")
	for i, e := range entries {
		pushes[i] = e.push()
		if pushes[i].Trace == "" {
			pushes[i].Trace = trace
		}
		switch {
		case key == "":
		case e.IdempotencyKey != "":
			return nil, one, fmt.Errorf("%w: entry %d has an idempotency_key and the request an Idempotency-Key; give one of them", errMalformed, i+1)
		case one:
			pushes[i].IdempotencyKey = key
		default:
			pushes[i].IdempotencyKey = key + "/" + strconv.Itoa(i+1)
		}
	}
	return pushes, one, nil
}

// idempotencyKey takes the header with quotes, as its draft standard writes it, and without.
func idempotencyKey(r *http.Request) string {
	key := r.Header.Get("Idempotency-Key")
	if n := len(key); n >= 2 && key[0] == '"' && key[n-1] == '"' {
		return key[1 : n-1]
	}
	return key
}

// decode reads one object or an array of objects, and nothing after it. A field that does not exist is an error: a
// misspelt option would be lost in silence.
func decode(body []byte) (entries []entryToPush, one bool, err error) {
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.DisallowUnknownFields()
	if trimmed := bytes.TrimLeft(body, " \t\r\n"); len(trimmed) > 0 && trimmed[0] == '[' {
		err = decoder.Decode(&entries)
	} else {
		one, entries = true, make([]entryToPush, 1)
		err = decoder.Decode(&entries[0])
	}
	if err == nil {
		if _, end := decoder.Token(); !errors.Is(end, io.EOF) {
			err = errors.New("there is something after the JSON value")
		}
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
	return invalidation.Push{
		Payload: e.Payload, LockKey: e.LockKey, Flow: e.Flow, Priority: e.Priority, DueAt: e.DueAt, StartBy: e.StartBy,
		FinishBy: e.FinishBy, Cost: e.Cost, Name: e.Name, IdempotencyKey: e.IdempotencyKey, UniqueKey: e.UniqueKey,
		UniquePolicy: invalidation.UniquePolicy(e.UniquePolicy), Trace: e.Trace, Callback: e.Callback,
	}
}
