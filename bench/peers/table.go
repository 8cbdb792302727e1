package peers

import (
	"cmp"
	"encoding/csv"
	"fmt"
	"io"
	"slices"
	"strconv"
	"text/tabwriter"
)

// WriteTable prints one table a scenario: medians over the rounds, and the spread of the rate. The columns from client
// on are costs per entry, the client process's greatest memory, and the share of the machine that others took
// meanwhile.
func WriteTable(w io.Writer, scenarios []Scenario, contenders []Command, runs []Run) error {
	for _, s := range scenarios {
		fmt.Fprintf(w, "\n%s: %s\n", s.Name, s.About)
		timed := slices.ContainsFunc(runs, func(r Run) bool { return r.Scenario == s.Name && r.Latency != Latency{} })
		sinceCall := slices.ContainsFunc(runs, func(r Run) bool {
			return r.Scenario == s.Name &&
				r.FromPush != Latency{}
		})
		tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprint(tw, "contender\tentries/s\tmin\tmax\t")
		if timed {
			fmt.Fprint(tw, "p50 ms\tp95\tp99\t")
		}
		if sinceCall {
			fmt.Fprint(tw, "from push p50\tp95\tp99\t")
		}
		fmt.Fprintln(tw, "client us\tserver us\tWAL B\tcommits\tbuffers\tRSS MB\tothers %\t")
		var missing []string
		for _, c := range contenders {
			switch some := of(runs, s.Name, c.Name); {
			case len(some) > 0 && !some[0].Unsupported:
				fmt.Fprintln(tw, c.Name+" "+c.Version+"\t"+row(some, timed, sinceCall))
			case c.Processes <= 1 || len(some) > 0:
				missing = append(missing, c.Name)
			}
		}
		if err := tw.Flush(); err != nil {
			return err
		}
		for _, name := range missing {
			fmt.Fprintf(w, "  %s: not supported\n", name)
		}
	}
	return nil
}

func of(runs []Run, scenario, contender string) []Run {
	return slices.DeleteFunc(slices.Clone(runs), func(r Run) bool {
		return r.Scenario != scenario || r.Contender != contender
	})
}

// row is the cells of one contender.
func row(runs []Run, timed, sinceCall bool) string {
	col := func(value func(Run) float64) []float64 {
		var values []float64
		for _, r := range runs {
			values = append(values, value(r))
		}
		slices.Sort(values)
		return values
	}
	median := func(value func(Run) float64) float64 { return middle(col(value)) }
	perEntry := func(value func(Run) float64) float64 {
		return median(func(r Run) float64 { return value(r) / float64(r.Entries) })
	}
	rate := col(Run.Rate)
	cells := fmt.Sprintf("%.0f\t%.0f\t%.0f\t", middle(rate), rate[0], rate[len(rate)-1])
	latency := func(l func(Run) Latency) {
		for _, at := range []func(Latency) int{
			func(l Latency) int { return l.P50 }, func(l Latency) int { return l.P95 },
			func(l Latency) int { return l.P99 },
		} {
			cells += fmt.Sprintf("%.2f\t", median(func(r Run) float64 { return float64(at(l(r))) / 1000 }))
		}
	}
	if timed {
		latency(func(r Run) Latency { return r.Latency })
	}
	if sinceCall {
		latency(func(r Run) Latency { return r.FromPush })
	}
	return cells + fmt.Sprintf("%.1f\t%.1f\t%.0f\t%.4f\t%.1f\t%.0f\t%.0f\t",
		perEntry(func(r Run) float64 { return r.ClientCPUSeconds * 1e6 }),
		perEntry(func(r Run) float64 { return r.CPUSeconds * 1e6 }),
		perEntry(func(r Run) float64 { return float64(r.WALBytes) }),
		perEntry(func(r Run) float64 { return float64(r.Commits) }),
		perEntry(func(r Run) float64 { return float64(r.Buffers) }),
		median(func(r Run) float64 { return float64(r.ClientRSSBytes) / (1 << 20) }),
		median(func(r Run) float64 { return r.OthersShare * 100 }))
}

// middle is the median of sorted values.
func middle(sorted []float64) float64 {
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// Rate is in entries a second.
func (r Run) Rate() float64 { return float64(r.Entries) / r.Seconds }

// WriteCSV writes every run as one line: totals, not per entry; latencies in microseconds.
func WriteCSV(w io.Writer, runs []Run) error {
	out := csv.NewWriter(w)
	lines := [][]string{{
		"scenario", "contender", "round", "unsupported", "entries", "seconds", "p50_us", "p95_us", "p99_us",
		"from_push_p50_us", "from_push_p95_us", "from_push_p99_us",
		"client_cpu_seconds", "server_cpu_seconds", "wal_bytes", "commits", "buffers", "client_rss_bytes",
		"others_share",
	}}
	for _, r := range runs {
		line := []string{r.Scenario, r.Contender}
		for _, v := range []any{
			r.Round, r.Unsupported, r.Entries, round(r.Seconds),
			r.Latency.P50, r.Latency.P95, r.Latency.P99, r.FromPush.P50, r.FromPush.P95, r.FromPush.P99,
			round(r.ClientCPUSeconds), round(r.CPUSeconds), r.WALBytes, r.Commits, r.Buffers, r.ClientRSSBytes,
			round(r.OthersShare),
		} {
			line = append(line, fmt.Sprint(v))
		}
		lines = append(lines, line)
	}
	return cmp.Or(out.WriteAll(lines), out.Error())
}

func round(v float64) string { return strconv.FormatFloat(v, 'f', 4, 64) }
