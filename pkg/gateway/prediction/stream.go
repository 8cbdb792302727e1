package prediction

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// streamEvery is the time between two looks for output.
const streamEvery = 100 * time.Millisecond

// streamMax is how long one connection reads a stream.
const streamMax = 30 * time.Minute

// events writes server-sent events.
type events struct {
	w       http.ResponseWriter
	control *http.ResponseController
	n       int
}

func (e *events) send(name, data string) error {
	e.n++
	var text strings.Builder
	fmt.Fprintf(&text, "event: %s\nid: %d\n", name, e.n)
	for line := range strings.SplitSeq(data, "\n") {
		text.WriteString("data: " + line + "\n")
	}
	text.WriteByte('\n')
	_ = e.control.SetWriteDeadline(time.Now().Add(30 * time.Second)) // a test's writer has none
	if _, err := io.WriteString(e.w, text.String()); err != nil {
		return err
	}
	return e.control.Flush()
}

// reading is one client that reads the stream of a prediction.
type reading struct {
	service *Predictions
	queue   *invalidation.Queue
	p       row
	token   invalidation.Token
	seq     int
	rest    string // of a server-sent event that is not whole
	wrote   bool
	events  *events
}

// stream sends the output of a prediction as it comes, and done at its end.
func (s *Predictions) stream(w http.ResponseWriter, r *http.Request) {
	p, err := findStream(r.Context(), s.db, r.PathValue("id"), r.PathValue("key"))
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	q, err := invalidation.Open(r.Context(), s.db, p.QueueName)
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	e := &events{w: w, control: http.NewResponseController(w)}
	ctx, cancel := context.WithTimeout(r.Context(), streamMax)
	defer cancel()
	reader := &reading{service: s, queue: q, p: p, events: e}
	if err := reader.run(ctx); err != nil && ctx.Err() == nil {
		s.log.Debug("stream of prediction", "prediction", p.ID, "error", err)
	}
}

func (r *reading) run(ctx context.Context) error {
	ticks := time.NewTicker(streamEvery)
	defer ticks.Stop()
	for {
		// The state is read before the output: of a run that has ended nothing comes behind it.
		p, err := findStream(ctx, r.service.db, r.p.ID, *r.p.StreamKey)
		if err != nil {
			return err
		}
		if err := r.pieces(ctx); err != nil {
			return err
		}
		if p.ended() {
			return r.end(p)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticks.C:
		}
	}
}

// piecesMost is how many pieces of output are read at once.
const piecesMost = 100

var errBegunAnew = errors.New("the run was broken off and begins anew: read the prediction")

// pieces sends what has come since. A second run cannot take back what the first has put out.
func (r *reading) pieces(ctx context.Context) error {
	for {
		list, err := r.queue.Output(ctx, invalidation.EntryID(r.p.Entry), r.token, r.seq, piecesMost)
		if err != nil {
			return err
		}
		for _, piece := range list {
			if r.wrote && piece.Token != r.token {
				return errors.Join(r.fail(errBegunAnew.Error()), errBegunAnew)
			}
			r.token, r.seq = piece.Token, piece.Seq
			if err := r.text(string(piece.Data)); err != nil {
				return err
			}
		}
		if len(list) < piecesMost {
			return nil
		}
	}
}

// text sends the texts of the chunks of a piece: whole server-sent events of the worker.
func (r *reading) text(piece string) error {
	r.rest += piece
	for {
		event, rest, whole := strings.Cut(r.rest, "\n\n")
		if !whole {
			return nil
		}
		r.rest = rest
		if delta := deltaOf(event); delta != "" {
			r.wrote = true
			if err := r.events.send("output", delta); err != nil {
				return err
			}
		}
	}
}

// deltaOf reads the text of a chunk of a chat or a completion.
func deltaOf(event string) (text string) {
	for line := range strings.SplitSeq(event, "\n") {
		data, is := strings.CutPrefix(line, "data:")
		if !is {
			continue
		}
		var chunk struct {
			Choices []struct {
				Delta struct {
					Content string `json:"content"`
				} `json:"delta"`
				Text string `json:"text"`
			} `json:"choices"`
		}
		if json.Unmarshal([]byte(data), &chunk) != nil {
			continue // [DONE]
		}
		for _, c := range chunk.Choices {
			text += c.Delta.Content + c.Text
		}
	}
	return text
}

func (r *reading) fail(reason string) error {
	text, err := json.Marshal(map[string]string{"detail": reason})
	if err != nil {
		return err
	}
	if err := r.events.send("error", string(text)); err != nil {
		return err
	}
	return r.events.send("done", `{"reason":"error"}`)
}

// end sends what a prediction came to. Output that was not streamed is sent whole.
func (r *reading) end(p row) error {
	v := p.view("")
	switch {
	case v.Status == failed:
		return r.fail(*v.Error)
	case v.Status == canceled:
		return r.events.send("done", `{"reason":"canceled"}`)
	case !r.wrote:
		if err := r.events.send("output", whole(v.Output)); err != nil {
			return err
		}
	}
	return r.events.send("done", "{}")
}

// whole is an output as the text of one event: texts without their quotes.
func whole(output json.RawMessage) string {
	var text string
	if json.Unmarshal(output, &text) == nil {
		return text
	}
	var texts []string
	if json.Unmarshal(output, &texts) == nil {
		return strings.Join(texts, "")
	}
	return string(output)
}
