package main

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/penstock/penstock/chaos/judge"
)

// span is a time for which a step, or a fault, keeps the recovery of a lock waiting.
type span struct {
	from, to time.Time
}

// The steps between the death of a node and the next grant of a key that it held, in the order in which they
// are charged: a moment that belongs to several is the first one's.
var recoverySteps = []string{
	"lease of the dead node", "database away or locked", "no term of a leader", "recovery suspended",
	"faults at the leader", "recovery itself", "until the next claim",
}

// recovered is one lock of a killed node, and for how long each step kept it waiting.
type recovered struct {
	queue, key  string
	died, freed time.Time
	waits       []time.Duration // by step
	calm        time.Duration   // from the last fault that concerns it until it was freed
	elsewhere   time.Duration   // until the next grant of its key
	retried     bool            // the node had recorded an error: the entry was in line anew when it was due
}

// recoveries follows each lock that a killed node held until it was freed and granted again.
func (s *site) recoveries(h *judge.History) []recovered {
	killed := map[string]time.Time{}
	for _, d := range h.Deaths {
		if d.Killed {
			killed[d.Process] = d.At
		}
	}
	heard := map[string]time.Time{}
	for _, b := range h.Beats {
		heard[b.Process] = later(heard[b.Process], b.At)
	}
	again := map[[2]string][]*judge.Grant{}
	for i := range h.Grants {
		g := &h.Grants[i]
		again[[2]string{g.Queue, g.Key}] = append(again[[2]string{g.Queue, g.Key}], g)
	}
	waits := map[string][]int64{} // for due times, by the key of the lock of a solo entry
	for _, p := range h.Places {
		if p.Position == 0 {
			key := fmt.Sprintf("#%d", p.Entry)
			waits[key] = append(waits[key], p.Seq)
		}
	}
	away, faulty := disturbances(h)
	causes := [][]span{nil, away, withoutTerm(h.Terms), s.suspensions(), faulty}
	var list []recovered
	for i := range h.Grants {
		g := &h.Grants[i]
		died, dead := killed[g.Process]
		if !dead || !g.At.Before(died) || !g.Freed.After(died) {
			continue
		}
		r := recovered{
			queue: g.Queue, key: g.Key, died: died, freed: g.Freed,
			calm: g.Freed.Sub(lastFault(h, died, g.Freed)),
		}
		causes[0] = []span{{died, later(died, heard[g.Process].Add(h.Lease))}}
		r.waits = charge(span{died, g.Freed}, causes)
		r.waits = append(r.waits, 0)
		for _, next := range again[[2]string{g.Queue, g.Key}] {
			if next.Seq > g.FreedSeq {
				r.waits[len(r.waits)-1] = next.At.Sub(g.Freed)
				r.elsewhere = next.At.Sub(died)
				r.retried = slices.ContainsFunc(waits[g.Key], func(seq int64) bool {
					return seq > g.Seq && seq < next.Seq
				})
				break
			}
		}
		list = append(list, r)
	}
	return list
}

// charge splits a time among the causes, the first that holds at a moment, and a rest that is last.
func charge(whole span, causes [][]span) []time.Duration {
	edges := []time.Time{whole.from, whole.to}
	within := make([][]span, len(causes)) // the few of many thousands that matter here
	for i, spans := range causes {
		for _, s := range spans {
			if !s.from.Before(whole.to) || !s.to.After(whole.from) {
				continue
			}
			within[i] = append(within[i], s)
			for _, at := range []time.Time{s.from, s.to} {
				if at.After(whole.from) && at.Before(whole.to) {
					edges = append(edges, at)
				}
			}
		}
	}
	slices.SortFunc(edges, time.Time.Compare)
	waits := make([]time.Duration, len(causes)+1)
	for i := 1; i < len(edges); i++ {
		middle := edges[i-1].Add(edges[i].Sub(edges[i-1]) / 2)
		step := slices.IndexFunc(within, func(spans []span) bool {
			return slices.ContainsFunc(spans, func(s span) bool { return s.from.Before(middle) && s.to.After(middle) })
		})
		if step < 0 {
			step = len(causes)
		}
		waits[step] += edges[i].Sub(edges[i-1])
	}
	return waits
}

// lastFault is the end of the last disturbance of recovery between two times, or the earlier one.
func lastFault(h *judge.History, died, freed time.Time) time.Time {
	last := died
	for _, d := range h.Disturbances {
		if d.From.Before(freed) && d.To.After(died) {
			last = later(last, earlier(d.To, freed))
		}
	}
	return last
}

// atDatabase names the disturbances during which no transaction can go on.
var atDatabase = regexp.MustCompile(`Postgres|^table|max_connections|disk|standby`)

// disturbances are those of the database and those of the leader's own way to it.
func disturbances(h *judge.History) (away, faulty []span) {
	for _, d := range h.Disturbances {
		if atDatabase.MatchString(d.What) {
			away = append(away, span{d.From, d.To})
		} else {
			faulty = append(faulty, span{d.From, d.To})
		}
	}
	return away, faulty
}

// withoutTerm are the times at which no leader was in office.
func withoutTerm(terms []judge.Term) (gaps []span) {
	var until time.Time
	for i, t := range terms {
		if i > 0 && t.At.After(until) {
			gaps = append(gaps, span{until, t.At})
		}
		until = t.At.Add(t.Lease)
		if t.Resigned {
			until = t.At
		}
	}
	return append(gaps, span{until, until.Add(time.Hour)})
}

var (
	suspendedLine = regexp.MustCompile(`^time=(\S+) .*msg="recovery (suspended|resumed)" term=(\d+)`)
	electedLine   = regexp.MustCompile(`^time=(\S+) .*msg=elected `)
)

// suspensions are the times for which the leaders' logs say that recovery freed nothing by intent. One that
// was not resumed ends with the next election.
func (s *site) suspensions() []span {
	type line struct {
		at         time.Time
		what, term string
	}
	var lines []line
	for _, l := range s.leaders {
		logs, _ := filepath.Glob(filepath.Join(s.cfg.logs, l.name+".*.log"))
		for _, name := range logs {
			f, err := os.Open(name)
			if err != nil {
				continue
			}
			for scan := bufio.NewScanner(f); scan.Scan(); {
				found := suspendedLine.FindStringSubmatch(scan.Text())
				if found == nil {
					if found = electedLine.FindStringSubmatch(scan.Text()); found == nil {
						continue
					}
					found = append(found, "elected", "")
				}
				if at, err := time.Parse(time.RFC3339Nano, found[1]); err == nil {
					lines = append(lines, line{at, found[2], found[3]})
				}
			}
			f.Close()
		}
	}
	slices.SortFunc(lines, func(a, b line) int { return a.at.Compare(b.at) })
	var spans []span
	for i, began := range lines {
		if began.what != "suspended" {
			continue
		}
		for _, ended := range lines[i+1:] {
			if ended.what == "elected" || ended.what == "resumed" && ended.term == began.term {
				spans = append(spans, span{began.at, ended.at})
				break
			}
		}
	}
	return spans
}

// reportRecovery prints how long the locks of killed nodes waited in each step until they were freed and
// granted again, and the longest ones by themselves.
func (s *site) reportRecovery(w io.Writer, h *judge.History) {
	list := s.recoveries(h)
	if len(list) == 0 {
		return
	}
	fmt.Fprintf(w, "locks of killed nodes that were freed: %d\n", len(list))
	rows := map[string]func(r recovered) time.Duration{
		"from the death until freed, less the lease": func(r recovered) time.Duration {
			return r.freed.Sub(r.died) - h.Lease
		},
		"from the death until freed":                func(r recovered) time.Duration { return r.freed.Sub(r.died) },
		"from the last fault that concerns it":      func(r recovered) time.Duration { return r.calm },
		"lease and recovery itself, without faults": func(r recovered) time.Duration { return r.waits[0] + r.waits[5] },
	}
	for _, name := range slices.Sorted(maps.Keys(rows)) {
		printWaits(w, name, list, rows[name])
	}
	for _, retried := range []bool{false, true} {
		some := slices.DeleteFunc(slices.Clone(list), func(r recovered) bool { return r.retried != retried })
		name := map[bool]string{false: "at its old place", true: "as it was tried again after an error"}[retried]
		if len(some) > 0 {
			printWaits(w, fmt.Sprintf("from the death until granted again, %s (%d)", name, len(some)), some,
				func(r recovered) time.Duration { return r.elsewhere })
		}
	}
	for i, name := range recoverySteps {
		printWaits(w, "of that: "+name, list, func(r recovered) time.Duration { return r.waits[i] })
	}
	last := slices.MaxFunc(list, func(a, b recovered) int { return cmp.Compare(a.elsewhere, b.elsewhere) })
	fmt.Fprintf(w, "granted again last: key %s of %s\t%v after the death at %s, tried again after an error: %v\n",
		last.key, last.queue, round(last.elsewhere), last.died.UTC().Format(time.TimeOnly), last.retried)
	slices.SortFunc(list, func(a, b recovered) int { return cmp.Compare(b.freed.Sub(b.died), a.freed.Sub(a.died)) })
	seen := map[time.Time]bool{}
	for _, r := range list {
		if seen[r.died] || len(seen) == 5 {
			continue
		}
		seen[r.died] = true
		fmt.Fprintf(w, "death at %s, freed after\t%v", r.died.UTC().Format(time.TimeOnly), round(r.freed.Sub(r.died)))
		for i, name := range recoverySteps {
			if r.waits[i] > 100*time.Millisecond {
				fmt.Fprintf(w, ", %s %v", name, round(r.waits[i]))
			}
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintln(w)
}

// reportRestarts prints how long it took, each time when Postgres took connections again, until the next claim was
// committed, and until a lock that was claimed since had ended. Restarts that another fault of the database followed
// within that time are left out.
func (s *site) reportRestarts(w io.Writer, h *judge.History) {
	var claims, endings []time.Duration
	for _, back := range s.restarts {
		var claim, ending time.Time
		for i := range h.Grants {
			g := &h.Grants[i]
			if g.At.Before(back) {
				continue
			}
			if claim.IsZero() || g.At.Before(claim) {
				claim = g.At
			}
			if !g.Freed.IsZero() && (ending.IsZero() || g.Freed.Before(ending)) {
				ending = g.Freed
			}
		}
		again := slices.ContainsFunc(h.Disturbances, func(d judge.Disturbance) bool {
			return atDatabase.MatchString(d.What) && d.From.After(back) && d.From.Before(ending)
		})
		if !ending.IsZero() && !again {
			claims, endings = append(claims, claim.Sub(back)), append(endings, ending.Sub(back))
		}
	}
	if len(claims) == 0 {
		return
	}
	fmt.Fprintf(w, "Postgres was back\t%d times\n", len(claims))
	for _, waits := range []struct {
		name string
		list []time.Duration
	}{{"from then until the next claim", claims}, {"from then until such a lock ended", endings}} {
		slices.Sort(waits.list)
		last := len(waits.list) - 1
		fmt.Fprintf(w, "%s\tp50 %v\tlongest %v\n", waits.name, round(waits.list[last/2]), round(waits.list[last]))
	}
	fmt.Fprintln(w)
}

func round(d time.Duration) time.Duration { return d.Round(time.Millisecond) }

func printWaits(w io.Writer, name string, list []recovered, wait func(recovered) time.Duration) {
	waits := make([]time.Duration, len(list))
	for i, r := range list {
		waits[i] = wait(r)
	}
	slices.Sort(waits)
	at := func(percent int) time.Duration { return round(waits[len(waits)*percent/100]) }
	fmt.Fprintf(w, "%s\tp50 %v\tp99 %v\tlongest %v\n", name, at(50), at(99), round(waits[len(waits)-1]))
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
