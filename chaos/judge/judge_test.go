package judge

import (
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func at(ms int) time.Time { return epoch.Add(time.Duration(ms) * time.Millisecond) }

func tickAt(ms int) Tick { return Tick{"job", at(ms).UnixMicro()} }

// good is a history without a fault: two keyed entries in order, a solo one that failed once and
// whose node died, one with a callback that was cancelled, a statement, a joint push and a
// schedule.
func good() *History {
	h := &History{
		Lease: 3 * time.Second, Tolerance: 100 * time.Millisecond, CronStep: 2 * time.Second, CatchUpMax: 1000, DrainMax: time.Minute,
		Effects: map[int64]int{5: 1}, Rows: map[int64]bool{6: true}, Served: []string{"solo", "keyed"},
		Jobs: []string{"job"}, CronUntil: at(5000), LocksMax: map[string]int{"work": 1},
		Rates: map[string]Rate{"keyed": {Burst: 1, PerSecond: 10}},
		Pushes: []Push{
			{Op: 1, Queue: "keyed", Key: "k", Called: at(0), Returned: at(5), Told: true, Entry: 11},
			{Op: 2, Queue: "keyed", Key: "k", Called: at(10), Returned: at(15), Told: true, Entry: 12},
			{
				Op:       3,
				Queue:    "solo",
				Called:   at(10),
				Returned: at(15),
				Told:     true,
				Entry:    13,
				Due:      at(20),
				FailMax:  9,
				CrashMax: 9,
			},
			{
				Op: 4, Queue: "solo", Called: at(10), Returned: at(15), Told: true, Entry: 14, Callback: true,
				Cancel: &Cancel{Called: at(16), Returned: at(18), Cancelled: true},
			},
			{Op: 5, Queue: "work", Called: at(10), Returned: at(15), Told: true, Entry: 15, Effect: true},
			{Op: 6, Queue: "solo", Called: at(10), Returned: at(15), Told: true, Entry: 16, Joint: true},
			{Op: 7, Queue: "solo", Called: at(10), Returned: at(15), Refused: true},
			{Op: 18, Queue: "once", Called: at(10), Returned: at(15), Told: true, Entry: 18, Once: true},
			{Op: 51, Queue: "frail", Called: at(10), Returned: at(15), Told: true, Entry: 51, StartBy: at(100), FinishBy: at(900)},
			{
				Op: 52, Queue: "frail", Called: at(900), Returned: at(905), Told: true, Entry: 52,
				Cancel: &Cancel{Called: at(1490), Returned: at(1500), Requested: true},
			},
			{Op: 53, Queue: "frail", Called: at(900), Returned: at(905), Told: true, Entry: 53, FailMax: 2, CrashMax: 2},
			{
				Op: 54, Queue: "frail", Called: at(900), Returned: at(905), Told: true, Entry: 54,
				StartBy: at(1100), FinishBy: at(3000),
			},
			{Op: 61, Queue: "unique", Called: at(10), Returned: at(15), Told: true, Entry: 61, Unique: "u", WhileActive: true},
			{Op: 62, Queue: "unique", Called: at(2000), Returned: at(2005), Told: true, Entry: 61, Unique: "u", WhileActive: true},
			{Op: 63, Queue: "unique", Called: at(3000), Returned: at(3005), Told: true, Entry: 63, Unique: "u", WhileActive: true},
		},
		Calls: []Call{
			{Entry: 11, Token: 101, Op: 1, Begin: at(30), Closed: at(40), Answer: "ok", Nonce: "a"},
			{Entry: 12, Token: 102, Op: 2, Begin: at(50), Closed: at(60), Answer: "ok", Nonce: "b"},
			{Entry: 13, Token: 103, Op: 3, Begin: at(50), Closed: at(60), Answer: "error"},
			{Entry: 13, Token: 104, Op: 3, Begin: at(70), Closed: at(9000), Answer: "none"},
			{Entry: 13, Token: 107, Op: 3, Begin: at(5000), Closed: at(5010), Answer: "ok", Nonce: "c"},
			{Entry: 16, Token: 106, Op: 6, Begin: at(50), Closed: at(60), Answer: "ok", Nonce: "d"},
			{Entry: 18, Token: 109, Op: 18, Begin: at(50), Closed: at(60), Answer: "error"},
			{Entry: 18, Token: 110, Op: 18, Begin: at(70), Closed: at(80), Answer: "died"},
			{Entry: 52, Token: 120, Op: 52, Begin: at(1010), Closed: at(2100), Answer: "none"},
			{Entry: 53, Token: 121, Op: 53, Begin: at(1010), Closed: at(1100), Answer: "error"},
			{Entry: 53, Token: 122, Op: 53, Begin: at(1410), Closed: at(1500), Answer: "error"},
			{Entry: 54, Token: 123, Op: 54, Begin: at(1010), Closed: at(3010), Answer: "none"},
		},
		Beats:  []Beat{{Process: "n1", At: at(0)}, {Process: "n1", At: at(500)}, {Process: "n2", At: at(4900)}},
		Deaths: []Death{{Process: "n1", At: at(800), Killed: true}},
		RunMax: 8 * time.Second, RetryBase: 200 * time.Millisecond,
		Unhinted: []Unhinted{{"solo", 31, time.Second, 30 * time.Second}},
		Samples:  []Sample{{"limited", 3, 3, at(0)}},
		Firings:  []Firing{{"job", at(2000), at(2010), 21, false}, {"job", at(4000), at(4010), 22, false}, {"job", at(6000), at(6010), 23, true}},
		Ticks:    map[Tick]int{tickAt(2000): 1, tickAt(4000): 1}, Ticking: "cron",
		Deliveries: []Delivery{{ID: "id", Entry: 14, Outcome: "cancelled"}, {ID: "id", Entry: 14, Outcome: "cancelled", Accepted: true}},
		Told:       []Told{{11, "done"}},
		Batches:    []Batch{{7, 2, true, at(20)}, {8, 1, false, at(20)}},
		Items:      map[Item]int{{7, 1}: 1, {7, 2}: 1}, BatchParts: []BatchPart{{1, 1, 1, 1, "done"}},
		Tables: []Table{{"lock", 10, 20, 5, 9}},
	}
	for i, e := range []Ending{
		{Entry: 11, Queue: "keyed", Key: "k", Outcome: "done", Token: 101, Nonce: "a"},
		{Entry: 12, Queue: "keyed", Key: "k", Outcome: "done", Token: 102, Nonce: "b"},
		{Entry: 13, Queue: "solo", Outcome: "done", Token: 107, Nonce: "c", Attempt: 1, Crashes: 1},
		{Entry: 14, Queue: "solo", Outcome: "cancelled"},
		{Entry: 15, Queue: "work", Outcome: "done", Token: 105},
		{Entry: 16, Queue: "solo", Outcome: "done", Token: 106, Nonce: "d"},
		{Entry: 21, Queue: "cron", Outcome: "done"},
		{Entry: 22, Queue: "cron", Outcome: "done"},
		{Entry: 18, Queue: "once", Outcome: "failed", Class: "unknown", Attempt: 2},
		{Entry: 51, Queue: "frail", Outcome: "expired", At: at(150)},
		{Entry: 52, Queue: "frail", Outcome: "cancelled", At: at(2120)},
		{Entry: 53, Queue: "frail", Outcome: "failed", At: at(1510), Attempt: 2},
		{Entry: 54, Queue: "frail", Outcome: "expired", At: at(3020)},
		{Entry: 61, Queue: "unique", Outcome: "done", At: at(2500)},
		{Entry: 63, Queue: "unique", Outcome: "done", At: at(3500)},
	} {
		e.Seq = int64(200 + 10*i)
		h.Endings = append(h.Endings, e)
	}
	h.Grants = []Grant{
		{10, "keyed", "k", 101, 11, 1, "n1", at(20), time.Time{}, 0, 10, time.Time{}},
		{203, "keyed", "k", 102, 12, 1, "n1", at(45), time.Time{}, 0, 203, time.Time{}},
		{30, "solo", "#13", 103, 13, 1, "n1", at(45), time.Time{}, 0, 30, time.Time{}},
		{40, "solo", "#13", 104, 13, 1, "n1", at(65), at(4980), 0, 40, at(4980)},
		{50, "work", "#15", 105, 15, 1, "n1", at(45), time.Time{}, 0, 50, time.Time{}},
		{60, "solo", "#16", 106, 16, 1, "n1", at(45), time.Time{}, 0, 60, time.Time{}},
		{70, "solo", "#13", 107, 13, 2, "n2", at(4990), time.Time{}, 0, 70, time.Time{}},
		{72, "once", "#18", 109, 18, 1, "n1", at(45), at(62), 73, 72, at(62)},
		{74, "once", "#18", 110, 18, 1, "n1", at(65), time.Time{}, 0, 74, time.Time{}},
		{80, "frail", "#52", 120, 52, 3, "n3", at(1000), at(2120), 81, 80, at(2120)},
		{82, "frail", "#53", 121, 53, 3, "n3", at(1000), at(1110), 83, 82, at(1110)},
		{90, "frail", "#53", 122, 53, 3, "n3", at(1400), at(1510), 91, 90, at(1510)},
		{86, "frail", "#54", 123, 54, 3, "n3", at(1000), at(3020), 87, 86, at(3020)},
		{304, "solo", "#41", 341, 41, 1, "n1", at(26_000), time.Time{}, 0, 304, time.Time{}},
	}
	for ms := 0; ms <= 12_000; ms += 500 {
		h.Beats = append(h.Beats, Beat{Process: "n3", At: at(ms)})
	}
	h.Lanes = []string{"solo", "work"}
	o := online()
	h.Gateways, h.GatewayLease, h.Slots, h.SlotCalls, h.Requests = o.Gateways, o.GatewayLease, o.Slots, o.SlotCalls, o.Requests
	h.Beats = append(h.Beats, o.Beats...)
	h.Places = []Place{
		{Seq: 21, Queue: "solo", Entry: 13, At: at(14), Due: at(20)},
		{Seq: 22, Queue: "work", Entry: 15, Position: 15, At: at(14)},
		{Seq: 23, Queue: "solo", Entry: 16, Position: 16, At: at(14)},
		{Seq: 24, Queue: "solo", Entry: 13, Position: 17, At: at(21)},
		{Seq: 31, Queue: "solo", Entry: 13, At: at(60), Due: at(62)},
		{Seq: 32, Queue: "solo", Entry: 13, Position: 18, At: at(63)},
		{Seq: 65, Queue: "solo", Entry: 13, Position: 18, At: at(4980)}, // recovered
		{Seq: 84, Queue: "frail", Entry: 53, At: at(1110), Due: at(1310)},
		{Seq: 85, Queue: "frail", Entry: 53, Position: 54, At: at(1312)},
		{Seq: 301, Queue: "solo", Entry: 41, Position: 41, At: at(10_000)},
	}
	for op, entry := range map[int64]int64{
		1: 11, 2: 12, 3: 13, 4: 14, 5: 15, 6: 16, 18: 18, 51: 51, 52: 52, 53: 53, 54: 54, 61: 61,
	} {
		h.Insertions = append(h.Insertions, Insertion{Seq: op, Entry: entry, Op: op})
	}
	h.Insertions = append(h.Insertions, Insertion{Seq: endOf(h, 61).Seq + 1, Entry: 63, Op: 63})
	h.Setbacks = []Setback{
		{Seq: 31, Entry: 13, Queue: "solo", Token: 103, Holder: 1, Node: 1},
		{Seq: 84, Entry: 53, Queue: "frail", Token: 121, Holder: 3, Node: 3},
		{Seq: endOf(h, 53).Seq, Entry: 53, Queue: "frail", Token: 122, Holder: 3, Node: 3},
	}
	h.Doubts = []Doubt{{From: at(0), To: at(10)}}
	return h
}

// overtake lets an entry be granted half a second before the one that is in line before it and waits for 16 s.
func overtake(h *History) {
	h.Places = append(h.Places, Place{Seq: 302, Queue: "solo", Entry: 42, Position: 42, At: at(10_000)})
	h.Grants = append(h.Grants, Grant{303, "solo", "#42", 342, 42, 1, "n1", at(25_500), time.Time{}, 0, 303, time.Time{}})
}

// again lets an entry be called once more, on another node.
func again(h *History, entry int64, begin time.Time) {
	h.Grants = append(h.Grants, Grant{350, "solo", "#16", 350, entry, 2, "n2", begin, time.Time{}, 0, 350, time.Time{}})
	h.Calls = append(h.Calls, Call{
		Entry: entry, Token: 350, Begin: begin, Closed: begin.Add(10 * time.Millisecond), Answer: "error",
	})
}

func pushOf(h *History, entry int64) *Push {
	return &h.Pushes[slices.IndexFunc(h.Pushes, func(p Push) bool { return p.Entry == entry })]
}

func callOf(h *History, token int64) *Call {
	return &h.Calls[slices.IndexFunc(h.Calls, func(c Call) bool { return c.Token == token })]
}

func grantOf(h *History, token int64) *Grant {
	return &h.Grants[slices.IndexFunc(h.Grants, func(g Grant) bool { return g.Token == token })]
}

func endOf(h *History, entry int64) *Ending {
	return &h.Endings[slices.IndexFunc(h.Endings, func(e Ending) bool { return e.Entry == entry })]
}

func broken(h *History) map[string]int {
	names := map[string]int{}
	for _, f := range Judge(h) {
		if f.Broken > 0 {
			names[f.Name] = f.Broken
		}
	}
	return names
}

func TestHistoryWithoutFaultBreaksNothing(t *testing.T) {
	for _, f := range Judge(good()) {
		if f.Broken > 0 {
			t.Errorf("%s: %v", f.Name, f.Examples)
		}
		if f.Checked == 0 {
			t.Errorf("%s: the history of this test has no case", f.Name)
		}
	}
}

// Each row breaks one promise; the invariant of that name must report it.
func TestEachInvariantReportsItsViolation(t *testing.T) {
	cases := map[string]func(h *History){
		"an accepted entry has an outcome":                  func(h *History) { h.Endings = h.Endings[1:] },
		"an entry has one outcome":                          func(h *History) { h.Endings = append(h.Endings, h.Endings[0]) },
		"nothing runs or exists that was not pushed":        func(h *History) { h.Insertions = append(h.Insertions, Insertion{9, 99, 7, "solo"}) },
		"a push and its transaction commit together":        func(h *History) { h.Rows = nil },
		"an effect in the database happens once":            func(h *History) { h.Effects[5] = 2 },
		"parts of a batch are done once":                    func(h *History) { h.Items[Item{7, 1}] = 2 },
		"tokens are unique and grow per key":                func(h *History) { h.Grants[6].Token = 104 },
		"a call carries a committed token":                  func(h *History) { h.Calls[0].Token = 555 },
		"no overlap without silence beyond the lease":       func(h *History) { h.Beats[1].At = at(4000) },
		"an entry that was answered well runs once":         func(h *History) { again(h, 16, at(700)) },
		"an entry that must not run twice is called once":   func(h *History) { again(h, 18, at(700)) },
		"an end is recorded under the newest token only":    func(h *History) { h.Endings[2].Token = 104 },
		"a result is what its own call answered":            func(h *History) { h.Endings[0].Nonce = "z" },
		"entries of a key start in the order of acceptance": func(h *History) { h.Calls[0].Begin = at(55) },
		"one key's history is that of a queue":              func(h *History) { h.Calls[0].Begin = at(55) },
		"an entry that comes back has its place":            func(h *History) { h.Places[6].Position = 19 },
		"a due entry comes in line":                         func(h *History) { h.Places[5].At = at(5300) },
		"no entry in line is overtaken for long":            func(h *History) { overtake(h) },
		"attempts are errors":                               func(h *History) { h.Endings[0].Attempt = 1 },
		"crashes are deaths of nodes that had it":           func(h *History) { h.Endings[2].Crashes = 3 },
		"failures have a cause":                             func(h *History) { endOf(h, 53).Attempt = 1 },
		"limits are never exceeded":                         func(h *History) { h.Samples[0].Locks = 4 },
		"rates are never exceeded":                          func(h *History) { h.Rates["keyed"] = Rate{Burst: 0.5, PerSecond: 1} },
		"a unique key has one active entry":                 func(h *History) { endOf(h, 61).Seq += 5 },
		"a duplicate names an entry that has its key":       func(h *History) { endOf(h, 61).At = at(1500) },
		"each nominal time of a schedule fires once":        func(h *History) { h.Firings = h.Firings[1:] },
		"nothing runs before it is due":                     func(h *History) { h.Pushes[2].Due = at(500) },
		"an entry expires at its deadline":                  func(h *History) { pushOf(h, 51).StartBy, pushOf(h, 51).FinishBy = time.Time{}, time.Time{} },
		"a requested cancel ends the run":                   func(h *History) { callOf(h, 120).Closed = at(8000) },
		"a cancelled entry does not run":                    func(h *History) { h.Endings[3].Outcome = "done" },
		"one delivery id for each ending":                   func(h *History) { h.Deliveries[0].ID = "other" },
		"the API tells the outcome that is stored":          func(h *History) { h.Told[0].State = "failed" },
		slotsOfInstances:                                    func(h *History) { h.Slots["gpu"] = 1 },
		answersOfGateways:                                   func(h *History) { h.Requests[0].Nonce = "b" },
		gatewaysServeAgain:                                  func(h *History) { h.Unserved = []string{"g1 serves nothing"} },
		elsewhere:                                           func(h *History) { grantOf(h, 104).Freed = at(6500) },
		"all is terminal soon after the faults":             func(h *History) { h.Unfinished = []string{"entry 7"} },
		"slots in doubt are free soon after the faults":     func(h *History) { h.Doubtful = []string{"a slot"} },
		"an entry is found without a hint":                  func(h *History) { h.Unhinted[0].Took = h.Unhinted[0].Max },
		"hot tables stay bounded":                           func(h *History) { h.Tables[0].Dead = 100 },
		"no statement meets a deadlock":                     func(h *History) { h.Deadlocks = []string{"x"} },
		"the tables are consistent":                         func(h *History) { h.Broken = []string{"a lock has a node"} },
	}
	if len(cases) != len(Invariants) {
		t.Errorf("%d cases for %d invariants", len(cases), len(Invariants))
	}
	for name, spoil := range cases {
		h := good()
		spoil(h)
		if broken(h)[name] == 0 {
			t.Errorf("%q reports nothing; others: %v", name, broken(h))
		}
	}
}

// The time that a backlog may take after the faults follows from what it takes without.
func TestBacklogMayTakeTwiceItsTimeWithoutFaults(t *testing.T) {
	const promise = "all is terminal soon after the faults"
	h := good()
	h.FaultFree, h.Drained = 10*time.Second, 28*time.Second // twice, and the 8 s of a worker that hangs
	if found := broken(h); found[promise] != 0 {
		t.Errorf("28 s are too long where 10 s are needed without faults: %v", found)
	}
	h.Drained = 29 * time.Second
	if found := broken(h); found[promise] == 0 {
		t.Error("29 s are allowed where 10 s are needed without faults")
	}
	h.Released = 9 * time.Second
	if found := broken(h); found[promise] != 0 {
		t.Errorf("29 s are too long where locks are freed one by one in 9 s: %v", found)
	}
	h.FaultFree, h.Drained = time.Minute, 61*time.Second
	if found := broken(h); found[promise] == 0 {
		t.Error("more than -drain is allowed")
	}
}

// A slot whose call had an unknown end holds up no judgement about entries: they are terminal before it is free.
func TestSlotsInDoubtAreJudgedByTheTimeOfTheirProbe(t *testing.T) {
	const entries, slots = "all is terminal soon after the faults", "slots in doubt are free soon after the faults"
	const most = 17_000 + 100 // with the tolerance
	over := at(20_000)
	for name, c := range map[string]struct {
		d       Doubt
		broken  bool
		spoil   func(h *History)
		checked int
	}{
		"free after its probe":                      {d: Doubt{From: at(19_000), To: over.Add(most * time.Millisecond)}, checked: 1},
		"in doubt for longer":                       {d: Doubt{From: at(19_000), To: over.Add(most*time.Millisecond + 1)}, broken: true, checked: 1},
		"long in doubt, and free before the end":    {d: Doubt{From: at(0), To: over}, checked: 0},
		"given up long after the faults":            {d: Doubt{From: at(60_000), To: at(60_000 + most)}, checked: 1},
		"given up after the faults, and for longer": {d: Doubt{From: at(60_000), To: at(60_001 + most)}, broken: true, checked: 1},
		"in doubt still, which the drain tells":     {d: Doubt{From: at(60_000)}, checked: 0},
		"disturbed for the time that it is late": {
			d: Doubt{From: at(60_000), To: at(60_500 + most)}, checked: 1,
			spoil: func(h *History) { h.Refusals = []Disturbance{{"slow", at(61_000), at(61_600)}} },
		},
		"the server's clock jumped": {
			d: Doubt{From: at(60_000), To: at(600_000)}, checked: 0, spoil: func(h *History) { h.ClockJumped = true },
		},
	} {
		h := good()
		h.DoubtMax, h.FaultFree, h.Drained, h.FaultsOver = 17*time.Second, time.Second, 10*time.Second, over
		h.Doubts = []Doubt{c.d}
		if c.spoil != nil {
			c.spoil(h)
		}
		found := broken(h)
		if found[entries] != 0 || found[slots] > 0 != c.broken {
			t.Errorf("%s: %v, want broken: %v", name, found, c.broken)
		}
		var r report
		if slotsFreed(newIndex(h), &r); r.checked != c.checked {
			t.Errorf("%s: %d cases, want %d", name, r.checked, c.checked)
		}
	}
}

// An entry that is tried again is in line by when it is due.
func TestAPlaceByDueTimeIsBehindWhatWasAcceptedBefore(t *testing.T) {
	const promise = "an entry that comes back has its place"
	later := func(ms int, position int64) func(h *History) {
		return func(h *History) {
			h.Tolerance = 0
			h.Pushes = append(h.Pushes, Push{Op: 8, Queue: "solo", Told: true, Entry: 43, Called: at(ms), Returned: at(ms + 1)})
			h.Places = append(h.Places, Place{Seq: 300, Queue: "solo", Entry: 43, Position: position, At: at(ms + 1)})
		}
	}
	for name, c := range map[string]struct {
		spoil func(h *History)
		wrong bool
	}{
		"accepted before its time, before it":    {later(30, 17), false},
		"accepted before its time, behind it":    {later(30, 19), true},
		"pushed once it is in line, behind it":   {later(70, 19), false},
		"pushed once it is in line, before it":   {later(70, 16), true},
		"pushed at the time, on either side (1)": {later(62, 17), false},
		"pushed at the time, on either side (2)": {later(62, 19), false},
	} {
		h := good()
		c.spoil(h)
		if found := broken(h)[promise] > 0; found != c.wrong {
			t.Errorf("%s: found wrong: %v", name, found)
		}
	}
}

// A claim takes the first entries in line, and records them in any order.
func TestEntriesOfOneClaimDoNotOvertakeEachOther(t *testing.T) {
	h := good()
	overtake(h)
	for i := range h.Grants {
		if h.Grants[i].Seq == 303 || h.Grants[i].Seq == 304 {
			h.Grants[i].Transaction = 300
		}
	}
	if n := broken(h)["no entry in line is overtaken for long"]; n != 0 {
		t.Errorf("%d entries of the claim are reported", n)
	}
}

// What disturbs the database or the leader excuses an entry that waits meanwhile, and no other time does.
func TestOvertakingIsJudgedByTimeWithoutDisturbance(t *testing.T) {
	const promise = "no entry in line is overtaken for long"
	h := good()
	overtake(h)
	h.Disturbances = []Disturbance{{"a", at(9000), at(10_200)}, {"b", at(10_100), at(10_600)}, {"c", at(26_000), at(30_000)}}
	if found := broken(h); found[promise] != 0 {
		t.Error("an entry is reported that was overtaken 14.9 s after the disturbance")
	}
	h.Disturbances = h.Disturbances[2:]
	h.Deaths = append(h.Deaths, Death{Process: "n3", At: at(12_000), Until: at(13_000)})
	if found := broken(h); found[promise] != 0 {
		t.Error("the time in which a node was stopped counts")
	}
	h.Deaths = h.Deaths[:len(h.Deaths)-1]
	if found := broken(h); found[promise] == 0 {
		t.Error("a disturbance that came after the grant excuses it")
	}
}

// An error that a leader is answered costs it a pass: what is due comes in line with the next one.
func TestAnErrorAtALeaderExcusesWhatIsDueForItsPass(t *testing.T) {
	const promise = "a due entry comes in line"
	h := good()
	h.Places[5].At = at(5300)
	h.Refusals = []Disturbance{{"error", at(3000), at(4000)}}
	if found := broken(h); found[promise] != 0 {
		t.Errorf("an entry is late that waited for the pass after an error: %v", found)
	}
	h.Places[5].At = at(6300)
	if found := broken(h); found[promise] == 0 {
		t.Error("one error excuses more than one pass")
	}
}

// An entry that was in line for a moment, or among disturbances, is no case of a promise about longer times.
func TestCasesOfTimesAreThoseThatCouldBeBroken(t *testing.T) {
	const due, overtaken = "a due entry comes in line", "no entry in line is overtaken for long"
	checked := func(change func(h *History)) map[string]int {
		h, counts := good(), map[string]int{}
		change(h)
		for _, f := range Judge(h) {
			counts[f.Name] = f.Checked
		}
		return counts
	}
	whole := checked(func(*History) {})
	if whole[due] != 2 || whole[overtaken] != 1 {
		t.Errorf("%d and %d cases, want 2 and 1", whole[due], whole[overtaken])
	}
	soon := checked(func(h *History) { h.Grants[len(h.Grants)-1].At = at(10_100) })
	if soon[overtaken] != 0 {
		t.Error("an entry that was granted at once is a case")
	}
	disturbed := checked(func(h *History) {
		h.Disturbances = []Disturbance{{"a", at(50), at(100)}, {"b", at(12_000), at(14_000)}}
	})
	if disturbed[due] != 0 || disturbed[overtaken] != 0 {
		t.Errorf("%d and %d cases among disturbances, want none", disturbed[due], disturbed[overtaken])
	}
	h := good()
	h.Disturbances = []Disturbance{{"a", at(0), at(2020)}, {"b", at(30_000), at(40_000)}}
	if calm, all := CalmTime(h); all != 25_980*time.Millisecond || calm != 23_980*time.Millisecond {
		t.Errorf("%v of %v without a disturbance, want 23.98 s of 25.98 s", calm, all)
	}
}

// A heartbeat that waited for the same table lock as recovery may be committed a moment before the lock is freed.
func TestAHeartbeatThatWaitedWithRecoveryHidesNoDeath(t *testing.T) {
	for _, c := range []struct {
		began, broken int
	}{{4000, 0}, {4975, 1}} {
		h := good()
		h.Beats = append(h.Beats, Beat{Process: "n1", At: at(4970)})
		h.Grants[3].FreeBegan = at(c.began)
		if found := broken(h)["crashes are deaths of nodes that had it"]; min(found, 1) != c.broken {
			t.Errorf("recovery that began at %d ms: %d reports, want %d", c.began, found, c.broken)
		}
	}
}

// A node that is stopped while a worker answers takes it for a timeout, and only then.
func TestAnAnswerDuringAStopIsAnErrorOnlyBeyondTheTimeout(t *testing.T) {
	h := good()
	h.Endings[0].Attempt = 1
	stop := Death{Process: "n1", At: at(35), Until: at(9000)}
	h.Deaths = append(h.Deaths, stop)
	if found := broken(h); found["attempts are errors"] != 0 {
		t.Error("a timeout of the stopped node is reported")
	}
	h.Deaths[len(h.Deaths)-1].Until = at(30 + 8000 - 50) // the node began to wait before the worker was called
	if found := broken(h); found["attempts are errors"] != 0 {
		t.Error("a timeout of the stopped node is reported: it went on 50 ms before the harness's own count of it")
	}
	h.Deaths[len(h.Deaths)-1].Until = at(7000)
	if found := broken(h); found["attempts are errors"] == 0 {
		t.Error("an attempt without an error is not reported: the node went on before its timeout")
	}
	h.Deaths[len(h.Deaths)-1] = Death{Process: "n1", At: at(40 + 90), Until: at(9000)} // the node had not read the answer
	if found := broken(h); found["attempts are errors"] != 0 {
		t.Error("a timeout of a node is reported that was stopped 90 ms after its worker had answered")
	}
	h.Deaths[len(h.Deaths)-1].At = at(40 + 150)
	if found := broken(h); found["attempts are errors"] == 0 {
		t.Error("an attempt without an error is not reported: the node was stopped after it had read the answer")
	}
}

// A worker that is not run for seconds answers after the node has given up, and calls that an answer.
func TestAnAnswerBeyondTheTimeoutIsAnError(t *testing.T) {
	h := good()
	h.Endings[0].Attempt = 1
	h.Calls[0].Closed = h.Calls[0].Begin.Add(h.RunMax + 400*time.Millisecond)
	if found := broken(h); found["attempts are errors"] != 0 {
		t.Error("a timeout of the node is reported, whose worker answered too late")
	}
	h.Calls[0].Closed = h.Calls[0].Begin.Add(h.RunMax - time.Second)
	if found := broken(h); found["attempts are errors"] == 0 {
		t.Error("an attempt without an error is not reported: the worker answered a second before the timeout")
	}
}

// What was told while two primaries took writes may be lost, what was told before may not.
func TestOnlyWhatWasToldDuringAForkMayBeLost(t *testing.T) {
	h := good()
	h.Endings = h.Endings[1:]
	h.Insertions = slices.DeleteFunc(h.Insertions, func(i Insertion) bool { return i.Entry == 11 })
	h.Forked = [2]time.Time{at(2), at(8)}
	if found := broken(h); found["an accepted entry has an outcome"] != 0 {
		t.Error("an entry that was accepted during the fork is reported")
	}
	h.Forked = [2]time.Time{at(100), at(108)}
	if found := broken(h); found["an accepted entry has an outcome"] == 0 {
		t.Error("an entry that was accepted before the fork is not reported")
	}
}

// A judge that used code of the product could share its mistakes.
func TestJudgeImportsNothingOfTheProduct(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range file.Imports {
			if strings.Contains(i.Path.Value, "penstock") {
				t.Errorf("%s imports %s", name, i.Path.Value)
			}
		}
	}
}

func TestLinearizabilityFindsAnOvertaking(t *testing.T) {
	h := &History{}
	for i := range 20 {
		began := at(10 * i)
		h.Pushes = append(h.Pushes, Push{
			Op: int64(i + 1), Queue: "keyed", Key: "k", Told: true, Entry: int64(i + 1),
			Called: began, Returned: began.Add(5 * time.Millisecond),
		})
		h.Calls = append(h.Calls, Call{Entry: int64(i + 1), Op: int64(i + 1), Begin: at(1000 + 10*i)})
	}
	check := func(h *History) int {
		var r report
		linearizable(newIndex(h), &r)
		return len(r.found)
	}
	if check(h) != 0 {
		t.Fatal("an orderly history is refused")
	}
	h.Calls[7].Begin, h.Calls[8].Begin = h.Calls[8].Begin, h.Calls[7].Begin
	if check(h) == 0 {
		t.Error("an overtaking is not found")
	}
}
