package web

import (
	"cmp"
	"context"
	"fmt"
	"html/template"
	"slices"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/doctor"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/web/picture"
)

const (
	trendOver = 15 * time.Minute
	trendStep = 15 * time.Second

	noticesMax = 50
)

// overviewView is the page that one looks at first.
type overviewView struct {
	Queues   int
	Unknown  int        // queues that are not measured yet: no figure counts them
	Waiting  int64      // entries that could run and do not
	Backlog  *float64   // seconds of work at the present rate; nil: nothing leaves, or no queue is measured
	Oldest   *time.Time // since when its oldest entry waits
	OldestOf string     // its queue
	In, Out  *float64   // entries a second
	GPU      *float64   // busy seconds an hour; nil: no model has run
	Wasted   float64    // share of that
	Errors   *float64   // share of the entries that ended, in the last 15 minutes
	Failed   int64      // in that time
	Flow     template.HTML
	FlowData template.HTML
	Balanced bool
	Busiest  []queueRow
	Notices  []attention
	More     int  // notices that are not displayed
	Capped   bool // not all degradations and pauses were read
	chart    Chart
}

// Charts returns the series of the page.
func (v overviewView) Charts() map[string]Chart { return map[string]Chart{"rates": v.chart} }

// attention is something that needs a person, with the page about it.
type attention struct {
	Critical bool
	Code     string
	Text     string
	Address  string // below the dashboard's
	Since    *time.Time
}

func (d *Dashboard) overviewPages() {
	d.page(page{
		path: "", nav: "Overview", section: "Work", title: "Overview",
		template: "overview", live: true, read: d.overview,
	})
}

func (d *Dashboard) overview(ctx context.Context, _ query) (any, error) {
	queues, err := d.queues(ctx)
	if err != nil {
		return nil, err
	}
	trends, err := d.trends(ctx)
	if err != nil {
		return nil, err
	}
	failed, err := cached(ctx, d, "failed", 2*time.Second, func(ctx context.Context) (int64, error) {
		return d.db.FailedSince(ctx, trendOver, 100)
	})
	if err != nil {
		return nil, err
	}
	gpu, err := cached(ctx, d, "gpu", 10*time.Second, d.db.GPU)
	if err != nil {
		return nil, err
	}
	notices, capped, err := d.attention(ctx, queues)
	if err != nil {
		return nil, err
	}
	v := overviewView{Queues: len(queues), Capped: capped, chart: trends.total.chart()}
	v.Notices = notices[:min(len(notices), noticesMax)]
	v.More = len(notices) - len(v.Notices)
	for _, q := range queues {
		if q.Unmeasured {
			v.Unknown++
			continue
		}
		v.Waiting += q.AwaitingCompute
		v.In, v.Out = sum(v.In, q.InPerSecond), sum(v.Out, q.OutPerSecond)
		if since := waitingSince(q); since != nil && (v.Oldest == nil || since.Before(*v.Oldest)) {
			v.Oldest, v.OldestOf = since, q.Name
		}
	}
	if v.Unknown == 0 || v.Unknown < v.Queues {
		v.Backlog = drainSeconds(v.Waiting, v.Out)
	}
	if gpu.Seconds > 0 && gpu.Over > 0 {
		hourly := gpu.Seconds / gpu.Over * time.Hour.Seconds()
		v.GPU, v.Wasted = &hourly, gpu.Wasted/gpu.Seconds
	}
	// Samples miss failures before the first of them, the read those beyond its bound.
	failed = max(failed, trends.failures())
	v.Failed = failed
	if trends.gone > 0 {
		share := min(1, float64(v.Failed)/float64(trends.gone))
		v.Errors = &share
	}
	flow := stateFlow(d.cfg.Path, queues, trends, failed, v.In, v.Out)
	v.Flow, v.FlowData, v.Balanced = flow.HTML(), picture.Data(flow.Table()), flow.Balanced()
	rows := queueRows(queues, trends)
	slices.SortStableFunc(rows, func(a, b queueRow) int { return cmp.Compare(b.busy(), a.busy()) })
	v.Busiest = rows[:min(len(rows), 8)]
	return v, nil
}

// stateFlow is the picture of the states of some queues.
func stateFlow(root string, queues []operator.Queue, over trends, failed int64, in,
	out *float64,
) picture.StateFlow {
	f := picture.StateFlow{In: in, DoneNote: "or cancelled, 15 min"}
	for _, q := range queues {
		f.Initial.Count += q.Initial
		f.Computing.Count += q.Computing
		f.Waiting.Count += q.Pending - q.Computing
		f.Disabled.Count += q.Disabled
		f.Failed.Count += q.Failed
		f.Awaiting += q.AwaitingCompute
		f.Estimated = f.Estimated || q.Estimated
	}
	// Entries that fail leave the table as well: the others of those that left are done, expired or
	// cancelled.
	known := over.total.known()
	if seconds := known.Seconds(); seconds > 0 && out != nil {
		failing := float64(failed) / seconds
		done := max(0, *out-failing)
		f.FailedRate, f.Finished = &failing, &done
	}
	f.Done.Count = max(0, over.gone-failed)
	if known == 0 && over.gone == 0 {
		f.DoneNote = "no samples yet"
	}
	f.Initial.Href, f.Waiting.Href = root+"entries?state=initial", root+"entries?state=pending"
	f.Computing.Href, f.Disabled.Href = root+"entries?state=computing", root+"entries?state=disabled"
	f.Failed.Href = root + "failures"
	return f
}

// attention lists what needs a person, the critical first. Each has the page about its object. Capped reports that
// there may be more degradations or pauses than were read.
func (d *Dashboard) attention(
	ctx context.Context, queues []operator.Queue,
) (found []attention, capped bool, err error) {
	degradations, err := d.degradations(ctx)
	if err != nil {
		return nil, false, err
	}
	pauses, err := d.pauses(ctx)
	if err != nil {
		return nil, false, err
	}
	nodes, err := d.nodes(ctx)
	if err != nil {
		return nil, false, err
	}
	capped = len(degradations) >= degradationsMax || len(pauses) >= pausesMax
	if !slices.ContainsFunc(nodes, func(n operator.Node) bool { return n.State == "live" && n.Kind != "gateway" }) {
		text := "no task node is live, so nothing is run: start one with tasknode --database-url"
		found = append(found, attention{Critical: true, Code: "no node", Text: text, Address: "nodes"})
	}
	for _, g := range degradations {
		// The detail names the object.
		found = append(found, attention{
			Critical: g.Critical, Code: g.Code, Text: g.Detail, Address: d.pageOf(g.Object),
		})
	}
	faults, err := d.faults(ctx)
	if err != nil {
		return nil, false, err
	}
	found = append(found, faults...)
	for _, p := range pauses {
		since := p.Since
		text := fmt.Sprintf("%s %q is paused by %s", strings.ReplaceAll(p.Scope, "_", " "), p.Value, p.Actor)
		if p.Reason != "" {
			text += ": " + p.Reason
		}
		address := "pauses"
		if p.Scope == "queue" {
			address = d.pageOf("queue " + p.Value)
		}
		found = append(found, attention{Code: "paused", Text: text, Address: address, Since: &since})
	}
	for _, q := range queues {
		if q.OutOfService {
			text := "queue " + q.Name + " is out of service: it accepts entries, and none is run"
			found = append(found, attention{Code: "disabled", Text: text, Address: d.pageOf("queue " + q.Name)})
		}
	}
	slices.SortStableFunc(found, func(a, b attention) int {
		switch {
		case a.Critical == b.Critical:
			return 0
		case a.Critical:
			return -1
		}
		return 1
	})
	return found, capped, nil
}

// listedByObject are the checks of doctor that count degradations and pauses: the list has these themselves.
var listedByObject = []string{
	"standstills", "dead slots", "instances", "hints", "room", "blocked keys", "cron jobs", "pauses",
}

// faults lists the instances in quarantine, and the warnings and critical findings of the doctor's last
// examination: it takes longer than a page may. One that is older than findingsFor, because nobody had the page open,
// says nothing about now.
func (d *Dashboard) faults(ctx context.Context) ([]attention, error) {
	instances, err := cached(ctx, d, "instances", beat, func(ctx context.Context) ([]operator.Instance, error) {
		return d.db.Instances(ctx, "", operator.InstanceKey{}, instancesMax)
	})
	if err != nil {
		return nil, err
	}
	var found []attention
	for _, i := range instances {
		if i.QuarantinedUntil != nil {
			found = append(found, attention{
				Code: "quarantined", Text: "instance " + i.Server + " of " + i.Model + ": " + i.Reason,
				Address: "models?" + parameters("model", i.Model),
			})
		}
	}
	leader, err := cached(ctx, d, "leader", beat, d.db.Leader)
	if err != nil {
		return nil, err
	}
	examined, at, _, _ := d.examined.last(d.cfg.Examine)
	if at != nil && time.Since(*at) > findingsFor {
		examined = nil
	}
	for _, f := range examined {
		if f.Check == "leader" && leader != nil && leader.Live { // a failover is over sooner than the next examination
			continue
		}
		serious := f.Severity == doctor.Critical || f.Severity == doctor.Warning
		listed := len(f.Details) > 0 && slices.Contains(listedByObject, f.Check) // not where the check itself failed
		if serious && !listed {
			found = append(found, attention{
				Critical: f.Severity == doctor.Critical, Code: f.Check, Text: f.Summary, Address: "database#doctor",
			})
		}
	}
	return found, nil
}

// pageOf returns the address of the page about an object named as in the audit: queue NAME, node
// NAME, entry 17.
func (d *Dashboard) pageOf(object string) string {
	kind, name, _ := strings.Cut(object, " ")
	path := map[string]string{
		"queue": "queues/{name}", "entry": "entries/{name}", "model": "models", "instance": "models",
		"node":      "nodes",
		"operation": "operations", "batch": "operations", "token": "tokens", "limit": "limits",
		"cron": "cron", "lock": "locks",
	}[kind]
	if path == "" {
		return ""
	}
	address, err := d.link(path, "name", name)
	if err != nil {
		return ""
	}
	return strings.TrimPrefix(address, d.cfg.Path)
}

func sum(a, b *float64) *float64 {
	if b == nil {
		return a
	}
	total := value(a) + *b
	return &total
}

func value(v *float64) float64 {
	if v == nil {
		return 0
	}
	return *v
}

// drainSeconds returns how long n entries take at a rate; nil: nothing leaves.
func drainSeconds(n int64, perSecond *float64) *float64 {
	if n == 0 {
		var none float64
		return &none
	}
	if value(perSecond) < 0.001 {
		return nil
	}
	seconds := float64(n) / *perSecond
	return &seconds
}
