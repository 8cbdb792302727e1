package judge

import (
	"cmp"
	"fmt"
	"slices"
)

// oneOfAKey looks at the entries of each unique key. Where it holds until its entry ends, each was inserted after the
// one before it had ended; where it holds until its entry starts, after the one before it was granted or had ended. The
// database records these in the order in which it did them, since the insertion reads the other two.
func oneOfAKey(x *index, r *report) {
	byKey := map[string][]Insertion{}
	for _, i := range x.Insertions {
		if p := x.pushByOp[i.Op]; i.Op != 0 && p != nil && p.Unique != "" {
			byKey[p.Unique] = append(byKey[p.Unique], i)
		}
	}
	places := x.allPlaces()
	var unsure []string
	for key, entries := range byKey {
		slices.SortFunc(entries, func(a, b Insertion) int { return cmp.Compare(a.Seq, b.Seq) })
		for n, i := range entries {
			r.checked++
			if n == 0 {
				continue
			}
			before := entries[n-1]
			ends, push := x.endings[before.Entry], x.pushByOp[i.Op]
			ended := len(ends) > 0 && ends[0].Seq < i.Seq
			switch {
			case ended:
			case push.WhileActive:
				r.bad("entry %d of unique key %q was inserted before entry %d had ended", i.Entry, key, before.Entry)
			default:
				if waits, sure := x.waitsBeside(before, i, places[before.Entry]); sure {
					r.bad("entry %d of unique key %q was inserted while entry %d waited for its time", i.Entry, key,
						before.Entry)
				} else if waits {
					unsure = append(unsure, fmt.Sprintf("entry %d of unique key %q was inserted while entry %d was in "+
						"line", i.Entry, key, before.Entry))
				}
			}
		}
	}
	if len(unsure) > unsureMax {
		r.found = append(r.found, unsure...)
	}
}

// unsureMax is how many pushes of a run may find an entry in line that a claim has which comes to nothing. Such a claim
// is one in a hundred and lasts for milliseconds, and leaves no record.
const unsureMax = 1

// waitsBeside says that an entry had not been granted when another one of its key was inserted. It is sure of one that
// was pushed for a time after the answer to the other push: no claim can have had it until then. One that is in line
// may be on its way to a claim, whose grant is recorded soon.
func (x *index) waitsBeside(before, i Insertion, places []*Place) (waits, sure bool) {
	grants := x.grantsOf(&Push{Queue: x.pushByOp[before.Op].Queue, Entry: before.Entry})
	returned := x.pushByOp[i.Op].Returned
	granted := slices.ContainsFunc(grants, func(g *Grant) bool { return g.Seq < i.Seq })
	if x.ClockJumped || granted || len(places) == 0 || x.forked(returned) {
		return false, false
	}
	if pushed := places[0]; pushed.Position == 0 && returned.Before(pushed.Due) {
		return true, true
	}
	soon := returned.Add(x.Tolerance)
	return !slices.ContainsFunc(grants, func(g *Grant) bool { return g.At.Before(soon) }) &&
		!slices.ContainsFunc(x.endings[before.Entry], func(e *Ending) bool { return e.At.Before(soon) }), false
}

// duplicatesHold looks at pushes that were answered with the entry of another one: it has the same unique key, and had
// not ended when the push was asked for. Where the key holds until its entry starts, it was not granted for all the
// time of the push: one that came back in line holds its key again.
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
		if g := x.grantedThroughout(p); g != nil && !p.WhileActive && !x.ClockJumped {
			r.bad("operation %d with unique key %q was answered with entry %d, which was granted %v before and not "+
				"freed until the answer", p.Op, p.Unique, p.Entry, p.Called.Sub(g.At))
		}
	}
}

// grantedThroughout is the grant that the entry of a push had from before it was asked for until after the answer; nil:
// none. The server's clock is the same machine's, and a grant is recorded before it is committed: while it is not, no
// push has its entry as the answer either.
func (x *index) grantedThroughout(p *Push) *Grant {
	grants := x.grantsOf(p)
	i := slices.IndexFunc(grants, func(g *Grant) bool {
		return g.At.Before(p.Called) && (g.Freed.IsZero() || g.Freed.After(p.Returned)) && !x.forked(g.At)
	})
	if i < 0 {
		return nil
	}
	return grants[i]
}
