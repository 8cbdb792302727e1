package scale

// Fleet is the instances of a model that are paid for, whether they serve or not.
type Fleet struct {
	Existing int     // registered, or reported by a backend
	Draining int     // of these
	Surplus  int     // existing ones beyond the shares of their deployments that do not drain
	Overdue  int     // that an order named for removal some time ago
	Cost     float64 // of the existing ones, an hour
}

// fleet are the instances of the model, those of no deployment among them.
func (d *modelDecision) fleet() Fleet {
	f := Fleet{Existing: d.in.Unmanaged, Draining: d.in.Draining}
	for _, s := range d.deployments {
		n := s.Registered + s.Draining
		if s.Existing != nil {
			n = max(n, *s.Existing)
		}
		f.Existing += n
		if s.Cost <= costMax { // not so if it is no number
			f.Cost += float64(n) * s.Cost
		}
		for _, name := range s.Removing {
			if s.overdue(name, d.in.At) {
				f.Overdue++
			}
		}
		share, decided := d.parts[s.Name]
		if decided && s.told() && s.Mode.applies() {
			f.Surplus += max(0, n-s.Draining-share)
		}
	}
	return f
}
