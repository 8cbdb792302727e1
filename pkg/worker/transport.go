package worker

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// Config has the settings that all adapters of a process share. The zero value works.
type Config struct {
	// Secret returns the secret that a header refers to; that of the zero SecretStore by default.
	Secret func(ref string) (string, error)
}

const (
	// idleConnections are kept open to one instance, so that as many slots need no handshake per call.
	idleConnections = 512
	// idleTimeout is after how long an unused connection is closed. It stays below the shortest keep-alive in common
	// servers (2 s), because a request written to a connection that the worker is just closing has an unknown outcome.
	idleTimeout = 1500 * time.Millisecond
)

func (c Config) withDefaults() Config {
	if c.Secret == nil {
		c.Secret = SecretStore{}.Read
	}
	return c
}

// wire is the HTTP side of one instance.
type wire struct {
	model Model
	base  *url.URL
	// transport makes one exchange. A call follows no redirect and keeps no cookies, which is all that an http.Client
	// would add to it, with a copy of the headers.
	transport http.RoundTripper
	secret    func(ref string) (string, error)
}

func newWire(model Model, base *url.URL, config Config) wire {
	dialer := &net.Dialer{Timeout: model.Timeouts.Connect.Duration(), KeepAlive: 15 * time.Second, Control: CheckDial}
	return wire{
		model:  model,
		base:   base,
		secret: config.Secret,
		transport: &http.Transport{
			DialContext:            dialer.DialContext,
			TLSHandshakeTimeout:    model.Timeouts.Connect.Duration(),
			MaxIdleConnsPerHost:    idleConnections,
			IdleConnTimeout:        idleTimeout,
			MaxResponseHeaderBytes: 64 << 10,
			DisableCompression:     true, // a small compressed answer must not unfold past the limit
		},
	}
}

// at returns the URL of a path below the endpoint.
func (w *wire) at(path string) string {
	return strings.TrimSuffix(w.base.String(), "/") + path
}

// origin returns the URL of a path at the endpoint's host.
func (w *wire) origin(path string) string {
	return w.base.Scheme + "://" + w.base.Host + path
}

// askBelow gets a path below root, which is where a route by path leads to, and at the origin if the
// server has nothing there.
func (w *wire) askBelow(ctx context.Context, limit time.Duration, root, path string) (int, []byte, error) {
	header := http.Header{}
	if w.model.Protocol == ProtocolGeneric {
		SetSource(header)
	}
	for {
		status, _, body, err := w.ask(ctx, limit, request{
			method: http.MethodGet, url: w.origin(root + path), header: header,
			accept: "application/json, text/plain;q=0.9, */*;q=0.1",
		})
		absent := status == http.StatusNotFound || status == http.StatusMethodNotAllowed
		if root == "" || err != nil || !absent {
			return status, body, err
		}
		root = ""
	}
}

// request is one exchange to be made.
type request struct {
	method, url string
	body        []byte
	header      http.Header // besides the model's own
	accept      string
	events      parts // puts the answer together if it is a stream; nil: it is none
}

// answer is what came back. Exactly one of reply and err is set.
type answer struct {
	reply  *http.Response
	err    error
	sent   bool      // the whole request may have reached the worker
	unsent bool      // it could not be built: nothing was dialled
	sentAt time.Time // zero when it was never written
	first  time.Time // when the first byte of the answer came; zero: there was none
}

// do sends the request. The caller closes the reply's body.
func (w *wire) do(ctx context.Context, r request) answer {
	header, err := resolveHeaders(w.model.Headers, w.secret)
	if err != nil {
		return answer{err: err, unsent: true}
	}
	for name, values := range r.header {
		header[name] = values
	}
	header.Set("Accept", cmp.Or(r.accept, "application/json"))
	var trace sendTrace
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GetConn: func(string) { trace.dialled.Store(true) }, WroteHeaders: func() { trace.wroteHeaders.Store(true) },
		WroteRequest: trace.wroteRequest, GotFirstResponseByte: trace.gotFirstByte,
	})
	req, err := http.NewRequestWithContext(ctx, r.method, r.url, nil)
	if err != nil {
		return answer{err: fmt.Errorf("build request: %w", err), unsent: true}
	}
	req.Header = header
	handedOver := func() bool { return true } // every byte of the body, to the transport
	if r.body != nil {
		header.Set("Content-Type", "application/json")
		// GetBody stays nil: net/http would otherwise send a request with an
		// Idempotency-Key a second time by itself when a reused connection breaks.
		req.ContentLength = int64(len(r.body))
		if len(r.body) <= shortBody {
			req.Body, handedOver = io.NopCloser(bytes.NewReader(r.body)), trace.wroteHeaders.Load
		} else {
			body := &countedBody{data: bytes.NewReader(r.body)}
			req.Body, handedOver = io.NopCloser(body), body.drained
		}
	}
	reply, err := w.transport.RoundTrip(req) //nolint:bodyclose // the caller closes it, as it says above
	a := answer{
		reply: reply, err: err, sentAt: at(&trace.wrote), first: at(&trace.first),
		unsent: err != nil && !trace.dialled.Load(),
	}
	// A body of which the transport took every byte may have arrived, unless
	// the final write itself was refused.
	a.sent = handedOver() && !trace.refused.Load()
	var dial *net.OpError
	if errors.As(err, &dial) && dial.Op == "dial" {
		a.sent = false
	}
	return a
}

// shortBody is how many bytes of a body are sent in one write with the headers: net/http does so with readers of
// package bytes, whose data is there at once, and flushes the headers before it reads from any other. They fit
// into its buffer of 4 KiB with usual headers; the transport has taken them when it has written the headers.
const shortBody = 2 << 10

// countedBody knows whether all of it was handed to the transport. net/http
// reads it in a goroutine of its own that may outlive Do.
type countedBody struct {
	data *bytes.Reader
	left atomic.Bool // set once the last byte was read
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.data.Read(p)
	if b.data.Len() == 0 {
		b.left.Store(true)
	}
	return n, err
}

func (b *countedBody) drained() bool { return b.left.Load() }

type sendTrace struct {
	wrote   atomic.Pointer[time.Time]
	first   atomic.Pointer[time.Time] // byte of the answer
	refused atomic.Bool
	dialled atomic.Bool // a connection was asked for: the request itself is in order
	// the headers are written or in the transport's buffer, and the body follows without a pause
	wroteHeaders atomic.Bool
}

func (t *sendTrace) wroteRequest(info httptrace.WroteRequestInfo) {
	if info.Err != nil {
		t.refused.Store(true)
		return
	}
	now := time.Now()
	t.wrote.Store(&now)
}

func (t *sendTrace) gotFirstByte() {
	now := time.Now()
	t.first.Store(&now)
}

func at(p *atomic.Pointer[time.Time]) time.Time {
	if t := p.Load(); t != nil {
		return *t
	}
	return time.Time{}
}

// read takes the whole answer, at most MaxResponseBytes of it.
func (w *wire) read(reply *http.Response) ([]byte, error) {
	defer reply.Body.Close()
	limit := w.model.MaxResponseBytes
	if reply.ContentLength > limit {
		return nil, &TooLargeError{LimitBytes: limit}
	}
	body, err := io.ReadAll(io.LimitReader(reply.Body, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(body)) > limit {
		return nil, &TooLargeError{LimitBytes: limit}
	}
	return body, nil
}

// submit sends a call as build makes it, within its time, and has judge read the answer.
func (w *wire) submit(ctx context.Context, call Call, build func(finishBy time.Time) (request, error),
	judge func(reply) Outcome,
) Outcome {
	ctx, cancel, finishBy := w.begin(ctx, call)
	defer cancel()
	r, err := build(finishBy)
	if err != nil {
		return BadPayload(err)
	}
	header := w.headers(call, finishBy)
	for name, values := range r.header {
		header[name] = values
	}
	r.header = header
	return w.exchange(ctx, call, r, judge)
}

// exchange sends a request, and puts its answer together from the events of a stream, or has judge read it whole.
func (w *wire) exchange(ctx context.Context, call Call, r request, judge func(reply) Outcome) Outcome {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	a := w.do(ctx, r)
	switch {
	case a.err != nil:
		return w.broken(ctx, a, a.err)
	case r.events != nil && a.reply.StatusCode/100 == 2 && isEventStream(a.reply):
		return w.consume(ctx, stop, a, call, r.events)
	}
	return w.judged(ctx, a, judge)
}

// reply is a whole answer.
type reply struct {
	status int
	header http.Header
	body   []byte
}

// judged reads the rest of an answer and has judge decide what it means.
func (w *wire) judged(ctx context.Context, a answer, judge func(reply) Outcome) Outcome {
	body, err := w.read(a.reply)
	var o Outcome
	if err != nil {
		o = w.broken(ctx, a, err)
	} else {
		o = judge(reply{a.reply.StatusCode, a.reply.Header, body})
	}
	if o.Kind == Unknown && LostByProxy(a.reply.StatusCode, body) {
		o.MaybeRunning = !w.model.CloseEndsRun() // the proxy has closed its connection
	}
	o.SentAt, o.FirstByteAt = a.sentAt, a.first
	o.StatusCode = cmp.Or(o.StatusCode, a.reply.StatusCode)
	return o
}

// broken classifies an exchange that has no complete answer. Nothing ran if
// the request did not reach the worker as a whole; otherwise it may have.
func (w *wire) broken(ctx context.Context, a answer, err error) Outcome {
	o := Outcome{Err: err, SentAt: a.sentAt, FirstByteAt: a.first, Reason: Clip(bare(err).Error()), Unsent: a.unsent}
	var tooLarge *TooLargeError
	cause := context.Cause(ctx)
	switch {
	case errors.As(err, &tooLarge):
		// It ran, and would answer the same again.
		o.Kind, o.Class, o.Reason = Failed, ClassInput, tooLarge.Error()
	case cause != nil && errors.Is(cause, context.Canceled):
		o.Err = cause
		if !a.sent || w.model.CloseEndsRun() {
			o.Kind, o.Reason = Cancelled, "connection closed by a cancel"
			break
		}
		o.Kind, o.MaybeRunning, o.Reason = Unknown, true,
			"connection closed by a cancel; this protocol does not say that it stops the run"
	case cause != nil:
		o.Err = cause
		o.Reason = Clip(cause.Error())
		o.Kind, o.MaybeRunning = Unknown, !w.model.CloseEndsRun()
		if !a.sent {
			o.Kind, o.MaybeRunning = NotReady, false
		}
	case !a.sent:
		o.Kind = NotReady
	default:
		o.Kind, o.MaybeRunning = Unknown, !w.model.CloseEndsRun()
	}
	return o
}

// bare strips the URL that net/http puts into its errors: an endpoint may be
// internal, and reasons are shown to clients.
func bare(err error) error {
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		return wrapped.Err
	}
	return err
}

// begin bounds a submit by the run time limit and the entry's deadline. It also
// returns until when the worker may run: an accepted run outlives the submit,
// and its cold start is not charged to it.
func (w *wire) begin(ctx context.Context, call Call) (context.Context, context.CancelFunc, time.Time) {
	now, limits := time.Now(), w.model.Timeouts
	hangUp, cause := now.Add(limits.Run.Duration()), ErrRunLimit
	finishBy := hangUp
	if w.model.Type == TypeAsync {
		finishBy = now.Add(limits.Start.Duration() + w.model.MaxPollTime.Duration())
	}
	if !call.FinishBy.IsZero() && call.FinishBy.Before(hangUp) {
		hangUp, cause = call.FinishBy, ErrDeadline
	}
	if !call.FinishBy.IsZero() && call.FinishBy.Before(finishBy) {
		finishBy = call.FinishBy
	}
	ctx, cancel := context.WithDeadlineCause(ctx, hangUp, cause)
	return ctx, cancel, finishBy
}

func (w *wire) headers(call Call, finishBy time.Time) http.Header {
	h := http.Header{}
	setRun(h, call.RunRef)
	if w.model.OnUnknown == Reattach {
		h.Set(headerIdemKey, call.Entry) // the worker knows entries by it, whichever node calls
	}
	setRemaining(h, finishBy)
	setTrace(h, call)
	return h
}

// body builds the request body from the model's template, or passes the
// payload on.
func (m Model) body(call Call, finishBy time.Time) (json.RawMessage, error) {
	payload := call.Payload
	if len(payload) == 0 {
		payload = json.RawMessage("null")
	}
	if !json.Valid(payload) {
		return nil, errors.New("payload is not JSON")
	}
	if m.Body == nil {
		return payload, nil
	}
	values := map[string]json.RawMessage{
		"payload":     payload,
		"entry":       quote(call.Entry),
		"attempt":     json.RawMessage(strconv.Itoa(call.Attempt)),
		"remote_name": quote(m.RemoteName),
	}
	if !finishBy.IsZero() {
		values["remaining_ms"] = json.RawMessage(strconv.FormatInt(millisecondsLeft(finishBy), 10))
	}
	return expand(m.Body, values)
}

func quote(text string) json.RawMessage {
	quoted, _ := json.Marshal(text) // a string always encodes
	return quoted
}

// BadPayload is the outcome of a call that cannot be built from its entry: nothing was sent.
func BadPayload(err error) Outcome {
	return Outcome{Kind: Rejected, Class: ClassInput, Reason: Clip(err.Error()), Err: err}
}

// ask makes a control request (poll, cancel, probe) within limit.
func (w *wire) ask(ctx context.Context, limit time.Duration, r request) (int, http.Header, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	a := w.do(ctx, r)
	if a.err != nil {
		return 0, nil, nil, bare(a.err)
	}
	body, err := w.read(a.reply)
	return a.reply.StatusCode, a.reply.Header, body, err
}

// remotePath fills a worker's own name for a run into a path. The name comes
// from outside: it must stay one segment of the path.
func remotePath(template, id string) string {
	return strings.Replace(template, "{id}", url.PathEscape(id), 1)
}

// usableRemote refuses names that could not be asked for again.
func usableRemote(id string) bool {
	return id != "" && id != "." && id != ".." && len(id) <= 256 &&
		!strings.ContainsFunc(id, func(r rune) bool { return r <= ' ' || r == 0x7f })
}
