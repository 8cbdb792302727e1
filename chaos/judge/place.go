package judge

import (
	"cmp"
	"slices"
	"strconv"
	"time"
)

// Place is a change of where a solo entry is in its lane, in the order in which the database made it.
type Place struct {
	Seq      int64
	Queue    string
	Entry    int64
	Position int64     // of its ready row; 0: it is not in line, and waits until Due
	At       time.Time // from when on it may be claimed, or waits; zero: the server's clock jumped
	Due      time.Time
}

const (
	// OvertakenMax is for how long, without a disturbance, entries may be granted before one that has been in line
	// before them. A node learns of a ready row that came in behind its mark from its next look at the heads of its
	// lanes: every second, five seconds after one that took long, and a lease more where that one is not answered.
	OvertakenMax = 15 * time.Second
	// dueMax is how long after its time, without a disturbance, an entry may come in line, beside the lease.
	dueMax = 2 * time.Second
)

// places are those of each entry of the lanes that are judged, in their order.
func (x *index) places() map[int64][]*Place {
	byEntry := map[int64][]*Place{}
	for i := range x.Places {
		if p := &x.Places[i]; slices.Contains(x.Lanes, p.Queue) {
			byEntry[p.Entry] = append(byEntry[p.Entry], p)
		}
	}
	for _, places := range byEntry {
		slices.SortFunc(places, func(a, b *Place) int { return cmp.Compare(a.Seq, b.Seq) })
	}
	return byEntry
}

// accepted is when a client pushed an entry that was due at once, and the position that this entry took.
type accepted struct {
	*Push
	position int64
}

// acceptedAtOnce are such pushes of each lane.
func (x *index) acceptedAtOnce(places map[int64][]*Place) map[string][]accepted {
	lanes := map[string][]accepted{}
	for i := range x.Pushes {
		p := &x.Pushes[i]
		if p.Told && p.Key == "" && p.Due.IsZero() && len(places[p.Entry]) > 0 && places[p.Entry][0].Position > 0 {
			lanes[p.Queue] = append(lanes[p.Queue], accepted{p, places[p.Entry][0].Position})
		}
	}
	return lanes
}

// placesAreKept looks at each entry that comes in line again. One that recovery frees, or that is handed back, has the
// place that it had. One that was retried is behind what was accepted before it was due, and before what was pushed
// after it was in line.
func placesAreKept(x *index, r *report) {
	byEntry := x.places()
	lanes := x.acceptedAtOnce(byEntry)
	for entry, places := range byEntry {
		for i := 1; i < len(places); i++ {
			was, is := places[i-1], places[i]
			switch {
			case is.Position == 0:
			case was.Position > 0:
				r.checked++
				if was.Position != is.Position {
					r.bad("entry %d of %s was at position %d and came back at position %d",
						entry, is.Queue, was.Position, is.Position)
				}
			case !was.Due.IsZero() && !is.At.IsZero():
				r.checked++
				x.placedByDueTime(was, is, lanes[is.Queue], r)
			}
		}
	}
}

func (x *index) placedByDueTime(was, is *Place, lane []accepted, r *report) {
	for _, other := range lane {
		if other.Entry == is.Entry {
			continue
		}
		if other.Returned.Before(was.Due.Add(-x.Tolerance)) && other.position > is.Position {
			r.bad("entry %d of %s, due at %s, is before entry %d, which was accepted before that time",
				is.Entry, is.Queue, was.Due.Format(time.TimeOnly), other.Entry)
			return
		}
		if other.Called.After(is.At.Add(x.Tolerance)) && other.position < is.Position {
			r.bad("entry %d of %s came in line at %s, and is behind entry %d, which was pushed after that", is.Entry,
				is.Queue, is.At.Format(time.TimeOnly), other.Entry)
			return
		}
	}
}

// dueComeInLine looks at each entry that waits for its time, after an error or since its client wants so. It counts
// those that had as much time without a disturbance, from when they were due, as they may take: one that came late
// among disturbances is excused, and one that came at once among them shows nothing of a leader that is late.
func dueComeInLine(x *index, r *report) {
	calm := x.newCalm()
	for entry, places := range x.places() {
		for i := 1; i < len(places); i++ {
			was, is := places[i-1], places[i]
			if was.Position > 0 || is.Position == 0 || was.Due.IsZero() || is.At.IsZero() {
				continue
			}
			limit, due := x.Lease+dueMax+x.Tolerance, laterOf(was.Due, was.At)
			late := calm.between(due, is.At)
			if late > limit || calm.between(due, due.Add(limit)) == limit {
				r.checked++
			}
			if late > limit {
				r.bad("entry %d of %s was due at %s and came in line %v later, %v of that without a disturbance", entry,
					is.Queue, was.Due.Format(time.TimeOnly), is.At.Sub(was.Due), late)
			}
		}
	}
}

// placedGrant is a grant of a solo entry, and the position that the entry had.
type placedGrant struct {
	*Grant
	entry, position int64
}

// grantsInLine are the grants of each lane, in their order.
func (x *index) grantsInLine(byEntry map[int64][]*Place) map[string][]placedGrant {
	lanes := map[string][]placedGrant{}
	for i := range x.Grants {
		g := &x.Grants[i]
		entry, err := strconv.ParseInt(g.Key[1:], 10, 64)
		if g.Key[0] != '#' || err != nil || !slices.Contains(x.Lanes, g.Queue) {
			continue
		}
		one := placedGrant{g, entry, 0}
		for _, p := range byEntry[entry] {
			if p.Seq < g.Seq {
				one.position = p.Position
			}
		}
		lanes[g.Queue] = append(lanes[g.Queue], one)
	}
	for _, grants := range lanes {
		slices.SortFunc(grants, func(a, b placedGrant) int { return cmp.Compare(a.Seq, b.Seq) })
	}
	return lanes
}

// nothingOvertakenForLong looks at how long each entry was in line, and which entries behind it were granted meanwhile.
// It counts the entries that were in line for longer, without a disturbance, than they may be overtaken.
func nothingOvertakenForLong(x *index, r *report) {
	byEntry, calm := x.places(), x.newCalm()
	lanes := x.grantsInLine(byEntry)
	for entry, places := range byEntry {
		for _, p := range places {
			if p.Position == 0 || p.At.IsZero() {
				continue
			}
			grants := lanes[p.Queue]
			from, _ := slices.BinarySearchFunc(grants, p.Seq,
				func(g placedGrant, seq int64) int { return cmp.Compare(g.Seq, seq) })
			own := slices.IndexFunc(grants[from:], func(g placedGrant) bool { return g.entry == entry })
			if own < 0 || calm.between(p.At, grants[from+own].At) <= OvertakenMax+x.Tolerance {
				continue // it was cancelled, or is missing, which another promise is about, or was granted in time
			}
			r.checked++
			for _, g := range grants[from : from+own] {
				if g.Transaction != grants[from+own].Transaction && g.position > p.Position &&
					calm.between(p.At, g.At) > OvertakenMax+x.Tolerance {
					r.bad("entry %d of %s, in line at position %d since %s, was not granted until %v later, and "+
						"entry %d at position %d was granted before it", entry, p.Queue, p.Position,
						p.At.Format(time.TimeOnly), grants[from+own].At.Sub(p.At), g.entry, g.position)
					break
				}
			}
		}
	}
}

// calm is the time outside of disturbances.
type calm struct {
	from, to []time.Time // of the disturbances, in order and apart
}

// CalmTime is how long it was from the first grant of a run to the last one, and how much of that was without a
// disturbance: where that is little, the promises about times of lanes have few cases.
func CalmTime(h *History) (calm, all time.Duration) {
	var first, last time.Time
	for i := range h.Grants {
		at := h.Grants[i].At
		if first.IsZero() || at.Before(first) && !at.IsZero() {
			first = at
		}
		last = laterOf(last, at)
	}
	return newIndex(h).newCalm().between(first, last), last.Sub(first)
}

// Undisturbed reports whether nothing disturbed a time.
func Undisturbed(h *History, from, to time.Time) bool {
	return newIndex(h).newCalm().between(from, to) == max(0, to.Sub(from))
}

// newCalm takes for disturbed the time of faults and errors at the database and at the leader, that in which a node is
// stopped or none is heard, and the time between the last sign of life of a term and the first one of the next.
func (x *index) newCalm() *calm { return calmOutside(x.troubled()) }

func calmOutside(spans []Disturbance) *calm {
	slices.SortFunc(spans, func(a, b Disturbance) int { return a.From.Compare(b.From) })
	c := &calm{}
	for _, s := range spans {
		last := len(c.to) - 1
		switch {
		case !s.To.After(s.From):
		case last >= 0 && !s.From.After(c.to[last]):
			c.to[last] = laterOf(c.to[last], s.To)
		default:
			c.from, c.to = append(c.from, s.From), append(c.to, s.To)
		}
	}
	return c
}

// troubled are the times in which what a leader does may take longer: what keeps it, the database or a node from its
// work. An error at one of its statements delays the duty of another one: a new leader begins them one after another.
func (x *index) troubled() []Disturbance {
	spans := slices.Concat(x.Disturbances, x.Refusals, x.LeaderErrors, x.unheard())
	for i := 1; i < len(x.Terms); i++ {
		if a, b := x.Terms[i-1], x.Terms[i]; a.Number != b.Number {
			spans = append(spans, Disturbance{From: a.At, To: b.At})
		}
	}
	for _, stops := range x.stops {
		for _, d := range stops {
			spans = append(spans, Disturbance{From: d.At, To: d.Until})
		}
	}
	return spans
}

// between is how much of the time between two moments was without a disturbance.
func (c *calm) between(from, to time.Time) time.Duration {
	sum := max(0, to.Sub(from))
	first, _ := slices.BinarySearchFunc(c.to, from, time.Time.Compare)
	for i := first; i < len(c.to) && c.from[i].Before(to); i++ {
		begin, end := laterOf(c.from[i], from), c.to[i]
		if end.After(to) {
			end = to
		}
		sum -= max(0, end.Sub(begin))
	}
	return sum
}

func laterOf(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
