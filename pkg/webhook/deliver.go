package webhook

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/net/publicsuffix"

	"github.com/penstock/penstock/internal/duration"
	"github.com/penstock/penstock/internal/oneline"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Config of the deliveries of a Handler. The zero value works; the defaults are in withDefaults.
type Config struct {
	Policy  AddressPolicy
	Vault   Vault         // of the secrets that sign
	Issuer  string        // of every message; empty: a fingerprint of the public key
	Timeout time.Duration // of one attempt, connecting included; 15 s
	// Unproven bounds the attempts at once to all hosts together that did not answer promptly last time; 8. Where it
	// is less than the threads that deliver, receivers that answer slowly leave threads for those that answer
	// promptly. Hosts of one site (siteOf) have half of it, and those at which an
	// attempt lasted for the whole timeout a quarter.
	Unproven int
	Dialer   net.Dialer // for unusual networks; its Control runs after the policy's
}

func (c Config) withDefaults() Config {
	c.Timeout = cmp.Or(c.Timeout, 15*time.Second)
	c.Unproven = cmp.Or(c.Unproven, 8)
	return c
}

// Attempts at once.
const (
	addressInFlight = 4  // to one address
	hostInFlight    = 32 // to one host, which strangers may share
)

// message is one callback on its way.
type message struct {
	ID      string // stable over all attempts; no dot
	URL     string
	Body    []byte       // see envelope
	Secrets []Secret     // one, or two while one replaces the other
	Keys    []signingKey // that sign beside the secrets, as many
	Attempt int          // 1 for the first
	Age     time.Duration
	At      time.Time // of this attempt, by the database's clock: receivers refuse one that is minutes off
}

// deliveryKind of an outcome.
type deliveryKind string

// What an attempt came to.
const (
	delivered deliveryKind = "delivered" // the receiver answered 2xx
	retry     deliveryKind = "retry"     // try again after Wait; this was an attempt
	deferred  deliveryKind = "deferred"  // not tried: come back after Wait; this was no attempt
	disabled  deliveryKind = "disabled"  // the receiver answered 410: send it nothing more
	failed    deliveryKind = "failed"    // no further attempt: they are used up, or the address is not allowed
)

// deliveryOutcome of one attempt.
type deliveryOutcome struct {
	Kind       deliveryKind
	Wait       time.Duration // of retry and deferred
	StatusCode int           // 0 when there was no answer
	Reason     string        // one line for a person
	Took       time.Duration
}

// answerBytesMax is how much of an answer is read: enough to show what the
// receiver said, and to let it reuse the connection.
const answerBytesMax = 4 << 10

// deliverer makes attempts. It is safe for concurrent use.
type deliverer struct {
	config    Config
	client    *http.Client
	fresh     *http.Client // makes a connection for each message
	endpoints *endpoints
}

// newDeliverer returns a deliverer with its own connections.
func newDeliverer(config Config) *deliverer {
	config = config.withDefaults()
	kept := &http.Transport{
		// No proxy from the environment: it would connect on our behalf,
		// past the policy.
		Proxy:                  nil,
		DialContext:            config.Policy.Dialer(config.Dialer),
		TLSHandshakeTimeout:    config.Timeout, // the end of an attempt does not end its handshake
		MaxIdleConnsPerHost:    addressInFlight,
		MaxIdleConns:           256,
		IdleConnTimeout:        30 * time.Second,
		MaxResponseHeaderBytes: 16 << 10,
		DisableCompression:     true,
	}
	fresh := kept.Clone()
	fresh.DisableKeepAlives = true
	stay := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &deliverer{
		config: config,
		endpoints: newEndpoints(
			flightLimits{address: addressInFlight, host: hostInFlight, unproven: config.Unproven}),
		client: &http.Client{Transport: kept, CheckRedirect: stay},
		fresh:  &http.Client{Transport: fresh, CheckRedirect: stay},
	}
}

// deliver makes one attempt. Ending ctx ends it, as deferred.
func (d *deliverer) deliver(ctx context.Context, m message) deliveryOutcome {
	address, err := d.config.Policy.CheckURL(m.URL)
	if err != nil {
		return deliveryOutcome{Kind: failed, Reason: err.Error()}
	}
	to := target{id: withoutQuery(address), host: origin(address), site: siteOf(address)}
	began := time.Now()
	f, refused := d.endpoints.enter(began, to)
	if f == nil {
		return d.postponed(m, refused)
	}
	end := func() { d.endpoints.forgo(f) } // also where the attempt panics
	defer func() { end() }()
	o, healthy := d.attempt(context.WithValue(ctx, schemeKey{}, address.Scheme), address, m)
	o.Took = time.Since(began)
	if o.Kind != deferred {
		end = func() {
			d.endpoints.leave(time.Now(), f, verdict{
				healthy: healthy, took: o.Took, timedOut: !healthy && o.Took >= d.config.Timeout, reason: o.Reason,
			})
		}
	}
	return o
}

// postponed is the outcome of an attempt that was not admitted. It is no attempt, unless the breaker is open beyond the
// time at which the schedule has the next one: then it counts as the one that was due. Otherwise the messages to a
// receiver that is down would not end: all of them together get one attempt each time that the breaker has been open.
func (d *deliverer) postponed(m message, refused refusal) deliveryOutcome {
	wait := jittered(refused.wait)
	if refused.down == "" {
		return deliveryOutcome{Kind: deferred, Wait: wait, Reason: "the receiver has enough deliveries in flight"}
	}
	reason := reasonOf("not tried, since the attempts before failed: " + refused.down)
	if m.Age+wait <= due(m.Attempt+1) {
		return deliveryOutcome{Kind: deferred, Wait: wait, Reason: reason}
	}
	// By its age it is due for the next attempt, too, once the breaker lets it through: it may be late for a reason
	// that is none of the receiver's, as a queue that was paused.
	return d.after(m, wait, reason)
}

// siteOf is the part of a host that one party has registered, by the list of public suffixes: names below it cost that
// party nothing. A name outside of the list, as within a cluster, is a site of its own; an IP address one for each
// port.
func siteOf(u *url.URL) string {
	host := strings.TrimSuffix(strings.ToLower(u.Hostname()), ".")
	if _, err := netip.ParseAddr(host); err == nil {
		return origin(u)
	}
	suffix, managed := publicsuffix.PublicSuffix(host)
	if !managed && !strings.Contains(suffix, ".") {
		return host
	}
	if site, err := publicsuffix.EffectiveTLDPlusOne(host); err == nil {
		return site
	}
	return host
}

// origin is scheme, host and port of an address, in lower case, without the dot at the end of a full name and without
// the scheme's own port.
func origin(u *url.URL) string {
	host := strings.TrimSuffix(strings.ToLower(u.Hostname()), ".")
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	port := u.Port()
	if port != "" && (port != "443" || u.Scheme != "https") && (port != "80" || u.Scheme != "http") {
		host += ":" + port
	}
	return u.Scheme + "://" + host
}

// withoutQuery is an address by origin and path: what a receiver is known by, whatever parameters come with it.
func withoutQuery(u *url.URL) string { return origin(u) + u.EscapedPath() }

// attempt also returns whether the endpoint counts as up.
func (d *deliverer) attempt(ctx context.Context, address *url.URL, m message) (o deliveryOutcome, healthy bool) {
	signed, err := sign(m.ID, m.At, m.Body, m.Secrets, m.Keys)
	if err != nil {
		return deliveryOutcome{Kind: failed, Reason: err.Error()}, true
	}
	bounded, cancel := context.WithTimeout(ctx, d.config.Timeout)
	defer cancel()
	bounded, span := invalidation.StartSpan(bounded, "POST", trace.SpanKindClient,
		attribute.String("server.address", address.Hostname()))
	defer func() {
		span.SetAttributes(attribute.Int("http.response.status_code", o.StatusCode))
		if o.Kind != delivered {
			span.SetStatus(codes.Error, o.Reason)
		}
		span.End()
	}()
	req, err := http.NewRequestWithContext(bounded, http.MethodPost, address.String(), bytes.NewReader(m.Body))
	if err != nil {
		return deliveryOutcome{Kind: failed, Reason: "build request: " + err.Error()}, true
	}
	req.Header = signed
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "Penstock-Webhook/1")
	if parent := invalidation.TraceParent(bounded); parent != "" {
		req.Header.Set("Traceparent", parent)
	}
	reply, err := d.send(req)
	if err != nil {
		return d.broken(ctx, m, err)
	}
	defer reply.Body.Close()
	said, _ := io.ReadAll(io.LimitReader(reply.Body, answerBytesMax)) // what cannot be read is not needed
	return d.judge(m, reply, string(said))
}

// send sends a message, which has one id however often it comes, and sends it once more on a new connection where one
// that had been idle ended before an answer began: the receiver may have closed it while the message was on its way.
// The transport would do so for each idle connection to a receiver that ends on the message.
func (d *deliverer) send(req *http.Request) (*http.Response, error) {
	var reused, answered atomic.Bool
	reply, err := d.client.Do(req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
		GotConn:              func(c httptrace.GotConnInfo) { reused.Store(c.Reused) },
		GotFirstResponseByte: func() { answered.Store(true) },
	})))
	if err == nil || !reused.Load() || answered.Load() || req.Context().Err() != nil {
		return reply, err
	}
	if req.Body, err = req.GetBody(); err != nil {
		return nil, err
	}
	return d.fresh.Do(req)
}

func (d *deliverer) broken(ctx context.Context, m message, err error) (deliveryOutcome, bool) {
	switch {
	case ctx.Err() != nil:
		return deliveryOutcome{Kind: deferred, Reason: "delivery was interrupted on our side"}, true
	case errors.Is(err, ErrForbiddenAddress):
		return deliveryOutcome{Kind: failed, Reason: reasonOf(withoutURL(err).Error())}, true
	}
	return d.again(m, 0, reasonOf(withoutURL(err).Error())), false
}

func (d *deliverer) judge(m message, reply *http.Response, said string) (deliveryOutcome, bool) {
	status := reply.StatusCode
	reason := reasonOf(fmt.Sprintf("receiver answered %d %s", status, said))
	var o deliveryOutcome
	switch {
	case status/100 == 2:
		o = deliveryOutcome{Kind: delivered}
	case status == http.StatusGone:
		o = deliveryOutcome{Kind: disabled, Reason: goneReason}
	case status/100 == 3:
		o = d.again(m, 0, "receiver answered with a redirect, which is not followed: register the final address")
	default:
		o = d.again(m, duration.RetryAfter(reply.Header, m.At, retryAfterMax), reason)
	}
	o.StatusCode = status
	// A receiver that refuses is up; one that says 5xx or too many is not.
	return o, status < 500 && status != http.StatusTooManyRequests
}

// again plans the next attempt: at the time of the schedule, or later if the receiver asked for it, and at the end of
// the schedule at the latest. A message that was deferred may come to the end before its attempts are used up.
func (d *deliverer) again(m message, asked time.Duration, reason string) deliveryOutcome {
	wait, _ := Schedule(m.Attempt+1, rand.Float64())
	return d.after(m, max(wait, asked), reason)
}

// after is the outcome of an attempt that failed: the next one comes after wait, if one is left.
func (d *deliverer) after(m message, wait time.Duration, reason string) deliveryOutcome {
	left := scheduleEnd() - m.Age
	if m.Attempt >= len(waits) || left <= 0 {
		return usedUp(reason)
	}
	return deliveryOutcome{Kind: retry, Wait: min(wait, left), Reason: reason}
}

func usedUp(reason string) deliveryOutcome {
	return deliveryOutcome{Kind: failed, Reason: reasonOf("attempts used up; last: " + reason)}
}

func jittered(wait time.Duration) time.Duration {
	return wait + time.Duration(rand.Float64()*float64(wait)/5)
}

// withoutURL drops the URL, which may hold a capability, from the error.
func withoutURL(err error) error {
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		return wrapped.Err
	}
	return err
}

// reasonMax bounds the reason of an outcome, in characters.
const reasonMax = 300

func reasonOf(text string) string { return oneline.Short(text, reasonMax) }
