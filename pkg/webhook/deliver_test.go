package webhook

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

func loopback() AddressPolicy {
	return AddressPolicy{AllowNetworks: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}
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

func messageTo(url string, attempt int) message {
	return message{
		ID: "msg_1", URL: url, Body: []byte(`{"a":1}`), Secrets: []Secret{NewSecret()}, Attempt: attempt, At: time.Now(),
	}
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
		kind    deliveryKind
		least   time.Duration // of Wait; the jitter adds up to a fifth
	}{
		{"200", answers(200), 1, delivered, 0},
		{"204", answers(204), 9, delivered, 0},
		{"endless answer", endless, 1, delivered, 0},
		{"410", answers(410), 1, disabled, 0},
		{"400", answers(400), 1, retry, 5 * time.Second},
		{"404, third attempt", answers(404), 3, retry, 30 * time.Minute},
		{"500, ninth attempt", answers(500), 9, retry, 24 * time.Hour},
		{"500, tenth attempt", answers(500), 10, failed, 0},
		{"503 with Retry-After", answers(503, "Retry-After", "120"), 1, retry, 2 * time.Minute},
		{"429 asking for less than the schedule", answers(429, "Retry-After", "1"), 3, retry, 30 * time.Minute},
		{"429 asking for a year", answers(429, "Retry-After", "31536000"), 1, retry, 24 * time.Hour},
		{"Retry-After as a date", answers(503, "Date", "Wed, 21 Oct 2015 07:00:00 GMT", "Retry-After", "Wed, 21 Oct 2015 08:00:00 GMT"), 1, retry, time.Hour},
		{"redirect", answers(302, "Location", elsewhere.URL), 1, retry, 5 * time.Second},
		{"permanent redirect", answers(308, "Location", elsewhere.URL), 1, retry, 5 * time.Second},
		{"hangs", hangs, 1, retry, 5 * time.Second},
		{"drops the connection", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 1, retry, 5 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := receiving(t, c.answer)
			within := time.Minute
			if c.name == "hangs" {
				within = 300 * time.Millisecond
			}
			d := newDeliverer(Config{Policy: loopback(), Timeout: within})
			o := d.deliver(t.Context(), messageTo(s.URL, c.attempt))
			if o.Kind != c.kind || o.Wait < c.least || o.Wait > c.least+c.least/5 {
				t.Errorf("got %s, wait %s (%s); want %s, wait %s", o.Kind, o.Wait, o.Reason, c.kind, c.least)
			}
			if strings.ContainsAny(o.Reason, "\n\r") || strings.Contains(o.Reason, s.URL) {
				t.Errorf("reason %q", o.Reason)
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
	m := messageTo(s.URL+"/hook?k=v", 1)
	m.Secrets = []Secret{NewSecret(), secret}
	if o := newDeliverer(Config{Policy: loopback()}).deliver(t.Context(), m); o.Kind != delivered {
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
	d := newDeliverer(Config{Policy: loopback()})
	if o := d.deliver(ctx, messageTo(s.URL, 10)); o.Kind != deferred {
		t.Errorf("got %s: %s", o.Kind, o.Reason)
	}
	if len(d.endpoints.byID)+len(d.endpoints.byHost)+d.endpoints.unproven != 0 {
		t.Error("something is still counted as in flight")
	}
}

// One receiver does not answer before the other deliveries have ended, one is down; the third is served as if they were
// not there. The hanging one keeps some of the threads, and the other deliveries to it come back later.
func TestDeadReceiversCostNoOthers(t *testing.T) {
	const threads, each = 8, 100
	var hanging, arrived atomic.Int64
	slow := receiving(t, func(w http.ResponseWriter, r *http.Request) {
		hanging.Add(1)
		hangs(w, r)
	})
	good := receiving(t, func(http.ResponseWriter, *http.Request) { arrived.Add(1) })
	gone := receiving(t, hangs)
	gone.Close()
	d := newDeliverer(Config{Policy: loopback(), Timeout: time.Hour})

	work := make(chan string)
	var workers sync.WaitGroup
	for range threads {
		workers.Go(func() {
			for url := range work {
				d.deliver(t.Context(), messageTo(url, 1))
			}
		})
	}
	hung := time.After(time.Minute)
	for range each {
		for _, url := range []string{slow.URL, gone.URL, good.URL} {
			select {
			case work <- url:
			case <-hung:
				t.Fatalf("all %d threads wait for the hanging receiver, after %d of %d deliveries to the good one",
					threads, arrived.Load(), each)
			}
		}
	}
	close(work)
	for end := time.Now().Add(time.Minute); arrived.Load() < each; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d of %d deliveries arrived at the good receiver", arrived.Load(), each)
		}
	}
	slow.CloseClientConnections() // ends the attempts that hang
	workers.Wait()
	if n := hanging.Load(); n > threads/2 {
		t.Errorf("%d of %d threads were spent on the hanging receiver, want half at most", n, threads)
	}
}

func TestBreakerOfAnEndpoint(t *testing.T) {
	e := newEndpoints(flightLimits{4, 32, 8})
	to := target{id: "http://a/x", host: "http://a"}
	now := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
	try := func(healthy bool) bool {
		f, _ := e.enter(now, to)
		if f != nil {
			e.leave(now, f, verdict{healthy: healthy, took: time.Millisecond, reason: "500"})
		}
		return f != nil
	}
	for i := range 5 {
		if !try(false) {
			t.Fatalf("resting after %d failures, want 5", i)
		}
	}
	if f, no := e.enter(now, to); f != nil || no.wait != 30*time.Second || no.down != "500" {
		t.Errorf("after 5 failures: admitted %t, %+v", f != nil, no)
	}
	if f, _ := e.enter(now, target{id: "http://a/y", host: "http://a"}); f == nil {
		t.Error("another address of the host is refused")
	}
	now = now.Add(30 * time.Second)
	trial, _ := e.enter(now, to)
	if trial == nil {
		t.Fatal("no trial after the breaker was open")
	}
	if f, _ := e.enter(now, to); f != nil {
		t.Error("a second attempt beside the trial")
	}
	e.leave(now, trial, verdict{took: time.Millisecond, reason: "500"})
	if _, no := e.enter(now, to); no.wait != time.Minute {
		t.Errorf("rest after a failed trial is %s, want twice the first", no.wait)
	}
	now = now.Add(time.Minute)
	if !try(true) || !try(false) || !try(true) {
		t.Error("a successful trial did not bring the endpoint back")
	}
	if _, known := e.byID[to.id]; known {
		t.Error("a healthy endpoint is remembered")
	}
}

// onTrial is an endpoint whose breaker was open: a trial is under way, and an attempt that began before it opened.
func onTrial(t *testing.T) (e *endpoints, now time.Time, to target, earlier, trial *flight) {
	t.Helper()
	e = newEndpoints(flightLimits{address: 4, host: 32, unproven: 8})
	now, to = time.Now(), target{"https://a.example/hook", "https://a.example", "a.example"}
	earlier, _ = e.enter(now, to)
	for range breakerFailures {
		f, _ := e.enter(now, to)
		e.leave(now, f, verdict{reason: "500"})
	}
	now = now.Add(breakerOpen + time.Second)
	if trial, _ = e.enter(now, to); trial == nil {
		t.Fatal("no trial after the breaker was open")
	}
	return e, now, to, earlier, trial
}

// An attempt that began before the breaker opened, and ends during the trial, is not the trial: until that ends there
// is no other attempt, and no longer rest.
func TestAnEarlierAttemptIsNotTheTrialOfItsEndpoint(t *testing.T) {
	for name, end := range map[string]func(*endpoints, time.Time, *flight){
		"tells nothing": func(e *endpoints, _ time.Time, f *flight) { e.forgo(f) },
		"failed":        func(e *endpoints, now time.Time, f *flight) { e.leave(now, f, verdict{reason: "500"}) },
	} {
		e, now, to, earlier, _ := onTrial(t)
		end(e, now, earlier)
		if other, no := e.enter(now, to); other != nil || no.wait != fullWait {
			t.Errorf("%s: another attempt beside the trial: admitted %t, or after %s", name, other != nil, no.wait)
		}
	}
}

// An earlier attempt that succeeds closes the breaker: attempts are admitted beside the trial, whose failure is one.
func TestAnEarlierAttemptThatSucceedsEndsTheTrialOfItsEndpoint(t *testing.T) {
	e, now, to, earlier, trial := onTrial(t)
	e.leave(now, earlier, verdict{healthy: true})
	if f, no := e.enter(now, to); f == nil {
		t.Errorf("none is admitted for %s beside the trial", no.wait)
	}
	e.leave(now, trial, verdict{reason: "500"})
	if f, no := e.enter(now, to); f == nil {
		t.Errorf("one failure opens the breaker for %s", no.wait)
	}
}

func TestHostIsBoundedWiderThanAnAddress(t *testing.T) {
	e := newEndpoints(flightLimits{2, 3, 8})
	now, admitted := time.Now(), 0
	for _, path := range []string{"/a", "/a", "/a", "/b", "/b"} {
		if f, _ := e.enter(now, target{id: "http://h" + path, host: "http://h"}); f != nil {
			admitted++
		}
	}
	if admitted != 3 {
		t.Errorf("%d attempts in flight to one host, want 3", admitted)
	}
}

// Slow receivers under any number of names hold no more than their share of the threads that deliver.
func TestSlowReceiversUnderManyNamesLeaveThreadsForPromptOnes(t *testing.T) {
	var slow sync.WaitGroup
	release := make(chan struct{})
	tarPit := receiving(t, func(http.ResponseWriter, *http.Request) { <-release })
	good := receiving(t, answers(200))
	// Every name resolves to the tar pit: wildcard DNS.
	dialer := net.Dialer{Resolver: resolver(t, func(string) []string { return []string{"127.0.0.1"} })}
	d := newDeliverer(Config{Policy: loopback(), Dialer: dialer, Unproven: 3, Timeout: time.Minute})
	if o := d.deliver(t.Context(), messageTo(good.URL, 1)); o.Kind != delivered {
		t.Fatalf("first delivery: %s", o.Reason)
	}
	_, port, _ := net.SplitHostPort(strings.TrimPrefix(tarPit.URL, "http://"))
	outcomes := make(chan deliveryOutcome, 20)
	for i := range 20 {
		slow.Go(func() {
			outcomes <- d.deliver(t.Context(), messageTo(fmt.Sprintf("http://tar%d.example.com:%s/%d", i, port, i), 1))
		})
	}
	for range 17 {
		if o := <-outcomes; o.Kind != deferred {
			t.Errorf("a delivery beyond the bound came to %s: %s", o.Kind, o.Reason)
		}
	}
	for i := range 10 {
		if o := d.deliver(t.Context(), messageTo(good.URL, 1)); o.Kind != delivered {
			t.Errorf("delivery %d to the prompt receiver: %s, %s", i, o.Kind, o.Reason)
		}
	}
	close(release)
	slow.Wait()
}

// Beyond endpointsMax the endpoint that was used longest ago is forgotten, without a walk through all of them.
func TestEndpointsWithTroubleAreBounded(t *testing.T) {
	e := newEndpoints(flightLimits{4, 32, 8})
	now := time.Now()
	for i := range 3 * endpointsMax {
		id := fmt.Sprintf("http://h/%d", i)
		f, _ := e.enter(now, target{id: id, host: "http://h"})
		e.leave(now, f, verdict{took: time.Millisecond, reason: "500"})
		if len(e.byID) > endpointsMax {
			t.Fatalf("%d endpoints are remembered", len(e.byID))
		}
	}
	if e.byID["http://h/0"] != nil || e.byID[fmt.Sprintf("http://h/%d", 3*endpointsMax-1)] == nil {
		t.Error("another endpoint than the oldest was forgotten")
	}
	for i := range 2 * endpointsMax {
		e.prompt.set(fmt.Sprint(i), true)
	}
	if e.prompt.order.Len() != endpointsMax || len(e.prompt.byName) != endpointsMax || e.prompt.has("0") {
		t.Errorf("%d prompt hosts are remembered", len(e.prompt.byName))
	}
}

func TestDeliveryToAForbiddenAddressIsNotTried(t *testing.T) {
	dials := &dialCount{}
	d := newDeliverer(Config{Dialer: net.Dialer{Control: dials.refuse}})
	o := d.deliver(t.Context(), messageTo("http://127.0.0.1:80/", 1))
	if o.Kind != failed || dials.count.Load() != 0 {
		t.Errorf("got %s after %d connections", o.Kind, dials.count.Load())
	}
}

// A proxy would connect on behalf of the node, past the policy.
func TestDeliveriesUseNoProxyOfTheEnvironment(t *testing.T) {
	transport, is := newDeliverer(Config{}).client.Transport.(*http.Transport)
	if !is || transport.Proxy != nil {
		t.Error("deliveries may go through a proxy")
	}
}

// While its breaker is open an address gets no attempts, so that 200 messages to it could not use up ten each in years.
func TestUnracedMessagesToADeadAddressEndWithTheTimeOfTheirAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused := net.Dialer{Control: func(string, string, syscall.RawConn) error { return syscall.ECONNREFUSED }}
		d := newDeliverer(Config{Policy: loopback(), Dialer: refused})
		type waiting struct {
			message
			at time.Time
		}
		began, ended, first := time.Now(), 0, time.Duration(0)
		line := make([]waiting, 200)
		for i := range line {
			line[i] = waiting{messageTo("http://127.0.0.1:9/", 1), began}
		}
		for len(line) > 0 && time.Since(began) < 30*24*time.Hour {
			slices.SortStableFunc(line, func(a, b waiting) int { return a.at.Compare(b.at) })
			next := &line[0]
			time.Sleep(time.Until(next.at))
			next.Age = time.Since(began)
			o := d.deliver(t.Context(), next.message)
			next.at = time.Now().Add(o.Wait)
			switch o.Kind {
			case failed:
				if !strings.Contains(o.Reason, "refused") {
					t.Errorf("a message ended because %q", o.Reason)
				}
				first = cmp.Or(first, next.Age)
				line = line[1:]
				ended++
			case retry:
				next.Attempt++
			}
		}
		took := time.Since(began)
		t.Logf("%d messages have ended, the first after %s, the last after %s", ended, first, took)
		if ended != 200 || first < 3*24*time.Hour || took > 4*24*time.Hour {
			t.Errorf("want 200 messages to end in the fourth day")
		}
	})
}

// What waited for another reason, as in a queue that was paused for two hours, is tried as soon as the breaker of its
// receiver lets it through, and not hours later.
func TestAMessageThatIsLateComesWhenTheBreakerHasClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused := net.Dialer{Control: func(string, string, syscall.RawConn) error { return syscall.ECONNREFUSED }}
		d := newDeliverer(Config{Policy: loopback(), Dialer: refused})
		late := messageTo("http://127.0.0.1:9/", 1)
		late.Age = 2 * time.Hour
		for tries := 0; ; tries++ {
			o := d.deliver(t.Context(), messageTo("http://127.0.0.1:9/", 1))
			if strings.HasPrefix(o.Reason, "not tried") {
				break
			}
			if tries > 1000 {
				t.Fatal("the breaker does not open")
			}
		}
		for range 3 {
			o := d.deliver(t.Context(), late)
			if !strings.HasPrefix(o.Reason, "not tried") || o.Wait > time.Minute {
				t.Errorf("attempt %d comes after %s (%s: %s)", late.Attempt+1, o.Wait, o.Kind, o.Reason)
			}
			late.Attempt++
		}
	})
}

// Slow receivers under any number of names of one site leave places for first deliveries to hosts of others.
func TestFirstDeliveriesDoNotWaitForSlowNames(t *testing.T) {
	const timeout = 15 * time.Second
	start := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
	type running struct {
		ends time.Time
		f    *flight
		good bool
	}
	var line []target // in order; good ones come last
	for i := range 1000 {
		host := fmt.Sprintf("http://t%d.tar.example", i)
		line = append(line, target{id: host + "/", host: host, site: "tar.example"})
	}
	for i := range 20 {
		host := fmt.Sprintf("http://good%d.example", i)
		line = append(line, target{id: host + "/", host: host, site: fmt.Sprintf("good%d.example", i)})
	}
	e := newEndpoints(flightLimits{4, 32, 8})
	var inFlight []running
	delivered := 0
	for now := start; delivered < 20; now = now.Add(100 * time.Millisecond) {
		if now.Sub(start) > time.Minute {
			t.Fatalf("%d of 20 first deliveries have arrived after a minute", delivered)
		}
		inFlight = slices.DeleteFunc(inFlight, func(r running) bool {
			if r.ends.After(now) {
				return false
			}
			e.leave(now, r.f, verdict{healthy: r.good, took: timeout, timedOut: !r.good, reason: "timed out"})
			if r.good {
				delivered++
			}
			return true
		})
		line = slices.DeleteFunc(line, func(to target) bool {
			f, _ := e.enter(now, to)
			if f == nil {
				return false
			}
			good := to.site != "tar.example"
			ends := now.Add(timeout)
			if good {
				ends = now.Add(time.Second)
			}
			inFlight = append(inFlight, running{ends, f, good})
			return true
		})
	}
	if !e.slow.has("tar.example") && len(inFlight) == 0 {
		t.Error("no slow name was tried")
	}
}

// Hosts of slow sites have a quarter of the places, so that most are left for hosts that nothing is known of.
func TestSlowSitesTogetherHaveAQuarterOfThePlaces(t *testing.T) {
	e := newEndpoints(flightLimits{4, 32, 8})
	now := time.Now()
	to := func(i int) target {
		name := fmt.Sprintf("slow%d.example", i)
		return target{id: "http://" + name + "/", host: "http://" + name, site: name}
	}
	for i := range 20 {
		f, _ := e.enter(now, to(i))
		e.leave(now, f, verdict{took: 15 * time.Second, timedOut: true, reason: "timed out"})
	}
	var admitted []*flight
	for i := range 20 {
		if f, _ := e.enter(now, to(i)); f != nil {
			admitted = append(admitted, f)
		}
	}
	if len(admitted) != 2 {
		t.Errorf("%d attempts to slow sites in flight, want 2 of 8", len(admitted))
	}
	e.leave(now, admitted[0], verdict{healthy: true, took: 3 * time.Second})
	if e.slow.has(to(0).site) {
		t.Error("a site that answered is still taken for slow")
	}
}

func TestASiteIsWhatOnePartyHasRegistered(t *testing.T) {
	for address, want := range map[string]string{
		"https://n1.hooks.evil.com/":             "evil.com",
		"https://hooks.shop.co.uk/":              "shop.co.uk",
		"https://job-x7.a.run.app/":              "job-x7.a.run.app", // each name under a.run.app is another party's
		"http://hook.team.svc.cluster.local./in": "hook.team.svc.cluster.local",
		"http://receiver:8080/":                  "receiver",
		"http://10.1.2.3:8080/":                  "http://10.1.2.3:8080",
	} {
		if got := siteOf(mustParse(t, address)); got != want {
			t.Errorf("the site of %s is %s, want %s", address, got, want)
		}
	}
}

// A message that was not tried, or not admitted, until shortly before the end of its schedule has its last attempt there,
// whatever its receiver asks for, and none after it.
func TestAMessageThatWasDeferredHasItsLastAttemptByTheEnd(t *testing.T) {
	d := newDeliverer(Config{Policy: loopback()})
	for began := time.Duration(0); began <= scheduleEnd(); began += time.Hour {
		for _, asked := range []time.Duration{0, 10 * time.Minute, 24 * time.Hour} {
			m := message{Attempt: 1, Age: began}
			o := d.again(m, asked, "refused")
			for ; o.Kind == retry; o = d.again(m, asked, "refused") {
				m.Attempt++
				m.Age += o.Wait
			}
			if o.Kind != failed || m.Age > scheduleEnd() {
				t.Errorf("first tried at %s, and asked for %s: attempt %d, the last one, is at %s", began, asked, m.Attempt, m.Age)
			}
		}
	}
}

// The schedule begins anew where the first attempt came after the end.
func TestTheAgeOfAMessageIsThatOfItsSchedule(t *testing.T) {
	const h = time.Hour
	for _, c := range []struct{ accepted, tried, want time.Duration }{
		{0, 0, 0},
		{80 * h, 0, 80 * h}, // never tried
		{100 * h, 0, 0},
		{100 * h, 5 * h, 5 * h},
		{100 * h, 20 * h, 100 * h}, // tried when it was 80 hours old
		{100 * h, 100 * h, 100 * h},
	} {
		if got := age(c.accepted, c.tried); got != c.want {
			t.Errorf("accepted %s ago and tried %s ago: age %s, want %s", c.accepted, c.tried, got, c.want)
		}
	}
}

// Receivers refuse a time that is minutes off: that of a callback is the database's, whatever the clock of this machine.
func TestACallbackIsSignedWithTheTimeOfTheDatabase(t *testing.T) {
	var header http.Header
	s := receiving(t, func(w http.ResponseWriter, r *http.Request) {
		header = r.Header.Clone()
		w.WriteHeader(http.StatusOK)
	})
	m := messageTo(s.URL, 1)
	m.At = time.Now().Add(-time.Hour)
	if o := newDeliverer(Config{Policy: loopback()}).deliver(t.Context(), m); o.Kind != delivered {
		t.Fatalf("got %+v", o)
	}
	if err := Verify(header, m.At, m.Body, m.Secrets...); err != nil {
		t.Error(err)
	}
}

// A receiver that accepts a connection and does not answer the handshake, as one whose load balancer is frozen, costs a
// connection for as long as an attempt may last, and not until the restart of the node.
func TestAReceiverThatAnswersNoHandshakeKeepsNoConnection(t *testing.T) {
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	closed := make(chan struct{}, 1)
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = io.Copy(io.Discard, conn) // until the client closes it
		closed <- struct{}{}
	}()
	d := newDeliverer(Config{Policy: loopback(), Timeout: 200 * time.Millisecond})
	if o := d.deliver(t.Context(), messageTo("https://"+listener.Addr().String(), 1)); o.Kind != retry {
		t.Errorf("got %s (%s), want %s", o.Kind, o.Reason, retry)
	}
	select {
	case <-closed:
	case <-time.After(time.Minute):
		t.Error("the connection is open a minute after the attempt")
	}
}

type panics struct{}

func (panics) RoundTrip(*http.Request) (*http.Response, error) { panic("a bug") }

func TestAnAttemptThatPanicsIsInFlightNoMore(t *testing.T) {
	d := newDeliverer(Config{Policy: loopback()})
	d.client.Transport = panics{}
	for range addressInFlight {
		func() {
			defer func() { _ = recover() }() // as a processing thread does
			d.deliver(t.Context(), messageTo("http://127.0.0.1:1/", 1))
		}()
	}
	if e := d.endpoints; e.unproven != 0 || len(e.byID)+len(e.byHost)+len(e.bySite) != 0 {
		t.Errorf("%d attempts to unproven hosts are counted, addresses %v, hosts %v, sites %v", e.unproven, e.byID, e.byHost, e.bySite)
	}
}

// A receiver may close a connection that has been idle while a message is on its way to it. That says nothing about the
// receiver: the message goes to it once more, on a new connection, and no attempt is spent.
func TestAnIdleConnectionThatItsReceiverHasClosedCostsNoAttempt(t *testing.T) {
	var mu sync.Mutex
	served := map[string]bool{} // addresses of connections that had a request
	var closed int
	s := receiving(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if !served[r.RemoteAddr] {
			served[r.RemoteAddr] = true
			w.WriteHeader(http.StatusNoContent)
			return
		}
		closed++
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		conn.Close()
	})
	d := newDeliverer(Config{Policy: loopback()})
	for range 2 {
		if o := d.deliver(t.Context(), messageTo(s.URL, 1)); o.Kind != delivered {
			t.Errorf("got %s (%s), want %s", o.Kind, o.Reason, delivered)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if closed != 1 || len(served) != 2 {
		t.Errorf("%d connections were closed, and %d served a message; want 1 and 2", closed, len(served))
	}
}

// A receiver that ends on a message has it twice in an attempt, however many connections to it are idle.
func TestAnAttemptSendsAMessageTwiceAtMost(t *testing.T) {
	var ended atomic.Int32
	var together sync.WaitGroup
	together.Add(addressInFlight)
	s := receiving(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/ok" {
			together.Done()
			together.Wait()
			w.WriteHeader(http.StatusNoContent)
			return
		}
		ended.Add(1)
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		conn.Close()
	})
	d := newDeliverer(Config{Policy: loopback()})
	var all sync.WaitGroup
	for range addressInFlight {
		all.Go(func() {
			if o := d.deliver(t.Context(), messageTo(s.URL+"/ok", 1)); o.Kind != delivered {
				t.Errorf("got %s (%s), want %s", o.Kind, o.Reason, delivered)
			}
		})
	}
	all.Wait()
	if o := d.deliver(t.Context(), messageTo(s.URL+"/ends", 1)); o.Kind != retry || ended.Load() != 2 {
		t.Errorf("got %s, and the message was sent %d times; want %s and 2", o.Kind, ended.Load(), retry)
	}
}
