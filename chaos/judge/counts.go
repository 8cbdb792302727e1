package judge

import (
	"cmp"
	"slices"
	"strconv"
	"time"
)

// attemptsAreErrors looks at what workers answered: an entry has no more attempts than errors, and no fewer than those
// after which it was to be tried again later, or failed. An error for which the node blames the instance is free: the
// entry is handed back, or another instance is called within the run. The death of a node that had told of the run is
// a crash, and no attempt.
func attemptsAreErrors(x *index, r *report) {
	places := x.allPlaces()
	for i := range x.Endings {
		e := &x.Endings[i]
		if len(x.calls[e.Entry]) == 0 {
			continue
		}
		r.checked++
		most, least := 0, 0
		for _, c := range x.calls[e.Entry] {
			switch {
			case e.Key == "" && x.cutByDeath(c): // a lock of a key may outlive the ending of a run
			case c.Answer != "ok" && c.Answer != "busy" || x.missed(c):
				most++
			}
			if x.recorded(c) && x.setBack(c, e, places[e.Entry]) {
				least++
			}
		}
		if p := x.pushByEntry[e.Entry]; p != nil && p.Once && e.Class == classUnknown {
			most++ // that it is unknown whether it ran
		}
		if e.Attempt > most || e.Attempt < least {
			r.bad("entry %d has %d attempts, and workers answered it with %d errors but for deaths of nodes, of which "+
				"%d were recorded", e.Entry, e.Attempt, most, least)
		}
	}
}

// setBack says that the entry of a call was to be tried again later, or failed, after it.
func (x *index) setBack(c *Call, e *Ending, places []*Place) bool {
	if e.Key != "" { // of a key no places are recorded
		return slices.ContainsFunc(x.setbacks[c.Entry], func(s *Setback) bool { return s.Token == c.Token })
	}
	back := x.cameBack(c, places)
	return back != nil && back.Position == 0 || back == nil && e.Outcome == "failed"
}

// recorded says that a run ended with a call that was answered with an error, and that nothing kept its node from
// recording that, until its lock was freed. A node may call another instance after an error, within the run.
func (x *index) recorded(c *Call) bool {
	g := x.grants[c.Token]
	another := slices.ContainsFunc(x.calls[c.Entry], func(o *Call) bool {
		return o.Token == c.Token && o.Begin.After(c.Begin)
	})
	return c.Answer == "error" && !another && g != nil && !x.forked(c.Begin) &&
		!x.disturbed(g.Process, c.Begin, laterOf(c.Closed.Add(x.Lease), g.Freed))
}

// crashesAreDeaths counts, for each entry, the grants that covered it and were freed when their node had been silent
// for a lease: it has no more crashes. It has no fewer than nodes were killed that had said in a heartbeat that they
// ran it, nor have the entries of a key together.
func crashesAreDeaths(x *index, r *report) {
	struck := map[[2]string]int{}
	for i := range x.Endings {
		e := &x.Endings[i]
		if least := x.crashesOf(e); e.Crashes < least {
			r.bad("entry %d has %d crashes, and %d nodes were killed while they ran it", e.Entry, e.Crashes, least)
		}
		if e.Crashes == 0 {
			continue
		}
		r.checked++
		key := e.Key
		if key == "" {
			key = "#" + strconv.FormatInt(e.Entry, 10)
		}
		deaths := x.deathsOf([2]string{e.Queue, key}, e.Entry)
		if e.Crashes > deaths {
			r.bad(
				"entry %d has %d crashes, and was taken from %d nodes that were silent for a lease",
				e.Entry,
				e.Crashes,
				deaths,
			)
		}
		struck[[2]string{e.Queue, key}] += e.Crashes
	}
	for key, crashes := range struck {
		if deaths := x.deathsOf(key, 0); crashes > deaths {
			r.bad("entries of key %s of %s have %d crashes, and its locks were taken from %d nodes that were silent "+
				"for a lease: a lock runs one entry at a time", key[1], key[0], crashes, deaths)
		}
	}
	x.crashesOfKeys(r)
}

// crashesOfKeys is that a lock of a key under which a run was cut off by the death of the node counts a crash for one
// of the entries that it covered, and that there are as many crashes as such locks of a key. It does not ask for which
// entry: a push that commits later may be in line before the one that ran. A lock whose entry ended before it was freed
// is no case: the node may have recorded that and begun nothing else.
func (x *index) crashesOfKeys(r *report) {
	ofKey, crashes := map[[2]string][]*Ending{}, map[[2]string]int{}
	for i := range x.Endings {
		e := &x.Endings[i]
		key := [2]string{e.Queue, e.Key}
		ofKey[key], crashes[key] = append(ofKey[key], e), crashes[key]+e.Crashes
	}
	locks, seen := map[[2]string]int{}, map[int64]bool{}
	for i := range x.Calls {
		c := &x.Calls[i]
		g, ends := x.grants[c.Token], x.endings[c.Entry]
		outlived := g != nil && len(ends) > 0 && ends[0].Key == g.Key && ends[0].Seq > g.FreedSeq
		if !outlived || seen[c.Token] || !x.cutByDeath(c) {
			continue
		}
		seen[c.Token] = true
		r.checked++
		key := [2]string{g.Queue, g.Key}
		locks[key]++
		if !slices.ContainsFunc(ofKey[key], func(e *Ending) bool {
			return e.Crashes > 0 && e.Entry <= g.Last && e.Seq > g.Seq && e.Token != g.Token
		}) {
			r.bad("%s was killed while it ran entry %d under token %d, and no entry of key %s which that covered has "+
				"a crash", g.Process, c.Entry, c.Token, g.Key)
		}
	}
	for key, n := range locks {
		if crashes[key] < n {
			r.bad("entries of key %s of %s have %d crashes, and %d nodes were killed while they ran one", key[1],
				key[0], crashes[key], n)
		}
	}
}

// begunBeats is how many heartbeats of a node are committed before one of them has told for certain of a run that began
// before them: one may have been on its way.
const begunBeats = 2

// crashesOf counts the locks of a solo entry under which a call of it was cut off by the death of the node.
func (x *index) crashesOf(e *Ending) (least int) {
	if e.Key != "" {
		return 0 // see crashesOfKeys
	}
	seen := map[int64]bool{}
	for _, c := range x.calls[e.Entry] {
		if !seen[c.Token] && x.cutByDeath(c) {
			seen[c.Token] = true
			least++
		}
	}
	return least
}

// cutByDeath says that a call was cut off by the death of a node which had told of it in a heartbeat, and that the lock
// was freed by another than the node, when the lease of that had ended. A transaction of the node itself, which records
// how the call ended, may wait for a row for longer than the node lives, but began before its death: later only where
// its connection was slow.
func (x *index) cutByDeath(c *Call) bool {
	g := x.grants[c.Token]
	answered := c.Answer == "ok" || c.Answer == "error" || c.Answer == "busy"
	if g == nil || answered || x.forked(c.Begin) || x.ClockJumped {
		return false
	}
	died := x.killedAt(g.Process)
	cut := !died.IsZero() && c.Begin.Before(died) && c.Closed.After(died) && c.Closed.Sub(died) < x.Lease
	byAnother := g.Freed.Sub(died) >= x.Lease/2 && g.FreeBegan.Sub(died) > x.Tolerance
	if !cut || !byAnother || x.away(g.Process, died, died) {
		return false
	}
	told := 0
	for _, b := range x.beats[g.Process] {
		if b.After(c.Begin.Add(x.Tolerance)) && b.Before(c.Closed) {
			told++
		}
	}
	return told >= begunBeats
}

// killedAt is when a process was killed; zero: it was not.
func (x *index) killedAt(process string) (at time.Time) {
	for _, d := range x.Deaths {
		if d.Process == process && d.Killed {
			return d.At
		}
	}
	return at
}

// deathsOf counts the locks of a key that were taken from nodes which were silent for a lease, and that
// covered an entry. The transaction that takes a lock may have waited since it saw that the lease had ended, for a
// table that is locked: a heartbeat that waited as well may be committed just before it.
func (x *index) deathsOf(key [2]string, entry int64) (deaths int) {
	for _, g := range x.byKey[key] {
		if g.Last < entry || g.Freed.IsZero() {
			continue
		}
		if x.silentWithin(g.Process, g.FreeBegan, g.Freed) >= x.Lease-x.Tolerance {
			deaths++
		}
	}
	return deaths
}

// limitsHold goes by samples, and by the order in which locks were granted and freed: a grant under a limit sees
// every lock that was freed before it, so that the count is right at each grant. Cases are those at the limit: below it
// a limit that does not bind shows nothing.
func limitsHold(x *index, r *report) {
	for queue, most := range x.LocksMax {
		type change struct {
			seq   int64
			by    int
			token int64
		}
		var changes []change
		for i := range x.Grants {
			if g := &x.Grants[i]; g.Queue == queue {
				changes = append(changes, change{g.Seq, 1, g.Token})
				if g.FreedSeq > 0 {
					changes = append(changes, change{g.FreedSeq, -1, g.Token})
				}
			}
		}
		slices.SortFunc(changes, func(a, b change) int { return cmp.Compare(a.seq, b.seq) })
		held := 0
		for _, c := range changes {
			if held += c.by; c.by < 0 || held < most {
				continue
			}
			r.checked++
			if held > most {
				r.bad("%s had %d locks when token %d was granted, at most %d are allowed", queue, held, c.token, most)
			}
		}
	}
	for _, s := range x.Samples {
		if s.Locks >= s.Max {
			r.checked++
		}
		if s.Locks > s.Max {
			r.bad(
				"%s had %d locks at %s, at most %d are allowed",
				s.Queue,
				s.Locks,
				s.At.Format(time.TimeOnly),
				s.Max,
			)
		}
	}
}

// notEarly looks at the time that a client gave an entry, and at those that the database gave it: no run begins before
// it is due, no entry that was tried again is due before the wait after an error is over, and none comes in line or is
// granted before it is due. The last two are times of the server alone, in which there is nothing to tolerate.
func notEarly(x *index, r *report) {
	for i := range x.Pushes {
		p := &x.Pushes[i]
		if p.Due.IsZero() || p.Entry == 0 {
			continue
		}
		r.checked++
		for _, c := range x.calls[p.Entry] {
			if early := p.Due.Sub(c.Begin); early > x.Tolerance {
				r.bad("entry %d ran %v before it was due", p.Entry, early)
			}
		}
	}
	for entry, places := range x.allPlaces() {
		for i, was := range places {
			if was.Position > 0 || was.Due.IsZero() {
				continue
			}
			if i+1 < len(places) && places[i+1].Position > 0 && places[i+1].At.Before(was.Due) {
				r.bad("entry %d came in line %v before it was due", entry, was.Due.Sub(places[i+1].At))
			}
			for _, g := range x.byKey[[2]string{was.Queue, "#" + strconv.FormatInt(entry, 10)}] {
				if g.Seq > was.Seq && (i+1 == len(places) || g.Seq < places[i+1].Seq) && g.At.Before(was.Due) {
					r.bad("entry %d was granted %v before it was due", entry, was.Due.Sub(g.At))
				}
			}
		}
		x.waitsAfterErrors(entry, places, r)
	}
}

// allPlaces are those of each solo entry, in their order, of whichever lane.
func (x *index) allPlaces() map[int64][]*Place {
	byEntry := map[int64][]*Place{}
	for i := range x.Places {
		byEntry[x.Places[i].Entry] = append(byEntry[x.Places[i].Entry], &x.Places[i])
	}
	for _, places := range byEntry {
		slices.SortFunc(places, func(a, b *Place) int { return cmp.Compare(a.Seq, b.Seq) })
	}
	return byEntry
}

// cameBack is the place that an entry had after the lock under which a call of it was made; nil: none.
func (x *index) cameBack(c *Call, places []*Place) *Place {
	g := x.grants[c.Token]
	if i := slices.IndexFunc(places, func(p *Place) bool { return p.Seq > g.Seq }); i >= 0 {
		return places[i]
	}
	return nil
}

// waitsAfterErrors is that an entry which a worker answered with an error waits, from the answer on, for as long as the
// policy of its queue says at least, also where it is handed back. The worker notes the time before it answers, and the
// server's clock is the same machine's.
func (x *index) waitsAfterErrors(entry int64, places []*Place, r *report) {
	for _, c := range x.calls[entry] {
		if x.RetryBase == 0 || !x.recorded(c) {
			continue
		}
		back := x.cameBack(c, places)
		if back == nil || back.At.IsZero() {
			continue // it has ended, or the server's clock jumped
		}
		r.checked++
		due := back.Due
		if back.Position > 0 {
			due = back.At
		}
		if due.Sub(c.Closed) < x.RetryBase {
			r.bad("entry %d was answered with an error under token %d, and was due again %v later, sooner than after "+
				"%v", entry, c.Token, due.Sub(c.Closed), x.RetryBase)
		}
	}
}

func toldIsStored(x *index, r *report) {
	for _, t := range x.Told {
		r.checked++
		if ends := x.endings[t.Entry]; len(ends) == 0 || ends[0].Outcome != t.State {
			r.bad("the API says that entry %d is %s, which is not stored", t.Entry, t.State)
		}
	}
}

func drains(x *index, r *report) {
	r.checked++
	for _, left := range x.Unfinished {
		r.bad("%s", left)
	}
	if most := x.drainMost(); x.Drained > most {
		r.bad("the backlog was gone %v after the faults, at most %v are allowed (%v without faults); last was %s",
			x.Drained, most, x.FaultFree, x.Last)
	}
}

// drainMost is how long the backlog may take after the faults: twice as long as it takes without any, after the
// time within which the work of the node that was killed last is free, and the last call of a hanging worker is over.
// Where recovery is made to free locks one by one, that time is as long as it took.
func (x *index) drainMost() time.Duration {
	if x.FaultFree == 0 {
		return x.DrainMax
	}
	return min(x.DrainMax, 2*x.FaultFree+max(x.Lease+2*time.Second, x.RunMax, x.Released)+x.Tolerance)
}

func foundWithoutHint(x *index, r *report) {
	for _, u := range x.Unhinted {
		r.checked++
		if u.Took >= u.Max {
			r.bad(
				"entry %d of %s, pushed while no notification was delivered, has not ended after %v",
				u.Entry,
				u.Queue,
				u.Max,
			)
		}
	}
}

func tablesBounded(x *index, r *report) {
	for _, t := range x.Tables {
		r.checked++
		if t.Bytes > t.BytesMax {
			r.bad("%s grew to %d bytes, at most %d are allowed", t.Name, t.Bytes, t.BytesMax)
		}
		if t.Dead > t.DeadMax {
			r.bad("%s had %d dead tuples, at most %d are allowed", t.Name, t.Dead, t.DeadMax)
		}
	}
}

func consistent(x *index, r *report) {
	r.checked++
	for _, b := range x.Broken {
		r.bad("%s", b)
	}
}

func noDeadlock(x *index, r *report) {
	r.checked++
	for _, line := range x.Deadlocks {
		r.bad("%s", line)
	}
}
