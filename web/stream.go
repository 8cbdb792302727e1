package web

import (
	"cmp"
	"context"
	"net/http"
	"strconv"
	"time"

	"github.com/penstock/penstock/internal/stream"
)

const (
	streamAlive = 15 * time.Second // between signs of life, so that no proxy closes the connection
	streamWrite = 10 * time.Second // for a browser to take an event
	streamMax   = 30 * time.Minute // then the browser connects again
	streamCheck = 10 * time.Second // between two checks of the session
	streamsMax  = 1000             // at once; a browser beyond them polls
)

// streams bounds the event streams at once.
type streams struct{ places chan struct{} }

func newStreams() *streams { return &streams{places: make(chan struct{}, streamsMax)} }

func (s *streams) enter() bool {
	select {
	case s.places <- struct{}{}:
		return true
	default:
		return false
	}
}

func (s *streams) leave() { <-s.places }

// stream sends a page's part and points as server-sent events (WHATWG HTML, 9.2), each when it has
// changed. Browsers whose page is hidden or paused close the stream. It looks for the session from
// time to time, so that a revoked token ends it.
func (d *Dashboard) stream(w http.ResponseWriter, r *http.Request,
	draw func(context.Context) (*snapshot, error),
) {
	if !d.streams.enter() {
		w.Header().Set("Retry-After", "10")
		http.Error(w, "this leader has as many streams as it may have; the page polls",
			http.StatusServiceUnavailable)
		return
	}
	defer d.streams.leave()
	ctx, cancel := context.WithTimeout(r.Context(), streamMax)
	defer cancel()
	defer context.AfterFunc(d.drained, cancel)()
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Now().Add(streamMax + streamWrite)) // the server's own would end the request
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	w.WriteHeader(http.StatusOK)
	s := newEventStream(w, r)
	if s.send("clock", "", strconv.AppendInt(nil, time.Now().UnixMilli(), 10)) != nil {
		return
	}
	tick := time.NewTimer(0)
	defer tick.Stop()
	checked := time.Now()
	for {
		if time.Since(checked) > streamCheck {
			if _, err := d.visitor(r); err != nil && !unanswered(err) {
				_ = s.send("bye", "", nil) // the browser may have gone
				return
			}
			checked = time.Now()
		}
		now, err := draw(ctx)
		if err != nil || s.show(now) != nil {
			return
		}
		tick.Reset(untilBeat(time.Now()))
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// untilBeat returns the time to the next beat.
func untilBeat(now time.Time) time.Duration { return now.Truncate(beat).Add(beat).Sub(now) }

// eventStream is one browser that follows a page.
type eventStream struct {
	out     *stream.Events
	seen    string // tag of the snapshot that the browser has
	points  string // that it has
	written time.Time
}

func newEventStream(w http.ResponseWriter, r *http.Request) *eventStream {
	seen := cmp.Or(r.Header.Get("Last-Event-ID"), r.URL.Query().Get("seen"))
	return &eventStream{out: stream.NewEvents(w, r, streamWrite), seen: seen}
}

// show sends what the browser does not have yet.
func (s *eventStream) show(now *snapshot) error {
	if now.tag == s.seen {
		if time.Since(s.written) < streamAlive {
			return nil
		}
		return s.send("alive", "", nil)
	}
	if points := string(now.points); points != s.points {
		s.points = points
		if err := s.send("points", "", now.points); err != nil {
			return err
		}
	}
	s.seen = now.tag
	return s.send("part", now.tag, now.part)
}

func (s *eventStream) send(event, id string, data []byte) error {
	s.written = time.Now()
	return s.out.Event(id, event, string(data))
}
