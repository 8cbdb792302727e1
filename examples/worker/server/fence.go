package server

// fence remembers the highest token seen for each entry.
// Its memory is two maps: when the young one is full it becomes the old one, and the old one is
// dropped. So at least the last limit entries are known, and never more than twice as many.
type fence struct {
	limit      int
	young, old map[string]uint64
}

func newFence(limit int) *fence {
	return &fence{limit: limit, young: map[string]uint64{}, old: map[string]uint64{}}
}

// observe refuses a token lower than one seen before, and remembers the rest.
func (f *fence) observe(entry string, token uint64) error {
	highest := max(f.young[entry], f.old[entry])
	if token < highest {
		return errStale
	}
	f.young[entry] = token
	if len(f.young) >= f.limit {
		f.old, f.young = f.young, make(map[string]uint64, f.limit)
	}
	return nil
}
