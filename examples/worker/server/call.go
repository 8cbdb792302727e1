package server

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock/penstock/examples/worker/model"
)

const headerBytesMax = 256

// call is what one request asks for.
type call struct {
	caller
	model      string
	work       model.Work
	print      [sha256.Size]byte // of model and payload: tells a repeated call from another one under the same key
	dispatcher bool
	async      bool
}

// caller is what a request's headers say about the entry behind it.
type caller struct {
	entry       string // Penstock-Entry; "" where absent
	token       uint64 // Penstock-Token; 0 where absent
	key         string // under which repeated calls find their run; "" for a call that stands alone
	remaining   time.Duration
	hasDeadline bool
}

// readCaller reads the headers that every request may carry.
func readCaller(h http.Header) (caller, error) {
	c := caller{entry: h.Get("Penstock-Entry")}
	for _, name := range []string{"Penstock-Entry", "Idempotency-Key"} {
		if len(h.Get(name)) > headerBytesMax {
			return c, &model.InputError{Field: name, Reason: fmt.Sprintf("is longer than %d bytes", headerBytesMax)}
		}
	}
	if text := h.Get("Penstock-Token"); text != "" {
		token, err := strconv.ParseUint(text, 10, 64)
		if err != nil || token == 0 {
			return c, &model.InputError{Field: "Penstock-Token", Reason: "must be a whole number above 0"}
		}
		if c.entry == "" {
			return c, &model.InputError{Field: "Penstock-Entry", Reason: "is required beside Penstock-Token"}
		}
		c.token = token
	}
	if text := h.Get("Penstock-Remaining-Ms"); text != "" {
		ms, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return c, &model.InputError{
				Field:  "Penstock-Remaining-Ms",
				Reason: "must be a whole number of milliseconds",
			}
		}
		// Ten years are as good as more, and do not overflow.
		c.remaining, c.hasDeadline = time.Duration(min(ms, 10*365*24*3600*1000))*time.Millisecond, true
	}
	switch {
	case c.entry != "":
		c.key = "entry " + c.entry
	case h.Get("Idempotency-Key") != "":
		c.key = "key " + h.Get("Idempotency-Key")
	}
	return c, nil
}

// readCall reads a request for the named model, or for the one its body names where name is empty.
func (s *Server) readCall(w http.ResponseWriter, r *http.Request, name string) (*call, error) {
	who, err := readCaller(r.Header)
	if err != nil {
		return nil, err
	}
	c := &call{caller: who, dispatcher: r.Header.Get("X-Source") == "dispatcher"}
	payload, err := s.readBody(w, r)
	if err != nil {
		return nil, err
	}
	byBody := name == ""
	if byBody {
		if name, payload, err = unwrap(payload); err != nil {
			return nil, err
		}
	}
	m, known := s.modelNamed(name)
	switch {
	case !known && byBody:
		return nil, &model.InputError{
			Field:  "model",
			Reason: fmt.Sprintf("%q is not one of %s", name, strings.Join(s.modelNames(), ", ")),
		}
	case !known:
		return nil, errNoModel
	}
	if c.async, err = s.wantsAsync(r, name); err != nil {
		return nil, err
	}
	if c.work, err = m.Prepare(payload); err != nil {
		return nil, err
	}
	c.model, c.print = name, sha256.Sum256(slices.Concat([]byte(name), []byte{0}, payload))
	return c, nil
}

func (s *Server) readBody(w http.ResponseWriter, r *http.Request) (json.RawMessage, error) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, s.cfg.BodyBytes))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, err
	case err != nil:
		return nil, &malformedError{Reason: "body: " + err.Error()}
	}
	// Compacted, so that calls that differ in white space only are the same call.
	var payload bytes.Buffer
	if err := json.Compact(&payload, body); err != nil {
		return nil, &malformedError{Reason: "body is not JSON: " + err.Error()}
	}
	return payload.Bytes(), nil
}

// unwrap takes {"model": m, "payload": p} apart, or {"model": m, ...} where the rest is the payload.
func unwrap(body json.RawMessage) (name string, payload json.RawMessage, err error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(body, &fields); err != nil || fields == nil {
		return "", nil, &malformedError{Reason: "body must be an object with the fields model and payload"}
	}
	if err := json.Unmarshal(fields["model"], &name); err != nil || name == "" {
		return "", nil, &model.InputError{Field: "model", Reason: "is required: the name of a model"}
	}
	if payload, ok := fields["payload"]; ok {
		return name, payload, nil
	}
	delete(fields, "model")
	payload, err = json.Marshal(fields)
	return name, payload, err
}

// wantsAsync tells whether to answer with a job id: ?async=true, Prefer: respond-async, or the model's habit.
func (s *Server) wantsAsync(r *http.Request, name string) (bool, error) {
	if text := r.URL.Query().Get("async"); text != "" {
		async, err := strconv.ParseBool(text)
		if err != nil {
			return false, &model.InputError{Field: "async", Reason: "must be true or false"}
		}
		return async, nil
	}
	for _, preference := range strings.Split(strings.Join(r.Header.Values("Prefer"), ","), ",") {
		if strings.TrimSpace(preference) == "respond-async" {
			return true, nil
		}
	}
	return slices.Contains(s.cfg.Async, name), nil
}
