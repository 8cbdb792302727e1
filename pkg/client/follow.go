package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"time"
)

// Event is a change of an entry, or a piece of its output.
type Event struct {
	// Kind is state, progress, output, and at last ended, or gone where the queue keeps no outcomes.
	Kind string
	// ID is the position after which Follow goes on.
	ID string

	State EntryState // of state (id and state alone) and ended

	Done    float64 // of progress: 0 to 1
	Message string  // of progress

	// Of output: a piece of the output of a run, in the order of Token and Seq. A larger token is a
	// new run, which begins anew.
	Output  []byte
	Token   int64
	Attempt int // 1 for the first
	Seq     int // from 1, without gaps in a token
}

// Follow yields the events of an entry, earlier progress and output included, until it has ended or
// ctx ends. A connection that breaks is made anew, and goes on where it broke. After is the ID of
// the last event that was seen, in this process or before; empty for everything. An error is
// yielded last.
func (c *Client) Follow(ctx context.Context, id int64, after string) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		r := request{method: http.MethodGet, path: entryPath(id) + "/events", after: after, stream: true}
		for try := 1; ; try++ {
			err := c.events(ctx, r, func(e Event) bool {
				r.after, try = e.ID, 0 // what breaks now is not what broke before
				return yield(e, nil)
			})
			if errors.Is(err, errEnough) {
				return
			}
			wait, retry := c.pause(err, max(try, 1))
			if !retry || try >= c.cfg.Tries {
				yield(Event{}, wrap(r, err))
				return
			}
			select {
			case <-time.After(wait):
			case <-ctx.Done():
				yield(Event{}, wrap(r, context.Cause(ctx)))
				return
			}
		}
	}
}

// errEnough says that the stream is complete, or its reader has stopped.
var errEnough = errors.New("followed to the end")

// events reads one answer, and returns why it ended.
func (c *Client) events(ctx context.Context, r request, each func(Event) bool) error {
	answer, err := c.send(ctx, r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode == http.StatusNoContent {
		return errEnough
	}
	in := bufio.NewReader(answer.Body)
	for {
		e, err := readEvent(in)
		switch {
		case err != nil:
			return err
		case e.Kind == "problem":
			return fmt.Errorf("the server cannot go on: %s", e.Message)
		case !each(e) || e.Kind == "ended" || e.Kind == "gone":
			return errEnough
		}
	}
}

// readEvent reads as much of the format (WHATWG HTML, 9.2.6) as the API writes: a line a field, then an empty one.
func readEvent(in *bufio.Reader) (e Event, err error) {
	var data []byte
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return e, errors.Join(io.ErrUnexpectedEOF, err)
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			if e.Kind == "" {
				continue // it was a sign of life
			}
			return e, e.read(data)
		}
		field, value, _ := bytes.Cut(line, []byte(": "))
		switch string(field) {
		case "id":
			e.ID = string(value)
		case "event":
			e.Kind = string(value)
		case "data":
			data = value
		}
	}
}

func (e *Event) read(data []byte) error {
	var fields struct {
		Done    float64
		Message string
		Detail  string
		Token   int64
		Attempt int
		Seq     int
		Data    *string
		Base64  []byte `json:"data_base64"`
	}
	var into any = &fields
	if e.Kind == "state" || e.Kind == "ended" {
		into = &e.State
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("read event %s: %w", e.Kind, err)
	}
	e.Done, e.Message, e.Output, e.Token, e.Attempt, e.Seq = fields.Done, fields.Message+fields.Detail, fields.Base64,
		fields.Token, fields.Attempt, fields.Seq
	if fields.Data != nil {
		e.Output = []byte(*fields.Data)
	}
	return nil
}
