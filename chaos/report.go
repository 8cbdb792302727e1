package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/penstock/penstock/chaos/judge"
	"github.com/penstock/penstock/chaos/pgproxy"
)

// verdict counts what speaks against a run: promises that were broken, and what is missing to say that they held, such
// as a case of one.
type verdict struct{ broken, missing int }

// report prints what was done and what was found.
func (s *site) report(
	out io.Writer,
	p *plan,
	h *judge.History,
	findings []judge.Finding,
	took time.Duration,
) (v verdict) {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintf(
		w,
		"\nseed %d, %v of load and faults, %d operations at %.0f a second, %d leaders, %d task nodes, lease %v\n",
		s.cfg.seed,
		took.Round(time.Second),
		len(h.Pushes),
		s.cfg.rate,
		s.cfg.leaders,
		s.cfg.nodes,
		s.cfg.lease,
	)
	done := 0
	for _, e := range h.Endings {
		if e.Outcome == "done" {
			done++
		}
	}
	fmt.Fprintf(
		w,
		"%d entries ended, %d of them done; %d calls of workers, %d grants, %d heartbeats; drained in %v\n\n",
		len(
			h.Endings,
		),
		done,
		len(h.Calls),
		len(h.Grants),
		len(h.Beats),
		h.Drained.Round(100*time.Millisecond),
	)
	s.reportFaults(w, p)
	s.reportCommits(w)
	s.reportErrors(w)
	s.reportRecovery(w, h)
	s.reportRestarts(w, h)
	s.reportFootprint(w)
	if calm, all := judge.CalmTime(h); all > 0 {
		fmt.Fprintf(w, "without disturbances: %v of %v, for the promises about times of lanes\n\n",
			round(calm), round(all))
	}
	fmt.Fprintln(w, "promise\tchecked\tbroken")
	for _, f := range findings {
		fmt.Fprintf(w, "%s\t%d\t%d\n", f.Name, f.Checked, f.Broken)
		if f.Broken > 0 {
			v.broken++
		}
	}
	w.Flush()
	reportFindings(out, findings)
	s.reportLateness(out)
	for _, missing := range s.missing(h, findings, took) {
		fmt.Fprintf(out, "PROBLEM %s\n", missing)
		v.missing++
	}
	for _, problem := range s.problems {
		fmt.Fprintf(out, "PROBLEM %v\n", problem)
		v.missing++
	}
	return v
}

// reportFindings prints what broke promises, and of which promises about times without disturbances there is no case.
func reportFindings(out io.Writer, findings []judge.Finding) {
	for _, f := range findings {
		for _, e := range f.Examples {
			fmt.Fprintf(out, "BROKEN  %s: %s\n", f.Name, e)
		}
	}
	for _, f := range findings {
		if f.Checked == 0 && (slices.Contains(inCalm, f.Name) || slices.Contains(judge.OfQuietMachines, f.Name)) {
			fmt.Fprintf(out, "NO CASE %s: this run shows nothing about it\n", f.Name)
		}
	}
}

// longRun is how long a run lasts at least that must have a case of each promise and of each kind of fault.
const longRun = 5 * time.Minute

// timed are promises about times of the server, of which there are none where its clock jumps.
var timed = []string{
	"nothing runs before it is due", "a due entry comes in line", "rates are never exceeded", overtaken,
	"an entry expires at its deadline",
}

// overtaken has a case only where an entry waits in line for longer than 15 s.
const overtaken = "no entry in line is overtaken for long"

// inCalm are promises whose cases are seconds on end without a disturbance, of the leaders as well, which not every
// long run has: with the usual faults the programs are answered two or three errors a second. A release run has to have
// them.
var inCalm = []string{overtaken, "a due entry comes in line", "an entry expires at its deadline"}

// calledOnce has no case beside programs of another build, see onceQueue.
const calledOnce = "an entry that must not run twice is called once"

// missingAtAll names what a run of any length must have met to show anything: clients that were told of entries, calls
// of workers, heartbeats of each process that called workers, and where programs are killed one that was. Without
// heartbeats a process is silent for ever, which excuses every overlap and every crash: the recorder is at fault then.
func missingAtAll(h *judge.History, kills bool) (list []string) {
	if !slices.ContainsFunc(h.Pushes, func(p judge.Push) bool { return p.Told }) {
		list = append(list, "no client was told that an entry was accepted")
	}
	if len(h.Calls) == 0 {
		list = append(list, "no worker was called")
	}
	if kills && !slices.ContainsFunc(h.Deaths, func(d judge.Death) bool { return d.Killed }) {
		list = append(list, "no program was killed")
	}
	for _, process := range judge.Unheard(h) {
		list = append(list, "no heartbeat of "+process+" was recorded, which was granted locks")
	}
	return append(list, refusedAll(h)...)
}

// refusedAll names the kinds of pushes, by their queue and times, of which each one was refused: the load makes none
// that is to be refused.
func refusedAll(h *judge.History) (list []string) {
	type kind struct {
		queue                  string
		due, startBy, finishBy bool
	}
	refused, told := map[kind]int{}, map[kind]bool{}
	for _, p := range h.Pushes {
		k := kind{p.Queue, !p.Due.IsZero(), !p.StartBy.IsZero(), !p.FinishBy.IsZero()}
		told[k] = told[k] || p.Told
		if p.Refused {
			refused[k]++
		}
	}
	for k, n := range refused {
		if !told[k] {
			list = append(list, fmt.Sprintf(
				"each of the pushes to %s with due_at %t, start_by %t and finish_by %t was refused, %d",
				k.queue, k.due, k.startBy, k.finishBy, n))
		}
	}
	slices.Sort(list)
	return list
}

// missing names the promises that had no case, and the faults at transactions that never took effect: a run
// without them shows nothing about either.
func (s *site) missing(h *judge.History, findings []judge.Finding, took time.Duration) (list []string) {
	list = missingAtAll(h, s.cfg.faults && !s.cfg.holds)
	if took < longRun && !s.cfg.release || !s.cfg.faults || s.cfg.kills || s.cfg.rate < 5 {
		return list
	}
	for _, f := range findings {
		if f.Name == calledOnce && s.cfg.before != "" {
			continue
		}
		if s.cfg.gateways == 0 && slices.Contains(judge.OfGateways, f.Name) {
			continue
		}
		if f.Checked == 0 && (!s.cfg.clock || !slices.Contains(timed, f.Name)) &&
			(s.cfg.release || !slices.Contains(inCalm, f.Name)) && !slices.Contains(judge.OfQuietMachines, f.Name) {
			list = append(list, "no case of the promise: "+f.Name)
		}
	}
	s.policy.mu.Lock()
	for _, kind := range pgproxy.Frequent {
		if s.policy.lost(kind) == 0 {
			list = append(list, fmt.Sprintf("no answer to a %s was swallowed", kind))
		}
	}
	s.policy.mu.Unlock()
	if s.cfg.release {
		list = append(list, s.missingForRelease()...)
	}
	return list
}

func (s *site) reportFaults(w io.Writer, p *plan) {
	fmt.Fprintln(w, "fault\ttimes")
	names := make([]string, 0, len(p.done))
	for name := range p.done {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Fprintf(w, "%s\t%d\n", name, p.done[name])
	}
	deaths, kills, starts, others, dropped := 0, 0, 0, 0, int64(0)
	for _, one := range s.all() {
		deaths, kills = deaths+len(one.deaths), kills+one.kills()
		starts, others = starts+one.starts, others+one.others
		dropped += one.link.Dropped()
	}
	for _, at := range slices.Sorted(maps.Keys(s.points)) {
		fmt.Fprintf(w, "failpoint: kill -9 %s\t%d\n", at, s.points[at])
	}
	fmt.Fprintf(w, "all deaths, stops and cuts beyond half a lease\t%d\nof these by SIGKILL\t%d\n", deaths, kills)
	fmt.Fprintf(w, "starts of programs\t%d\nof these of the other build\t%d\n", starts, others)
	fmt.Fprintf(w, "notifications dropped\t%d\nthe harness itself was late by up to\t%v\n\n", dropped,
		s.lateness.Round(time.Millisecond))
}

// reportCommits prints the faults at transactions, a row a fault and a column a kind.
func (s *site) reportCommits(w io.Writer) {
	s.policy.mu.Lock()
	defer s.policy.mu.Unlock()
	header := make([]string, 0, len(pgproxy.Kinds))
	for _, k := range pgproxy.Kinds {
		header = append(header, string(k))
	}
	fmt.Fprintf(w, "at transactions\t%s\n", strings.Join(header, "\t"))
	row := func(name string, count func(k pgproxy.Kind) int) {
		cells := make([]string, 0, len(pgproxy.Kinds))
		for _, k := range pgproxy.Kinds {
			cells = append(cells, fmt.Sprint(count(k)))
		}
		fmt.Fprintf(w, "%s\t%s\n", name, strings.Join(cells, "\t"))
	}
	row("committed", func(k pgproxy.Kind) int { return s.policy.commits[k] })
	for f := pgproxy.CutBefore; f <= pgproxy.KillAfter; f++ {
		row(f.String(), func(k pgproxy.Kind) int { return s.policy.happens[faultKey{k, f.String()}] })
	}
	fmt.Fprintln(w)
}

// reportErrors prints how many pairs of a call site and an SQLSTATE were tried.
func (s *site) reportErrors(w io.Writer) {
	s.policy.mu.Lock()
	defer s.policy.mu.Unlock()
	pairs, injected, whole := 0, 0, 0
	for site := range s.policy.seen {
		codes := s.policy.tried[site]
		pairs += len(codes)
		if len(codes) == len(sqlstates) {
			whole++
		}
		for _, n := range codes {
			injected += n
		}
	}
	fmt.Fprintf(
		w,
		"SQLSTATEs injected at %d call sites: %d, %d of %d pairs of site and code; all %d codes at %d sites\n\n",
		len(s.policy.seen),
		injected,
		pairs,
		len(s.policy.seen)*len(sqlstates),
		len(sqlstates),
		whole,
	)
}
