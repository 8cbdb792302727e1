package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/charmbracelet/x/ansi"

	"github.com/penstock/penstock/internal/oneline"
	"github.com/penstock/penstock/pkg/operator"
)

// page is one page of top: a title, and the lines of its table.
type page struct {
	title string
	draw  func(a *app, s *operator.Snapshot, order int) string
}

var pages = []page{
	{"queues", func(a *app, s *operator.Snapshot, order int) string { return a.topQueues(s, order) }},
	{"lanes", func(a *app, s *operator.Snapshot, _ int) string {
		return a.table(columns2text(laneColumns(), s.Lanes, false))
	}},
	{"nodes", func(a *app, s *operator.Snapshot, _ int) string {
		return a.table(columns2text(a.at(s).nodeColumns(), s.Nodes, false))
	}},
	{"locks", func(a *app, s *operator.Snapshot, _ int) string {
		return a.table(columns2text(lockColumns(), s.Locks, false))
	}},
}

// at is the app with the clock of a snapshot, so that ages fit the rest of the picture.
func (a *app) at(s *operator.Snapshot) *app {
	b := *a
	b.now = s.At.Local
	return &b
}

// ranked is a queue with its rates.
type ranked struct {
	operator.Queue
	rate *operator.Rate
}

// orders are the orders of the queues; the first is the default.
var orders = []struct {
	name    string
	compare func(x, y ranked) int
}{
	{"head age", func(x, y ranked) int { return cmp.Compare(headAge(y), headAge(x)) }},
	{"out/s", func(x, y ranked) int { return cmp.Compare(y.out(), x.out()) }},
	{"waiting", func(x, y ranked) int { return cmp.Compare(y.AwaitingCompute, x.AwaitingCompute) }},
	{"failed", func(x, y ranked) int { return cmp.Compare(y.Failed, x.Failed) }},
	{"name", func(ranked, ranked) int { return 0 }},
}

func headAge(r ranked) float64 {
	if r.HeadAgeSeconds == nil {
		return -1
	}
	return *r.HeadAgeSeconds
}

func (r ranked) out() float64 {
	if r.rate == nil {
		return -1
	}
	return r.rate.Out
}

func (a *app) topQueues(s *operator.Snapshot, order int) string {
	rows := make([]ranked, len(s.Queues))
	for i, q := range s.Queues {
		rows[i].Queue = q
		for j := range s.Rates {
			if s.Rates[j].Queue == q.Name {
				rows[i].rate = &s.Rates[j]
			}
		}
	}
	slices.SortStableFunc(rows, func(x, y ranked) int {
		return cmp.Or(orders[order].compare(x, y), strings.Compare(x.Name, y.Name))
	})
	var columns []column[ranked]
	for _, c := range queueColumns() {
		columns = append(columns, column[ranked]{
			title: c.title, right: c.right, wide: c.wide,
			text: func(r ranked) string { return c.text(r.Queue) },
		})
		if c.title == "FAILED" {
			columns = append(columns,
				column[ranked]{
					title: "IN/S", right: true,
					text: func(r ranked) string { return perSecond(r.rate, false) },
				},
				column[ranked]{
					title: "OUT/S", right: true,
					text: func(r ranked) string { return perSecond(r.rate, true) },
				})
		}
	}
	return a.table(columns2text(columns, rows, a.format == "wide"))
}

func perSecond(r *operator.Rate, out bool) string {
	if r == nil {
		return ""
	}
	n := r.In
	if out {
		n = r.Out
	}
	if n == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f", n)
}

// headline is the state of the whole in two lines.
func (a *app) headline(s *operator.Snapshot) string {
	leader := a.paint(red, "no leader")
	if l := s.Leader; l != nil && l.Live {
		leader = fmt.Sprintf("leader %s (term %d)", oneline.Of(l.Holder), l.Term)
	} else if l != nil {
		leader = a.paint(red,
			fmt.Sprintf("no leader: %s fell silent %s ago", oneline.Of(l.Holder), age(l.SilentSeconds)))
	}
	states, gateways := map[string]int{}, 0
	for _, n := range s.Nodes {
		switch {
		case n.Kind != "gateway":
			states[n.State]++
		case n.State == "live":
			gateways++
		}
	}
	nodes := fmt.Sprintf("nodes %d live", states["live"])
	for _, state := range []string{"draining", "dead"} {
		if states[state] > 0 {
			nodes += ", " + a.paint(cellColours[state], fmt.Sprintf("%d %s", states[state], state))
		}
	}
	if gateways > 0 {
		nodes += fmt.Sprintf("  gateways %d live", gateways)
	}
	running, failed, in, out := int64(0), int64(0), 0.0, 0.0
	for _, q := range s.Queues {
		running, failed = running+q.Computing, failed+q.Failed
	}
	for _, r := range s.Rates {
		in, out = in+r.In, out+r.Out
	}
	unknown := ""
	if s.Unmeasured > 0 {
		unknown = fmt.Sprintf("  (%s not measured yet)", many(int64(s.Unmeasured), "queue", "queues"))
	}
	v := s.Server
	return fmt.Sprintf("%s  %s  %s  computing %d  waiting %d  failed %d%s  in %.1f/s  out %.1f/s\n",
		a.paint(bold, s.At.UTC().Format("2006-01-02 15:04:05Z")),
		leader, nodes, running, s.Waiting, failed, unknown, in, out) +
		fmt.Sprintf("connections %d/%d  horizon %s  dead rows %d  notify queue %.0f %%\n", v.Connections,
			v.MaxConnections, age(v.HorizonSeconds),
			v.DeadTuples, v.NotifyUsage*100)
}

// topPicture is everything at once, as --once prints it: long tables are cut to ten rows.
func (a *app) topPicture(s *operator.Snapshot) string {
	picture := a.headline(s)
	for i, p := range pages {
		text := p.draw(a, s, 0)
		lines := strings.SplitAfter(strings.TrimSuffix(text, "\n"), "\n")
		if len(lines) == 1 {
			continue // only titles
		}
		if i > 0 && len(lines) > 11 {
			lines = append(lines[:11], fmt.Sprintf("... and %d more", len(lines)-11))
		}
		picture += "\n" + a.paint(bold, p.title) + "\n" + strings.Join(lines, "") + "\n"
	}
	return picture
}

// draw is the picture of the live view: one page, cut to the terminal.
func (t *top) draw() string {
	if t.snapshot == nil {
		if t.err != nil {
			return t.a.paint(red, "cannot read: "+oneline.Of(t.err.Error())) + "\ntrying again; q quits\n"
		}
		return "reading ...\n"
	}
	var tabs []string
	for i, p := range pages {
		name := fmt.Sprintf("%d %s", i+1, p.title)
		if i == t.page {
			name = t.a.paint("7", " "+name+" ")
		}
		tabs = append(tabs, name)
	}
	state := fmt.Sprintf("every %s, by %s", t.every, orders[t.order].name)
	if t.frozen {
		state += ", " + t.a.paint(yellow, "frozen")
	}
	if t.err != nil {
		state = t.a.paint(red, "cannot read: "+oneline.Of(t.err.Error()))
	}
	head := t.a.headline(t.snapshot) + strings.Join(tabs, "  ") + "    " + state + "\n\n"
	rows := strings.Split(strings.TrimSuffix(pages[t.page].draw(t.a, t.snapshot, t.order), "\n"), "\n")
	// The titles stay, the rows below them scroll; the last page stays full.
	room := max(1, t.height-strings.Count(head, "\n")-1)
	t.offset = max(0, min(t.offset, len(rows)-1-room))
	visible := rows[1+t.offset : min(len(rows), 1+t.offset+room)]
	lines := append(strings.Split(head+rows[0], "\n"), visible...)
	for i := range lines {
		lines[i] = ansi.Truncate(lines[i], t.width, "…")
	}
	return strings.Join(lines, "\n")
}
