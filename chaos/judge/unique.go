package judge

import (
	"cmp"
	"slices"
)

// oneOfAKey looks at the entries of unique keys that hold until their entry ends: each was inserted after the one
// before it had ended. The database records both in the order in which it did them, since the insertion reads the end.
func oneOfAKey(x *index, r *report) {
	byKey := map[string][]Insertion{}
	for _, i := range x.Insertions {
		if p := x.pushByOp[i.Op]; i.Op != 0 && p != nil && p.WhileActive {
			byKey[p.Unique] = append(byKey[p.Unique], i)
		}
	}
	for key, entries := range byKey {
		slices.SortFunc(entries, func(a, b Insertion) int { return cmp.Compare(a.Seq, b.Seq) })
		for n, i := range entries {
			r.checked++
			if n == 0 {
				continue
			}
			before := entries[n-1]
			if ends := x.endings[before.Entry]; len(ends) == 0 || ends[0].Seq > i.Seq {
				r.bad("entry %d of unique key %q was inserted before entry %d had ended", i.Entry, key, before.Entry)
			}
		}
	}
}

// duplicatesHold looks at pushes that were answered with the entry of another one: it has the same unique key, and had
// not ended when the push was asked for.
func duplicatesHold(x *index, r *report) {
	inserted := map[int64]Insertion{}
	for _, i := range x.Insertions {
		inserted[i.Entry] = i
	}
	for i := range x.Pushes {
		p := &x.Pushes[i]
		if p.Unique == "" || !p.Told {
			continue
		}
		holder := x.pushByOp[inserted[p.Entry].Op]
		if holder == p || holder == nil && !x.Forked[0].IsZero() {
			continue // its own, or one of a push that is left out
		}
		r.checked++
		if holder == nil || holder.Unique != p.Unique {
			r.bad("operation %d with unique key %q was answered with entry %d, which has another key", p.Op, p.Unique,
				p.Entry)
			continue
		}
		ends := x.endings[p.Entry]
		if len(ends) > 0 && !ends[0].At.IsZero() && ends[0].At.Before(p.Called.Add(-x.Tolerance)) {
			r.bad("operation %d with unique key %q was answered with entry %d, which had ended %v before", p.Op,
				p.Unique, p.Entry, p.Called.Sub(ends[0].At))
		}
	}
}
