package gateway

import "time"

// pausedAgain is the Retry-After of a request that a pause holds: nothing tells when it ends.
const pausedAgain = 30 * time.Second

// refusePaused is the refusal of a request that must not begin a call, whether there is room or not.
func refusePaused(detail string) *Rejection {
	return &Rejection{Reason: DropNoEndpoints, RetryAfter: pausedAgain, Detail: detail, paused: true}
}

// closed returns the refusal of each request for the model, nil where calls may begin.
func (m *ModelState) closed() error {
	switch {
	case m.Paused.holds(time.Now()):
		return refusePaused("paused: " + m.Paused.Reason)
	case m.unread != "":
		return refusePaused(m.unread + " that the model is called with cannot be read")
	}
	return nil
}

// closed returns the refusal of each request of the flow, nil where its calls may begin.
func (f FlowState) closed() error {
	if f.Paused.holds(time.Now()) {
		return refusePaused("the flow is paused: " + f.Paused.Reason)
	}
	return nil
}

// paused returns the refusal of the request by what is set now, nil where its call may begin: it may have waited since
// its model and its flow were looked at.
func (s *serving) paused() error {
	if r := s.gateway.models.route(s.asked.model); r != nil {
		if err := r.model.closed(); err != nil {
			return err
		}
	}
	return s.gateway.flow(s.ticket.Flow).closed()
}

// dropPaused ends the waits of requests that a pause holds: they would ask for slots, and have runs of durable entries
// preempted for them.
func (g *Gateway) dropPaused() {
	flows := map[string]bool{}
	held := func(flow string) bool {
		is, known := flows[flow]
		if !known {
			is = g.flow(flow).closed() != nil
			flows[flow] = is
		}
		return is
	}
	for _, r := range g.models.all() {
		closed := r.model.closed() != nil
		r.pool.do(func(now time.Time, p *Pool) {
			p.dropFlows(now, func(flow string) bool { return closed || held(flow) })
		})
	}
}

// dropFlows ends the waits of the requests of some flows.
func (p *Pool) dropFlows(now time.Time, which func(flow string) bool) {
	var gone []*Request
	for _, l := range p.lines {
		for _, f := range l.heap {
			for r := f.head; r != nil; r = r.next {
				if which(r.Flow) {
					gone = append(gone, r)
				}
			}
		}
	}
	for _, r := range gone {
		p.drop(now, r, DropNoEndpoints)
	}
	p.updateMode(now)
}
