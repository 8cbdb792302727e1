package web

import (
	"encoding/json"
	"strings"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/operator"
)

const partitionsMax = 1000

// partitionRow is a table with its partitions.
type partitionRow struct {
	Table       string
	Kept        *float64 // seconds
	List        []operator.Partition
	First, Last string // days or hours, as in the names of the partitions
	Bytes, Rows int64
	Stray       int64 // rows of the default partition
}

// partitionRows groups partitions, which come by table and name.
func partitionRows(found []operator.Partition) []partitionRow {
	var rows []partitionRow
	for _, p := range found {
		if len(rows) == 0 || rows[len(rows)-1].Table != p.Table {
			rows = append(rows, partitionRow{Table: p.Table, Kept: p.Kept})
		}
		row := &rows[len(rows)-1]
		row.List = append(row.List, p)
		row.Bytes, row.Rows = row.Bytes+p.Bytes, row.Rows+p.Rows
		if p.Default {
			row.Stray += p.Rows
			continue
		}
		row.Last = dayOf(strings.TrimPrefix(p.Name, p.Table+"_"))
		if row.First == "" {
			row.First = row.Last
		}
	}
	return rows
}

// dayOf writes the day of a partition's name, 20260301 or 2026030114, as people read it.
func dayOf(suffix string) string {
	for _, f := range []struct{ layout, text string }{{"20060102", "2 Jan"}, {"2006010215", "2 Jan 15:04"}} {
		if at, err := time.Parse(f.layout, suffix); err == nil {
			return at.Format(f.text)
		}
	}
	return suffix
}

// claimLatency is how long claims took in the database.
type claimLatency struct {
	Mean   *float64 // seconds; nil: there was none
	Claims int64
	Since  *time.Time // nil: since the nodes started
}

const (
	claimsOver  = 5 * time.Minute
	claimsEvery = 5 * time.Second
)

// claimHistory keeps the counters of the nodes' heartbeats over claimsOver, since the page was first
// displayed by this leader: the difference is what the latest claims took.
type claimHistory struct {
	mu   sync.Mutex
	kept []claimCounters // oldest first
}

// claimCounters are the counters of each node at a time.
type claimCounters struct {
	at time.Time
	of map[operator.NodeID]nodeReport
}

// add takes the nodes as they are now, and returns the latency since the oldest counters that are kept. Of
// nodes that started meanwhile all claims count.
func (h *claimHistory) add(nodes []operator.Node, at time.Time) claimLatency {
	now := claimCounters{at: at, of: map[operator.NodeID]nodeReport{}}
	for _, n := range nodes {
		var r nodeReport
		if n.Kind != "gateway" && json.Unmarshal(n.Load, &r) == nil {
			now.of[n.ID] = r
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(h.kept); n == 0 || at.Sub(h.kept[n-1].at) >= claimsEvery {
		h.kept = append(h.kept, now)
	}
	for len(h.kept) > 1 && at.Sub(h.kept[1].at) >= claimsOver {
		h.kept = h.kept[1:]
	}
	oldest := h.kept[0]
	l := claimLatency{}
	before := map[operator.NodeID]nodeReport{}
	if at.Sub(oldest.at) >= 2*claimsEvery {
		l.Since, before = &oldest.at, oldest.of
	}
	var ms int64
	for id, r := range now.of {
		l.Claims += max(0, r.Claims-before[id].Claims)
		ms += max(0, r.ClaimMS-before[id].ClaimMS)
	}
	if l.Claims > 0 {
		mean := float64(ms) / float64(l.Claims) / 1000
		l.Mean = &mean
	}
	return l
}
