package webhook

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func loopback() Policy {
	return Policy{AllowNetworks: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}
}

// receiving starts a receiver on a loopback port.
func receiving(t *testing.T, answer http.HandlerFunc) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(answer)
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

func answers(status int, headers ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i+1 < len(headers); i += 2 {
			w.Header().Set(headers[i], headers[i+1])
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, "said\nthis")
	}
}

func hangs(_ http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	<-r.Context().Done()
}

func message(url string, attempt int) Message {
	return Message{ID: "msg_1", URL: url, Body: []byte(`{"a":1}`), Secrets: []Secret{NewSecret()}, Attempt: attempt}
}

func TestWhatBecomesOfADelivery(t *testing.T) {
	var followed atomic.Int64
	elsewhere := receiving(t, func(http.ResponseWriter, *http.Request) { followed.Add(1) })
	endless := func(w http.ResponseWriter, _ *http.Request) {
		for range 1000 {
			if _, err := w.Write(make([]byte, 64<<10)); err != nil {
				return
			}
		}
	}
	for _, c := range []struct {
		name    string
		answer  http.HandlerFunc
		attempt int
		kind    Kind
		least   time.Duration // of Wait; the jitter adds up to a fifth
	}{
		{"200", answers(200), 1, Delivered, 0},
		{"204", answers(204), 9, Delivered, 0},
		{"endless answer", endless, 1, Delivered, 0},
		{"410", answers(410), 1, Disabled, 0},
		{"400", answers(400), 1, Retry, 5 * time.Second},
		{"404, third attempt", answers(404), 3, Retry, 30 * time.Minute},
		{"500, ninth attempt", answers(500), 9, Retry, 24 * time.Hour},
		{"500, tenth attempt", answers(500), 10, Failed, 0},
		{"503 with Retry-After", answers(503, "Retry-After", "120"), 1, Retry, 2 * time.Minute},
		{"429 asking for less than the schedule", answers(429, "Retry-After", "1"), 3, Retry, 30 * time.Minute},
		{"429 asking for a year", answers(429, "Retry-After", "31536000"), 1, Retry, 24 * time.Hour},
		{"Retry-After as a date", answers(503, "Date", "Wed, 21 Oct 2015 07:00:00 GMT", "Retry-After", "Wed, 21 Oct 2015 08:00:00 GMT"), 1, Retry, time.Hour},
		{"redirect", answers(302, "Location", elsewhere.URL), 1, Retry, 5 * time.Second},
		{"permanent redirect", answers(308, "Location", elsewhere.URL), 1, Retry, 5 * time.Second},
		{"hangs", hangs, 1, Retry, 5 * time.Second},
		{"drops the connection", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 1, Retry, 5 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := receiving(t, c.answer)
			d := NewDeliverer(Config{Policy: loopback(), Timeout: 300 * time.Millisecond})
			o := d.Deliver(t.Context(), message(s.URL, c.attempt))
			if o.Kind != c.kind || o.Wait < c.least || o.Wait > c.least+c.least/5 {
				t.Errorf("got %s, wait %s (%s); want %s, wait %s", o.Kind, o.Wait, o.Reason, c.kind, c.least)
			}
			if strings.ContainsAny(o.Reason, "\n\r") || strings.Contains(o.Reason, s.URL) {
				t.Errorf("reason %q", o.Reason)
			}
			if o.Took > 2*time.Second {
				t.Errorf("took %s", o.Took)
			}
		})
	}
	if n := followed.Load(); n != 0 {
		t.Errorf("%d redirects were followed", n)
	}
}

func TestReceiverCanVerifyWhatArrives(t *testing.T) {
	secret, verified := NewSecret(), make(chan error, 1)
	s := receiving(t, func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		err := Verify(r.Header, time.Now(), body, secret)
		if r.Method != http.MethodPost || r.Header.Get("Content-Type") != "application/json" || r.URL.RawQuery != "k=v" {
			err = fmt.Errorf("got %s, %s, %s", r.Method, r.Header.Get("Content-Type"), r.URL)
		}
		verified <- err
	})
	m := message(s.URL+"/hook?k=v", 1)
	m.Secrets = []Secret{NewSecret(), secret}
	if o := NewDeliverer(Config{Policy: loopback()}).Deliver(t.Context(), m); o.Kind != Delivered {
		t.Fatalf("got %s: %s", o.Kind, o.Reason)
	}
	if err := <-verified; err != nil {
		t.Error(err)
	}
}

func TestInterruptedDeliveryIsNoAttempt(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s := receiving(t, func(w http.ResponseWriter, r *http.Request) {
		cancel()
		hangs(w, r)
	})
	d := NewDeliverer(Config{Policy: loopback()})
	if o := d.Deliver(ctx, message(s.URL, 10)); o.Kind != Deferred {
		t.Errorf("got %s: %s", o.Kind, o.Reason)
	}
	if len(d.endpoints.byID)+len(d.endpoints.byHost) != 0 {
		t.Error("something is still counted as in flight")
	}
}

// One receiver hangs, one is down; the third is served as if they were not there.
func TestDeadReceiversCostNoOthers(t *testing.T) {
	var hanging, arrived atomic.Int64
	slow := receiving(t, func(w http.ResponseWriter, r *http.Request) {
		hanging.Add(1)
		hangs(w, r)
	})
	good := receiving(t, func(http.ResponseWriter, *http.Request) { arrived.Add(1) })
	gone := receiving(t, hangs)
	gone.Close()
	d := NewDeliverer(Config{Policy: loopback(), Timeout: 500 * time.Millisecond})

	// A pool of 8 works off 300 deliveries, two in three to dead receivers.
	work, outcomes := make(chan string), sync.Map{}
	var workers sync.WaitGroup
	began := time.Now()
	for range 8 {
		workers.Go(func() {
			for url := range work {
				o := d.Deliver(t.Context(), message(url, 1))
				n, _ := outcomes.LoadOrStore(url+" "+string(o.Kind), new(atomic.Int64))
				n.(*atomic.Int64).Add(1) //nolint:errcheck // stored two lines above
			}
		})
	}
	for range 100 {
		for _, url := range []string{slow.URL, gone.URL, good.URL} {
			work <- url
		}
	}
	close(work)
	workers.Wait()
	took := time.Since(began)
	outcomes.Range(func(key, n any) bool {
		t.Log(key, n.(*atomic.Int64).Load()) //nolint:errcheck // all values are
		return true
	})
	if n := arrived.Load(); n != 100 {
		t.Errorf("%d of 100 deliveries arrived at the good receiver", n)
	}
	if n := hanging.Load(); n > 8 {
		t.Errorf("%d attempts were spent on the hanging receiver, want at most 8", n)
	}
	// Without breaker and bound: 100 timeouts of 0.5 s over 8 workers, 6 s.
	if took > 3*time.Second {
		t.Errorf("took %s", took)
	}
}

func TestBreakerOfAnEndpoint(t *testing.T) {
	e := newEndpoints(BreakerConfig{}.withDefaults(), 4, 32)
	to := place{id: "http://a/x", host: "http://a"}
	now := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
	try := func(healthy bool) bool {
		_, admitted := e.enter(now, to)
		if admitted {
			e.leave(now, to, healthy)
		}
		return admitted
	}
	for i := range 5 {
		if !try(false) {
			t.Fatalf("resting after %d failures, want 5", i)
		}
	}
	if wait, admitted := e.enter(now, to); admitted || wait != 30*time.Second {
		t.Errorf("after 5 failures: admitted %t, wait %s", admitted, wait)
	}
	if _, admitted := e.enter(now, place{id: "http://a/y", host: "http://a"}); !admitted {
		t.Error("another address of the host is refused")
	}
	now = now.Add(30 * time.Second)
	if _, admitted := e.enter(now, to); !admitted {
		t.Fatal("no trial after the rest")
	}
	if _, admitted := e.enter(now, to); admitted {
		t.Error("a second attempt beside the trial")
	}
	e.leave(now, to, false)
	if wait, _ := e.enter(now, to); wait != time.Minute {
		t.Errorf("rest after a failed trial is %s, want twice the first", wait)
	}
	now = now.Add(time.Minute)
	if !try(true) || !try(false) || !try(true) {
		t.Error("a successful trial did not bring the endpoint back")
	}
	if _, known := e.byID[to.id]; known {
		t.Error("a healthy endpoint is remembered")
	}
}

func TestHostIsBoundedWiderThanAnAddress(t *testing.T) {
	e := newEndpoints(BreakerConfig{}.withDefaults(), 2, 3)
	now, admitted := time.Now(), 0
	for _, path := range []string{"/a", "/a", "/a", "/b", "/b"} {
		if _, ok := e.enter(now, place{id: "http://h" + path, host: "http://h"}); ok {
			admitted++
		}
	}
	if admitted != 3 {
		t.Errorf("%d attempts in flight to one host, want 3", admitted)
	}
}

func TestDeliveryToAForbiddenAddressIsNotTried(t *testing.T) {
	dials := &dialCount{}
	d := NewDeliverer(Config{Dialer: net.Dialer{Control: dials.refuse}})
	o := d.Deliver(t.Context(), message("http://127.0.0.1:80/", 1))
	if o.Kind != Failed || dials.count.Load() != 0 {
		t.Errorf("got %s after %d connections", o.Kind, dials.count.Load())
	}
}
