package scale

import (
	"slices"
	"time"
)

// registration is an instance of a deployment as it is registered.
type registration struct {
	ID           int32
	Server       string
	Endpoint     string
	Ready        bool // it takes requests
	EverReady    bool
	Draining     bool
	DrainedByUs  bool
	Removed      bool       // an operator removes it
	Expired      bool       // its time to live has ended, which ends its drain or its row
	DrainingAt   *time.Time // since when it drains
	Quarantined  bool
	Unhealthy    bool
	Held         int // slots
	TemplateHash string
	CreatedAt    time.Time
	Unmanaged    bool // it belongs to no deployment

	BackendBeganAt *time.Time // of its start, by the clock of its backend; nil: not known

	usage `db:"-"` // known where there are more instances than are wanted
}

// member is an instance of a deployment: registered, or in its backend, or both.
//
//	registered  its backend                     what becomes of it
//	yes         has it, or cannot list it       it serves, or is about to, or drains
//	yes         does not have it, or it ends    its row is removed; while slots are held it drains
//	yes         has it, and it failed           the same, and an order removes it
//	yes         has another start of its name   the same if the leader drained it (succeeded); else it gets the row
//	no          has it, with an endpoint        it is registered
//	no          has it, without an endpoint     it is a start still
//	no          has it, and it failed           an order removes it
//	no          has it, and it ends             nothing
type member struct {
	registration
	registered  bool
	wasDraining bool // before this round
	taken       bool // its name or endpoint is registered and belongs to no deployment: requests may run there

	state     BackendState // at the backend; of a registered one that cannot be listed, as if it ran
	began     time.Time
	message   string // of the failure
	revision  string
	succeeded bool // the registered one ended, and another one has its name
}

// absent is the state of a registered instance that its backend does not have.
const absent BackendState = "absent"

// lives says that the member exists and that its stop is not under way.
func (m *member) lives() bool { return m.state != absent && m.state != InstanceEnding }

func (m *member) failed() bool { return m.state == InstanceFailed }

// join brings both lists together, and finds what is to be registered.
func (p *planner) join(registered []registration, found []BackendInstance) {
	byName := map[string]*member{}
	p.known = map[string]bool{}
	unreported := InstanceRunning
	if p.listed {
		unreported = absent
	}
	for _, r := range registered {
		p.known[r.Server] = true
		m := &member{
			registration: r, registered: true, wasDraining: r.Draining, state: unreported, began: r.CreatedAt,
		}
		byName[r.Server] = m
		p.members = append(p.members, m)
	}
	for _, f := range found {
		p.known[f.Name] = true
		m := byName[f.Name]
		if m == nil {
			m = &member{registration: registration{Server: f.Name, TemplateHash: f.TemplateHash}, taken: p.s.isTaken(f)}
			p.members = append(p.members, m)
		}
		m.report(f, slices.Contains(p.s.Removing, m.Server))
		switch {
		case f.State != InstanceRunning:
		case f.Endpoint != "" && f.Endpoint != m.Endpoint && !m.succeeded:
			p.register(f, m.taken)
		case !m.registered:
			p.out.starting = append(p.out.starting, f.Began)
		}
	}
	sortTimes(p.out.starting)
}

// report notes what the backend reported of a member. removing says that an order has named it for removal.
func (m *member) report(f BackendInstance, removing bool) {
	m.state, m.began, m.message, m.revision = f.State, f.Began, f.Message, f.Revision
	// Pods of a StatefulSet keep their names: a row that outlives its pod would have its successor drained.
	m.succeeded = m.Draining && (m.DrainedByUs || removing) && m.isOther(f)
	if f.TemplateHash != "" {
		m.TemplateHash = f.TemplateHash
	}
}

// isOther says whether what the backend reports under the name of a registered instance is another start than the one
// that was registered. Both times are the backend's, whose clock may differ from the database's.
func (r registration) isOther(f BackendInstance) bool {
	began := f.Began.Truncate(time.Microsecond) // as the database keeps it
	return r.BackendBeganAt != nil && !r.BackendBeganAt.Equal(began)
}

// countExisting counts what exists, and compares it with the round before.
func (p *planner) countExisting() {
	failedAt := p.s.FailedAt
	for _, m := range p.members {
		if m.lives() {
			p.out.existing++
		}
		p.out.healthy = p.out.healthy || m.Ready && (failedAt == nil || m.began.After(*failedAt))
	}
	p.lost = p.isLost()
}

// forgetGone removes the rows of instances that are gone. One of which slots are held drains first: it gets no more
// requests.
func (p *planner) forgetGone() {
	if !p.listed {
		return
	}
	for _, m := range p.members {
		gone := m.registered && (!m.lives() || m.failed() || m.succeeded)
		switch {
		case gone && m.Held == 0:
			p.out.forget = append(p.out.forget, m.Server)
		case gone && !m.Draining:
			m.Draining = true
			p.out.drain = append(p.out.drain, m.Server)
		}
	}
}

// keepLiving leaves the members that the order counts. One that failed is among them, until an order has removed it.
func (p *planner) keepLiving() {
	for _, m := range p.members {
		if m.state == InstanceEnding && p.isOutdated(m) {
			p.leaving++
		}
	}
	p.members = slices.DeleteFunc(p.members, func(m *member) bool { return !m.lives() || m.succeeded })
}

// leaveSurplus leaves to the backend what it has beyond the order while it replaces instances by itself: in the rolling
// update of a Deployment, pods of the next ReplicaSet. They are no part of the order. One that was removed would be
// started again each time, and the update would never end. What an order has named for removal goes: it is no surplus.
func (p *planner) leaveSurplus() {
	revisions := map[string]bool{}
	var candidates []*member
	stay := 0
	for _, m := range p.members {
		if m.revision != "" {
			revisions[m.revision] = true
		}
		if slices.Contains(p.s.Removing, m.Server) {
			continue
		}
		stay++
		if !m.Draining && !m.failed() {
			candidates = append(candidates, m)
		}
	}
	surplus := min(stay-max(p.s.Ordered, p.s.Desired), len(candidates))
	if len(revisions) < 2 || surplus <= 0 {
		return
	}
	slices.SortStableFunc(candidates, func(a, b *member) int { // those that start first, then the youngest
		switch {
		case a.Ready == b.Ready:
			return b.began.Compare(a.began)
		case b.Ready:
			return -1
		}
		return 1
	})
	p.surplus = surplus
	p.members = slices.DeleteFunc(p.members, func(m *member) bool {
		return slices.Contains(candidates[:surplus], m)
	})
}
