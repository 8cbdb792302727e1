package scale

import (
	"maps"
	"slices"
	"time"
)

// isTaken says whether an instance of the backend is registered, under its name or by its endpoint, and belongs to no
// deployment: registering it takes it over, or is refused. Requests may run there, which this deployment cannot drain.
func (s applied) isTaken(f BackendInstance) bool {
	return slices.ContainsFunc(s.others, func(r registration) bool {
		return r.Server == f.Name || f.Endpoint != "" && r.Endpoint == f.Endpoint
	})
}

// register registers an instance, but for one that was refused a moment ago. Such a one may be refused again.
func (p *planner) register(f BackendInstance, taken bool) {
	r, refused := p.s.refused[f.Name]
	if refused && !taken {
		p.out.starting = append(p.out.starting, f.Began)
	}
	if !r.paused || r.endpoint != f.Endpoint {
		p.out.register = append(p.out.register, f)
		if taken {
			p.out.adopts = append(p.out.adopts, f.Name)
		}
		return
	}
	p.pause(f.Name, r)
}

// adopted says whether instances were taken over that belonged to no deployment.
func (p *steps) adopted() bool {
	return slices.ContainsFunc(p.adopts, func(name string) bool { return p.refused[name] == nil })
}

// beganEarlier is how much before its time a start may seem to have begun: the times of pods are whole seconds, and of
// another clock.
const beganEarlier = 2 * time.Second

// followed says whether a start was seen from its beginning on: it began under this deployment, and no report of the
// backend was missing since. How long another one took is not known, however old it is.
func (s applied) followed(began time.Time) bool {
	if began.Before(s.CreatedAt.Add(-beganEarlier)) || s.SeenAt == nil || s.now().Sub(*s.SeenAt) > blindAfter {
		return false
	}
	began = began.Truncate(time.Microsecond) // as the database keeps it
	return slices.ContainsFunc(s.Starting, began.Equal) || began.After(s.SeenAt.Add(-blindAfter))
}

// isLost says whether an instance has gone that no order removed: it was preempted, or removed by hand.
func (p *planner) isLost() bool {
	if p.s.Existing == nil {
		return false
	}
	missing := *p.s.Existing - p.out.existing
	for _, name := range p.s.Removing {
		exists := func(m *member) bool { return m.Server == name && m.lives() }
		if !slices.ContainsFunc(p.members, exists) {
			missing--
		}
	}
	return missing > 0
}

// beginsAnew says whether ordered_at is set to now although the order does not grow: the missing instances replace ones
// that were lost or are first named for removal in this round. If some were missing before, it is not: they would never
// count as stuck.
func (p *planner) beginsAnew() bool {
	if p.s.Existing == nil || p.s.Ordered > *p.s.Existing {
		return false
	}
	isNew := func(name string) bool { return !slices.Contains(p.s.Removing, name) }
	return p.lost || p.starts > 0 && slices.ContainsFunc(p.remove, isNew)
}

// registerNoRemoved leaves out of what is registered the instances that the order removes: requests could be sent to
// one. The refusal of one is kept: without it the next round would take it for registered.
func (p *planner) registerNoRemoved() {
	p.out.register = slices.DeleteFunc(p.out.register, func(i BackendInstance) bool {
		removed := slices.Contains(p.remove, i.Name)
		if r, refused := p.s.refused[i.Name]; removed && refused {
			p.pause(i.Name, r)
		}
		return removed
	})
}

func (p *planner) pause(name string, r refusal) {
	if p.out.paused == nil {
		p.out.paused = map[string]refusal{}
	}
	p.out.paused[name] = r
}

// refusal is the message about the instances that a round does not try again.
func (p *steps) refusal() string {
	if len(p.paused) == 0 {
		return ""
	}
	return p.paused[slices.Min(slices.Collect(maps.Keys(p.paused)))].message
}
