package web

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/operator"
)

// shell is the state of the platform that every page displays.
type shell struct {
	Leader    *operator.Leader
	HasLeader bool // Leader could be read; nil is then that there was never one
	HasNodes  bool // the numbers of nodes could be read
	Nodes     int  // live
	Draining  int
	Dead      int
	MoreNodes bool // than were counted
	Pauses    []operator.Pause
	Attention int // degradations
	Critical  bool
	Outage    *outage
}

// outage tells that a page displays the past.
type outage struct {
	At     time.Time // of the oldest value on the page
	Text   string
	Advice string
}

// trouble is the page in place of one that could not be read.
type trouble struct {
	Status int
	Head   string
	Text   string
	Advice string
}

const (
	slowText   = "The database took longer than 2 s to answer."
	slowAdvice = "Narrow the page: choose one queue, a state, or a shorter time. The page goes on trying."
	downText   = "The database does not answer."
	downAdvice = "The page tries again every second and goes on by itself. Work that runs is not affected " +
		"by this page."
)

func outageOf(err error, at time.Time) *outage {
	if slow(err) {
		return &outage{At: at, Text: slowText, Advice: slowAdvice}
	}
	return &outage{At: at, Text: downText, Advice: downAdvice}
}

// troubleOf says what an error means for a visitor. The text of an unexpected error goes to the log
// alone.
func (d *Dashboard) troubleOf(err error, status int) trouble {
	t := trouble{Status: status, Head: http.StatusText(status), Text: textOf(err)}
	switch {
	case slow(err):
		t.Head, t.Text, t.Advice = "No answer in time", slowText, slowAdvice
	case status == http.StatusServiceUnavailable:
		t.Head, t.Text, t.Advice = "No answer", downText, downAdvice
	case status == http.StatusInternalServerError:
		d.cfg.Log.Error("read a page", "error", err)
		t.Head, t.Text = "Not readable", "This page could not be read; the log of the leader has the reason."
	}
	return t
}

// sentence writes the message of an error with a capital letter and a full stop.
func sentence(text string) string {
	if text == "" {
		return ""
	}
	return strings.ToUpper(text[:1]) + strings.TrimRight(text[1:], ".") + "."
}

// shell reads the state that every page displays. What cannot be read is left out: the page itself
// says why.
func (d *Dashboard) shell(ctx context.Context) shell {
	var s shell
	leader, err := cached(ctx, d, "leader", beat, d.db.Leader)
	if err == nil {
		s.Leader, s.HasLeader = leader, true
	}
	nodes, err := d.nodes(ctx)
	s.HasNodes = err == nil
	s.MoreNodes = len(nodes) >= nodesMax
	for _, n := range nodes {
		switch {
		case n.Kind == "gateway":
		case n.State == "dead":
			s.Dead++
		case n.State == "draining":
			s.Draining++
		default:
			s.Nodes++
		}
	}
	s.Pauses, _ = d.pauses(ctx)
	found, _ := d.degradations(ctx)
	s.Attention = len(found)
	s.Critical = slices.ContainsFunc(found, func(g operator.Degradation) bool { return g.Critical })
	return s
}

// How many are read for all pages.
const (
	pausesMax       = 200
	degradationsMax = 100
)

// These reads are shared by several pages.

func (d *Dashboard) nodes(ctx context.Context) ([]operator.Node, error) {
	return cached(ctx, d, "nodes", beat, func(ctx context.Context) ([]operator.Node, error) {
		return d.db.NodesOfEachState(ctx, nodesMax)
	})
}

func (d *Dashboard) pauses(ctx context.Context) ([]operator.Pause, error) {
	return cached(ctx, d, "pauses", beat, func(ctx context.Context) ([]operator.Pause, error) {
		return d.db.Pauses(ctx, operator.PauseFilter{Limit: pausesMax})
	})
}

func (d *Dashboard) degradations(ctx context.Context) ([]operator.Degradation, error) {
	return cached(ctx, d, "degradations", 3*time.Second,
		func(ctx context.Context) ([]operator.Degradation, error) {
			return d.db.Degradations(ctx, degradationsMax)
		})
}

// queues returns the queues, the small ones counted now. It is for pages about counts.
func (d *Dashboard) queues(ctx context.Context) ([]operator.Queue, error) {
	return cached(ctx, d, "queues", beat, d.db.LiveQueues)
}

// sampledQueues returns the queues with the counts of the leader's last sample. Pauses and what blocks a
// queue are as of now.
func (d *Dashboard) sampledQueues(ctx context.Context) ([]operator.Queue, error) {
	return cached(ctx, d, "sampled queues", beat, func(ctx context.Context) ([]operator.Queue, error) {
		return d.db.Queues(ctx)
	})
}

// navigationGroup is a group of items of the navigation.
type navigationGroup struct {
	Label string
	Items []navigationItem
}

type navigationItem struct {
	Label, Address string
	Here           bool
}

// sections are the groups of the navigation, in their order.
var sections = []string{"Work", "Fleet", "Policy", "System"}

// navigation returns the items of the navigation, with the item of a page marked.
func (d *Dashboard) navigation(here page) []navigationGroup {
	groups := make([]navigationGroup, 0, len(sections))
	for _, section := range sections {
		g := navigationGroup{Label: section}
		for _, p := range d.pages {
			if p.nav == "" || p.section != section {
				continue
			}
			marked := p.path == here.path || (here.nav == "" && p.path == here.section)
			g.Items = append(g.Items, navigationItem{Label: p.nav, Address: d.cfg.Path + p.path, Here: marked})
		}
		if len(g.Items) > 0 {
			groups = append(groups, g)
		}
	}
	return groups
}
