package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/penstock/penstock/pkg/worker"
)

// mayRefuse says whether an answer may be one of a worker that ran nothing, as far as its status tells. 400 is also
// that of a port which takes TLS alone.
func mayRefuse(status int) bool {
	if status < http.StatusMultipleChoices || status >= 500 && status != http.StatusServiceUnavailable {
		return false
	}
	if status == http.StatusBadRequest {
		return true
	}
	o := worker.ClassifyAnswer(status, nil, nil, nil)
	return o.FreeOfCharge() && !o.MaybeRunning
}

// unfit says whether an answer blames the instance, which ran nothing: it does not take the credentials of the gateway,
// names another address, or does not have what was asked for. 409 is not among these here: it may be about the
// Idempotency-Key of the client.
func unfit(o worker.Outcome) bool {
	return o.Kind == worker.NotReady && !o.MaybeRunning && o.StatusCode < 500 && o.StatusCode != http.StatusConflict
}

var errRefused = errors.New("the worker refuses the calls of the gateway")

// turnAway ends an attempt at an instance that is unfit for the call: another one is tried, if there is a sound one.
// Otherwise an answer that the instance does not have what was asked for passes, and is not held against it, since the
// request may be wrong. The other answers are not for the client: its own credentials were kept back, and an address is
// one of the worker's network.
func (c *call) turnAway(ctx context.Context, cancel context.CancelCauseFunc, answer *http.Response, r *refusal) result {
	end := CallEnd{Failed: true, Fault: true, Misrouted: r.misrouted, Unfit: true}
	switch {
	case c.route.pool.others(c.ticket) && c.mayRetry():
		return result{again: true, end: end, err: errors.New(r.reason)}
	case r.misrouted:
		passed := c.copy(ctx, cancel, answer, nil)
		passed.end.Misrouted = true // no fault: no other instance has shown that it has what was asked for
		return passed
	}
	return result{end: end, fault: faultStatus, err: fmt.Errorf("%w: it answers %d", errRefused, answer.StatusCode)}
}
