package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/penstock/penstock/pkg/invalidation"
)

const (
	eventsAlive = 15 * time.Second // between signs of life to a client, so that nothing in between closes the connection
	eventsWrite = 10 * time.Second // for a client to take an event
	eventsMax   = time.Hour        // then the client comes again, with where it stands
)

// place is how far a client has read, in microseconds since 1970 of the last progress: the id of an event, which it sends
// back as Last-Event-ID to go on from there.
type place int64

func (p place) String() string { return strconv.FormatInt(int64(p), 36) }

// endedID is the id of the last event. Who sends it has seen everything. No place is written so.
const endedID = "-"

// readPlace reads a Last-Event-ID. One that is not ours is no error: the client gets everything.
func readPlace(id string) (p place, ended bool) {
	n, err := strconv.ParseInt(id, 36, 64)
	if err != nil || n < 0 {
		return 0, id == endedID
	}
	return place(n), false
}

// events follows one entry in server-sent events (WHATWG HTML, 9.2): state, progress, and at last ended with what
// GET on the entry says. Who has seen the end is told with 204 not to come again.
func (a *API) events(w http.ResponseWriter, r *http.Request) error {
	number, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err != nil {
		return fmt.Errorf("%w: %q is not the id of an entry", errInvalid, r.PathValue("id"))
	}
	if r.URL.RawQuery != "" {
		return fmt.Errorf("%w: this address takes no query parameters", errInvalid)
	}
	id := invalidation.EntryID(number)
	at, ended := readPlace(r.Header.Get("Last-Event-ID"))
	if ended {
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	c, err := a.subscribe(r.Context(), id)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Now().Add(eventsMax + eventsAlive)) // the server's would end the request
	w.WriteHeader(http.StatusOK)
	f := &follower{api: a, id: id, at: at, out: &eventWriter{w: w, rc: rc}}
	if c != nil {
		defer c.leave()
		if !f.follow(r.Context(), c) {
			return nil // the client has gone, or will come again
		}
	}
	f.end(r.Context())
	return nil
}

// describeEvents says what no type does.
func describeEvents(op *huma.Operation) {
	op.Description += " Events state, progress and ended (or gone, where no outcome is kept); send the last id as Last-Event-ID to go on. 204 after the end."
	op.Responses["200"] = &huma.Response{Description: "Events", Content: map[string]*huma.MediaType{"text/event-stream": {}}}
}

// follower is one client that follows an entry.
type follower struct {
	api   *API
	id    invalidation.EntryID
	at    place
	state string
	out   *eventWriter
}

// follow passes on what changes until the entry has ended. False: there is nobody to tell it to any more.
func (f *follower) follow(ctx context.Context, c *waiter) bool {
	ctx, cancel := context.WithTimeout(ctx, eventsMax)
	defer cancel()
	alive := time.NewTicker(eventsAlive)
	defer alive.Stop()
	for f.out.err == nil {
		seen := c.seen()
		f.pass(seen)
		if seen.ended {
			break
		}
		select {
		case <-c.changed:
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
func (f *follower) pass(s sighting) {
	if s.state != "" && s.state != f.state {
		f.state = s.state
		f.out.event(f.at.String(), "state", map[string]any{"id": f.id, "state": s.state})
	}
	if at := place(s.progressAt.UnixMicro()); !s.progressAt.IsZero() && at > f.at {
		f.at = at
		f.out.event(f.at.String(), "progress", map[string]any{"done": s.done, "message": s.message, "updated_at": s.progressAt})
	}
}

// end sends how the entry ended, if that is kept.
func (f *follower) end(ctx context.Context) {
	read, err := f.api.readEntry(ctx, int64(f.id))
	switch {
	case errors.Is(err, invalidation.ErrEntryNotFound):
		f.out.event(endedID, "gone", map[string]any{"id": f.id})
	case err != nil:
		f.out.event("", "problem", f.api.told(ctx, err))
	default:
		f.out.event(endedID, "ended", read)
	}
}

// eventWriter writes events until one cannot be written.
type eventWriter struct {
	w   http.ResponseWriter
	rc  *http.ResponseController
	err error
}

func (e *eventWriter) event(id, name string, data any) {
	text, err := json.Marshal(data)
	if err != nil {
		e.err = err
		return
	}
	if id != "" {
		id = "id: " + id + "\n"
	}
	e.write(fmt.Sprintf("%sevent: %s\ndata: %s\n\n", id, name, text))
}

func (e *eventWriter) comment(text string) { e.write(": " + text + "\n\n") }

func (e *eventWriter) write(text string) {
	if e.err != nil {
		return
	}
	e.rc.SetWriteDeadline(time.Now().Add(eventsWrite)) //nolint:errcheck // where it cannot be set, the server's own stands
	if _, e.err = e.w.Write([]byte(text)); e.err == nil {
		e.err = e.rc.Flush()
	}
}
