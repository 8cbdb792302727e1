package web

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"html/template"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/web/picture"
)

const nodesMax = 500

// nodesView is all registered task nodes.
type nodesView struct {
	Nodes    []nodeCard
	Live     int
	Gateways int // they have a page of their own
	Capped   bool
}

// nodeCard is a node with what its last heartbeat reported.
type nodeCard struct {
	operator.Node
	Beat     time.Time
	Late     bool
	Busy     template.HTML // threads in use
	Gauges   []gauge
	Refusals []refusal
	Version  string
	Hints    string
	Claims   int64 // since its start
	Claimed  int64
	Runs     int64
	Errors   *float64 // share of runs
	ClaimMS  *float64 // mean, in seconds
}

// gauge is a level of the governor.
type gauge struct {
	Name    string
	Picture template.HTML
	Used    float64
	High    float64
	Low     float64
	Closed  bool
	// DeclaredOnly: when closed, it refuses only queues that declare a need of the resource.
	DeclaredOnly bool
}

// refusal is why a node claimed nothing, and how often.
type refusal struct {
	Code, Meaning string
	Count         int64
}

// refusalMeanings are the reasons that nodes report, in words.
var refusalMeanings = map[string]string{
	"threads":     "no idle processing thread",
	"stale":       "no recent reading of CPU and memory",
	"memory_high": "memory is above its mark",
	"memory_need": "the declared memory does not fit beside what runs",
	"memory_size": "an entry needs more memory than the node has",
	"cpu_high":    "CPU is above its mark",
	"cpu_need":    "the declared cores do not fit beside what runs",
	"cpu_size":    "an entry needs more cores than the node has",
	"slots":       "no free slot of the model",
	"limit":       "a limit of the queue is reached",
}

// nodeReport is the part of a heartbeat's load that pages display. A node of an earlier version reports less.
type nodeReport struct {
	Version   string           `json:"version"`
	Hints     string           `json:"hints"`
	Claims    int64            `json:"claims"`
	Claimed   int64            `json:"claimed"`
	Runs      int64            `json:"runs"`
	RunErrors int64            `json:"run_errors"`
	ClaimMS   int64            `json:"claim_ms"`
	Refusals  map[string]int64 `json:"refusals"`
	Governor  struct {
		Levels []struct {
			Resource  string  `json:"resource"`
			Used      float64 `json:"used"`
			High, Low float64
			Closed    bool
			Declared  bool `json:"declared_only"`
		} `json:"levels"`
	} `json:"governor"`
}

func (d *Dashboard) nodePages() {
	d.page(page{
		path: "nodes", nav: "Nodes", section: "Fleet", title: "Nodes", template: "nodes", live: true,
		read: d.nodeList,
	})
	d.verb(verb{
		name: "drain_node", title: "Drain node", role: operatorRole, destroys: true, objects: []string{"node"},
		effect: "The node claims nothing more, finishes its runs, releases the rest and exits. Other nodes take over " +
			"its queues. A drain cannot be taken back; start the process again instead.",
		preview: func(ctx context.Context, in form) (preview, error) {
			n, err := operator.FindNode(ctx, d.db, in.Get("node"))
			if err != nil {
				return preview{}, err
			}
			p := preview{
				Count: plural(n.Locks, "lock", "locks") + " of node " + n.Name,
				Facts: []fact{{"queues", strings.Join(n.Queues, ", ")}, {"state", n.State}},
			}
			if only := d.servedByOne(ctx, n); only != "" {
				p.Warning = "No other live node serves " + only + "."
			}
			return p, nil
		},
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			n, err := operator.FindNode(ctx, d.change, in.Get("node"))
			if err != nil {
				return "", err
			}
			return d.do(ctx, operator.DrainNode, int64(n.ID), by, time.Time{}, "Node "+n.Name+" drains.")
		},
	})
}

// servedByOne names the queues that no other live node serves.
func (d *Dashboard) servedByOne(ctx context.Context, only operator.Node) string {
	nodes, err := d.nodes(ctx)
	if err != nil {
		return ""
	}
	var alone []string
	for _, queue := range only.Queues {
		if !slices.ContainsFunc(nodes, func(n operator.Node) bool {
			return n.ID != only.ID && n.State == "live" && slices.Contains(n.Queues, queue)
		}) {
			alone = append(alone, queue)
		}
	}
	return strings.Join(alone[:min(len(alone), 10)], ", ")
}

func plural(n int64, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return strconv.FormatInt(n, 10) + " " + many
}

func (d *Dashboard) nodeList(ctx context.Context, _ query) (any, error) {
	nodes, err := d.nodes(ctx)
	if err != nil {
		return nil, err
	}
	v := nodesView{Capped: len(nodes) >= nodesMax}
	for _, n := range nodes {
		if n.Kind == "gateway" {
			v.Gateways++
			continue
		}
		v.Nodes = append(v.Nodes, nodeCardOf(n))
		if n.State == "live" {
			v.Live++
		}
	}
	order := map[string]int{"live": 0, "draining": 1}
	rank := func(n nodeCard) int {
		if at, known := order[n.State]; known {
			return at
		}
		return len(order)
	}
	slices.SortStableFunc(v.Nodes, func(a, b nodeCard) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.Name, b.Name))
	})
	return v, nil
}

func nodeCardOf(n operator.Node) nodeCard {
	c := nodeCard{Node: n, Beat: time.Now().Add(-seconds(n.SilentSeconds)), Late: n.SilentSeconds > n.LeaseSeconds/2}
	if n.Threads > 0 {
		busy := min(1, float64(n.Locks)/float64(n.Threads))
		c.Busy = picture.Gauge{Title: "threads in use", Value: busy}.HTML()
	}
	var r nodeReport
	_ = json.Unmarshal(n.Load, &r) // of another program, or another version: what is not as expected is left out
	c.Version, c.Hints, c.Claims, c.Claimed, c.Runs = r.Version, r.Hints, r.Claims, r.Claimed, r.Runs
	if r.Runs > 0 {
		share := float64(r.RunErrors) / float64(r.Runs)
		c.Errors = &share
	}
	if r.Claims > 0 {
		mean := float64(r.ClaimMS) / float64(r.Claims) / 1000
		c.ClaimMS = &mean
	}
	for _, g := range r.Governor.Levels {
		c.Gauges = append(c.Gauges, gauge{
			Name: g.Resource, Used: g.Used, High: g.High, Low: g.Low, Closed: g.Closed, DeclaredOnly: g.Declared,
			Picture: picture.Gauge{
				Title: fmt.Sprintf("%s of %s", g.Resource, n.Name), Value: g.Used,
				Mark: g.High,
			}.HTML(),
		})
	}
	for code, count := range r.Refusals {
		c.Refusals = append(c.Refusals, refusal{code, cmp.Or(refusalMeanings[code], code), count})
	}
	slices.SortFunc(c.Refusals, func(a, b refusal) int {
		return cmp.Or(-cmp.Compare(a.Count, b.Count), cmp.Compare(a.Code, b.Code))
	})
	return c
}
