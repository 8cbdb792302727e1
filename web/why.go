package web

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/penstock/penstock/pkg/operator"
)

// check is a condition of the claim, as the page of an entry lists it.
type check struct {
	Name    string
	Holds   bool
	Reasons []reasonLine // where it does not hold
}

// reasonLine is a reason with the page about what blocks the entry.
type reasonLine struct {
	Text    string
	Label   string // of the link
	Address string // below the dashboard's; empty: there is none
}

// conditions are the conditions of the claim in the order in which they are evaluated, with the
// codes of explain that say that they do not hold.
var conditions = []struct {
	name  string
	codes []string
}{
	{"the entry is enabled", []string{"disabled"}},
	{"it is due", []string{"not_due", "promotion_late", "cron_paused"}},
	{"its deadlines have not passed", []string{"expired"}},
	{"no cancel was requested", []string{"cancel_requested"}},
	{"the queue is in service and not paused", []string{"paused", "queue_disabled"}},
	{"a live node serves the queue", []string{"no_node", "nodes_paused"}},
	{"neither the queue nor the flow is throttled", []string{"throttled"}},
	{"the queue's locks are below its limits", []string{"limit", "node_limit"}},
	{"its rate allows the next", []string{"rate"}},
	{"a processing thread is free", []string{"no_thread"}},
	{"its nodes have the processor time and memory for it", []string{"no_resources"}},
	{"its model has an instance and a free slot", []string{"no_instance", "no_slot"}},
	{"its lock key is free", []string{"key_held", "key_pushed"}},
	{"its lock key is not blocked by a failure", []string{"key_blocked"}},
	{"it is the first of its key", []string{"ahead_in_key"}},
	{"it is the first in its lane", []string{"ahead_in_lane"}},
}

// checks explains why an entry does not run: each condition of the claim, and for those that do not
// hold the reasons.
func (d *Dashboard) checks(ctx context.Context, e operator.EntryStatus) (list []check, blocked int, err error) {
	explained, err := cached(ctx, d, keyOf("explain", e.ID), beat,
		func(ctx context.Context) (operator.Explanation, error) { return d.db.Explain(ctx, e.ID) })
	if err != nil {
		return nil, 0, err
	}
	left := slices.Clone(explained.Reasons)
	for _, c := range conditions {
		one := check{Name: c.name, Holds: true}
		left = slices.DeleteFunc(left, func(r operator.Reason) bool {
			if !slices.Contains(c.codes, r.Code) {
				return false
			}
			one.Holds = false
			one.Reasons = append(one.Reasons, lineOf(e, r))
			return true
		})
		if !one.Holds {
			blocked++
		}
		list = append(list, one)
	}
	for _, r := range left {
		if r.Code != "running" && r.Code != "ended" {
			list = append(list, check{
				Name:    strings.ReplaceAll(r.Code, "_", " "),
				Reasons: []reasonLine{lineOf(e, r)},
			})
			blocked++
		}
	}
	return list, blocked, nil
}

// lineOf returns a reason with a link to what blocks the entry.
func lineOf(e operator.EntryStatus, r operator.Reason) reasonLine {
	line := reasonLine{Text: sentence(r.Text)}
	text := func(name string) string {
		v, found := r.Numbers[name]
		if !found || v == nil {
			return ""
		}
		if number, is := v.(float64); is {
			return fmt.Sprintf("%.0f", number)
		}
		return fmt.Sprint(v)
	}
	switch r.Code {
	case "paused":
		line.Label, line.Address = "pauses", "pauses"
		if text("scope") == "" {
			line.Label, line.Address = "queue", "queues/"+e.Queue
		}
	case "queue_disabled", "node_limit":
		line.Label, line.Address = "queue", "queues/"+e.Queue
	case "disabled", "throttled":
		line.Label, line.Address = "queue", "queues/"+e.Queue
	case "limit", "rate":
		line.Label, line.Address = "limits", "limits"
	case "no_node", "no_thread", "no_resources", "nodes_paused":
		line.Label, line.Address = "nodes", "nodes"
	case "no_instance", "no_slot":
		line.Label, line.Address = "models", "models"
	case "key_held":
		line.Label, line.Address = "locks", "locks"
		if id := text("entry_id"); id != "" {
			line.Label, line.Address = "entry "+id, "entries/"+id
		}
	case "key_blocked":
		line.Label, line.Address = "blocked keys", "locks?"+parameters("queue", e.Queue)
	case "ahead_in_key":
		line.Label, line.Address = "entries of the key", "entries?"+parameters("queue", e.Queue, "lock_key",
			e.LockKey)
	case "ahead_in_lane":
		line.Label, line.Address = "entries of the flow", "entries?"+parameters("queue", e.Queue, "flow",
			e.Flow, "state", "pending")
	case "cron_paused":
		line.Label, line.Address = "cron", "cron"
	case "promotion_late":
		line.Label, line.Address = "database", "database"
	}
	return line
}
