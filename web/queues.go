package web

import (
	"html/template"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/web/picture"
)

// queueRow is a queue in a list.
type queueRow struct {
	operator.Queue
	Spark template.HTML
	Drain *float64   // seconds; nil: nothing leaves
	Since *time.Time // since when its oldest entry waits
	Badge []badge
}

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
			Title: "entries a second into and out of queue " + q.Name + ", last 15 minutes", Unit: "/s", Values: t.in, Second: t.out,
		}.HTML()
		row.Since = waitingSince(q)
		rows = append(rows, row)
	}
	return rows
}

// waitingSince returns since when the oldest entry waits that a node would claim. It is rounded to the second, so that it
// does not change with each count.
func waitingSince(q operator.Queue) *time.Time {
	if q.HeadAgeSeconds == nil {
		return nil
	}
	at := time.Now().Add(-time.Duration(*q.HeadAgeSeconds * float64(time.Second))).Round(time.Second)
	return &at
}

func badgesOf(q operator.Queue) []badge {
	var found []badge
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
