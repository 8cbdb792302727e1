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
	"net/url"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/penstock/penstock/internal/duration"
	"github.com/penstock/penstock/internal/oneline"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Config of a Deliverer. The zero value works; the defaults are in withDefaults.
type Config struct {
	Policy       AddressPolicy
	Vault        Vault         // of the secrets that sign
	Issuer       string        // of every message; empty: a fingerprint of the public key
	Timeout      time.Duration // of one attempt, connecting included; 15 s
	InFlight     int           // attempts at once to one address; 4
	HostInFlight int           // attempts at once to one host, which strangers may share; 32
	// Unproven bounds the attempts at once to all hosts together that did not answer promptly last time; 8. Where it is
	// less than the threads that deliver, receivers that answer slowly leave threads for those that answer promptly.
	Unproven int
	Breaker  BreakerConfig
	Dialer   net.Dialer // for unusual networks; its Control runs after the policy's
}

func (c Config) withDefaults() Config {
	c.Timeout = cmp.Or(c.Timeout, 15*time.Second)
	c.InFlight = cmp.Or(c.InFlight, 4)
	c.HostInFlight = cmp.Or(c.HostInFlight, 32)
	c.Unproven = cmp.Or(c.Unproven, 8)
	c.Breaker = c.Breaker.withDefaults()
	return c
}

// Message is one callback on its way.
type Message struct {
	ID      string // stable over all attempts; no dot
	URL     string
	Body    []byte       // see Envelope
	Secrets []Secret     // one, or two while one replaces the other
	Keys    []SigningKey // that sign beside the secrets, as many
	Attempt int          // 1 for the first
}

// DeliveryKind of an outcome.
type DeliveryKind string

// What an attempt came to.
const (
	Delivered DeliveryKind = "delivered" // the receiver answered 2xx
	Retry     DeliveryKind = "retry"     // try again after Wait; this was an attempt
	Deferred  DeliveryKind = "deferred"  // not tried: come back after Wait; this was no attempt
	Disabled  DeliveryKind = "disabled"  // the receiver answered 410: send it nothing more
	Failed    DeliveryKind = "failed"    // no further attempt: they are used up, or the address is not allowed
)

// DeliveryOutcome of one attempt.
type DeliveryOutcome struct {
	Kind       DeliveryKind
	Wait       time.Duration // Retry, Deferred
	StatusCode int           // 0 when there was no answer
	Reason     string        // one line for a person
	Took       time.Duration
}

// answerBytesMost is how much of an answer is read: enough to show what the
// receiver said, and to let it reuse the connection.
const answerBytesMost = 4 << 10

// Deliverer makes attempts. It is safe for concurrent use.
type Deliverer struct {
	config    Config
	client    *http.Client
	endpoints *endpoints
}

// NewDeliverer returns a deliverer with its own connections.
func NewDeliverer(config Config) *Deliverer {
	config = config.withDefaults()
	return &Deliverer{
		config: config,
		endpoints: newEndpoints(config.Breaker,
			flightLimits{address: config.InFlight, host: config.HostInFlight, unproven: config.Unproven}),
		client: &http.Client{
			Transport: &http.Transport{
				// No proxy from the environment: it would connect on our behalf,
				// past the policy.
				Proxy:                  nil,
				DialContext:            config.Policy.Dialer(config.Dialer),
				TLSHandshakeTimeout:    10 * time.Second,
				MaxIdleConnsPerHost:    config.InFlight,
				MaxIdleConns:           256,
				IdleConnTimeout:        30 * time.Second,
				MaxResponseHeaderBytes: 16 << 10,
				DisableCompression:     true,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
}

// Deliver makes one attempt. Ending ctx ends it, as Deferred.
func (d *Deliverer) Deliver(ctx context.Context, m Message) DeliveryOutcome {
	address, err := d.config.Policy.CheckURL(m.URL)
	if err != nil {
		return DeliveryOutcome{Kind: Failed, Reason: err.Error()}
	}
	to := target{id: withoutQuery(address), host: origin(address)}
	began := time.Now()
	f, wait := d.endpoints.enter(began, to)
	if f == nil {
		return DeliveryOutcome{
			Kind: Deferred, Wait: jittered(wait),
			Reason: "endpoint is failing or has enough deliveries in flight",
		}
	}
	o, healthy := d.attempt(context.WithValue(ctx, schemeKey{}, address.Scheme), address, m, began)
	o.Took = time.Since(began)
	if o.Kind == Deferred {
		d.endpoints.forgo(f)
	} else {
		d.endpoints.leave(time.Now(), f, healthy, o.Took)
	}
	return o
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
func (d *Deliverer) attempt(ctx context.Context, address *url.URL, m Message, now time.Time) (o DeliveryOutcome,
	healthy bool,
) {
	signed, err := sign(m.ID, now, m.Body, m.Secrets, m.Keys)
	if err != nil {
		return DeliveryOutcome{Kind: Failed, Reason: err.Error()}, true
	}
	bounded, cancel := context.WithTimeout(ctx, d.config.Timeout)
	defer cancel()
	bounded, span := invalidation.StartSpan(bounded, "POST", trace.SpanKindClient,
		attribute.String("server.address", address.Hostname()))
	defer func() {
		span.SetAttributes(attribute.Int("http.response.status_code", o.StatusCode))
		if o.Kind != Delivered {
			span.SetStatus(codes.Error, o.Reason)
		}
		span.End()
	}()
	req, err := http.NewRequestWithContext(bounded, http.MethodPost, address.String(), bytes.NewReader(m.Body))
	if err != nil {
		return DeliveryOutcome{Kind: Failed, Reason: "build request: " + err.Error()}, true
	}
	req.Header = signed
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "Penstock-Webhook/1")
	if parent := invalidation.TraceParent(bounded); parent != "" {
		req.Header.Set("Traceparent", parent)
	}
	reply, err := d.client.Do(req)
	if err != nil {
		return d.broken(ctx, m, err)
	}
	defer reply.Body.Close()
	said, _ := io.ReadAll(io.LimitReader(reply.Body, answerBytesMost)) // what cannot be read is not needed
	return d.judge(m, reply, string(said), now)
}

func (d *Deliverer) broken(ctx context.Context, m Message, err error) (DeliveryOutcome, bool) {
	switch {
	case ctx.Err() != nil:
		return DeliveryOutcome{Kind: Deferred, Reason: "delivery was interrupted on our side"}, true
	case errors.Is(err, ErrForbiddenAddress):
		return DeliveryOutcome{Kind: Failed, Reason: reasonOf(withoutURL(err).Error())}, true
	}
	return d.again(m, 0, reasonOf(withoutURL(err).Error())), false
}

func (d *Deliverer) judge(m Message, reply *http.Response, said string, now time.Time) (DeliveryOutcome, bool) {
	status := reply.StatusCode
	reason := reasonOf(fmt.Sprintf("receiver answered %d %s", status, said))
	var o DeliveryOutcome
	switch {
	case status/100 == 2:
		o = DeliveryOutcome{Kind: Delivered}
	case status == http.StatusGone:
		o = DeliveryOutcome{Kind: Disabled, Reason: goneReason}
	case status/100 == 3:
		o = d.again(m, 0, "receiver answered with a redirect, which is not followed: register the final address")
	default:
		o = d.again(m, duration.RetryAfter(reply.Header, now, retryAfterMax), reason)
	}
	o.StatusCode = status
	// A receiver that refuses is up; one that says 5xx or too many is not.
	return o, status < 500 && status != http.StatusTooManyRequests
}

// again plans the next attempt: at the time of the schedule, or later if the
// receiver asked for it.
func (d *Deliverer) again(m Message, asked time.Duration, reason string) DeliveryOutcome {
	wait, more := Schedule(m.Attempt+1, rand.Float64())
	if !more {
		return DeliveryOutcome{Kind: Failed, Reason: reasonOf(fmt.Sprintf("attempts used up; last: %s", reason))}
	}
	return DeliveryOutcome{Kind: Retry, Wait: max(wait, asked), Reason: reason}
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
