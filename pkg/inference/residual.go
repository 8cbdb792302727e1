package inference

import (
	"cmp"
	"slices"
	"time"
)

// durations are how long the last calls to a model took, for estimates of how long those that run will take yet.
type durations struct {
	last []time.Duration // the oldest is at next once durationsMax are there
	next int
}

// durationsMax is how many calls are remembered.
const durationsMax = 256

func (d *durations) add(took time.Duration) {
	if len(d.last) < durationsMax {
		d.last = append(d.last, took)
		return
	}
	d.last[d.next] = took
	d.next = (d.next + 1) % durationsMax
}

// remaining is the expected time until the end of a call of this age: the mean residual life of the calls before it
// that took longer. One that has run for longer than all of them is expected to run for as long again.
func (d *durations) remaining(age time.Duration) time.Duration {
	var sum time.Duration
	longer := 0
	for _, took := range d.last {
		if took > age {
			sum += took - age
			longer++
		}
	}
	if longer == 0 {
		return age
	}
	return sum / time.Duration(longer)
}

// InstanceReport describes the use of an instance by a node, with each heartbeat. The autoscaler chooses by it which
// instances are given up first.
type InstanceReport struct {
	ID          int32 `json:"id"`
	InFlight    int   `json:"in_flight"`           // calls of this node
	RemainingMS int64 `json:"remaining_ms"`        // expected time until the last of them has ended
	LoadedMS    int64 `json:"loaded_ms,omitempty"` // since it last ran a call with an affinity, 1 at least; 0: never
}

// Report describes the instances of all models that have calls of this node, or something loaded.
func (p *SlotPool) Report(now time.Time) []InstanceReport {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := []InstanceReport{}
	for _, state := range p.models {
		all = append(all, state.ledger.report(now)...)
	}
	slices.SortFunc(all, func(a, b InstanceReport) int { return cmp.Compare(a.ID, b.ID) })
	return all
}

func (l *slotLedger) report(now time.Time) (all []InstanceReport) {
	reports := map[int32]InstanceReport{}
	for id, s := range l.instances {
		if s.loaded != "" {
			reports[id] = InstanceReport{ID: id, LoadedMS: max(1, now.Sub(s.used).Milliseconds())}
		}
	}
	for id, s := range l.instances {
		if s.Busy() == 0 {
			continue
		}
		r := reports[id]
		r.ID, r.InFlight = id, s.Busy()
		for h := range s.All() {
			if h.Busy() {
				r.RemainingMS = max(r.RemainingMS, l.took.remaining(now.Sub(h.Call.since)).Milliseconds())
			}
		}
		reports[id] = r
	}
	for _, r := range reports {
		all = append(all, r)
	}
	return all
}
