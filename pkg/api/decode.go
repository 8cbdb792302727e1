package api

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// entryToPush is one entry in the body of a push. Only payload is needed; the options are those of penstock.push.
type entryToPush struct {
	Payload        json.RawMessage           `json:"payload" doc:"Any JSON value."`
	LockKey        string                    `json:"lock_key,omitempty" doc:"Entries with the same lock key run one after another, in the order of their acceptance."`
	Flow           string                    `json:"flow,omitempty" doc:"The tenant or user whose work it is; queues that are fair share by it."`
	Priority       *int16                    `json:"priority,omitempty" minimum:"0" maximum:"9" doc:"9 goes first. Absent: the queue's entry_priority."`
	DueAt          *Moment                   `json:"due_at,omitzero" doc:"It does not start before. A time, or a duration from its acceptance on such as 30m."`
	StartBy        *Moment                   `json:"start_by,omitzero" doc:"It expires if it has not started by then. A time, or a duration from its acceptance on such as 30m."`
	FinishBy       *Moment                   `json:"finish_by,omitzero" doc:"It expires if it has not ended by then. A time, or a duration from its acceptance on such as 30m."`
	Cost           float64                   `json:"cost,omitempty" minimum:"0" maximum:"1000000000000" doc:"In the unit that the queue's fairness counts; 0: as if absent."`
	Weight         int32                     `json:"weight,omitempty" minimum:"0" doc:"How many times the units of each limit of the queue it takes while it runs, at most the queue's max_weight. Absent or 0: 1."`
	Name           string                    `json:"name,omitempty" doc:"By which entries can be listed, paused and disabled."`
	IdempotencyKey string                    `json:"idempotency_key,omitempty" doc:"A second push with this key in the flow is answered with the first one's entry. The request may have the header Idempotency-Key instead."`
	UniqueKey      string                    `json:"unique_key,omitempty" doc:"Entries of one key are not queued twice, as unique_policy says."`
	UniquePolicy   invalidation.UniquePolicy `json:"unique_policy,omitempty" enum:"while_queued,while_active,one_running_one_queued"`
	Trace          string                    `json:"trace,omitempty" doc:"W3C traceparent. Absent: the header Traceparent of the request."`
	Callback       json.RawMessage           `json:"callback,omitempty" doc:"Where the outcome is sent: an object with url, context that is sent along, and format: none for the body of Standard Webhooks, job for {job_id, status, result}."`
}

// member is a member of a JSON object, and where its value is decoded to.
type member struct {
	name string
	into any
}

func (e *entryToPush) members() []member {
	return []member{
		{"payload", &e.Payload},
		{"lock_key", &e.LockKey},
		{"flow", &e.Flow},
		{"priority", &e.Priority},
		{"due_at", &e.DueAt},
		{"start_by", &e.StartBy},
		{"finish_by", &e.FinishBy},
		{"cost", &e.Cost},
		{"weight", &e.Weight},
		{"name", &e.Name},
		{"idempotency_key", &e.IdempotencyKey},
		{"unique_key", &e.UniqueKey},
		{"unique_policy", &e.UniquePolicy},
		{"trace", &e.Trace},
		{"callback", &e.Callback},
	}
}

// storable refuses texts that the database cannot store.
func (e *entryToPush) storable() error {
	for _, m := range e.members() {
		if text, ok := m.into.(*string); ok {
			if err := storable(m.name, *text); err != nil {
				return err
			}
		}
	}
	return nil
}

// push is the entry without the times that are durations, see delays.
func (e entryToPush) push() invalidation.Push {
	if bytes.Equal(e.Callback, []byte("null")) {
		e.Callback = nil
	}
	return invalidation.Push{
		Payload: e.Payload, LockKey: e.LockKey, Flow: e.Flow, Priority: e.Priority, DueAt: e.DueAt.given().Time,
		StartBy: e.StartBy.given().Time, FinishBy: e.FinishBy.given().Time, Cost: e.Cost, Weight: e.Weight,
		Name:           e.Name,
		IdempotencyKey: e.IdempotencyKey, UniqueKey: e.UniqueKey, UniquePolicy: e.UniquePolicy, Trace: e.Trace,
		Callback: e.Callback,
	}
}

// delays are the times of an entry that are given as durations: they count from its acceptance on, by the database's
// clock. 0 is none.
type delays struct{ due, start, finish time.Duration }

func (e entryToPush) delays() delays {
	return delays{e.DueAt.given().In, e.StartBy.given().In, e.FinishBy.given().In}
}

// from sets the times of a push that is accepted now.
func (d delays) from(now time.Time, p *invalidation.Push) {
	for _, t := range []struct {
		in time.Duration
		to *time.Time
	}{{d.due, &p.DueAt}, {d.start, &p.StartBy}, {d.finish, &p.FinishBy}} {
		if t.in > 0 {
			*t.to = now.Add(t.in)
		}
	}
}

// decode reads one object or an array of at most limit objects. It stops at the first element that is none, so that a
// body of small elements takes no more memory than one of entries.
func decode(body []byte, limit int) (entries []entryToPush, one bool, err error) {
	decoder := json.NewDecoder(bytes.NewReader(body))
	one = !isArray(body)
	switch {
	case one:
		entries = make([]entryToPush, 1)
		err = decodeEntry(decoder, &entries[0])
	default:
		entries, err = decodeEntries(decoder, limit)
	}
	if err == nil {
		err = atEnd(decoder)
	}
	switch {
	case errors.Is(err, errTooMany), errors.Is(err, errInvalid):
		return nil, one, err
	case err != nil:
		return nil, one, fmt.Errorf("%w: %w", errMalformed, err)
	}
	return entries, one, nil
}

// isArray tells whether a JSON text begins an array.
func isArray(text []byte) bool {
	trimmed := bytes.TrimLeft(text, " \t\r\n")
	return len(trimmed) > 0 && trimmed[0] == '['
}

func decodeEntries(decoder *json.Decoder, limit int) (entries []entryToPush, err error) {
	if _, err := decoder.Token(); err != nil {
		return nil, err
	}
	for decoder.More() {
		if len(entries) == limit {
			return nil, fmt.Errorf("%w: at most %d", errTooMany, limit)
		}
		var e entryToPush
		if err := decodeEntry(decoder, &e); err != nil {
			return nil, &entryError{len(entries) + 1, err}
		}
		entries = append(entries, e)
	}
	_, err = decoder.Token()
	return entries, err
}

func decodeEntry(decoder *json.Decoder, e *entryToPush) error {
	var unfit *memberError
	switch err := decodeObject(decoder, e.members()); {
	case errors.As(err, &unfit):
		return flaw(unfit.field, unfit.err)
	case err != nil:
		return err
	case e.Payload == nil:
		return flaw("payload", errMissing)
	}
	return nil
}

// decodeObject reads an object whose members must be among those given, in exactly this case, and each at most once: a
// misspelt option would be lost silently, and a doubled one would hide a value.
func decodeObject(decoder *json.Decoder, members []member) error {
	switch token, err := decoder.Token(); {
	case errors.Is(err, io.EOF):
		return errors.New("the body is empty")
	case err != nil:
		return inWords(err)
	case token != json.Delim('{'):
		return fmt.Errorf("the value: got %s, want an object, or a list of them", typeName(token))
	}
	seen := uint64(0)
	for decoder.More() {
		token, err := decoder.Token()
		if err != nil {
			return inWords(err)
		}
		name, _ := token.(string) // within an object nothing else comes here
		i := indexOf(members, name)
		switch {
		case i < 0:
			return &memberError{name, errUnknownMember}
		case seen&(1<<i) != 0:
			return &memberError{name, errDoubledMember}
		}
		seen |= 1 << i
		if err := decoder.Decode(members[i].into); err != nil {
			return about(members[i], err)
		}
		if m, ok := members[i].into.(**Moment); ok && *m != nil && (*m).unreadable {
			return &memberError{name, operator.ErrMoment}
		}
	}
	_, err := decoder.Token()
	return inWords(err)
}

// memberError is a member of well-formed JSON that does not fit.
type memberError struct {
	field string
	err   error
}

func (m *memberError) Error() string { return m.field + ": " + m.err.Error() }

var (
	errUnknownMember = errors.New("there is no such field")
	errDoubledMember = errors.New("it is given twice")
)

func indexOf(members []member, name string) int {
	for i := range members {
		if members[i].name == name {
			return i
		}
	}
	return -1
}

// decodeWhole reads a text that is one object and nothing else.
func decodeWhole(text []byte, members []member) error {
	decoder := json.NewDecoder(bytes.NewReader(text))
	if err := decodeObject(decoder, members); err != nil {
		return err
	}
	return atEnd(decoder)
}

func atEnd(decoder *json.Decoder) error {
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is something after the JSON value")
	}
	return nil
}

// wanted names the types of the fields of an entry. The one small integer is the priority.
var wanted = map[reflect.Kind]string{
	reflect.String: "a text", reflect.Int16: "a whole number from 0 to 9", reflect.Float64: "a number",
	reflect.Bool: "true or false",
}

// about says which field of an entry has a value that it cannot have.
func about(m member, err error) error {
	var mismatch *json.UnmarshalTypeError
	field := m.name
	if errors.As(err, &mismatch) {
		want := cmp.Or(wanted[mismatch.Type.Kind()], "another type")
		return &memberError{field, fmt.Errorf("got %s, want %s", mismatch.Value, want)}
	}
	return fmt.Errorf("%s: %w", field, inWords(err))
}

// inWords names the end of a text that is cut off.
func inWords(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("the JSON text ends early")
	}
	return err
}

func typeName(token json.Token) string {
	switch token.(type) {
	case float64:
		return "number"
	case string:
		return "string"
	case bool:
		return "bool"
	case json.Delim:
		return "array"
	}
	return "null"
}
