package judge

import (
	"slices"
	"testing"
	"time"
)

// seen holds records with one bug each, and the promise whose judge has to report it.
type seen struct {
	bug, promise string
	spoil        func(h *History)
}

func judgeEach(t *testing.T, cases []seen) {
	t.Helper()
	for _, c := range cases {
		h := good()
		c.spoil(h)
		if broken(h)[c.promise] == 0 {
			t.Errorf("%s: %q reports nothing; others: %v", c.bug, c.promise, broken(h))
		}
	}
}

func TestBatchesAreJudgedByWhatTheirClientsMade(t *testing.T) {
	const promise = "parts of a batch are done once"
	judgeEach(t, []seen{
		{"one of the items is not run", promise, func(h *History) { delete(h.Items, Item{7, 2}) }},
		{"a batch is lost", promise, func(h *History) { h.Items = nil }},
		{"a lost batch whose client was not told has one of its items run", promise, func(h *History) {
			h.Batches[1].Items, h.Items[Item{8, 1}] = 2, 1
		}},
		{"an item is run twice", promise, func(h *History) { h.Items[Item{7, 2}] = 2 }},
		{"an item is run that its client did not name", promise, func(h *History) { h.Items[Item{7, 3}] = 1 }},
		{"an item 0 is run", promise, func(h *History) { h.Items[Item{7, 0}] = 1 }},
		{"a batch is run that no client made", promise, func(h *History) { h.Items[Item{9, 1}] = 1 }},
		{"a part has an item that is not run", promise, func(h *History) { h.BatchParts[0].Least = 0 }},
		{"a part has an item that is run twice", promise, func(h *History) { h.BatchParts[0].Most = 2 }},
		{"a part has failed", promise, func(h *History) { h.BatchParts[0].Outcome = "failed" }},
	})
	h := good()
	h.Items[Item{8, 1}] = 1 // made, and its client was not told
	if found := broken(h); len(found) > 0 {
		t.Errorf("a batch of whose commit the client was not told is reported: %v", found)
	}
}

func TestFailuresDeadlinesAndCancelsHaveTheirJudges(t *testing.T) {
	const failures, deadlines = "failures have a cause", "an entry expires at its deadline"
	const cancelled, requested = "a cancelled entry does not run", "a requested cancel ends the run"
	judgeEach(t, []seen{
		{"failed after too few errors", failures, func(h *History) { endOf(h, 53).Attempt = 1 }},
		{"failed after too few crashes", failures, func(h *History) { endOf(h, 53).Attempt, endOf(h, 53).Crashes = 0, 1 }},
		{"failed, and may not", failures, func(h *History) { pushOf(h, 53).FailMax, pushOf(h, 53).CrashMax = 0, 0 }},
		{"more errors than it may have", failures, func(h *History) { endOf(h, 53).Attempt = 3 }},
		{"more crashes than it may have, and done", failures, func(h *History) {
			pushOf(h, 13).CrashMax, endOf(h, 13).Crashes = 1, 2
		}},
		{"failed as unknown, and may run twice", failures, func(h *History) {
			pushOf(h, 18).Once, pushOf(h, 18).FailMax = false, 9
		}},
		{"failed as unknown after answers alone", failures, func(h *History) {
			h.Calls = h.Calls[:6]
			h.Grants = h.Grants[:8]
			h.Deaths = nil
		}},
		{"expired without a deadline", deadlines, func(h *History) { endOf(h, 16).Outcome = "expired" }},
		{"expired before its time", deadlines, func(h *History) { endOf(h, 51).At = at(89) }},
		{"expired before finish_by alone", deadlines, func(h *History) { endOf(h, 54).At, pushOf(h, 54).StartBy = at(2500), time.Time{} }},
		{"expired by finish_by, which is before start_by", deadlines, func(h *History) {
			pushOf(h, 51).StartBy, pushOf(h, 51).FinishBy, endOf(h, 51).At = at(30_000), at(100), at(9000)
		}},
		{"waits for long beyond its deadline", deadlines, func(h *History) { endOf(h, 51).At = at(5300) }},
		{"is granted long after its deadline", deadlines, func(h *History) {
			endOf(h, 51).At = at(9010)
			h.Grants = append(h.Grants, Grant{Seq: 88, Queue: "frail", Key: "#51", Token: 124, Last: 51, Process: "n3", At: at(9000)})
		}},
		{"starts long after start_by", deadlines, func(h *History) { callOf(h, 123).Begin = at(3750) }},
		{"runs on after finish_by", deadlines, func(h *History) { callOf(h, 123).Closed = at(5650) }},
		{"cancelled without a wish", cancelled, func(h *History) { endOf(h, 16).Outcome = "cancelled" }},
		{"run after it was told to be cancelled", cancelled, func(h *History) { again(h, 14, at(700)) }},
		{"done after it was told to be cancelled", cancelled, func(h *History) { endOf(h, 14).Outcome = "done" }},
		{"a run goes on after its cancel was requested", requested, func(h *History) { callOf(h, 120).Closed = at(5650) }},
		{"a run begins after a cancel and goes on", requested, func(h *History) {
			h.Grants = append(h.Grants, Grant{Seq: 88, Queue: "frail", Key: "#52", Token: 124, Last: 52, Process: "n3", At: at(2500)})
			h.Calls = append(h.Calls, Call{Entry: 52, Token: 124, Op: 52, Begin: at(2500), Closed: at(8000), Answer: "none"})
		}},
		{"is granted long after its cancel", requested, func(h *History) {
			h.Grants = append(h.Grants, Grant{Seq: 88, Queue: "frail", Key: "#52", Token: 124, Last: 52, Process: "n3", At: at(7300)})
		}},
	})
}

// A node that does not hear, or that is stopped, ends no run, and a leader without a term nothing that waits.
func TestDeadlinesAndCancelsWaitForThoseWhoAreDisturbed(t *testing.T) {
	const deadlines, requested = "an entry expires at its deadline", "a requested cancel ends the run"
	for name, c := range map[string]struct {
		promise       string
		spoil, excuse func(h *History)
	}{
		"a heartbeat whose answer was lost": {
			requested, func(h *History) { callOf(h, 120).Closed = at(5650) },
			func(h *History) { h.Away = []Death{{Process: "n3", At: at(3000), Until: at(3000)}} },
		},
		"a node that is stopped": {
			requested, func(h *History) { callOf(h, 120).Closed = at(5650) },
			func(h *History) { h.Deaths = append(h.Deaths, Death{Process: "n3", At: at(2600), Until: at(5600)}) },
		},
		"heartbeats that come late": {
			requested, func(h *History) { callOf(h, 120).Closed = at(5650) }, func(h *History) {
				h.Beats = append(h.Beats[:len(h.Beats)-25:len(h.Beats)-25], Beat{Process: "n3", At: at(500)}, Beat{Process: "n3", At: at(3000)}, Beat{Process: "n3", At: at(5600)})
				h.Lease = 10 * time.Second
			},
		},
		"a leader that is not there": {
			deadlines, func(h *History) { endOf(h, 51).At = at(5300) },
			func(h *History) { h.Disturbances = []Disturbance{{"a", at(2000), at(3000)}} },
		},
		"a node that is cut off beyond finish_by": {
			deadlines, func(h *History) { callOf(h, 123).Closed = at(5650) },
			func(h *History) { h.Away = []Death{{Process: "n3", At: at(2900), Until: at(3500)}} },
		},
		"a server whose clock jumped": {
			deadlines, func(h *History) { endOf(h, 51).At = at(5300) }, func(h *History) { h.ClockJumped = true },
		},
	} {
		h := good()
		c.spoil(h)
		if broken(h)[c.promise] == 0 {
			t.Errorf("%s: nothing is reported without it", name)
		}
		c.excuse(h)
		if broken(h)[c.promise] != 0 {
			t.Errorf("%s excuses nothing", name)
		}
	}
	h := good()
	h.Away = []Death{{Process: "n2", At: at(0), Until: at(9000)}}
	callOf(h, 120).Closed = at(5650)
	if broken(h)[requested] == 0 {
		t.Error("what is wrong with another node excuses a run")
	}
}

func TestCountsAndTimesAreJudgedOnBothSides(t *testing.T) {
	const attempts, crashes, early = "attempts are errors", "crashes are deaths of nodes that had it", "nothing runs before it is due"
	judgeEach(t, []seen{
		{"an error is not counted", attempts, func(h *History) { endOf(h, 53).Outcome, endOf(h, 53).Attempt = "done", 0 }},
		{"an error is not counted, and the next one ends it", attempts, func(h *History) { endOf(h, 53).Attempt = 1 }},
		{"an attempt without an error", attempts, func(h *History) { endOf(h, 53).Attempt = 3 }},
		{"an attempt after an answer of a busy worker", attempts, func(h *History) { callOf(h, 122).Answer = "busy" }},
		{"the death of a node is not counted", crashes, killN3},
		{"tried again without a wait", early, func(h *History) {
			h.Places = slices.DeleteFunc(h.Places, func(p Place) bool { return p.Seq == 84 })
			placeOf(h, 85).At = at(1112)
		}},
		{"tried again after half of the wait", early, func(h *History) { placeOf(h, 84).Due = at(1200) }},
		{"in line before it is due", early, func(h *History) { placeOf(h, 85).At = at(1309) }},
		{"granted before it is due, and never in line", early, func(h *History) {
			h.Places = slices.DeleteFunc(h.Places, func(p Place) bool { return p.Seq == 85 })
			grantOf(h, 122).At = at(1309)
		}},
		{"run before its client wants", early, func(h *History) { pushOf(h, 53).Due = at(1200) }},
	})
}

func placeOf(h *History, seq int64) *Place {
	return &h.Places[slices.IndexFunc(h.Places, func(p Place) bool { return p.Seq == seq })]
}

// killN3 lets n3 be killed 1.6 s after it began to run entry 54, and the lock be freed after its lease. No crash is
// counted.
func killN3(h *History) {
	h.Deaths = append(h.Deaths, Death{Process: "n3", At: at(2600), Killed: true})
	h.Beats = slices.DeleteFunc(h.Beats, func(b Beat) bool { return b.Process == "n3" && b.At.After(at(2600)) })
	callOf(h, 123).Closed, grantOf(h, 123).Freed, endOf(h, 54).At = at(2610), at(5700), at(5710)
}

func TestOnlyTheDeathOfANodeThatToldOfARunIsACrashForCertain(t *testing.T) {
	const promise = "crashes are deaths of nodes that had it"
	for name, excuse := range map[string]func(h *History){
		"the crash is counted":              func(h *History) { endOf(h, 54).Crashes = 1 },
		"one heartbeat since":               func(h *History) { callOf(h, 123).Begin = at(1950) },
		"the node was stopped":              func(h *History) { h.Deaths[len(h.Deaths)-1].Killed = false },
		"the call ended before":             func(h *History) { callOf(h, 123).Closed = at(2590) },
		"the worker refused it":             func(h *History) { callOf(h, 123).Answer = "busy" },
		"the call went on for a lease":      func(h *History) { callOf(h, 123).Closed = at(5650) },
		"the lock was freed by the node":    func(h *History) { grantOf(h, 123).Freed = at(2605) },
		"a key, whose lock has other calls": func(h *History) { endOf(h, 54).Key = "k" },
	} {
		h := good()
		killN3(h)
		excuse(h)
		if n := broken(h)[promise]; n != 0 {
			t.Errorf("%s: a missing crash is reported", name)
		}
	}
}

// An instance that is to blame for an error costs the entry no attempt: it is handed back, after a wait.
func TestAnEntryThatIsHandedBackAfterAnErrorNeedsNoAttempt(t *testing.T) {
	h := good()
	*placeOf(h, 84) = Place{Seq: 84, Queue: "frail", Entry: 53, Position: 53, At: at(3110)}
	*placeOf(h, 85) = Place{Seq: 85, Queue: "other", Entry: 99, Position: 1}
	endOf(h, 53).Outcome, endOf(h, 53).Attempt = "done", 0
	if found := broken(h); len(found) > 0 {
		t.Errorf("%v", found)
	}
	placeOf(h, 84).At = at(1200)
	if found := broken(h); found["nothing runs before it is due"] == 0 {
		t.Error("it is handed back without a wait, and nothing is reported")
	}
}

func TestAnErrorAfterWhichTheNodeCallsAnotherInstanceIsNoAttempt(t *testing.T) {
	h := good()
	h.Calls = append(h.Calls, Call{Entry: 53, Token: 122, Op: 53, Begin: at(1501), Closed: at(1505), Answer: "ok"})
	endOf(h, 53).Outcome, endOf(h, 53).Attempt = "done", 1
	if found := broken(h); found["attempts are errors"] != 0 {
		t.Errorf("an attempt is missed: %v", found)
	}
}

func TestErrorsThatANodeMayNotHaveRecordedNeedNoAttemptAndNoWait(t *testing.T) {
	h := good()
	h.Deaths = append(h.Deaths, Death{Process: "n3", At: at(1105), Killed: true})
	endOf(h, 53).Outcome, endOf(h, 53).Attempt = "done", 0
	placeOf(h, 84).Due = at(1200)
	for _, promise := range []string{"attempts are errors", "nothing runs before it is due"} {
		if found := broken(h); found[promise] != 0 {
			t.Errorf("%s: %v", promise, found)
		}
	}
}

func TestSchedulesAreJudgedByTheirEffects(t *testing.T) {
	const promise = "each nominal time of a schedule fires once"
	judgeEach(t, []seen{
		{"a nominal time took effect twice", promise, func(h *History) { h.Ticks[tickAt(4000)] = 2 }},
		{"a nominal time took effect under two entries", promise, func(h *History) {
			h.Ticks[tickAt(4000)] = 2
			h.Endings = append(h.Endings, Ending{Seq: 900, Entry: 24, Queue: "cron", Outcome: "done"})
		}},
		{"an entry ended that is no firing", promise, func(h *History) {
			h.Endings = append(h.Endings, Ending{Seq: 900, Entry: 24, Queue: "cron", Outcome: "done"})
		}},
		{"an entry is two firings", promise, func(h *History) { h.Firings[2].Entry = 22 }},
		{"done without an effect", promise, func(h *History) { delete(h.Ticks, tickAt(4000)) }},
		{"failed with an effect", promise, func(h *History) { endOf(h, 22).Outcome = "failed" }},
		{"an effect of a time that was not fired", promise, func(h *History) { h.Ticks[tickAt(8000)] = 1 }},
		{"a run that goes on has two effects", promise, func(h *History) { h.Ticks[tickAt(6000)] = 2 }},
		{"an entry without an outcome", promise, func(h *History) { h.Firings[2].Running = false }},
		{"an entry with two outcomes", promise, func(h *History) { h.Endings = append(h.Endings, *endOf(h, 22)) }},
		{"a time that was not fired", promise, func(h *History) { h.Firings[2].Nominal = at(8000) }},
		{"a time that is not one of the schedule", promise, func(h *History) {
			h.Firings[2].Nominal, h.CatchUpMax = at(5000), 1
		}},
	})
}

// A schedule that is late by more nominal times than it catches up on drops the oldest ones, and no others.
func TestASchedulesCatchUpExcusesTheOldestTimesAlone(t *testing.T) {
	const promise = "each nominal time of a schedule fires once"
	late := func(catchUpMax int, nominal, fired time.Duration) bool {
		h := good()
		h.CatchUpMax = catchUpMax
		last := &h.Firings[2]
		last.Nominal = last.Nominal.Add(nominal)
		last.Fired = last.Nominal.Add(fired)
		return broken(h)[promise] > 0
	}
	for _, c := range []struct {
		what           string
		max            int
		nominal, fired time.Duration
		broken         bool
	}{
		{"times before the three latest ones", 3, 4 * time.Second, 4 * time.Second, false},
		{"one of the three latest", 3, 4 * time.Second, 3900 * time.Millisecond, true},
		{"a time of a schedule that drops none, however late", 0, 4 * time.Second, time.Hour, true},
		{"no time at all: a late one is fired again", 3, -2 * time.Second, time.Hour, true},
	} {
		if got := late(c.max, c.nominal, c.fired); got != c.broken {
			t.Errorf("%s is dropped: reported %v, want %v", c.what, got, c.broken)
		}
	}
}

// Each of these once passed a judge, or would pass it if one of its conditions were left out.
func TestWhatJudgesDidNotSee(t *testing.T) {
	const delivery, effects = "one delivery id for each ending", "an effect in the database happens once"
	const overlap, once = "no overlap without silence beyond the lease", "an entry that was answered well runs once"
	const keys, queue = "entries of a key start in the order of acceptance", "one key's history is that of a queue"
	const calls, unpushed = "a call carries a committed token", "nothing runs or exists that was not pushed"
	judgeEach(t, []seen{
		{"done without a run or a result", "a result is what its own call answered", func(h *History) {
			h.Endings[0].Nonce, h.Calls = "", h.Calls[1:]
		}},
		{"the answer of a call under another token", "a result is what its own call answered", func(h *History) { callOf(h, 101).Token = 102 }},
		{"the answer of a call that failed", "a result is what its own call answered", func(h *History) { callOf(h, 101).Answer = "error" }},
		{"a schedule that stopped", "each nominal time of a schedule fires once", func(h *History) {
			h.CronUntil = at(60_000)
		}},
		{"a schedule that never fired", "each nominal time of a schedule fires once", func(h *History) {
			h.Jobs = append(h.Jobs, "other")
		}},
		{"a limit exceeded between two samples", "limits are never exceeded", func(h *History) {
			h.Grants = append(h.Grants, Grant{80, "work", "#17", 108, 17, 1, "n1", at(45), at(46), 90, 80, at(46)})
		}},
		{"two entries of a key struck by one death", "crashes are deaths of nodes that had it", func(h *History) {
			h.Endings[0].Crashes, h.Endings[1].Crashes = 1, 1
			h.Grants[1].Last, h.Grants[1].Freed, h.Grants[1].FreeBegan = 12, at(4980), at(4980)
			h.Grants[0].Last = 10
			h.Endings[0].Entry = 12
		}},
		{"a push whose answer was lost has no outcome", "an accepted entry has an outcome", func(h *History) {
			h.Insertions = append(h.Insertions, Insertion{9, 99, 7, "solo"})
		}},
		{"a push that was told and that the database does not have", "an accepted entry has an outcome", func(h *History) {
			h.Endings = h.Endings[1:]
			h.Insertions = slices.DeleteFunc(h.Insertions, func(i Insertion) bool { return i.Entry == 11 })
		}},
		{"a result that is changed in place", "an entry has one outcome", func(h *History) { h.Changes = []Change{{What: "result", Entry: 11}} }},
		{"a lock that is changed in place", "tokens are unique and grow per key", func(h *History) {
			h.Changes = []Change{{What: "lock", Key: "k", Token: 101}}
		}},
		{"more crashes than nodes that were silent for a lease", "crashes are deaths of nodes that had it", func(h *History) {
			h.Beats = append(h.Beats, Beat{Process: "n1", At: at(2500)}) // silent for 2.5 s of a lease of 3 s
		}},
		{"a crash of an entry that no lock covered", "crashes are deaths of nodes that had it", func(h *History) { grantOf(h, 104).Last = 12 }},
		{"a crash of an entry whose lock was never freed", "crashes are deaths of nodes that had it", func(h *History) {
			grantOf(h, 104).Freed = time.Time{}
		}},
		{"no delivery", delivery, func(h *History) { h.Deliveries = nil }},
		{"a delivery that tells of another outcome", delivery, func(h *History) {
			h.Deliveries[0].Outcome, h.Deliveries[1].Outcome = "done", "done"
		}},
		{"the first of two deliveries tells of another outcome", delivery, func(h *History) { h.Deliveries[0].Outcome = "done" }},
		{"a delivery for an entry without an outcome", delivery, func(h *History) {
			h.Deliveries = append(h.Deliveries, Delivery{ID: "id2", Entry: 99, Outcome: "done"})
		}},
		{"done without an effect", effects, func(h *History) { h.Effects[5] = 0 }},
		{"failed with an effect", effects, func(h *History) { endOf(h, 15).Outcome = "failed" }},
		{"a run of an entry with a deadline, under the lock of another key alone", "a call carries a committed token", func(h *History) {
			grantOf(h, callOf(h, 123).Token).Key = "other"
		}},
		{"an overlap after half a lease of silence", overlap, func(h *History) { h.Beats[1].At = at(3500) }},
		{"an overlap with a call before the last one", overlap, func(h *History) {
			h.Calls = append(h.Calls, Call{Entry: 54, Token: 123, Op: 54, Begin: at(1020), Closed: at(1030), Answer: "error"})
			h.Grants = append(h.Grants, Grant{Seq: 88, Queue: "frail", Key: "#54", Token: 124, Last: 54, Process: "n3", At: at(1000)})
			h.Calls = append(h.Calls, Call{Entry: 54, Token: 124, Op: 54, Begin: at(1200), Closed: at(1300), Answer: "error"})
			callOf(h, 123).Closed = at(1021)
			h.Calls = append(h.Calls, Call{Entry: 54, Token: 124, Op: 54, Begin: at(1500), Closed: at(1600), Answer: "error"})
			h.Calls[slices.IndexFunc(h.Calls, func(c Call) bool { return c.Token == 124 })].Closed = at(2500)
			h.Calls = append(h.Calls, Call{Entry: 54, Token: 125, Op: 54, Begin: at(1700), Closed: at(1800), Answer: "error"})
			h.Grants = append(h.Grants, Grant{Seq: 89, Queue: "frail", Key: "#54", Token: 125, Last: 54, Process: "n3", At: at(1000)})
		}},
		{"two calls under one token at a time, of a silent node", overlap, func(h *History) {
			h.Calls = append(h.Calls, Call{Entry: 13, Token: 104, Op: 3, Begin: at(6000), Closed: at(6010), Answer: "error"})
		}},
		{"run again although nothing kept its node from recording it", once, func(h *History) {
			h.Beats = append(h.Beats, Beat{Process: "n1", At: at(1000)})
			h.Deaths[0].At = at(-10_000)
			again(h, 16, at(700))
		}},
		{"run again, and another node died", once, func(h *History) {
			h.Deaths[0].Process = "n2"
			again(h, 16, at(700))
		}},
		{"run again under the same token", once, func(h *History) {
			h.Calls = append(h.Calls, Call{Entry: 16, Token: 106, Op: 6, Begin: at(700), Closed: at(710), Answer: "ok"})
		}},
		{"the earlier entry of a key never started", keys, func(h *History) { h.Calls = h.Calls[1:] }},
		{"a later entry of a key started first", queue, func(h *History) { h.Calls[0].Begin = at(55) }},
		{"a call under a token of an earlier entry", calls, func(h *History) { grantOf(h, 102).Last = 11 }},
		{"a call under a token of another solo entry", calls, func(h *History) { grantOf(h, 106).Key = "#17" }},
		{"an entry of an operation that nobody made", unpushed, func(h *History) { h.Insertions = append(h.Insertions, Insertion{9, 99, 999, "solo"}) }},
		{"two entries of one operation", unpushed, func(h *History) {
			pushOf(h, 16).Told = false
			h.Insertions = append(h.Insertions, Insertion{9, 99, 6, "solo"})
		}},
		{"an operation that is another entry than was told", unpushed, func(h *History) {
			h.Insertions[slices.IndexFunc(h.Insertions, func(i Insertion) bool { return i.Entry == 16 })].Entry = 99
		}},
		{"a call for an entry that is not there", unpushed, func(h *History) {
			h.Calls = append(h.Calls, Call{Entry: 99, Token: 101, Op: 99, Begin: at(100), Closed: at(110), Answer: "ok"})
		}},
		{"a call for an operation as another entry", unpushed, func(h *History) { callOf(h, 106).Entry = 15 }},
		{"the client's row without the entry", "a push and its transaction commit together", func(h *History) {
			h.Insertions = slices.DeleteFunc(h.Insertions, func(i Insertion) bool { return i.Op == 6 })
		}},
		{"a key that is granted an older token", "tokens are unique and grow per key", func(h *History) { grantOf(h, 102).Token = 99 }},
		{"an end under a token that was never granted", "an end is recorded under the newest token only", func(h *History) { grantOf(h, 105).Key = "#17" }},
		{"an end under an older token of a key", "an end is recorded under the newest token only", func(h *History) {
			h.Grants = append(h.Grants, Grant{Seq: 205, Queue: "keyed", Key: "k", Token: 103, Last: 12, Process: "n1", At: at(46)})
		}},
		{"called again after a call without an answer", "an entry that must not run twice is called once", func(h *History) {
			callOf(h, 110).Answer = "none"
			again(h, 18, at(700))
		}},
		{"called again after it was answered well", "an entry that must not run twice is called once", func(h *History) {
			callOf(h, 110).Answer = "ok"
			again(h, 18, at(700))
		}},
		{"the API tells of an entry without an outcome", "the API tells the outcome that is stored", func(h *History) { h.Told[0].Entry = 99 }},
		{"slots free too late", "slots in doubt are free soon after the faults", func(h *History) {
			h.Doubts = []Doubt{{From: at(0), To: at(10_000)}}
		}},
		{"a table that grew", "hot tables stay bounded", func(h *History) { h.Tables[0].Bytes = 21 }},
	})
}

func TestEntriesOfSchedulesAndWebhooksMayWaitBeyondARun(t *testing.T) {
	h := good()
	h.Insertions, h.Waiting = append(h.Insertions, Insertion{9, 99, 0, "cron"}), []string{"cron"}
	if found := broken(h); len(found) > 0 {
		t.Errorf("%v", found)
	}
}

// What a process is cut off for lasts three leases at most: a death long before excuses nothing.
func TestADeathExcusesWhatIsWithinThreeLeasesOfIt(t *testing.T) {
	const promise = "an entry that was answered well runs once"
	run := func(death Death, hindrance bool) bool {
		h := good()
		h.Calls = append(h.Calls,
			Call{Entry: 54, Token: 130, Op: 54, Begin: at(10_000), Closed: at(10_010), Answer: "ok"},
			Call{Entry: 54, Token: 131, Op: 54, Begin: at(10_500), Closed: at(10_510), Answer: "ok"})
		h.Grants = append(h.Grants,
			Grant{Seq: 401, Queue: "frail", Key: "#54", Token: 130, Last: 54, Process: "n3", At: at(9990)},
			Grant{Seq: 402, Queue: "frail", Key: "#54", Token: 131, Last: 54, Process: "n2", At: at(10_490)})
		if hindrance {
			h.Hindrances = []Death{death}
		} else {
			h.Deaths = append(h.Deaths, death)
		}
		return broken(h)[promise] > 0
	}
	for _, hindrance := range []bool{false, true} {
		if !run(Death{Process: "n3", At: at(500)}, hindrance) {
			t.Error("a death more than three leases before excuses a second run")
		}
		if !run(Death{Process: "n3", At: at(10_700)}, hindrance) {
			t.Error("a death after the second run excuses it")
		}
		if !run(Death{Process: "n2", At: at(10_005)}, hindrance) {
			t.Error("the death of another process excuses a second run")
		}
		if run(Death{Process: "n3", At: at(1500)}, hindrance) || run(Death{Process: "n3", At: at(10_005)}, hindrance) {
			t.Error("a death within three leases before, or between the runs, excuses nothing")
		}
	}
}

// Between the last sign of life of a term and the first one of the next there is no leader, and at no other time.
func TestTimeWithoutATermIsNoCalmTime(t *testing.T) {
	h := &History{Terms: []Term{
		{Number: 1, At: at(1000)}, {Number: 1, At: at(4000)}, {Number: 2, At: at(6000)}, {Number: 2, At: at(9000)},
	}}
	calm := newIndex(h).newCalm()
	for _, c := range []struct{ from, to, want int }{
		{0, 10_000, 8000}, {1000, 4000, 3000}, {4000, 6000, 0}, {5000, 7000, 1000}, {6000, 9000, 3000}, {7000, 5000, 0},
	} {
		if got := calm.between(at(c.from), at(c.to)); got != time.Duration(c.want)*time.Millisecond {
			t.Errorf("from %d to %d ms: %v without a disturbance, want %d ms", c.from, c.to, got, c.want)
		}
	}
}

// A lock of a dead node is free within the lease and two seconds, from the last disturbance on.
func TestLocksOfADeadNodeAreJudgedByTimeWithoutDisturbance(t *testing.T) {
	span := func(from, to int) []Disturbance { return []Disturbance{{"a", at(from), at(to)}} }
	late := func(h *History) { grantOf(h, 104).Freed = at(800 + 3000 + 2000 + 150) }
	for name, c := range map[string]struct {
		spoil   func(h *History)
		checked int
		broken  bool
	}{
		"in time":                                    {func(*History) {}, 1, false},
		"within what the harness sees late":          {func(h *History) { grantOf(h, 104).Freed = at(5880) }, 1, false},
		"late":                                       {late, 1, true},
		"late, after a disturbance":                  {func(h *History) { late(h); h.Disturbances = span(900, 1000) }, 1, false},
		"late, after a slow commit":                  {func(h *History) { late(h); h.Refusals = span(900, 1000) }, 1, false},
		"late, after an error at a leader":           {func(h *History) { late(h); h.LeaderErrors = span(900, 1000) }, 1, false},
		"late, after a disturbance before the death": {func(h *History) { late(h); h.Disturbances = span(600, 700) }, 1, true},
		"late, before a disturbance":                 {func(h *History) { late(h); h.Disturbances = span(6000, 6500) }, 1, true},
		"late, while no node was heard": {func(h *History) {
			late(h)
			h.Beats = slices.DeleteFunc(h.Beats, func(b Beat) bool { return b.At.After(at(3500)) && b.At.Before(at(5600)) })
		}, 1, false},
		"late, with locks that are freed one by one":                 {func(h *History) { late(h); h.FreedOneByOne = true }, 0, false},
		"late, of a node that was stopped":                           {func(h *History) { late(h); h.Deaths[0].Killed = false }, 0, false},
		"in time, and disturbed so that it could not have been late": {func(h *History) { h.Disturbances = span(5000, 5100) }, 0, false},
	} {
		h := good()
		c.spoil(h)
		var r report
		freedInTime(newIndex(h), &r)
		if r.checked != c.checked || len(r.found) > 0 != c.broken {
			t.Errorf("%s: %d cases, want %d; reports %q", name, r.checked, c.checked, r.found)
		}
	}
}

// What a node may not know it may leave as unknown, and only that.
func TestAnOutcomeIsUnknownWhereTheNodeMayNotKnowIt(t *testing.T) {
	const promise = "failures have a cause"
	const entry, token = 55, 140
	run := func(change func(h *History)) bool {
		h := good()
		h.Pushes = append(h.Pushes, Push{Op: 55, Queue: "once", Told: true, Entry: entry, Once: true, Called: at(900), Returned: at(905)})
		h.Insertions = append(h.Insertions, Insertion{90, entry, 55, "once"})
		h.Grants = append(h.Grants, Grant{Seq: 401, Queue: "once", Key: "#55", Token: token, Last: entry, Process: "n3", At: at(11_000)})
		h.Calls = append(h.Calls, Call{Entry: entry, Token: token, Op: 55, Begin: at(11_010), Closed: at(11_100), Answer: "error"})
		h.Endings = append(h.Endings, Ending{Seq: 900, Entry: entry, Queue: "once", Outcome: "failed", Class: classUnknown, Attempt: 1})
		change(h)
		return broken(h)[promise] == 0
	}
	if run(func(*History) {}) {
		t.Error("its call was answered, and nothing was wrong with its node")
	}
	for name, change := range map[string]func(h *History){
		"a call without an answer": func(h *History) { callOf(h, token).Answer = "none" },
		"a call that was cut off":  func(h *History) { callOf(h, token).Answer = "died" },
		"an answer beyond the timeout of the node": func(h *History) {
			h.RunMax = 150 * time.Millisecond
		},
		"a node that died within a lease of the answer": func(h *History) {
			h.Deaths = append(h.Deaths, Death{Process: "n3", At: at(13_900), Killed: true})
		},
		"an entry that came back": func(h *History) {
			h.Grants = append(h.Grants, Grant{Seq: 402, Queue: "once", Key: "#55", Token: 141, Last: entry, Process: "n2", At: at(12_000)})
		},
	} {
		if !run(change) {
			t.Errorf("%s is not taken for a cause", name)
		}
	}
}

// The longest silence that touches a time counts as a whole, and heartbeats before and after it do not hide it.
func TestSilenceIsTheTimeBetweenTwoHeartbeats(t *testing.T) {
	x := newIndex(&History{Beats: []Beat{
		{Process: "n", At: at(9000)}, {Process: "n", At: at(1000)}, {Process: "n", At: at(2000)}, {Process: "n", At: at(6000)},
	}})
	for _, c := range []struct{ from, to, longest int }{
		{0, 500, 1000},
		{1500, 1600, 1000},
		{2100, 2200, 4000},
		{500, 7000, 4000},
		{6000, 8000, 3000},
		{9500, 9800, 800},
		{1000, 2000, 4000},
	} {
		if got := x.longestSilence("n", at(c.from), at(c.to)); got != time.Duration(c.longest)*time.Millisecond {
			t.Errorf("from %d to %d ms: %v, want %d ms", c.from, c.to, got, c.longest)
		}
	}
	for _, c := range []struct{ at, silent int }{{1000, 0}, {1900, 900}, {5999, 3999}, {6000, 0}} {
		if got := x.silent("n", at(c.at)); got != time.Duration(c.silent)*time.Millisecond {
			t.Errorf("at %d ms: silent for %v, want %d ms", c.at, got, c.silent)
		}
	}
	if got := x.silentWithin("n", at(5000), at(6500)); got < 3999*time.Millisecond || got > 4*time.Second {
		t.Errorf("from 5000 to 6500 ms: silent for %v, want 4 s", got)
	}
}

// An entry counts as a case where it could have been called twice: its call was not answered, or it was granted again.
func TestCasesOfAtMostOnceAreThoseThatCouldBeCalledAgain(t *testing.T) {
	checked := func(change func(h *History)) int {
		h := good()
		change(h)
		var r report
		calledAtMostOnce(newIndex(h), &r)
		return r.checked
	}
	for want, change := range map[int]func(h *History){
		1: func(*History) {}, // cut off
		0: func(h *History) { callOf(h, 110).Answer = "ok" },
	} {
		if got := checked(change); got != want {
			t.Errorf("%d cases, want %d", got, want)
		}
	}
	again := checked(func(h *History) {
		callOf(h, 110).Answer = "ok"
		h.Grants = append(h.Grants, Grant{Seq: 400, Queue: "once", Key: "#18", Token: 111, Last: 18, Process: "n2", At: at(5000)})
	})
	if again != 1 {
		t.Errorf("granted again: %d cases, want 1", again)
	}
}

func TestCasesOfALimitAreThoseAtTheLimit(t *testing.T) {
	for locks, want := range map[int]int{1: 2, 2: 0} { // the sample of good, and the only grant of work
		h := good()
		h.LocksMax["work"] = locks
		h.Samples[0].Locks = 4 - locks
		var r report
		limitsHold(newIndex(h), &r)
		if r.checked != want || len(r.found) > 0 {
			t.Errorf("a limit of %d: %d cases, want %d; %q", locks, r.checked, want, r.found)
		}
	}
}

func TestTheFirstDeadlineCounts(t *testing.T) {
	for _, c := range []struct{ start, finish, want time.Time }{
		{at(1), at(2), at(1)}, {at(2), at(1), at(1)}, {at(1), time.Time{}, at(1)}, {time.Time{}, at(1), at(1)}, {},
	} {
		if got := (&Push{StartBy: c.start, FinishBy: c.finish}).deadline(); !got.Equal(c.want) {
			t.Errorf("start by %v, finish by %v: %v", c.start, c.finish, got)
		}
	}
}

// Just within what is allowed nothing is reported.
func TestBoundsOfTimesAreThoseThatAreStated(t *testing.T) {
	for name, change := range map[string]func(h *History){
		"a run that ends 2.59 s after finish_by":       func(h *History) { callOf(h, 123).Closed = at(5590) },
		"a run that begins 2.5 s after start_by":       func(h *History) { callOf(h, 123).Begin, callOf(h, 123).Closed = at(3600), at(3700) },
		"an expiry 5.09 s after the deadline":          func(h *History) { endOf(h, 51).At = at(5190) },
		"a run that goes on 2.59 s after a heartbeat":  func(h *History) { callOf(h, 120).Closed = at(5590) },
		"an expiry just before the deadline, by clock": func(h *History) { endOf(h, 51).At = at(90) },
		"a second run of an entry, after start_by": func(h *History) {
			h.Grants = append(h.Grants, Grant{Seq: 88, Queue: "frail", Key: "#54", Token: 124, Last: 54, Process: "n3", At: at(5000)})
			callOf(h, 123).Answer, callOf(h, 123).Closed = "died", at(1100)
			h.Calls = append(h.Calls, Call{Entry: 54, Token: 124, Op: 54, Begin: at(5000), Closed: at(5400), Answer: "died"})
		},
		"a grant 5.08 s after the entry came back": func(h *History) {
			h.Grants = append(h.Grants, Grant{Seq: 88, Queue: "frail", Key: "#52", Token: 124, Last: 52, Process: "n3", At: at(7200)})
		},
		"a schedule that fired 29 s before its pause": func(h *History) { h.CronUntil = at(35_000) },
	} {
		h := good()
		change(h)
		if found := broken(h); len(found) > 0 {
			t.Errorf("%s: %v", name, found)
		}
	}
}

// What two primaries were told apart is not known of either: no batch, cancel or deadline of that time is judged.
func TestNothingIsAskedOfATimeWithTwoPrimaries(t *testing.T) {
	for name, spoil := range map[string]func(h *History){
		"a batch":             func(h *History) { h.Items = nil },
		"a cancel":            func(h *History) { callOf(h, 120).Closed = at(5650) },
		"a run to a deadline": func(h *History) { callOf(h, 123).Closed = at(5650) },
		"a wait":              func(h *History) { endOf(h, 51).At = at(5300) },
	} {
		h := good()
		h.BatchParts = nil
		spoil(h)
		if len(broken(h)) == 0 {
			t.Errorf("%s: nothing is reported without a fork", name)
		}
		h.Forked = [2]time.Time{at(19), at(2000)}
		found := broken(h)
		for _, promise := range []string{
			"parts of a batch are done once", "a requested cancel ends the run", "an entry expires at its deadline",
		} {
			if found[promise] > 0 {
				t.Errorf("%s: %q is reported", name, promise)
			}
		}
	}
}

// Pushes that overlap have no order, what was cancelled need not start, and an entry ahead in line overtakes nothing.
func TestOrderIsAskedOfWhatHasOne(t *testing.T) {
	const keys, queue, overtaken = "entries of a key start in the order of acceptance", "one key's history is that of a queue",
		"no entry in line is overtaken for long"
	for name, change := range map[string]func(h *History){
		"two pushes at a time, of which the later one starts first": func(h *History) {
			pushOf(h, 11).Returned, callOf(h, 101).Begin, callOf(h, 101).Closed = at(12), at(65), at(70)
		},
		"an entry that was cancelled and never started": func(h *History) {
			pushOf(h, 11).Cancel = &Cancel{Called: at(6), Returned: at(8)}
			h.Calls, endOf(h, 11).Outcome = h.Calls[1:], "cancelled"
		},
		"an entry ahead in line that is granted first": func(h *History) {
			overtake(h)
			for i := range h.Places {
				if h.Places[i].Entry == 42 {
					h.Places[i].Position = 40
				}
			}
		},
	} {
		h := good()
		change(h)
		found := broken(h)
		for _, promise := range []string{keys, queue, overtaken} {
			if found[promise] > 0 {
				t.Errorf("%s: %q is reported", name, promise)
			}
		}
	}
}

// A commit that comes late may come after the deadline of its entry, which ends soon after it.
func TestAPushThatIsAnsweredAfterItsDeadlineHasTimeFromThen(t *testing.T) {
	const promise = "an entry expires at its deadline"
	h := good()
	endOf(h, 51).At, pushOf(h, 51).Returned = at(5300), at(2000)
	if n := broken(h)[promise]; n != 0 {
		t.Errorf("an entry that was pushed after its deadline breaks the promise %d times", n)
	}
	endOf(h, 51).At = at(9000)
	if n := broken(h)[promise]; n == 0 {
		t.Error("an entry that waits for 7 s after its late push breaks no promise")
	}
}
