package sim

import (
	"fmt"
	"slices"
	"time"
)

// judge returns which promises the simulation found broken. It goes by what the worker saw, by what
// the client was told and by the committed events of the store.
func (w *world) judge() (violations []string) {
	bad := func(format string, args ...any) { violations = append(violations, fmt.Sprintf(format, args...)) }
	t := w.store.tables
	ends, tokens, granted := map[int64]int{}, map[lockKey]int64{}, map[int64]bool{}
	ran := map[[2]int64]*run{} // by entry and token
	for _, r := range w.runs {
		ran[[2]int64{r.entry, r.token}] = r
	}
	for _, e := range t.events {
		switch e.what {
		case "ended":
			if ends[e.entry]++; ends[e.entry] > 1 {
				bad("entry %d ended twice", e.entry)
			}
			switch r := ran[[2]int64{e.entry, e.token}]; {
			case e.token == 0: // ended by recovery, as one that kills its nodes
			case r == nil:
				bad("entry %d is %s under token %d, and did not run under it", e.entry, e.how, e.token)
			case r.well != (e.how == "done"):
				bad("entry %d is %s under token %d, and its run ended well: %v", e.entry, e.how, e.token, r.well)
			}
		case "granted":
			k := lockKey{e.queue, e.key}
			if e.token <= tokens[k] {
				bad("key %s was granted token %d after %d", e.key, e.token, tokens[k])
			}
			tokens[k], granted[e.token] = e.token, true
		}
	}
	for id, told := range w.told {
		if _, waits := t.entries[id]; told && ends[id] == 0 && !waits {
			bad("entry %d was accepted and is gone without an outcome", id)
		}
	}
	for _, found := range t.broken() {
		bad("%s", found)
	}
	for _, r := range w.runs {
		if !granted[r.token] {
			bad("entry %d ran under token %d, which was never committed", r.entry, r.token)
		}
	}
	if !w.drained {
		bad("%d entries are left %v after the faults", len(t.entries), calmMax)
	}
	w.judgeOverlaps(bad)
	w.judgeOrder(bad)
	w.judgeReruns(bad)
	w.judgeMarks(bad)
	slices.Sort(violations)
	return violations
}

// silence is for how long the node that holds a token had no committed heartbeat at a moment.
func (w *world) silence(token int64, at time.Time) time.Duration {
	var node int64
	for _, e := range w.store.tables.events {
		if e.what == "granted" && e.token == token {
			node = e.node
		}
	}
	var last time.Time
	for _, e := range w.store.tables.events {
		if e.what == "beat" && e.node == node && !e.at.After(at) {
			last = e.at
		}
	}
	return at.Sub(last)
}

// lost is when the lock under which a run began was freed, or otherwise when another run began at a time. The silence
// of the run's node counts at that moment. The next grant of the key may come much later, after the node was heard
// again, and the node hears of its loss later still; its handler may then take a while to end.
func (w *world) lost(r *run, began time.Time) time.Time {
	for _, e := range w.store.tables.events {
		if e.what == "freed" && e.key == r.key && e.token == r.token && !e.at.After(began) {
			return e.at
		}
	}
	return began
}

// judgeOverlaps finds runs of a key beside each other: only a node that was silent for a lease may go
// on with what another one was given.
func (w *world) judgeOverlaps(bad func(string, ...any)) {
	for i, later := range w.runs {
		for _, earlier := range w.runs[:i] {
			ended := earlier.ended
			if up, died := earlier.process.alive(); !up && (ended.IsZero() || died.Before(ended)) {
				ended = died
			}
			if earlier.key != later.key || !ended.IsZero() && !ended.After(later.began) {
				continue
			}
			silent := w.silence(earlier.token, w.lost(earlier, later.began))
			if silent < lease || earlier.token == later.token {
				bad(
					"key %s: entry %d ran under token %d beside entry %d under token %d, whose node was silent for %v",
					later.key,
					later.entry,
					later.token,
					earlier.entry,
					earlier.token,
					silent,
				)
			}
		}
	}
}

// judgeOrder finds entries of a key that started before older ones.
func (w *world) judgeOrder(bad func(string, ...any)) {
	newest := map[string]int64{}
	started := map[int64]bool{}
	for _, r := range w.runs {
		if r.key[0] == '#' || started[r.entry] {
			continue
		}
		started[r.entry] = true
		if r.entry < newest[r.key] {
			bad("key %s: entry %d started after entry %d, which was accepted later", r.key, r.entry, newest[r.key])
		}
		newest[r.key] = max(newest[r.key], r.entry)
	}
}

// judgeReruns finds entries of a key that ran before an older one came to its next run. An entry for which nothing was
// recorded under the token of a run is at its place again; until it has ended or is retried, a later token of the key
// runs it first.
func (w *world) judgeReruns(bad func(string, ...any)) {
	granted, recorded := map[int64]int{}, map[int64][]int{} // places in the list of events, by token and by entry
	events := w.store.tables.events
	for i, e := range events {
		switch e.what {
		case "granted":
			granted[e.token] = i
		case "ended", "retried":
			recorded[e.entry] = append(recorded[e.entry], i)
		}
	}
	for i, r := range w.runs {
		if r.key[0] == '#' {
			continue
		}
		for _, later := range w.runs[i+1:] {
			if later.key != r.key || later.entry <= r.entry || later.token <= r.token {
				continue
			}
			again := slices.ContainsFunc(w.runs, func(o *run) bool {
				return o.entry == r.entry && o.token > r.token && o.token <= later.token && !o.began.After(later.began)
			})
			lifted := slices.ContainsFunc(recorded[r.entry], func(at int) bool {
				return events[at].token == r.token || at > granted[r.token] && at < granted[later.token]
			})
			if !again && !lifted {
				bad("key %s: entry %d ran under token %d, of which nothing was recorded, and entry %d under token %d "+
					"before it ran again", r.key, r.entry, r.token, later.entry, later.token)
				break
			}
		}
	}
}

// grant is an entry under a token.
type grant struct{ entry, token int64 }

// judgeMarks finds runs that were not told that their entry may have run: recovery had ended the lock of an earlier run
// that had begun, and whose end was not recorded.
func (w *world) judgeMarks(bad func(string, ...any)) {
	recovered, recorded := map[int64]time.Time{}, map[grant]bool{}
	for _, e := range w.store.tables.events {
		switch {
		case e.what == "freed" && e.how == "recovered":
			recovered[e.token] = e.at
		case e.what == "retried":
			recorded[grant{e.entry, e.token}] = true
		}
	}
	for _, earlier := range w.runs {
		freed, lost := recovered[earlier.token]
		if !lost || !earlier.began.Before(freed) || recorded[grant{earlier.entry, earlier.token}] {
			continue
		}
		for _, later := range w.runs {
			if later.entry == earlier.entry && later.token > earlier.token && !later.mayHaveRun {
				bad("entry %d ran under token %d, which recovery took, and under token %d without the mark "+
					"that it may have run", later.entry, earlier.token, later.token)
			}
		}
	}
}
