package judge

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// Violation is one way in which a promise was broken.
type Violation struct{ Invariant, Detail string }

// Invariant is a promise and the check of it. Checked is how many cases the check looked at: none
// means that the run shows nothing about it.
type Invariant struct {
	Name  string
	Check func(x *index, r *report)
}

// report collects what one check found.
type report struct {
	checked int
	found   []string
}

func (r *report) bad(format string, args ...any) {
	r.found = append(r.found, fmt.Sprintf(format, args...))
}

// Invariants is the list of promises, in the order of docs/guarantees.md.
var Invariants = []Invariant{
	{"an accepted entry has an outcome", acceptedEnds},
	{"an entry has one outcome", oneOutcome},
	{"nothing runs or exists that was not pushed", nothingUnpushed},
	{"a push and its transaction commit together", jointRows},
	{"an effect in the database happens once", effectsOnce},
	{"parts of a batch are done once", batchesOnce},
	{"a unique key has one active entry", oneOfAKey},
	{"a duplicate names an entry that has its key", duplicatesHold},
	{"tokens are unique and grow per key", tokensGrow},
	{"a call carries a committed token", callsAreGranted},
	{"no overlap without silence beyond the lease", noOverlap},
	{"an entry that was answered well runs once", answeredOnce},
	{"an entry that must not run twice is called once", calledAtMostOnce},
	{"an end is recorded under the newest token only", newestToken},
	{"a result is what its own call answered", resultsAreAnswers},
	{"entries of a key start in the order of acceptance", keysInOrder},
	{"one key's history is that of a queue", linearizable},
	{"an entry that comes back has its place", placesAreKept},
	{"a due entry comes in line", dueComeInLine},
	{"no entry in line is overtaken for long", nothingOvertakenForLong},
	{"attempts are errors", attemptsAreErrors},
	{"crashes are deaths of nodes that had it", crashesAreDeaths},
	{"failures have a cause", failuresHaveCauses},
	{"limits are never exceeded", limitsHold},
	{"rates are never exceeded", ratesHold},
	{"each nominal time of a schedule fires once", slotsOnce},
	{"nothing runs before it is due", notEarly},
	{"an entry expires at its deadline", deadlinesHold},
	{"a cancelled entry does not run", cancelsHold},
	{"a requested cancel ends the run", requestsEndRuns},
	{"one delivery id for each ending", deliveriesOnce},
	{"the API tells the outcome that is stored", toldIsStored},
	{slotsOfInstances, slotsHold},
	{answersOfGateways, wholeOrError},
	{gatewaysServeAgain, gatewaysServe},
	{elsewhere, freedInTime},
	{"all is terminal soon after the faults", drains},
	{"slots in doubt are free soon after the faults", slotsFreed},
	{"an entry is found without a hint", foundWithoutHint},
	{"hot tables stay bounded", tablesBounded},
	{"no statement meets a deadlock", noDeadlock},
	{"the tables are consistent", consistent},
}

// elsewhere is the promise about the time of dead nodes, which has no case on a machine that is busy all the while.
const elsewhere = "locks of a dead node are free within the lease and two seconds"

// OfQuietMachines are the promises that a long run may have no case of.
var OfQuietMachines = []string{elsewhere}

// Finding is the result of one invariant over one history.
type Finding struct {
	Name     string
	Checked  int
	Broken   int
	Examples []string // the first few
}

// Judge checks every invariant.
func Judge(h *History) []Finding {
	x := newIndex(h)
	findings := make([]Finding, 0, len(Invariants))
	for _, i := range Invariants {
		var r report
		i.Check(x, &r)
		findings = append(findings, Finding{i.Name, r.checked, len(r.found), r.found[:min(5, len(r.found))]})
	}
	return findings
}

// acceptedEnds looks at what clients were told, and at what the database committed: the entry of a push whose answer
// was lost is accepted as well.
func acceptedEnds(x *index, r *report) {
	for _, i := range x.Insertions {
		if slices.Contains(x.Waiting, i.Queue) {
			continue
		}
		r.checked++
		if len(x.endings[i.Entry]) == 0 {
			r.bad("entry %d of %s was committed for operation %d, and has no outcome", i.Entry, i.Queue, i.Op)
		}
	}
	for i := range x.Pushes {
		p := &x.Pushes[i]
		if !p.Told {
			continue
		}
		r.checked++
		if len(x.endings[p.Entry]) == 0 {
			r.bad("operation %d was accepted as entry %d of %s, which has no outcome", p.Op, p.Entry, p.Queue)
		}
	}
}

func oneOutcome(x *index, r *report) {
	for entry, ends := range x.endings {
		r.checked++
		if len(ends) > 1 {
			r.bad("entry %d ended %d times: %s, then %s", entry, len(ends), ends[0].Outcome, ends[1].Outcome)
		}
	}
	for _, c := range x.Changes {
		if c.What != "lock" {
			r.bad("the %s of entry %d was changed after its end", c.What, c.Entry)
		}
	}
}

func nothingUnpushed(x *index, r *report) {
	inserted := map[int64]int64{}
	for _, i := range x.Insertions {
		if i.Op == 0 {
			continue // of a schedule, a batch or a webhook
		}
		r.checked++
		p := x.pushByOp[i.Op]
		switch {
		case p == nil && !x.Forked[0].IsZero():
			// of a push that is left out
		case p == nil:
			r.bad("entry %d has operation %d, which no client made", i.Entry, i.Op)
		case p.Refused:
			r.bad("entry %d has operation %d, whose client was told that it was refused", i.Entry, i.Op)
		case p.Told && p.Entry != i.Entry:
			r.bad("operation %d was accepted as entry %d and is also entry %d", i.Op, p.Entry, i.Entry)
		case inserted[i.Op] != 0:
			r.bad("operation %d is entry %d and entry %d", i.Op, inserted[i.Op], i.Entry)
		}
		inserted[i.Op] = i.Entry
	}
	for i := range x.Calls {
		c := &x.Calls[i]
		if x.forked(c.Begin) {
			continue
		}
		r.checked++
		if e, known := inserted[c.Op]; c.Op != 0 && (!known || e != c.Entry) {
			r.bad(
				"a worker was called for operation %d as entry %d, which is not in the database",
				c.Op,
				c.Entry,
			)
		}
	}
}

func jointRows(x *index, r *report) {
	inserted := map[int64]bool{}
	for _, i := range x.Insertions {
		inserted[i.Op] = true
	}
	for i := range x.Pushes {
		p := &x.Pushes[i]
		if !p.Joint {
			continue
		}
		r.checked++
		if x.Rows[p.Op] != inserted[p.Op] {
			r.bad(
				"operation %d: the client's own row exists: %v, the entry: %v",
				p.Op,
				x.Rows[p.Op],
				inserted[p.Op],
			)
		}
	}
}

func effectsOnce(x *index, r *report) {
	for i := range x.Pushes {
		p := &x.Pushes[i]
		ends := x.endings[p.Entry]
		if !p.Effect || p.Entry == 0 || len(ends) == 0 {
			continue
		}
		r.checked++
		want := 0
		if ends[0].Outcome == "done" {
			want = 1
		}
		if n := x.Effects[p.Op]; n != want {
			r.bad(
				"entry %d of operation %d is %s and its statement took effect %d times",
				p.Entry,
				p.Op,
				ends[0].Outcome,
				n,
			)
		}
	}
}

func tokensGrow(x *index, r *report) {
	seen := map[int64]bool{}
	for i := range x.Grants {
		r.checked++
		if seen[x.Grants[i].Token] {
			r.bad("token %d was granted twice", x.Grants[i].Token)
		}
		seen[x.Grants[i].Token] = true
	}
	for _, c := range x.Changes {
		if c.What == "lock" {
			r.bad("the lock of key %s was changed, and has token %d", c.Key, c.Token)
		}
	}
	for key, grants := range x.byKey {
		for i := 1; i < len(grants); i++ {
			if grants[i].Token <= grants[i-1].Token {
				r.bad(
					"key %s of %s was granted token %d after %d",
					key[1],
					key[0],
					grants[i].Token,
					grants[i-1].Token,
				)
			}
		}
	}
}

// callsAreGranted looks at the token of each call: its lock covers the entry, and has the key of the push. Of an entry
// that no client pushed only the form of the key is known.
func callsAreGranted(x *index, r *report) {
	for i := range x.Calls {
		c := &x.Calls[i]
		if x.forked(c.Begin) {
			continue // the token may have been drawn on the primary whose writes were lost
		}
		r.checked++
		g := x.grants[c.Token]
		switch {
		case g == nil:
			r.bad("entry %d was run under token %d, which was never committed", c.Entry, c.Token)
		case g.Last < c.Entry || !x.keyIsOf(g.Key, c):
			r.bad(
				"entry %d was run under token %d of key %s, which does not cover it",
				c.Entry,
				c.Token,
				g.Key,
			)
		}
	}
}

// keyIsOf says that a lock of this key may cover the entry of a call.
func (x *index) keyIsOf(key string, c *Call) bool {
	solo := "#" + strconv.FormatInt(c.Entry, 10)
	if p := x.pushByOp[c.Op]; c.Op != 0 && p != nil {
		return key == cmp.Or(p.Key, solo)
	}
	return key[:1] != "#" || key == solo
}

// noOverlap looks at the calls of each key: a later one may begin before an earlier one has ended only if the node of
// the earlier one had no committed heartbeat for a lease. It counts the calls before which one of the key went on for
// longer than is tolerated: beside a shorter one nothing shows.
func noOverlap(x *index, r *report) {
	byKey := map[[2]string][]*Call{}
	for i := range x.Calls {
		c := &x.Calls[i]
		if g := x.grants[c.Token]; g != nil && !x.forked(c.Begin) {
			byKey[[2]string{g.Queue, g.Key}] = append(byKey[[2]string{g.Queue, g.Key}], c)
		}
	}
	for key, calls := range byKey {
		slices.SortFunc(calls, func(a, b *Call) int { return a.Begin.Compare(b.Begin) })
		for i, later := range calls {
			if i > 0 && calls[i-1].Closed.Sub(calls[i-1].Begin) > x.overlapMax(calls[i-1], later) {
				r.checked++
			}
			for _, earlier := range calls[:i] {
				if overlap := earlier.Closed.Sub(later.Begin); overlap <= 0 || overlap <= x.overlapMax(earlier, later) {
					continue
				}
				process, silent := x.grants[earlier.Token].Process, x.silentUntil(earlier, later)
				if earlier.Token == later.Token || silent < x.Lease-x.Tolerance {
					r.bad(
						"key %s of %s: entry %d ran under token %d beside entry %d under token %d, %v after a "+
							"heartbeat of %s",
						key[1],
						key[0],
						later.Entry,
						later.Token,
						earlier.Entry,
						earlier.Token,
						silent,
						process,
					)
				}
			}
		}
	}
}

// notedMax is how long after the begin of a call the end of one may be noted from whose answer it follows. The recorder
// notes an answer before it sends it, and both by the same clock.
const notedMax = 50 * time.Millisecond

// overlapMax is for how long a call may seem to go on beside a later one although it does not. A node that gives up a
// call ends its connection, which the recorder sees late: after RunMax, when it drains, and where nothing was answered.
func (x *index) overlapMax(earlier, later *Call) time.Duration {
	process := x.grants[earlier.Token].Process
	from, to := earlier.Begin.Add(-x.Lease), later.Begin.Add(x.Tolerance)
	drained := slices.ContainsFunc(x.Hindrances, func(d Death) bool {
		return d.Process == process && d.At.After(from) && d.At.Before(to)
	})
	if earlier.Answer == "none" || x.missed(earlier) || drained {
		return x.Tolerance
	}
	return min(notedMax, x.Tolerance)
}

// silentUntil is for how long the node of a call had no committed heartbeat when a later call of the key began, or when
// its lock was freed: the node may be heard again between the two.
func (x *index) silentUntil(earlier, later *Call) time.Duration {
	g := x.grants[earlier.Token]
	silent := x.silent(g.Process, later.Begin)
	if !x.ClockJumped && !g.Freed.IsZero() && g.Freed.Before(later.Begin) {
		silent = max(silent, x.silentWithin(g.Process, g.FreeBegan, g.Freed))
	}
	return silent
}

func resultsAreAnswers(x *index, r *report) {
	for i := range x.Endings {
		e := &x.Endings[i]
		ran := e.Outcome == "done" && slices.Contains(x.Served, e.Queue)
		if e.Nonce == "" && !ran {
			continue
		}
		r.checked++
		if !slices.ContainsFunc(x.calls[e.Entry], func(c *Call) bool {
			return c.Nonce == e.Nonce && c.Token == e.Token && c.Answer == "ok"
		}) {
			r.bad(
				"the result of entry %d under token %d is no answer to a call under that token",
				e.Entry,
				e.Token,
			)
		}
	}
}
