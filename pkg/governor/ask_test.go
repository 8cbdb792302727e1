package governor

// Ask gives the verdict that Take would, and takes nothing: to explain a refusal.
func (g *Governor) Ask(queue string, free int) Admission {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.decide(g.needs[queue], free)
}

// Status is the state of the governor.
type Status struct {
	Readings Readings // FreeThreads is not known here and zero
	State    Gates
}

// Status returns the last readings and the gates.
func (g *Governor) Status() Status {
	g.mu.Lock()
	defer g.mu.Unlock()
	return Status{g.readings(0), g.state}
}
