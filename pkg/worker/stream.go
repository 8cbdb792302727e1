package worker

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

// parts is an answer that is put together from the events of a stream.
type parts interface {
	// take takes the next event. last reports that it ends the answer and is no part of it. The error is errStreamError
	// for an event that is an error of the server.
	take(event) (last bool, err error)
	// ends reports whether the end of the connection, within an event if cut, is that of the answer.
	ends(cut bool) bool
	begun() bool // the model has begun to answer
	size() int64 // of what is kept, in bytes
	outcome() Outcome
}

// acceptEvents is the header Accept of a request for a stream; an error comes as JSON.
const acceptEvents = "text/event-stream, application/json"

// consume reads a stream of server-sent events to its end, hands its frames to
// the call's output and puts the whole answer together.
func (w *wire) consume(ctx context.Context, stop context.CancelCauseFunc, a answer, call Call, whole parts) Outcome {
	defer a.reply.Body.Close()
	events := newEvents(a.reply.Body, w.model.MaxResponseBytes)
	if limit := w.model.Timeouts.NoProgress.Duration(); limit > 0 {
		// The first piece may take longer: a server answers at once and then works through the prompt.
		stalled := time.AfterFunc(max(limit, w.model.Timeouts.Start.Duration()), func() { stop(ErrNoProgress) })
		defer stalled.Stop()
		events.came = func() { stalled.Reset(limit) }
	}
	out := newChunker(ctx, call.Output)
	o := w.follow(events, whole, out, call.Payload, func(err error) Outcome { return w.broken(ctx, a, err) })
	if err := out.Close(); err != nil && o.Kind == Done {
		// The result below is whole; what was lost is the log of its parts.
		o.Err = fmt.Errorf("write output: %w", err)
	}
	o.SentAt, o.FirstByteAt, o.StatusCode = a.sentAt, a.first, a.reply.StatusCode
	return o
}

// follow reads events until the last one, an error event, or the end of the stream.
func (w *wire) follow(events *events, whole parts, out *chunker, request []byte, broken func(error) Outcome) Outcome {
	for {
		event, err := events.next()
		if errors.Is(err, io.EOF) {
			if whole.ends(events.cut) {
				return whole.outcome()
			}
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return broken(err)
		}
		switch last, err := whole.take(event); {
		case errors.Is(err, errStreamError):
			return errorAfterOK(event.data, request, whole.begun())
		case err != nil:
			return failed(ClassTransient, "worker streamed something that is not JSON")
		case last:
			return whole.outcome()
		case whole.size() > w.model.MaxResponseBytes:
			return broken(&TooLargeError{LimitBytes: w.model.MaxResponseBytes})
		}
		out.Write(event.frame())
	}
}

// event is one server-sent event; several data lines are joined by newlines.
type event struct {
	name string
	data []byte
}

// frame writes the event as a client may be sent it.
func (e event) frame() []byte {
	var b bytes.Buffer
	for line := range bytes.SplitSeq(e.data, []byte("\n")) {
		b.WriteString("data: ")
		b.Write(line)
		b.WriteByte('\n')
	}
	b.WriteByte('\n')
	return b.Bytes()
}

// events reads an event stream (WHATWG HTML, 9.2.6) whose events hold at most limit bytes each. A
// stream may be longer: what is kept of it is bounded where it is put together.
type events struct {
	lines *bufio.Reader
	left  int64
	limit int64
	cut   bool // the stream ended within an event

	// came is called when data has come, or a part of a long line of it. Comments and empty lines, by which a server
	// or one in front of it keeps the connection alive, tell nothing of the model. Nil: no call.
	came func()
}

func newEvents(r io.Reader, limit int64) *events {
	return &events{lines: bufio.NewReaderSize(r, 16<<10), left: limit, limit: limit}
}

func (e *events) next() (event, error) {
	var ev event
	hasData := false
	e.left = e.limit
	for {
		line, err := e.line()
		if err != nil {
			e.cut = hasData || len(line) > 0
			return event{}, err // an event without its empty line is not complete
		}
		if len(line) == 0 {
			if hasData {
				return ev, nil
			}
			ev.name, e.left = "", e.limit
			continue
		}
		field, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(field) {
		case "data":
			if hasData {
				ev.data = append(ev.data, '\n')
			}
			ev.data, hasData = append(ev.data, value...), true
		case "event":
			ev.name = string(value)
		}
	}
}

// line reads one line without its end; with an error, the part of it that came. Its length is bounded by what is left
// of the event's limit.
func (e *events) line() ([]byte, error) {
	var line []byte
	for {
		part, err := e.lines.ReadSlice('\n')
		e.left -= int64(len(part))
		if e.left < 0 {
			return nil, &TooLargeError{LimitBytes: e.limit}
		}
		line = append(line, part...)
		if e.came != nil && bytes.HasPrefix(line, []byte("data")) {
			e.came()
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		if err != nil {
			return line, err
		}
		return bytes.TrimRight(line, "\r\n"), nil
	}
}
