package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"

	"github.com/penstock/penstock/internal/stream"
	"github.com/penstock/penstock/pkg/invalidation"
)

const (
	// between signs of life to a client, so that nothing in between closes the connection
	eventsAlive = 15 * time.Second
	eventsWrite = 10 * time.Second // for a client to take an event
	eventsMax   = time.Hour        // then the client connects again, with its last event id
)

// place is how far a client has read: the last progress in microseconds since 1970, and the last piece of
// output. It is the id of an event, which the client sends back as Last-Event-ID to go on from there.
type place struct {
	progress int64
	token    invalidation.Token
	seq      int
}

func (p place) String() string {
	return strconv.FormatInt(p.progress, 36) + "." + strconv.FormatInt(int64(p.token), 36) + "." +
		strconv.FormatInt(int64(p.seq), 36)
}

// endedID is the id of the last event. A client that sends it has seen everything. No position is written so.
const endedID = "-"

// readPlace reads a Last-Event-ID. One that is not ours is no error: the client gets everything.
func readPlace(id string) (p place, ended bool) {
	var numbers [3]int64
	for i, text := range strings.SplitN(id, ".", 3) {
		n, err := strconv.ParseInt(text, 36, 64)
		if err != nil || n < 0 || i == 2 && n > math.MaxInt32 {
			return place{}, id == endedID
		}
		numbers[i] = n
	}
	return place{progress: numbers[0], token: invalidation.Token(numbers[1]), seq: int(numbers[2])}, false
}

// events follows one entry in server-sent events (WHATWG HTML, 9.2): state, progress, output, and at last
// ended with what GET on the entry says. A client that has seen the end is told with 204 not to connect again.
func (a *API) events(w http.ResponseWriter, r *http.Request) error {
	number, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err != nil {
		return fmt.Errorf("%w: %q is not the id of an entry", errInvalid, r.PathValue("id"))
	}
	if r.URL.RawQuery != "" {
		return errNoParameters
	}
	id := invalidation.EntryID(number)
	at, ended := readPlace(r.Header.Get("Last-Event-ID"))
	if ended {
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	name, c, err := a.watch.Find(r.Context(), id, callerOf(r.Context()).holder())
	if err != nil {
		return err
	}
	if c != nil {
		defer c.Leave()
	}
	// as it is now: one that was dropped and made again has another id
	queue, err := invalidation.Open(r.Context(), a.db, name)
	if err != nil {
		return err
	}
	since, err := queue.OutputSince(r.Context(), id)
	if err != nil {
		return err
	}
	if c != nil {
		c.FollowOutput(since)
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Now().Add(eventsMax + eventsAlive)) // the server's would end the request
	w.WriteHeader(http.StatusOK)
	f := &follower{api: a, queue: queue, id: id, since: since, at: at, out: newEventWriter(w, r)}
	if c == nil || f.follow(r.Context(), c) { // else the client has gone, or will come again
		f.end(r.Context())
	}
	return nil
}

// describeEvents says what no type does.
func describeEvents(op *huma.Operation) {
	op.Description += " Events state, progress, output and ended (or gone, where no outcome is kept); send the last " +
		"id as Last-Event-ID to go on. 204 after the end."
	op.Parameters = append(op.Parameters, entryParameter(), &huma.Param{
		Name: "Last-Event-ID", In: "header", Schema: &huma.Schema{Type: huma.TypeString},
		Description: "The id of the last event that was read: the stream goes on behind it.",
	})
	op.Responses["200"] = &huma.Response{
		Description: "Events",
		Content:     map[string]*huma.MediaType{"text/event-stream": {Schema: &huma.Schema{Type: huma.TypeString}}},
	}
	op.Responses["204"] = &huma.Response{Description: "The event of Last-Event-ID was the last one: do not come back"}
}

// follower is one client that follows an entry.
type follower struct {
	api   *API
	queue *invalidation.Queue
	id    invalidation.EntryID
	since time.Time // from when on it may have output
	at    place
	state string
	out   *eventWriter
}

// follow passes on what changes until the entry has ended. False: the client has gone.
func (f *follower) follow(ctx context.Context, c *invalidation.EntryWaiter) bool {
	ctx, cancel := context.WithTimeout(ctx, eventsMax)
	defer cancel()
	alive := time.NewTicker(eventsAlive)
	defer alive.Stop()
	for f.out.err == nil {
		if f.api.revoked(ctx) {
			return false // the next request of the client says why
		}
		seen := c.News()
		f.pass(ctx, seen)
		if seen.Ended {
			break
		}
		select {
		case <-c.Changed:
		case <-alive.C:
			f.out.comment("still here")
		case <-f.api.draining:
			return false
		case <-ctx.Done():
			return false
		}
	}
	return f.out.err == nil
}

// pass sends what the client has not seen.
func (f *follower) pass(ctx context.Context, s invalidation.EntryNews) {
	if s.State != "" && s.State != f.state {
		f.state = s.State
		f.out.event(f.at.String(), "state", map[string]any{"id": f.id, "state": s.State})
	}
	if at := s.ProgressAt.UnixMicro(); !s.ProgressAt.IsZero() && at > f.at.progress {
		f.at.progress = at
		f.out.event(f.at.String(), "progress",
			map[string]any{"done": s.Done, "message": s.Message, "updated_at": s.ProgressAt})
	}
	if s.Token > f.at.token || s.Token == f.at.token && s.Seq > f.at.seq {
		if err := f.output(ctx); err != nil {
			// It logs. The output is read again after the next poll, or by the client's next request.
			_ = f.api.problemOf(ctx, err)
		}
	}
}

// outputPieces are read at once.
const outputPieces = 100

// output sends what runs have put out since. A larger token begins anew.
func (f *follower) output(ctx context.Context) error {
	for f.out.err == nil {
		pieces, err := f.queue.Output(ctx, f.id, f.since, f.at.token, f.at.seq, outputPieces)
		if err != nil {
			return err
		}
		for _, p := range pieces {
			f.at.token, f.at.seq = p.Token, p.Seq
			data, key := any(string(p.Data)), "data"
			if !utf8.Valid(p.Data) {
				data, key = p.Data, "data_base64"
			}
			f.out.event(f.at.String(), "output",
				map[string]any{"token": p.Token, "attempt": p.Attempt, "seq": p.Seq, key: data})
		}
		if len(pieces) < outputPieces {
			break
		}
	}
	return nil
}

// end sends the rest of the output, and how the entry ended, if that is kept. For an entry that lives again, as a
// failure that was retried meanwhile, it sends no last event: the client comes again behind what it has.
func (f *follower) end(ctx context.Context) {
	err := f.output(ctx)
	var read entryRead
	if err == nil {
		read, err = f.api.readEntry(ctx, int64(f.id))
	}
	switch {
	case errors.Is(err, invalidation.ErrEntryNotFound):
		f.out.event(endedID, "gone", map[string]any{"id": f.id})
	case err != nil:
		f.out.event("", "problem", f.api.problemOf(ctx, err))
	case read.EndedAt != nil:
		f.out.event(endedID, "ended", read)
	}
}

// eventWriter writes events until one cannot be written.
type eventWriter struct {
	out *stream.Events
	err error
}

func newEventWriter(w http.ResponseWriter, r *http.Request) *eventWriter {
	return &eventWriter{out: stream.NewEvents(w, r, eventsWrite)}
}

func (e *eventWriter) event(id, name string, data any) {
	if e.err != nil {
		return
	}
	var text []byte
	text, e.err = json.Marshal(data)
	if e.err == nil {
		e.err = e.out.Event(id, name, string(text))
	}
}

func (e *eventWriter) comment(text string) {
	if e.err == nil {
		e.err = e.out.Comment(text)
	}
}
