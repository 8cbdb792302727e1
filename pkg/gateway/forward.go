package gateway

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/internal/stream"
	"github.com/penstock/penstock/pkg/worker"
)

// newTransport returns the connections to workers. Answers pass as they are, so that it neither asks for
// compression nor follows redirects.
func newTransport() *direct {
	return newDirect(&http.Transport{
		DialContext: newDialer().DialContext, DisableCompression: true, MaxIdleConnsPerHost: idleLinks,
		IdleConnTimeout: idleMax, TLSHandshakeTimeout: dialMax, ForceAttemptHTTP2: true,
		WriteBufferSize: 4 << 10, ReadBufferSize: 4 << 10,
		// Many calls share a connection: one that is lost without a word would keep all further ones for as long as
		// the system sends again what was not acknowledged, a quarter of an hour.
		HTTP2: &http.HTTP2Config{SendPingTimeout: keepAlive, PingTimeout: keepAlive},
	})
}

// Causes that end an exchange from this side.
var (
	errFirstByte = errors.New("the worker sent no head of an answer within the limit")
	errSilence   = errors.New("the worker fell silent in the middle of its answer")
	errStalled   = errors.New("the client did not read")
	errGoesOn    = errors.New("the worker answered that its run goes on: a model whose calls do is of model_type async")
)

// call is one request on its way to a worker.
type call struct {
	gateway *Gateway
	writer  http.ResponseWriter
	request *http.Request
	route   *route
	path    string
	held    *heldBody
	release func()   // ends the use of the body by the request
	body    [][]byte // what is sent, in parts; nil once it was released
	json    bool     // the body was read as JSON
	cut     bool     // the chunk with token counts is to be taken out
	ticket  *Request
	id      string
	token   string // its name; empty: requests need none
	queued  time.Duration
	tries   int
	began   time.Time   // of the attempt
	sent    atomic.Bool // set by the reader of the body when it is read; taken back where no byte was written
	limit   *time.Timer // ends the attempt for want of a head, or of more bytes behind it
	headed  atomic.Bool // the head of the answer is there
	writing atomic.Bool // something of the answer is on its way to the client, which may take its time
	lost    bool        // the answer is that of a proxy: the worker may have the call still
	answer  window
}

// How workers fail, for RequestRecord.Fault. A client that went away, its deadline, and a worker without room are none
// of them.
const (
	faultUnreachable = "unreachable" // no connection, or it ended before the head of an answer
	faultSilence     = "silence"     // no head of an answer, or no more of it, within the limit
	faultStatus      = "status"      // 5xx, or an answer that says that the run goes on
	faultCut         = "cut"         // the answer broke off
)

// result is how an attempt ended.
type result struct {
	end      CallEnd
	answered bool // bytes went to the client
	again    bool // nothing can have run, and no byte went out: another instance may be tried
	halved   bool // the client must not take what it got for a whole answer
	status   int  // that the client got; 0: none
	fault    string
	err      error
}

// attempt sends the call to the instance of its slot and passes the answer on.
func (c *call) attempt(ctx context.Context) result {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	c.began = time.Now()
	policy := &c.route.model.Policy
	firstByte := policy.FirstByteMax.Duration()
	if firstByte == 0 {
		firstByte = c.route.model.RunMax
	}
	c.headed.Store(false)
	var limit *time.Timer
	limit = time.AfterFunc(firstByte, func() {
		switch {
		case c.writing.Load(): // nothing is read of the worker meanwhile: begin anew
			limit.Reset(policy.SilenceMax.Duration())
		case c.headed.Load():
			cancel(errSilence)
		default:
			cancel(errFirstByte)
		}
	})
	c.limit = limit
	defer c.limit.Stop()
	upstream, err := c.upstream(ctx)
	if err != nil {
		return result{err: err, fault: faultUnreachable, end: CallEnd{Unused: true}}
	}
	answer, err := c.gateway.transport.RoundTrip(upstream)
	if err != nil {
		return c.broken(ctx, err, c.sent.Load(), time.Since(c.began))
	}
	defer func() { _ = answer.Body.Close() }()
	if !c.limit.Stop() {
		cancel(errFirstByte) // as the limit does in this moment: the head is late
		return c.broken(ctx, errFirstByte, true, time.Since(c.began))
	}
	// From the head of the answer on the limit is that of silence.
	c.headed.Store(true)
	if silence := policy.SilenceMax.Duration(); silence > 0 {
		c.limit.Reset(silence)
	}
	defer c.answer.close()
	if c.goesOn(answer) {
		// The slot is busy until the worker's count shows that the run has ended, or the time of a run is over.
		return result{
			err: errGoesOn, fault: faultStatus, end: CallEnd{Failed: true, Doubt: true, Took: time.Since(c.began)},
		}
	}
	first, refused := c.judge(answer)
	var r result
	switch {
	case refused == nil:
		r = c.copy(ctx, cancel, answer, first)
	case refused.unfit:
		r = c.turnAway(ctx, cancel, answer, refused)
	default:
		r = c.refuse(answer, refused)
	}
	r.end.Took = time.Since(c.began)
	return r
}

// upstream builds the request to the worker.
func (c *call) upstream(ctx context.Context) (*http.Request, error) {
	target, err := c.route.target(c.ticket.address, c.path)
	if err != nil {
		return nil, err
	}
	target.RawQuery = withQuery(target.RawQuery, c.request.URL.RawQuery)
	out := (&http.Request{
		Method: http.MethodPost, URL: target, Host: target.Host, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: make(http.Header, len(c.request.Header)+2), ContentLength: size(c.body),
		Body: c.reader(),
		// For a connection that was kept and is found closed before a byte was written to it.
		GetBody: func() (io.ReadCloser, error) { return c.reader(), nil },
	}).WithContext(ctx)
	for name, values := range c.request.Header {
		if !keptBack(name) {
			out.Header[name] = values
		}
	}
	withoutHops(out.Header, c.request.Header["Connection"])
	for name, values := range c.route.model.headers {
		out.Header[name] = values
	}
	out.Header["X-Request-Id"] = []string{c.attemptID()}
	if c.json && !isJSON(out.Header) {
		out.Header["Content-Type"] = []string{"application/json"} // servers refuse others, as that of curl -d
	}
	if key := c.request.Header.Get("Idempotency-Key"); key != "" {
		out.Header["Idempotency-Key"] = []string{ownKey(c.token, c.ticket.Flow, key)}
	}
	if c.route.model.Protocol == worker.ProtocolGeneric {
		worker.SetSource(out.Header)
	}
	return out, nil
}

// reader returns the body, and notes when it is read: from then on the worker may have got the request.
func (c *call) reader() io.ReadCloser {
	return &partsReader{held: c.held, parts: c.body, begun: &c.sent}
}

// broken says what an exchange without an answer came to. Another instance may be tried where nothing of the
// request was sent, and for a request that its client declares idempotent (see idempotent): a connection that
// closes later does not show that the call has not run.
func (c *call) broken(ctx context.Context, err error, sent bool, took time.Duration) result {
	cause := context.Cause(ctx)
	switch {
	case cause != nil && !sent:
		return result{err: cause, fault: faultOf(cause), end: CallEnd{Unused: true}}
	case cause != nil:
		return result{err: cause, fault: faultOf(cause), end: CallEnd{Failed: true, Took: took, Doubt: c.mayGoOn()}}
	case !sent:
		return result{err: err, fault: faultUnreachable, again: c.mayRetry(), end: CallEnd{Busy: true}}
	}
	return result{
		err: err, fault: faultUnreachable, again: c.idempotent() && c.mayRetry(),
		end: CallEnd{Failed: true, Fault: true, Took: took, Doubt: c.mayGoOn()},
	}
}

// faultOf is that of an exchange that was ended from this side, for a cause.
func faultOf(cause error) string {
	if errors.Is(cause, errFirstByte) || errors.Is(cause, errSilence) {
		return faultSilence
	}
	return ""
}

// mayGoOn says whether the run of the call may go on once its connection is closed.
func (c *call) mayGoOn() bool { return !c.route.stopsOnClose(c.path) }

// idempotent says whether the client allows that a call runs twice: it has sent the header Idempotency-Key.
func (c *call) idempotent() bool { return c.request.Header.Get("Idempotency-Key") != "" }

func (c *call) mayRetry() bool { return c.tries < 2 && c.route.pool.retries.allow() }

func isEvents(answer *http.Response) bool { return mediaType(answer.Header) == "text/event-stream" }

// isJSON says whether a body has the type of JSON. Only an answer of it may report its tokens: other texts, as
// transcriptions, may have anything in them.
func isJSON(header http.Header) bool {
	kind := mediaType(header)
	return kind == "application/json" || strings.HasSuffix(kind, "+json")
}

func mediaType(header http.Header) string {
	kind, _, _ := strings.Cut(header.Get("Content-Type"), ";")
	return strings.ToLower(strings.TrimSpace(kind))
}

// copy passes head and body on, each read at once, and reads the token counts from the end.
func (c *call) copy(ctx context.Context, cancel context.CancelCauseFunc, answer *http.Response, first []byte) result {
	c.release() // there is no other attempt
	c.body = nil
	stall := c.route.model.Policy.ClientStall.Duration()
	p := passing{call: c, cancel: cancel, events: isEvents(answer), out: stream.NewWriter(c.writer, c.request, stall)}
	p.whole = !p.events && answer.ContentLength >= 0
	p.counts = p.events || isJSON(answer.Header)
	c.answer.open(answer.ContentLength)
	c.head(answer, p.events && c.cut)
	p.watch(c.route.model.Policy.SilenceMax.Duration())
	defer p.unwatch()
	var err error
	if p.events {
		aside(func() { err = p.write(first) }) // the head goes with it, which takes net/http 3 KiB of stack
	}
	for err == nil {
		var piece []byte
		piece, err = c.answer.read(answer.Body)
		if len(piece) > 0 {
			if failed := p.write(piece); failed != nil {
				err = failed
			}
		}
	}
	if errors.Is(err, io.EOF) {
		err = p.finish()
	}
	return c.ended(ctx, &p, answer.StatusCode, err)
}

// aside runs a function on a stack of its own, and waits for it. A stack that has grown keeps its size: that of a
// request would do so while its stream lasts.
func aside(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	<-done
}

// head sends status and headers, and what the gateway adds.
func (c *call) head(answer *http.Response, shortened bool) {
	header := c.writer.Header()
	for name, values := range answer.Header {
		switch name {
		case "Connection", "Keep-Alive", "Transfer-Encoding", "Trailer", "Upgrade", "Proxy-Authenticate":
		case "Content-Length":
			if !shortened {
				header[name] = values
			}
		default:
			header[name] = values
		}
	}
	withoutHops(header, answer.Header["Connection"])
	c.gateway.own(header, c)
	c.writer.WriteHeader(answer.StatusCode)
}

// ended says what a passed answer came to, and tells a client whose stream broke.
func (c *call) ended(ctx context.Context, p *passing, status int, err error) result {
	r := result{answered: true, status: status}
	if p.counts {
		r.end.TokensIn, r.end.TokensOut = c.answer.usage()
	}
	if p.events {
		r.end.First = p.began.Sub(c.began)
	}
	// 501 and 505 are about the request.
	about := status == http.StatusNotImplemented || status == http.StatusHTTPVersionNotSupported
	r.end.Failed, r.end.Fault = status >= 300, status >= 500 && !about
	r.end.Doubt = c.lost && c.mayGoOn()
	if r.end.Fault {
		r.fault = faultStatus
	}
	if err == nil {
		return r
	}
	// As before the head: a connection that breaks does not show that the call has ended. A worker that tells the
	// length of its answer has the answer.
	r.end.Failed, r.end.Doubt = true, (c.lost || !p.whole) && c.mayGoOn()
	r.err = cmp.Or(context.Cause(ctx), err)
	r.end.Fault = r.end.Fault || context.Cause(ctx) == nil && !p.events
	if errors.Is(p.failed, errStalled) || c.request.Context().Err() != nil {
		r.status = statusLeft
		return r
	}
	switch cause := context.Cause(ctx); {
	case r.fault != "":
	case cause != nil:
		r.fault = faultOf(cause)
	default:
		r.fault = faultCut
	}
	if p.events {
		p.breakOff(r.err)
	}
	r.halved = !p.events
	return r
}
