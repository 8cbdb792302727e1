package browser

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/page"
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

// watched lets a test set the clock of the pages to come forward (window.ahead, in ms), and counts signs of life of the
// stream and seconds that have passed.
const watched = `(() => {
	window.ahead = 0; window.alive = 0; window.ticks = 0;
	const now = performance.now.bind(performance);
	performance.now = () => now() + window.ahead;
	const listen = EventSource.prototype.addEventListener;
	EventSource.prototype.addEventListener = function (name, f) {
		listen.call(this, name, e => { f.call(this, e); if (name === 'alive') window.alive++; });
	};
	setInterval(() => window.ticks++, 1000);
})()`

const streamState = `document.querySelector('#stream')?.dataset.state`

// A leader that hangs, and a proxy without a leader, close no connection or answer with an error: the page says that it
// gets nothing, keeps what it has, and goes on by itself.
func TestAPageThatGetsNothingSaysSo(t *testing.T) {
	s := newStage(t, true)
	live := s.proxied()
	tab := s.open()
	tab.do(chromedp.ActionFunc(func(ctx context.Context) error {
		_, err := page.AddScriptToEvaluateOnNewDocument(watched).Do(ctx)
		return err
	}))
	alive := make(chan struct{})
	hanging := func(w http.ResponseWriter, r *http.Request, _ string) {
		w.Header().Set("Content-Type", "text/event-stream")
		for {
			_ = http.NewResponseController(w).Flush() // the browser may have gone
			select {
			case <-alive:
				fmt.Fprint(w, "event: alive\ndata: \n\n")
			case <-r.Context().Done():
				return
			}
		}
	}
	live.Store(&hanging)
	tab.visit("queues")
	tab.until(streamState + ` === 'live'`)
	eval[int](tab, `window.ahead += 30_000`)
	alive <- struct{}{}
	tab.until(`window.alive === 1`)
	before := eval[int](tab, `window.ahead += 30_000, window.ticks`)
	tab.until(fmt.Sprintf(`window.ticks > %d`, before+1))
	if state := eval[string](tab, streamState); state != "live" {
		t.Errorf("30 s after a sign of life the page says %q", state)
	}

	tab.tolerated = "502 (Bad Gateway)"
	var refused atomic.Int32
	broken := func(w http.ResponseWriter, _ *http.Request, _ string) {
		refused.Add(1)
		http.Error(w, "no leader", http.StatusBadGateway)
	}
	live.Store(&broken)
	eval[int](tab, `window.ahead += 30_000`)
	tab.until(streamState + ` === 'lost'`)
	for begun := time.Now(); refused.Load() < 3 && time.Since(begun) < patience; {
		time.Sleep(20 * time.Millisecond)
	}
	if state := eval[string](tab, streamState); state != "lost" || refused.Load() < 3 {
		t.Errorf("after %d answers with status 502 the page says %q", refused.Load(), state)
	}
	if text := eval[string](tab, `document.querySelector('#live').innerText`); !strings.Contains(text, "embeddings") {
		t.Errorf("the page did not keep what it had: %.200s", text)
	}

	live.Store(nil)
	tab.until(streamState + ` === 'poll'`)
	s.exec(`SELECT penstock.create_queue('afterwards')`)
	tab.reads("afterwards")
	tab.until(streamState + ` === 'live'`) // the stream is tried again
}

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

// Axes, legends and pictures are in UTC wherever the browser and the leader are, and their headings say so.
func TestTimesOfAQueueAreInUTC(t *testing.T) {
	tab := newStage(t, true).open()
	tab.do(emulation.SetTimezoneOverride("Asia/Kolkata")) // 5 h 30 min ahead
	tab.visit("queues/embeddings")
	tab.until(`document.querySelector('[data-chart] .u-over') !== null`)
	tab.until(`(() => { const o = document.querySelector('[data-chart] .u-over'), r = o.getBoundingClientRect();
		o.dispatchEvent(new MouseEvent('mousemove', { clientX: r.right - 2, clientY: r.top + 20, bubbles: true }));
		return /^\d\d:\d\d/.test(document.querySelector('[data-chart] .u-value').textContent); })()`)
	apart := eval[float64](tab, `(() => { const [h, m] = document.querySelector('[data-chart] .u-value').textContent.split(':').map(Number), now = new Date();
		return (now.getUTCHours() * 60 + now.getUTCMinutes() - h * 60 - m + 1440) % 1440; })()`)
	if apart > 60 { // the chart has an hour
		t.Errorf("the newest time of the chart is %.0f minutes before now in UTC", apart)
	}
	tab.reads("from push, delays and earlier attempts included")
}
