package prediction

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/penstock/penstock/internal/stream"
)

// Bounds of one connection that reads a stream.
const (
	streamMax   = 30 * time.Minute
	streamQuiet = 15 * time.Second // then a comment keeps the connection open
	streamStall = 30 * time.Second // for a client that does not read
)

// stream sends the output of a prediction as it comes, and done at its end. It counts as a request in flight of the
// client whose prediction it is. With Last-Event-ID it goes on behind that event.
func (s *Predictions) stream(w http.ResponseWriter, r *http.Request) {
	p, err := findStream(r.Context(), s.db, r.PathValue("id"), r.PathValue("key"))
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	leave, err := s.gateway.AdmitAs(p.Owner, p.Model)
	defer leave()
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	mark := markOf(p.ID)
	last, err := readPlace(r.Header.Get("Last-Event-ID"), mark)
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	if last.seq == endSeq && last.event == endDone {
		w.WriteHeader(http.StatusNoContent) // there is no more: do not connect again
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Accel-Buffering", "no") // of proxies
	ctx, cancel := context.WithTimeout(r.Context(), streamMax)
	defer cancel()
	reader := &reading{
		service: s, p: p, follower: newFollower(last),
		events: stream.NewEvents(w, r, streamStall), mark: mark,
	}
	defer reader.events.Release()
	if err := reader.run(ctx); err != nil && ctx.Err() == nil {
		s.log.Debug("stream of prediction", "prediction", p.ID, "error", err)
	}
}

// reading is one client that reads the stream of a prediction.
type reading struct {
	service  *Predictions
	p        row
	follower *follower
	events   *stream.Events
	mark     string // of the prediction, in the ids of its events
}

func (r *reading) send(name, data string, at place) error {
	return r.events.Event(at.id(r.mark), name, data)
}

func (r *reading) run(ctx context.Context) error {
	if err := r.events.Comment("connected"); err != nil { // the head, before there is output
		return err
	}
	beat := &r.service.beat
	tap := beat.join(r.p)
	defer beat.leave(tap)
	quiet := time.NewTicker(streamQuiet)
	defer quiet.Stop()
	token, seq := r.follower.cursor()
	beat.want(tap, token, seq)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-quiet.C:
			if over, err := r.wait(); over || err != nil {
				return err
			}
			continue
		case n := <-tap.news:
			if over, err := r.tell(ctx, n); over || err != nil {
				return err
			}
		}
		quiet.Reset(streamQuiet)
		token, seq = r.follower.cursor()
		beat.want(tap, token, seq)
	}
}

// refused ends the stream where its client has lost the token that let it in.
func (r *reading) refused() (over bool, err error) {
	refusal := r.service.gateway.StillAdmitted(r.p.Owner, r.p.Model)
	if refusal == nil {
		return false, nil
	}
	return true, r.fail(refusal.Error(), r.follower.at)
}

// wait keeps the connection open while there is no news. over: the stream has ended.
func (r *reading) wait() (over bool, err error) {
	if over, err := r.refused(); over || err != nil {
		return over, err
	}
	return false, r.events.Comment("waiting")
}

// tell sends news. over: the stream has ended.
func (r *reading) tell(ctx context.Context, n news) (over bool, err error) {
	if over, err := r.refused(); over || err != nil {
		return over, err
	}
	list, broken := r.follower.take(n.pieces)
	for _, d := range list {
		if err := r.send("output", d.text, d.at); err != nil {
			return true, err
		}
	}
	if broken != nil {
		return true, errors.Join(broken, r.fail(broken.Error(), r.follower.at))
	}
	if !n.ended {
		return false, nil
	}
	p, err := findStream(ctx, r.service.db, r.p.ID, *r.p.StreamKey)
	switch {
	case errors.Is(err, errNone):
		return true, errors.Join(err, r.fail(errGone.Error(), r.atEnd(endDone)))
	case err != nil: // the client may come again for the end
		return true, errors.Join(err, r.fail("the end of the prediction cannot be read now", r.follower.at))
	}
	return true, r.end(p)
}

// atEnd is the place of an event behind all output of the run.
func (r *reading) atEnd(event int) place {
	return place{r.follower.at.token, endSeq, event, r.follower.at.bytes}
}

// fail ends the stream with an error. A client that connects again goes on behind at.
func (r *reading) fail(reason string, at place) error {
	text, err := json.Marshal(map[string]string{"detail": reason})
	if err != nil {
		return err
	}
	if err := r.send("error", string(text), at); err != nil {
		return err
	}
	return r.send("done", `{"reason":"error"}`, at)
}

// end sends what a prediction came to, with the part of its output that was not streamed.
func (r *reading) end(p row) error {
	v := p.view("")
	flaw := r.follower.check(streamedTexts(p.Result))
	switch {
	case v.Status == failed:
		return r.fail(*v.Error, r.atEnd(endDone))
	case v.Status == canceled:
		return r.send("done", `{"reason":"canceled"}`, r.atEnd(endDone))
	case flaw != nil:
		return errors.Join(flaw, r.fail(flaw.Error(), r.atEnd(endDone)))
	case v.DataRemoved && !r.follower.hasTexts():
		return r.fail(errElsewhere.Error(), r.atEnd(endDone))
	}
	rest, err := r.rest(v.Output, p.Result)
	if err != nil {
		return errors.Join(err, r.fail("the output cannot be read: read the prediction", r.atEnd(endDone)))
	}
	if rest != "" {
		if err := r.send("output", rest, r.atEnd(endOutput)); err != nil {
			return err
		}
	}
	return r.send("done", "{}", r.atEnd(endDone))
}

// rest is the part of an output that the client does not have: behind texts the calls of tools, as the result of the
// worker with null for the texts.
func (r *reading) rest(output, result json.RawMessage) (string, error) {
	switch {
	case r.follower.hasAll():
		return "", nil
	case !r.follower.hasTexts():
		return whole(output), nil
	case callsTools(result):
		text, err := withoutTexts(result)
		return string(text), err
	}
	return "", nil
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
