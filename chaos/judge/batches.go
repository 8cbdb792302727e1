package judge

// batchesOnce looks at the items of each batch as its client named them, and not as the product keeps them: a row that
// the product lost is missing in its own tables as well.
func batchesOnce(x *index, r *report) {
	known := map[int64]Batch{}
	for _, b := range x.Batches {
		known[b.Label] = b
		r.checked += b.Items
		made := b.Told && !x.forked(b.Returned)
		for no := 1; no <= b.Items; no++ {
			made = made || x.Items[Item{b.Label, no}] > 0
		}
		for no := 1; made && no <= b.Items; no++ {
			if n := x.Items[Item{b.Label, no}]; n != 1 {
				r.bad("item %d of the %d of batch %d took effect %d times", no, b.Items, b.Label, n)
			}
		}
	}
	for item, n := range x.Items {
		if b, made := known[item.Label]; !made || item.No < 1 || item.No > b.Items {
			r.bad("item %d of batch %d took effect %d times, and no client made it", item.No, item.Label, n)
		}
	}
	for _, p := range x.BatchParts {
		r.checked++
		if p.Outcome != "done" || p.Least != 1 || p.Most != 1 {
			r.bad("part %d of batch %d is %q, and its items took effect %d to %d times", p.No, p.Batch, p.Outcome,
				p.Least, p.Most)
		}
	}
}
