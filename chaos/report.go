package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/penstock/penstock/chaos/judge"
	"github.com/penstock/penstock/chaos/pgproxy"
)

// report prints what was done and what was found, and returns how many promises were broken.
func (s *site) report(
	out io.Writer,
	p *plan,
	h *judge.History,
	findings []judge.Finding,
	took time.Duration,
) (broken int) {
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
	reportRecovery(w, h)
	fmt.Fprintln(w, "promise\tchecked\tbroken")
	for _, f := range findings {
		fmt.Fprintf(w, "%s\t%d\t%d\n", f.Name, f.Checked, f.Broken)
		if f.Broken > 0 {
			broken++
		}
	}
	w.Flush()
	for _, f := range findings {
		for _, e := range f.Examples {
			fmt.Fprintf(out, "BROKEN  %s: %s\n", f.Name, e)
		}
	}
	for _, problem := range s.problems {
		fmt.Fprintf(out, "PROBLEM %v\n", problem)
		broken++
	}
	return broken
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
	kills, starts := 0, 0
	for _, one := range s.all() {
		kills += len(one.deaths)
		starts += one.starts
	}
	fmt.Fprintf(
		w,
		"all deaths, stops and cuts beyond half a lease\t%d\nstarts of programs\t%d\n\n",
		kills,
		starts,
	)
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

// reportRecovery prints how long the locks of a killed node were held after its death, until they were freed.
func reportRecovery(w io.Writer, h *judge.History) {
	killed := map[string]time.Time{}
	for _, d := range h.Deaths {
		if d.Killed {
			killed[d.Process] = d.At
		}
	}
	var waits []time.Duration
	for i := range h.Grants {
		g := &h.Grants[i]
		died, dead := killed[g.Process]
		if dead && g.At.Before(died) && g.Freed.After(died) {
			waits = append(waits, g.Freed.Sub(died))
		}
	}
	if len(waits) == 0 {
		return
	}
	slices.Sort(waits)
	at := func(percent int) time.Duration { return waits[len(waits)*percent/100].Round(time.Millisecond) }
	fmt.Fprintf(w, "from the death of a node until its locks were freed: %d locks, p50 %v, p99 %v, longest %v\n\n",
		len(waits), at(50), at(99), waits[len(waits)-1].Round(time.Millisecond))
}
