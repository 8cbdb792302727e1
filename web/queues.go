package web

import (
	"cmp"
	"context"
	"html/template"
	"slices"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/web/picture"
)

// queuesView is the list of queues.
type queuesView struct {
	Rows         []queueRow
	Order        string
	Applications []string
	Application  string
}

// queueOrders are the orders in which the list can be read.
var queueOrders = map[string]func(a, b queueRow) int{
	"name":    func(a, b queueRow) int { return strings.Compare(a.Name, b.Name) },
	"waiting": func(a, b queueRow) int { return cmp.Compare(b.AwaitingCompute, a.AwaitingCompute) },
	"oldest":  func(a, b queueRow) int { return cmp.Compare(value(b.HeadAgeSeconds), value(a.HeadAgeSeconds)) },
	"rate":    func(a, b queueRow) int { return cmp.Compare(value(b.OutPerSecond), value(a.OutPerSecond)) },
	"failed":  func(a, b queueRow) int { return cmp.Compare(b.Failed, a.Failed) },
}

func (d *Dashboard) queuePages() {
	d.page(page{
		path: "queues", nav: "Queues", section: "Work", title: "Queues",
		template: "queues", live: true, read: d.listQueues,
	})
	d.page(page{
		path: "queues/{name}", section: "queues", title: "Queue",
		template: "queue", live: true, read: d.showQueue,
	})
}

func (d *Dashboard) listQueues(ctx context.Context, q query) (any, error) {
	found, err := d.queues(ctx)
	if err != nil {
		return nil, err
	}
	all, err := d.trends(ctx)
	if err != nil {
		return nil, err
	}
	shares, err := d.sharesOfQueues(ctx)
	if err != nil {
		return nil, err
	}
	limits, err := d.limits(ctx)
	if err != nil {
		return nil, err
	}
	used := make(map[string]*int64, len(limits))
	for i := range limits {
		used[limits[i].Name] = &limits[i].InUse
	}
	v := queuesView{Order: q.Get("order"), Application: q.Get("application")}
	if queueOrders[v.Order] == nil {
		v.Order = "name"
	}
	for _, x := range found {
		v.Applications = append(v.Applications, x.Application)
	}
	slices.Sort(v.Applications)
	v.Applications = slices.Compact(v.Applications)
	for _, row := range queueRows(found, all) {
		if v.Application == "" || row.Application == v.Application {
			row.share, row.InUse = shares[row.Name], used[ownLimit(row.Name)]
			v.Rows = append(v.Rows, row)
		}
	}
	slices.SortStableFunc(v.Rows, queueOrders[v.Order])
	return v, nil
}

// share is the part of its application's service that a queue gets, and the part that its weight
// asks for.
type share struct{ Wanted, Got *float64 }

// sharesOfQueues returns the shares of queues that were served in the last minutes. Fairness among
// queues holds for those of one application that have work at the same time; a queue without work
// wants nothing.
func (d *Dashboard) sharesOfQueues(ctx context.Context) (map[string]share, error) {
	found, err := cached(ctx, d, "queue shares", 3*time.Second, d.db.QueueShares)
	if err != nil {
		return nil, err
	}
	weights, service := map[string]float64{}, map[string]float64{}
	for _, s := range found {
		if s.Busy {
			weights[s.Application] += s.Weight
		}
		service[s.Application] += s.Slots
	}
	shares := make(map[string]share, len(found))
	for _, s := range found {
		var one share
		if s.Busy && weights[s.Application] > 0 {
			wanted := s.Weight / weights[s.Application]
			one.Wanted = &wanted
		}
		if service[s.Application] > 0 {
			got := s.Slots / service[s.Application]
			one.Got = &got
		}
		shares[s.Queue] = one
	}
	return shares, nil
}

// queueRow is a queue in a list.
type queueRow struct {
	operator.Queue
	Spark template.HTML
	Drain *float64   // seconds; nil: nothing leaves
	Since *time.Time // since when its oldest entry waits
	Badge []badge
	InUse *int64 // lock records times weight, of the queue's own limit; nil: it has none
	share share
}

// Share is the queue's part of the service.
func (r queueRow) Share() share { return r.share }

// Full is how near the queue's locks are to their limit, 0 to 1; nil: it has none.
func (r queueRow) Full() *float64 {
	if r.MaxConcurrent == nil || *r.MaxConcurrent == 0 || r.InUse == nil {
		return nil
	}
	share := float64(*r.InUse) / float64(*r.MaxConcurrent)
	return &share
}

// ownLimit is the name of the limit that max_concurrent of a queue makes.
func ownLimit(queue string) string { return "queue:" + queue }

// badge is a state that one must see at a glance. It has a text, and not only a colour.
type badge struct{ Kind, Text, Title string }

// busy orders queues: those with work first.
func (r queueRow) busy() float64 {
	return float64(r.AwaitingCompute+r.Computing) + value(r.InPerSecond) + value(r.OutPerSecond)
}

func queueRows(queues []operator.Queue, all trends) []queueRow {
	rows := make([]queueRow, 0, len(queues))
	for _, q := range queues {
		row := queueRow{Queue: q, Drain: drainSeconds(q.AwaitingCompute, q.OutPerSecond), Badge: badgesOf(q)}
		t := all.of[q.Name]
		row.Spark = picture.Sparkline{
			Title: "entries a second into and out of queue " + q.Name + ", last 15 " +
				"minutes", Unit: "/s", Values: t.in, Second: t.out,
		}.HTML()
		row.Since = waitingSince(q)
		rows = append(rows, row)
	}
	return rows
}

// waitingSince returns since when the oldest entry waits that a node would claim. It is rounded to
// the second, so that it does not change with each count.
func waitingSince(q operator.Queue) *time.Time {
	if q.HeadAgeSeconds == nil {
		return nil
	}
	at := time.Now().Add(-time.Duration(*q.HeadAgeSeconds * float64(time.Second))).Round(time.Second)
	return &at
}

func badgesOf(q operator.Queue) []badge {
	var found []badge
	if q.Unmeasured {
		found = append(found, badge{"", "not measured yet", "the leader measures new queues in turn"})
	}
	if q.OutOfService {
		found = append(found, badge{"off", "disabled", "it accepts entries, and none is run"})
	}
	if q.Paused {
		title := "by " + q.PausedBy
		if q.PausedReason != "" {
			title += ": " + q.PausedReason
		}
		found = append(found, badge{"warn", "paused", title})
	}
	if q.Blocked != nil && !q.Paused && !q.OutOfService && q.AwaitingCompute > 0 {
		found = append(found, badge{"warn", strings.ReplaceAll(*q.Blocked, "_", " "), "no node claims from it"})
	}
	if q.Capacity != nil && q.Initial+q.Pending >= *q.Capacity {
		found = append(found, badge{"bad", "full", "pushes are refused"})
	}
	return found
}
