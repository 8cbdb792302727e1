package gateway

import (
	"bytes"
	"cmp"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// refusalMax bounds an answer that is read whole to see whether it is a refusal for want of room.
const refusalMax = 64 << 10

// refusal is an answer that says that nothing ran: the worker had no room, or is unfit for the call. It goes on only if
// no other instance takes the call.
type refusal struct {
	body       []byte // of the answer
	reason     string
	retryAfter time.Duration // what the worker asked for; 0: it did not
	unfit      bool          // see unfit
	misrouted  bool          // with unfit: the worker does not have what was asked for
}

// goesOn says whether a run goes on behind its answer, which is no answer to a client that waits. Such an answer is
// short; one that cannot be it, as it begins otherwise, is not held back.
func (c *call) goesOn(answer *http.Response) bool {
	model := c.route.model
	if model.Protocol == worker.ProtocolCog || answer.StatusCode == http.StatusSeeOther {
		return worker.GoesOn(model.Protocol, model.Statuses, answer.StatusCode, nil)
	}
	if model.Protocol != worker.ProtocolGeneric || answer.StatusCode/100 != 2 || isEvents(answer) ||
		answer.ContentLength > refusalMax {
		return false
	}
	c.answer.open(answer.ContentLength)
	begin, err := c.answer.read(answer.Body)
	begin = bytes.Clone(begin) // it is longer than a read
	for err == nil && len(begin) <= refusalMax && couldBeObject(begin) {
		if silence := model.Policy.SilenceMax.Duration(); silence > 0 {
			c.limit.Reset(silence)
		}
		var more []byte
		more, err = c.answer.read(answer.Body)
		begin = append(begin, more...)
	}
	c.answer.close() // what it has comes again
	answer.Body = rejoin(begin, answer.Body)
	return errors.Is(err, io.EOF) && worker.GoesOn(model.Protocol, model.Statuses, answer.StatusCode, begin)
}

// couldBeObject says whether the beginning of a text may be that of a JSON object.
func couldBeObject(begin []byte) bool {
	begin = begin[skipSpace(begin, 0):]
	return len(begin) == 0 || begin[0] == '{'
}

// judge reads as much of an answer as shows whether it is a refusal, and returns that, or the first event of a stream.
func (c *call) judge(answer *http.Response) (first []byte, refused *refusal) {
	c.lost = worker.LostByProxy(answer.StatusCode, nil)
	if mayRefuse(answer.StatusCode) {
		body, err := io.ReadAll(io.LimitReader(answer.Body, refusalMax))
		o := worker.ClassifyAnswer(answer.StatusCode, answer.Header, body, c.held.bytes())
		r := &refusal{body: body, reason: o.Reason, retryAfter: o.RetryAfter, unfit: unfit(o), misrouted: o.Misrouted}
		if !r.unfit && err == nil && free(o, c.route, body) {
			return nil, r
		}
		c.lost = worker.LostByProxy(answer.StatusCode, body)
		answer.Body = rejoin(body, answer.Body)
		if r.unfit {
			return nil, r
		}
	}
	if !isEvents(answer) {
		return nil, nil
	}
	c.answer.open(answer.ContentLength)
	first = c.answer.firstEvent(answer.Body)
	event := withData(first)
	event = event[:cmp.Or(eventEnd(event), len(event))] // others may have come with it
	if data := eventData(event); len(data) > 0 {
		if o, failed := worker.ClassifyFirstEvent(data, c.held.bytes()); failed && o.FreeOfCharge() && !o.MaybeRunning {
			return nil, &refusal{body: first, reason: o.Reason, retryAfter: o.RetryAfter}
		}
	}
	return first, nil
}

// free says whether an answer shows that nothing ran.
func free(o worker.Outcome, r *route, body []byte) bool {
	if o.StatusCode == http.StatusConflict {
		return r.model.Protocol == worker.ProtocolCog // all its slots are taken
	}
	return o.Kind == worker.Busy || (o.Kind == worker.NotReady && !o.MaybeRunning && len(bytes.TrimSpace(body)) == 0)
}

// refuse keeps the answer of a worker without room, or sends it on. One without a body becomes an error of the gateway.
func (c *call) refuse(answer *http.Response, r *refusal) result {
	if c.mayRetry() {
		return result{again: true, end: CallEnd{Busy: true, RetryAfter: r.retryAfter}, err: errors.New(r.reason)}
	}
	if len(r.body) == 0 {
		answer.Body.Close()
		return result{end: CallEnd{Busy: true, RetryAfter: r.retryAfter}, err: &Rejection{
			Reason: DropOverloaded, RetryAfter: r.retryAfter, Detail: "the workers that were asked have no room",
		}}
	}
	rest := answer.Body
	defer rest.Close()
	answer.Body = io.NopCloser(bytes.NewReader(bytes.Clone(r.body))) // the window is read to once more
	answer.Header.Del("Content-Length")
	sent := c.copy(c.request.Context(), func(error) {}, answer, nil)
	sent.end = CallEnd{Busy: true, RetryAfter: r.retryAfter}
	return sent
}

// firstEvent reads until the first event with data is whole, the stream ends, or the event gets too long. Whole events
// without data wait only for what has begun to come behind them: workers send comments while they compute. An error
// of the stream comes again with the next read.
func (w *window) firstEvent(body io.Reader) []byte {
	first, err := w.read(body)
	for n := 0; err == nil && len(first) <= refusalMax && undecided(first); n++ {
		if n == 0 {
			first = bytes.Clone(first) // it is longer than a read
		}
		var more []byte
		more, err = w.read(body)
		first = append(first, more...)
	}
	return first
}

// undecided says whether more has to come of a stream until its first event is judged.
func undecided(begin []byte) bool {
	event := withData(begin)
	if len(event) == 0 && eventEnd(begin) > 0 {
		return false
	}
	return eventEnd(event) == 0 && couldBeError(event)
}

// couldBeError says whether what has come of an event may still turn out as an error: nothing else is
// held back.
func couldBeError(begin []byte) bool {
	text := bytes.TrimLeft(begin, " \r\n")
	if bytes.HasPrefix(text, []byte("event:")) || bytes.HasPrefix(text, []byte(":")) || len(text) < len(dataField) {
		return true
	}
	data := bytes.TrimLeft(bytes.TrimPrefix(text, dataField), " {\n\t")
	const member = `"error"`
	n := min(len(data), len(member))
	return string(data[:n]) == member[:n]
}

type joined struct {
	io.Reader
	io.Closer
}

func rejoin(head []byte, rest io.ReadCloser) io.ReadCloser {
	return joined{io.MultiReader(bytes.NewReader(head), rest), rest}
}
