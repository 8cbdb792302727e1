package api

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/penstock/penstock/internal/stream"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Streamed is the result of a stream.
type Streamed struct {
	Lines      int64 `json:"lines"` // that were answered, blank ones left out
	Inserted   int64 `json:"inserted"`
	Replayed   int64 `json:"replayed"`
	Duplicates int64 `json:"duplicates"`
	Refused    int64 `json:"refused"`
	// NextLine is the first line without an answer, from 1; 0 if every line has one. Whether it was accepted is not
	// known: send it again under the same Idempotency-Key.
	NextLine int64 `json:"next_line,omitempty"`
	// Errors are the first lines that were refused, where lines are not answered one by one.
	Errors []LineError `json:"errors,omitempty"`
}

// LineError says why a line was refused. Code is one of the codes of problem documents.
type LineError struct {
	Line   int64  `json:"line"`
	Code   string `json:"code"`
	Detail string `json:"detail"`
}

// errorsMax bounds the errors that a summary lists.
const errorsMax = 100

// answers writes what becomes of lines: each as it is known, or in the end a summary. Only the former needs a client
// that reads while it writes.
type answers struct {
	w    http.ResponseWriter
	rc   *http.ResponseController
	out  stream.Writer // of lines
	each bool

	sum     Streamed
	last    int64 // line that has an answer
	started bool
	buf     []byte
}

func newAnswers(w http.ResponseWriter, r *http.Request, each bool) *answers {
	a := &answers{w: w, rc: http.NewResponseController(w), out: stream.NewWriter(w, r, streamIdle), each: each}
	if r.ProtoMajor == 2 {
		a.rc.SetWriteDeadline(time.Time{}) //nolint:errcheck // the server's: a stream may last longer
	}
	return a
}

func (a *answers) add(lines []*streamLine) error {
	a.buf = a.buf[:0]
	for _, line := range lines {
		a.count(line)
	}
	if !a.each || len(lines) == 0 {
		return nil
	}
	return a.send()
}

func (a *answers) count(l *streamLine) {
	a.last = l.number
	a.sum.Lines++
	if l.err != nil {
		a.sum.Refused++
		p := problem(classify(context.Background(), l.err))
		told := LineError{Line: l.number, Code: p.Code, Detail: aboutOne.Replace(p.Detail)}
		if !a.each {
			if len(a.sum.Errors) < errorsMax {
				a.sum.Errors = append(a.sum.Errors, told)
			}
			return
		}
		text, _ := json.Marshal(told) //nolint:errchkjson // two texts and a number
		a.buf = append(append(a.buf, text...), '\n')
		return
	}
	switch l.pushed.Verdict {
	case invalidation.Replayed:
		a.sum.Replayed++
	case invalidation.Duplicate:
		a.sum.Duplicates++
	default:
		a.sum.Inserted++
	}
	if a.each {
		a.buf = append(strconv.AppendInt(append(a.buf, `{"line":`...), l.number, 10), `,"id":`...)
		a.buf = append(strconv.AppendInt(a.buf, int64(l.pushed.ID), 10), `,"verdict":"`...)
		a.buf = append(append(a.buf, l.pushed.Verdict...), "\"}\n"...)
	}
}

// aboutOne takes from an error which entry of the push it was: there is one, or the line says so.
var aboutOne = strings.NewReplacer(" (entry 1)", "", " of entry 1 ", " ")

func (a *answers) send() error {
	if !a.started {
		a.started = true
		a.w.Header().Set("Content-Type", "application/x-ndjson")
		a.w.Header().Set("Cache-Control", "no-store")
		a.w.Header().Set("X-Accel-Buffering", "no")
		a.w.WriteHeader(http.StatusOK)
	}
	return a.out.Send(a.buf)
}

// streamEnd is the last line of an answer, or the whole of it.
type streamEnd struct {
	Summary Streamed `json:"summary"`
	Problem *Problem `json:"problem,omitempty"` // why the stream ended before the body did
}

// finish writes the end. An error that comes back was not written: the answer has not begun.
func (a *answers) finish(err error) error {
	a.rc.SetWriteDeadline(time.Now().Add(streamIdle)) //nolint:errcheck // the server's own holds otherwise
	if err != nil {
		a.sum.NextLine = a.last + 1
		if !a.started {
			return &brokenStream{sum: a.sum, err: err}
		}
	}
	end := streamEnd{Summary: a.sum}
	if err != nil {
		end.Problem = problem(err)
	}
	if !a.each {
		writeJSON(a.w, "application/json", http.StatusOK, end)
		return nil
	}
	text, err := json.Marshal(end)
	if err != nil {
		return err
	}
	a.buf = append(text, '\n')
	_ = a.send() // the client has gone
	return nil
}

// brokenStream is why a stream ended early, and how far it had come.
type brokenStream struct {
	sum Streamed
	err error
}

func (b *brokenStream) Error() string { return b.err.Error() }
func (b *brokenStream) Unwrap() error { return b.err }
