package web

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// deadlined remembers the write deadline that was set last.
type deadlined struct {
	*httptest.ResponseRecorder
	last time.Time
}

func (d *deadlined) SetWriteDeadline(at time.Time) error {
	d.last = at
	return nil
}

// Over HTTP/2 a deadline that passes between two events ends the stream, and a page may not change for 15 seconds.
func TestAnEventLeavesNoDeadlineOverHTTP2(t *testing.T) {
	w := &deadlined{ResponseRecorder: httptest.NewRecorder(), last: time.Unix(1, 0)}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/ui/", nil)
	r.ProtoMajor = 2
	s := newEventStream(w, r)
	if err := s.show(&snapshot{tag: "a", part: []byte("<p>\n")}); err != nil {
		t.Fatal(err)
	}
	if !w.last.IsZero() {
		t.Errorf("a deadline is set at %s", w.last)
	}
}
