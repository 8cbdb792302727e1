package judge

import (
	"slices"
	"testing"
)

const oneActive, duplicate = "a unique key has one active entry", "a duplicate names an entry that has its key"

// queued is the good history and a unique key that holds until its entry starts: entry 71 is pushed for a time, which
// is 2000, operation 72 is a duplicate of it while it waits, entry 73 is pushed while it runs, and operation 74 is a
// duplicate of that, in line.
func queued() *History {
	h := good()
	push := func(op, entry int64, called int) {
		h.Pushes = append(h.Pushes, Push{
			Op: op, Queue: "unique", Called: at(called), Returned: at(called + 20), Told: true, Entry: entry, Unique: "q",
		})
	}
	push(71, 71, 1000)
	push(72, 71, 1500)
	push(73, 73, 2500)
	push(74, 73, 2700)
	h.Insertions = append(h.Insertions,
		Insertion{Seq: 501, Entry: 71, Op: 71, Queue: "unique"}, Insertion{Seq: 511, Entry: 73, Op: 73, Queue: "unique"})
	h.Places = append(h.Places,
		Place{Seq: 502, Queue: "unique", Entry: 71, At: at(1010), Due: at(2000)},
		Place{Seq: 505, Queue: "unique", Entry: 71, Position: 71, At: at(2010)},
		Place{Seq: 512, Queue: "unique", Entry: 73, Position: 73, At: at(2510)})
	h.Grants = append(h.Grants,
		Grant{Seq: 506, Queue: "unique", Key: "#71", Token: 171, Last: 71, Process: "n3", At: at(2020), Freed: at(3010), FreedSeq: 520},
		Grant{Seq: 522, Queue: "unique", Key: "#73", Token: 173, Last: 73, Process: "n3", At: at(3020), Freed: at(3510), FreedSeq: 530})
	h.Endings = append(h.Endings,
		Ending{Seq: 521, Entry: 71, Queue: "unique", Outcome: "done", At: at(3010), Token: 171},
		Ending{Seq: 531, Entry: 73, Queue: "unique", Outcome: "done", At: at(3510), Token: 173})
	return h
}

// beside inserts an entry of the key in the place of a duplicate, while the one of before waits.
func beside(h *History, op int64, seq int64) {
	pushOf := &h.Pushes[slices.IndexFunc(h.Pushes, func(p Push) bool { return p.Op == op })]
	pushOf.Entry = op
	h.Insertions = append(h.Insertions, Insertion{Seq: seq, Entry: op, Op: op, Queue: "unique"})
	h.Endings = append(h.Endings, Ending{Seq: 900 + op, Entry: op, Queue: "unique", Outcome: "expired", At: at(9000)})
}

func TestAUniqueKeyOfAnEntryThatWaitsIsJudgedByItsStart(t *testing.T) {
	again := func(freed int) func(h *History) { // entry 71 comes back while operation 72, at 1500 to 1520, is asked for
		return func(h *History) {
			h.Grants = append(h.Grants, Grant{
				Seq: 503, Queue: "unique", Key: "#71", Token: 170, Last: 71, Process: "n3", At: at(1400), Freed: at(freed), FreedSeq: 504,
			})
		}
	}
	for name, c := range map[string]struct {
		promise string
		spoil   func(h *History)
		broken  bool
	}{
		"the record without a bug": {duplicate, func(*History) {}, false},
		"a push while the entry runs is a duplicate": {duplicate, func(h *History) {
			h.Pushes = h.Pushes[:len(h.Pushes)-1]
			h.Pushes[len(h.Pushes)-1].Entry = 71
			h.Insertions = slices.DeleteFunc(h.Insertions, func(i Insertion) bool { return i.Op == 73 })
		}, true},
		"a duplicate of an entry that runs until after the answer":      {duplicate, again(1521), true},
		"a duplicate of an entry that came back before the answer":      {duplicate, again(1519), false},
		"a duplicate of an entry that was granted after the push":       {duplicate, func(h *History) { grantOf(h, 171).At = at(1501) }, false},
		"a duplicate of an entry that runs, by a clock that jumped":     {duplicate, func(h *History) { again(1521)(h); h.ClockJumped = true }, false},
		"a second entry, inserted while the first waits for its time":   {oneActive, func(h *History) { beside(h, 72, 503) }, true},
		"a second entry, answered as the first is due":                  {oneActive, func(h *History) { beside(h, 72, 503); h.Pushes[len(h.Pushes)-3].Returned = at(2000) }, false},
		"a second entry, inserted while the first is in line":           {oneActive, func(h *History) { beside(h, 74, 513) }, false},
		"two entries, each inserted while the one before it is in line": {oneActive, func(h *History) { beside(h, 74, 513); beside(h, 72, 510); inLine(h) }, true},
		"two such entries, whose claims are recorded a little later":    {oneActive, func(h *History) { beside(h, 74, 513); beside(h, 72, 510); inLine(h); soon(h) }, false},
		"two entries in line at a time with two primaries": {oneActive, func(h *History) {
			beside(h, 74, 513)
			beside(h, 72, 510)
			inLine(h)
			h.Forked[0], h.Forked[1] = at(500), at(3000)
		}, false},
		"a second entry that is inserted once the first was granted": {oneActive, func(h *History) { grantOf(h, 171).Seq = 510 }, false},
		"a second entry that is inserted once the first ended, unstarted": {oneActive, func(h *History) {
			endOf(h, 71).Seq = 510
			h.Grants = slices.DeleteFunc(h.Grants, func(g Grant) bool { return g.Token == 171 })
		}, false},
	} {
		h := queued()
		c.spoil(h)
		if n := broken(h)[c.promise]; n > 0 != c.broken {
			t.Errorf("%s: %d reports, want some: %v", name, n, c.broken)
		}
	}
}

// inLine lets entry 71 be in line from its push on, and be granted long after.
func inLine(h *History) {
	h.Places = slices.DeleteFunc(h.Places, func(p Place) bool { return p.Entry == 71 })
	h.Places = append(h.Places, Place{Seq: 502, Queue: "unique", Entry: 71, Position: 71, At: at(1010)})
	grantOf(h, 171).Seq, grantOf(h, 171).At = 519, at(2900)
}

// soon lets the claims of both be recorded after the pushes that found their entries in line.
func soon(h *History) {
	grantOf(h, 171).At, grantOf(h, 173).At = at(1520), at(2700)
}
