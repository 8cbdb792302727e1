package judge

import (
	"slices"
	"time"
)

// How a request to a gateway was answered, as its client saw it.
const (
	AnsweredWhole = "whole"   // the whole answer of a worker
	AnsweredError = "error"   // a refusal, or a stream whose last event is an error
	AnsweredNot   = "not"     // the connection ended before an answer
	AnsweredPart  = "in part" // something else: neither whole nor an error
)

// The promises about gateways, which have no case where none runs.
const (
	slotsOfInstances   = "an instance has no more calls than slots"
	answersOfGateways  = "a request has a whole answer or an error"
	gatewaysServeAgain = "a gateway serves soon after the faults"
)

// OfGateways are the promises about gateways.
var OfGateways = []string{slotsOfInstances, answersOfGateways, gatewaysServeAgain}

// Request is a request to a gateway.
type Request struct {
	Op         int64
	Process    string // the incarnation of the gateway when it was sent
	Begin, End time.Time
	How        string
	Nonce      string // in the answer
}

// slotsHold counts the calls that an instance has at the begin of each: never more than it has slots, unless the
// process behind one of them was silent for its lease. Such a process has lost its slots, and its call may go on. Cases
// are the calls with which an instance has as many as slots.
func slotsHold(x *index, r *report) {
	running := map[string][]*Call{}
	calls := make([]*Call, 0, len(x.SlotCalls))
	for i := range x.SlotCalls {
		calls = append(calls, &x.SlotCalls[i])
	}
	slices.SortFunc(calls, func(a, b *Call) int { return a.Begin.Compare(b.Begin) })
	for _, c := range calls {
		now := slices.DeleteFunc(running[c.Instance], func(o *Call) bool {
			return o.Closed.Sub(c.Begin) <= x.Tolerance
		})
		now = append(now, c)
		running[c.Instance] = now
		if x.forked(c.Begin) {
			continue
		}
		if len(now) >= x.Slots[c.Instance] {
			r.checked++
		}
		lapsed := func(o *Call) bool { return x.lapsed(o, c.Begin) }
		if len(now) > x.Slots[c.Instance] && !slices.ContainsFunc(now, lapsed) {
			r.bad("%s had %d calls on %d slots at %s, when operation %d began by %s", c.Instance, len(now),
				x.Slots[c.Instance], c.Begin.Format(time.StampMilli), c.Op, x.caller(c))
		}
	}
}

// caller is the process that made a call: a gateway by the word of its client, a node by the grant of the token.
func (x *index) caller(c *Call) string {
	if g := x.grants[c.Token]; g != nil {
		return g.Process
	}
	return c.Via
}

// lapsed says that the process of a call was silent for its lease at some time of the call until a moment.
func (x *index) lapsed(c *Call, until time.Time) bool {
	lease := x.GatewayLease
	if x.grants[c.Token] != nil {
		lease = x.Lease
	}
	return x.longestSilence(x.caller(c), c.Begin, until) >= lease-x.Tolerance ||
		x.silent(x.caller(c), c.Begin) >= lease-x.Tolerance
}

// wholeOrError looks at each request: its client has the answer of a call for it, or an error; or the gateway died,
// was stopped or was ended in its time.
func wholeOrError(x *index, r *report) {
	answers := map[int64][]string{}
	for i := range x.SlotCalls {
		if c := &x.SlotCalls[i]; c.Answer == "ok" {
			answers[c.Op] = append(answers[c.Op], c.Nonce)
		}
	}
	for i := range x.Requests {
		q := &x.Requests[i]
		r.checked++
		switch q.How {
		case AnsweredWhole:
			if !slices.Contains(answers[q.Op], q.Nonce) {
				r.bad("request %d was answered by %s with %q, which no call for it answered", q.Op, q.Process, q.Nonce)
			}
		case AnsweredNot, AnsweredPart:
			if !x.gone(q) {
				r.bad("request %d to %s was answered %s from %s to %s, and nothing kept the gateway from it", q.Op,
					q.Process, q.How, q.Begin.Format(time.StampMilli), q.End.Format(time.StampMilli))
			}
		}
	}
}

// endMax is for how long a gateway ends after it was told to.
const endMax = 15 * time.Second

// gone says that the gateway of a request ended, or was stopped, at some time of it.
func (x *index) gone(q *Request) bool {
	concerns := func(d Death) bool {
		last := d.At
		if d.Until.After(last) {
			last = d.Until
		}
		return d.Process == q.Process && d.At.Before(q.End.Add(x.Tolerance)) && last.Add(endMax).After(q.Begin)
	}
	return slices.ContainsFunc(x.Deaths, concerns) || slices.ContainsFunc(x.Hindrances, concerns)
}

// gatewaysServe is that each gateway serves once the faults are over.
func gatewaysServe(x *index, r *report) {
	if x.Gateways == 0 {
		return
	}
	r.checked += x.Gateways
	for _, left := range x.Unserved {
		r.bad("%s", left)
	}
}
