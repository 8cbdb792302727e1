package scale

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/penstock/penstock/internal/oneline"
)

// steps is what is to be done for a deployment: in the database first, then by its backend.
type steps struct {
	// Of the rows of instances.
	register []BackendInstance
	adopts   []string // of register, that are registered and belong to no deployment
	forget   []string // registered, gone or ending at the backend, no slot held
	drain    []string
	undrain  []int32
	paused   map[string]refusal // to be registered later
	refused  map[string]error   // of register, by the database: see writeInstances

	// Of the order.
	order *Order // nil: none is to be given
	rolls bool   // it asks for one more than desired, to replace one
	anew  bool   // the starts that are not reported begin in this round

	// Of the state of the deployment.
	existing  int
	starting  []time.Time          // not registered yet
	failed    int                  // starts that failed
	message   string               // of a failure
	healthy   bool                 // an instance is ready that was started after the last failure
	unhealthy map[string]time.Time // since when instances are
	removing  map[string]time.Time // named by this order or an earlier one, and not gone, and since when
	overdue   string               // the message about those that do not go
}

// plan compares what a deployment is to have with what is registered and what its backend reported. listed
// says that found is all that exists. It is pure. No step stops an instance that may have a request:
// a victim is drained, and named for removal when no slot of it is held.
func plan(s applied, registered []registration, found []BackendInstance, listed bool, now time.Time) steps {
	p := planner{s: s, now: now, listed: listed, policy: s.policy.WithDefaults()}
	p.join(registered, found)
	p.countExisting()
	p.forgetGone()
	p.keepLiving()
	p.leaveSurplus()
	p.followUnhealthy()
	if s.DecidedAt != nil && !s.Off && s.Mode.applies() {
		p.countFailed()
		p.reduce()
		p.grow()
		p.decideOrder()
	}
	p.out.anew = p.beginsAnew()
	p.registerNoRemoved()
	p.followRemovals()
	return p.out
}

type planner struct {
	s      applied
	policy Policy
	now    time.Time
	listed bool

	// What there is.
	members []*member       // all of them, and from keepLiving on those that the order counts
	known   map[string]bool // names that are registered or reported
	lost    bool            // fewer exist than in the round before, not counting those that orders removed
	surplus int             // left to the backend
	leaving int             // of another template, that end or are removed

	// What is to change.
	remove []string
	starts int // that are to begin
	// replaced are instances that go first and are replaced when they are gone: stuck starts that begin to drain, and
	// those of another template where there is no room for one more.
	replaced int
	out      steps
}

// countFailed counts the instances that ended by themselves. One counts once: it is drained and named for removal then,
// and may exist for longer, with slots that are held.
func (p *planner) countFailed() {
	for _, m := range p.members {
		if m.failed() && !m.wasDraining && !slices.Contains(p.s.Removing, m.Server) {
			p.out.failed++
			p.out.message = "start failed: " + oneline.Short(m.message, messageMax)
		}
	}
}

// followRemovals notes since when orders have named instances for removal that exist or are registered.
func (p *planner) followRemovals() {
	p.out.removing = map[string]time.Time{}
	backAgain := func(name string) bool { // taken back by an operator, or by a leader of the version before
		return slices.ContainsFunc(p.members, func(m *member) bool {
			return m.Server == name && m.registered && !m.Draining
		})
	}
	for _, name := range slices.Concat(p.remove, p.s.Removing) {
		if !p.known[name] || backAgain(name) {
			continue
		}
		since, known := p.s.RemovingSince[name]
		if !known {
			since = p.now
		}
		p.out.removing[name] = since
	}
	for _, name := range slices.Sorted(maps.Keys(p.out.removing)) {
		if p.s.overdue(name, p.now) {
			p.out.overdue = oneline.Short(fmt.Sprintf("instance %s is to go since %s and is still there",
				name, p.out.removing[name].UTC().Format(time.RFC3339)), messageMax)
			return
		}
	}
}

// active are the members that take requests or are about to, and may be given up. One that is taken is a part of the
// model's number as an instance of no deployment, and not of this one's.
func (p *planner) active() []*member {
	var active []*member
	for _, m := range p.members {
		if !m.Draining && !m.taken {
			active = append(active, m)
		}
	}
	return active
}

// isRegistered says whether a member has a row, or gets one in this round: a probe may find it ready at any time,
// and slots of it may be held from then on. One whose registration was refused counts as a start until it has one.
func (p *planner) isRegistered(m *member) bool {
	_, refused := p.s.refused[m.Server]
	return m.registered || !refused &&
		slices.ContainsFunc(p.out.register, func(i BackendInstance) bool { return i.Name == m.Server })
}

// reduce names what is to be removed now, and drains what is too much. A stuck start that is registered drains
// first: it may have become ready, and have got a request, since the rows were read. It is replaced when it is
// removed.
func (p *planner) reduce() {
	p.undrain()
	replaced := p.isServed()
	p.members = slices.DeleteFunc(p.members, func(m *member) bool {
		stuck := p.isStuck(m)
		drained := p.mayLeave(m, replaced)
		gone := m.Held == 0 && (m.failed() || drained || stuck && !p.isRegistered(m))
		switch {
		case gone:
			p.remove = append(p.remove, m.Server)
			if drained && p.isOutdated(m) {
				p.leaving++
			}
		case stuck && m.Held == 0 && !m.Draining:
			m.Draining = true
			p.replaced++
			p.out.drain = append(p.out.drain, m.Server)
		}
		return gone
	})
	p.replaceHung()
	active := p.active()
	excess := len(active) - p.s.Desired
	if old := p.outdated(active); len(old) > 0 && excess <= 1 {
		p.roll(active, old, excess)
		return
	}
	p.drop(active, excess)
}

// undrain ends drains as long as instances are missing: one that drains, or has drained, needs no cold start. It leaves
// out those that an order has named for removal, and idle ones that register themselves: they were told to stop.
func (p *planner) undrain() {
	missing := p.s.Desired - len(p.active())
	for _, m := range p.members {
		if missing <= 0 {
			return
		}
		stays := m.registered && m.Draining && m.DrainedByUs && (p.listed || m.Held > 0) && !m.failed()
		if stays && !p.isStuck(m) && !p.isHung(m) && !p.isOutdated(m) && !slices.Contains(p.s.Removing, m.Server) {
			m.Draining = false
			p.out.undrain = append(p.out.undrain, m.ID)
			missing--
		}
	}
}

func (p *planner) isStuck(m *member) bool {
	return p.s.ReplaceBefore != nil && !m.taken && !m.EverReady && !m.Ready && m.began.Before(*p.s.ReplaceBefore)
}

// drop drains the n members whose removal costs least; one that is not registered has no requests, and is
// removed at once.
func (p *planner) drop(from []*member, n int) {
	candidates := make([]removable, len(from))
	byName := map[string]*member{}
	for i, m := range from {
		byName[m.Server] = m
		candidates[i] = removable{
			ID: m.Server, Ready: m.Ready, Quarantined: m.Quarantined, Running: m.Held, Started: m.began,
			Remaining: m.remaining, Affinity: m.affinity,
		}
	}
	for _, name := range victims(candidates, n) {
		m := byName[name]
		m.Draining, m.DrainedByUs = true, true
		if p.isRegistered(m) {
			p.out.drain = append(p.out.drain, name)
			continue
		}
		p.remove = append(p.remove, name)
		if p.isOutdated(m) {
			p.leaving++
		}
		p.members = slices.DeleteFunc(p.members, func(x *member) bool { return x == m })
	}
}

// isOutdated says whether a member was started with another template.
func (p *planner) isOutdated(m *member) bool {
	return p.s.TemplateHash != "" && m.TemplateHash != "" && m.TemplateHash != p.s.TemplateHash
}

// outdated are the members that were started with another template.
func (p *planner) outdated(active []*member) []*member {
	var old []*member
	for _, m := range active {
		if p.isOutdated(m) {
			old = append(old, m)
		}
	}
	return old
}

// roll replaces members of an older template one by one: one more is started, and when all of the new template are
// ready, one of the old ones is drained. Where there is no room for one more the old one goes first, and the new one is
// started when it is gone.
func (p *planner) roll(active, old []*member, excess int) {
	for _, m := range active {
		if !m.Ready && !slices.Contains(old, m) {
			return
		}
	}
	full := p.s.full || p.s.noRoom(p.now)
	switch {
	case excess >= 1:
		p.drop(old, 1)
	case !full:
		p.starts, p.out.rolls = 1, excess == 0
	case p.leavers() == 0 && (excess == 0 || p.s.noRoom(p.now) && p.s.backsOff(p.now)):
		p.drop(old, 1)
	}
}

// leavers are instances of another template that drain or end: they have their room until they are gone.
func (p *planner) leavers() int {
	n := p.leaving
	for _, m := range p.members {
		if m.Draining && m.DrainedByUs && p.isOutdated(m) {
			n++
		}
	}
	return n
}

// grow asks for new instances, and for none while starts fail.
func (p *planner) grow() {
	if p.s.full || p.s.noRoom(p.now) {
		p.replaced += p.leavers()
	}
	missing := p.s.Desired - len(p.active()) - p.replaced
	p.starts = max(p.starts+min(0, missing), missing, 0)
	if p.out.failed > 0 || p.s.backsOff(p.now) {
		p.starts = 0
	}
}

// Orders that change nothing are given again after these times.
const (
	confirmListed   = 5 * time.Second
	confirmUnlisted = time.Minute
)

func (p *planner) decideOrder() {
	count := len(p.members) + p.starts
	s := p.s
	order := &Order{
		BackendTarget: s.backendTarget(), ID: s.OrderID, Count: count, Current: p.out.existing, Remove: p.remove,
		Reason: fmt.Sprintf("%d desired, %d exist, %d are removed", s.Desired, p.out.existing, len(p.remove)),
	}
	if p.s.backsOff(p.now) && len(p.remove) == 0 {
		return
	}
	if count != s.Ordered || s.OrderID == 0 || len(p.remove) > 0 {
		order.ID = max(s.OrderID+1, p.now.UnixMilli())
		p.out.order = order
		return
	}
	again, same := confirmListed, count == p.out.existing-p.surplus
	if !p.listed {
		again, same = confirmUnlisted, false
	}
	pending := s.AppliedID != s.OrderID
	late := s.AppliedAt == nil || p.now.Sub(*s.AppliedAt) >= again
	if pending || late && !same {
		p.out.order = order
	}
}

func (s deploymentRow) backendTarget() BackendTarget {
	return BackendTarget{
		Name: s.Name, Model: s.Model, Target: s.Target, Template: s.Template, TemplateHash: s.TemplateHash,
	}
}
