package gateway

import "time"

// PoolState is a view of a pool, for status and metrics.
type PoolState struct {
	Model     string            `json:"model"`
	Mode      string            `json:"mode"`
	ModeSince time.Time         `json:"mode_since"`
	Ceiling   int               `json:"ceiling"`
	InFlight  int               `json:"stock"` // the key is that of older programs
	Waiting   map[string]int    `json:"waiting"`
	Held      int               `json:"slots_held"`
	Idle      int               `json:"slots_idle"`
	OverLimit int               `json:"over_limit"` // waiting requests that more slots would not help
	Lower     float64           `json:"lower_bound"`
	Upper     float64           `json:"upper_bound"`
	Flows     int               `json:"active_flows"`
	Bytes     int               `json:"bytes_waiting"`
	Dropped   map[Dropped]int64 `json:"dropped"`
	Instances []InstanceView    `json:"instances"`

	counts Counts
}

// InstanceView is an instance as its pool sees it.
type InstanceView struct {
	ID       int32   `json:"id"`
	Server   string  `json:"server"`
	Usable   bool    `json:"usable"`
	Slots    int     `json:"slots"`
	Held     int     `json:"slots_held"`
	InFlight int     `json:"in_flight"`
	Limit    int     `json:"limit"`
	Rate     float64 `json:"tokens_per_second"`
	KVUsage  float64 `json:"kv_usage"`

	RemainingMS float64 `json:"remaining_ms"` // of its calls: the mean duration of one, whatever their age
}

// view returns the state of the pool.
func (p *Pool) view(now time.Time, model string) PoolState {
	s := PoolState{
		Model: model, Mode: p.mode.String(), ModeSince: p.modeSince, Ceiling: p.ceiling(), InFlight: p.inFlight,
		OverLimit: p.overLimit(now), Waiting: map[string]int{}, Bytes: p.bytes, Dropped: map[Dropped]int64{},
		counts: p.count,
	}
	s.Lower, s.Upper = p.bounds()
	s.Held, s.Idle = p.fleet.held()
	for c, l := range p.lines {
		s.Waiting[Criticality(c).String()] = l.waiting //nolint:gosec // below criticalityCount
		s.Flows += len(l.heap)
	}
	for reason, n := range p.count.Dropped {
		s.Dropped[reason] = n
	}
	s.counts.Dropped = s.Dropped
	for _, i := range p.fleet.instances {
		s.Instances = append(s.Instances, InstanceView{
			ID: i.id, Server: i.server, Usable: i.usable, Slots: i.limit.slots, Held: i.slots.Held(),
			InFlight: i.inFlight, Limit: i.limit.value(), Rate: i.rate, KVUsage: i.kv,
			RemainingMS: min(float64(i.inFlight), 1) * p.cost.ms,
		})
	}
	return s
}

// Counters returns the pool's counters since its start.
func (s PoolState) Counters() Counts { return s.counts }
