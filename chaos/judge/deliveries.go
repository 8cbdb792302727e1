package judge

func deliveriesOnce(x *index, r *report) {
	ids := map[int64]map[string]bool{}
	for _, d := range x.Deliveries {
		if ids[d.Entry] == nil {
			ids[d.Entry] = map[string]bool{}
		}
		ids[d.Entry][d.ID] = true
		switch ends := x.endings[d.Entry]; {
		case len(ends) == 0:
			r.bad("the end of entry %d was reported, and it has no outcome", d.Entry)
		case d.Outcome != ends[0].Outcome:
			r.bad("entry %d is %s and was reported as %s", d.Entry, ends[0].Outcome, d.Outcome)
		}
	}
	for i := range x.Pushes {
		p := &x.Pushes[i]
		if !p.Callback || p.Entry == 0 || len(x.endings[p.Entry]) == 0 {
			continue
		}
		r.checked++
		if len(ids[p.Entry]) != 1 {
			r.bad("the end of entry %d was reported under %d ids", p.Entry, len(ids[p.Entry]))
		}
	}
}
