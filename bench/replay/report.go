package replay

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
)

// Class is tenants of about the same weight, and how long their requests waited, in seconds.
type Class struct {
	Name              string
	Tenants, Requests int
	P50, P95, P99     float64
}

// Report is what an algorithm made of a trace.
type Report struct {
	Classes []Class
	// Served is Jain's index of the part of its time in the system that a tenant was served: 1 if all are
	// alike. Attained is Jain's index of the service that tenants got in a minute through which all of them
	// waited, averaged over such minutes.
	Served, Attained float64
	Busy             float64 // part of all slot-seconds
	Missed           float64 // slot-seconds that were idle while a request waited
}

// classes are by the number of a tenant's requests.
var classes = []struct {
	name  string
	least int
}{{"heavy (100 and more)", 100}, {"middling (10 to 99)", 10}, {"light (under 10)", 0}}

// Judge says how an outcome treated the tenants.
func Judge(trace []Request, c Config, o Outcome) Report {
	of := map[string][]int{}
	for i, r := range trace {
		of[r.Tenant] = append(of[r.Tenant], i)
	}
	all := Class{Name: "all"}
	waits := make([][]float64, len(classes)+1)
	r := Report{Classes: make([]Class, len(classes))}
	var served []float64
	for _, requests := range of {
		class := slices.IndexFunc(classes, func(c struct {
			name  string
			least int
		},
		) bool {
			return len(requests) >= c.least
		})
		r.Classes[class].Tenants++
		service, wait := 0.0, 0.0
		for _, i := range requests {
			service, wait = service+trace[i].Service, wait+o.Waits[i]
			waits[class] = append(waits[class], o.Waits[i])
		}
		served = append(served, service/(service+wait))
	}
	for i := range classes {
		r.Classes[i].Name = classes[i].name
		r.Classes[i].measure(waits[i])
		all.Tenants += r.Classes[i].Tenants
		waits[len(classes)] = append(waits[len(classes)], waits[i]...)
	}
	all.measure(waits[len(classes)])
	r.Classes = append(r.Classes, all)
	r.Served, r.Attained = jain(served), attained(trace, of, o)
	r.Busy, r.Missed = 1-o.Idle/(o.Span*float64(c.Nodes*c.Slots)), o.Missed
	return r
}

func (c *Class) measure(waits []float64) {
	slices.Sort(waits)
	at := func(q float64) float64 {
		if len(waits) == 0 {
			return 0
		}
		return waits[min(len(waits)-1, int(q*float64(len(waits))))]
	}
	c.Requests, c.P50, c.P95, c.P99 = len(waits), at(0.5), at(0.95), at(0.99)
}

// jain is the fairness index of Jain, Chiu and Hawe 1984: 1 if all are equal, 1/n if one has all.
func jain(values []float64) float64 {
	sum, squares := 0.0, 0.0
	for _, v := range values {
		sum, squares = sum+v, squares+v*v
	}
	if squares == 0 {
		return 1
	}
	return sum * sum / squares / float64(len(values))
}

// attained averages Jain's index over the minutes in which two tenants or more waited from beginning to end.
func attained(trace []Request, of map[string][]int, o Outcome) float64 {
	const window = 60.0
	got := map[int][]float64{} // by the number of the window
	for _, requests := range of {
		for w := range throughout(trace, requests, o, window) {
			from := float64(w) * window
			sum := 0.0
			for _, i := range requests {
				sum += max(0, min(from+window, o.Began[i]+trace[i].Service)-max(from, o.Began[i]))
			}
			got[w] = append(got[w], sum)
		}
	}
	sum, n := 0.0, 0
	for _, values := range got {
		if len(values) > 1 {
			sum, n = sum+jain(values), n+1
		}
	}
	if n == 0 {
		return 1
	}
	return sum / float64(n)
}

// throughout is the windows all through which a tenant had a request waiting.
func throughout(trace []Request, requests []int, o Outcome, window float64) map[int]bool {
	windows := map[int]bool{}
	from, to := -1.0, -1.0 // of waiting without a gap
	flush := func() {
		for w := int(from/window) + 1; float64(w+1)*window <= to; w++ {
			windows[w] = true
		}
	}
	for _, i := range requests { // within a flow they begin in the order in which they came
		if trace[i].At > to {
			flush()
			from = trace[i].At
		}
		to = max(to, o.Began[i])
	}
	flush()
	return windows
}

// Write prints reports side by side, by the names of their algorithms.
func Write(out io.Writer, names []string, reports []Report) {
	table := tabwriter.NewWriter(out, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "algorithm\ttenants\t\trequests\twait p50 s\tp95\tp99\t")
	for i, r := range reports {
		for _, c := range r.Classes {
			fmt.Fprintf(table, "%s\t%s\t%d\t%d\t%.1f\t%.1f\t%.1f\t\n", names[i], c.Name, c.Tenants, c.Requests, c.P50,
				c.P95, c.P99)
		}
	}
	fmt.Fprintln(table, "\t\t\t\t\t\t\t")
	fmt.Fprintln(table, "algorithm\tJain, time served\tJain, service of those that wait\tslots busy\tidle slot-s "+
		"while work waited\t")
	for i, r := range reports {
		fmt.Fprintf(table, "%s\t%.3f\t%.3f\t%.1f %%\t%.1f\t\n", names[i], r.Served, r.Attained, 100*r.Busy, r.Missed)
	}
	_ = table.Flush()
}
