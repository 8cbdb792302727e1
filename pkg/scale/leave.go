package scale

import "time"

// isServed says whether as many members are ready as are desired, or whether there is no room for others.
func (p *planner) isServed() bool {
	ready := 0
	for _, m := range p.active() {
		if m.Ready {
			ready++
		}
	}
	return ready >= p.s.Desired || p.s.noRoom(p.now)
}

// mayLeave says whether a member drains that is not to serve again. What something else drains, as an operator or a
// node whose call lost the device of it, may be mended until others serve in its place, but no longer than a start may
// take.
func (p *planner) mayLeave(m *member, replaced bool) bool {
	switch {
	case !m.Draining || m.Expired:
		return false
	case m.DrainedByUs || m.Removed || replaced:
		return true
	}
	return m.DrainingAt != nil && p.now.Sub(*m.DrainingAt) > time.Duration(p.policy.StuckMin)
}

// followUnhealthy notes since when instances are unhealthy in all rounds. After a time without rounds it begins anew:
// they may have been healthy meanwhile.
func (p *planner) followUnhealthy() {
	p.out.unhealthy = map[string]time.Time{}
	gap := p.s.SeenAt == nil || p.now.Sub(*p.s.SeenAt) > blindAfter
	for _, m := range p.members {
		if !m.Unhealthy {
			continue
		}
		since, known := p.s.Unhealthy[m.Server]
		if gap || !known {
			since = p.now
		}
		p.out.unhealthy[m.Server] = since
	}
}

// isHung says whether a member has been unhealthy for stuck_min_seconds.
func (p *planner) isHung(m *member) bool {
	since, unhealthy := p.out.unhealthy[m.Server]
	return unhealthy && p.now.Sub(since) > time.Duration(p.policy.StuckMin)
}

// replaceHung drains one member that hangs, whose replacement is started when it is gone. It does so while all others
// are ready or hang: what makes instances unhealthy may do so to each new one. It waits for no start for longer than
// stuck_min_seconds: one that was begun to cover for the member may have no place before that is gone.
func (p *planner) replaceHung() {
	var hung *member
	for _, m := range p.members {
		switch {
		case p.isHung(m) && !m.Draining:
			hung = m
		case p.isHung(m) || m.Ready || m.Draining:
		case p.now.Sub(m.began) <= time.Duration(p.policy.StuckMin):
			return
		}
	}
	if hung != nil {
		hung.Draining, hung.DrainedByUs = true, true
		p.replaced++
		p.out.drain = append(p.out.drain, hung.Server)
	}
}
