package browser

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
)

// proxied puts a proxy before the dashboard that answers requests for the live part by itself while live is set: form
// is stream, part or points.
func (s *stage) proxied() *atomic.Pointer[func(w http.ResponseWriter, r *http.Request, form string)] {
	s.Helper()
	live := &atomic.Pointer[func(w http.ResponseWriter, r *http.Request, form string)]{}
	pages := s.server.Config.Handler
	s.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		form := r.URL.Query().Get("live")
		if answer := live.Load(); answer != nil && form != "" {
			(*answer)(w, r, form)
			return
		}
		pages.ServeHTTP(w, r)
	}))
	s.Cleanup(s.server.Close)
	return live
}

const streamState = `document.querySelector('#stream')?.dataset.state`

// A page that polls is paused while an answer is on its way: the answer changes nothing, and no further poll follows.
func TestAPauseStopsAPageThatPolls(t *testing.T) {
	s := newStage(t, true)
	live := s.proxied()
	tab := s.open()
	tab.tolerated = "503 (Service Unavailable)" // the answer for the stream
	asked, gone := make(chan struct{}), make(chan struct{})
	slow := func(w http.ResponseWriter, r *http.Request, form string) {
		if form == "stream" {
			http.Error(w, "no stream", http.StatusServiceUnavailable)
			return
		}
		select {
		case asked <- struct{}{}:
		case <-r.Context().Done():
			return
		}
		select {
		case <-r.Context().Done():
			close(gone)
		case <-time.After(patience / 4):
			fmt.Fprint(w, "<p>too late</p>")
		}
	}
	live.Store(&slow)
	tab.visit("queues")
	<-asked
	tab.do(chromedp.Click(`#pause`))
	select {
	case <-gone:
	case <-asked:
		t.Error("a paused page polls")
	}
	if state := eval[string](tab, streamState); state != "paused" {
		t.Errorf("a paused page says %q", state)
	}
	live.Store(nil)
	s.exec(`SELECT penstock.create_queue('later')`)
	tab.do(chromedp.Click(`#pause`))
	tab.reads("later")
	tab.until(streamState + ` === 'live'`)
}
