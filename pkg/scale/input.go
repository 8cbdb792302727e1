package scale

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// inputSQL reads the inputs of the decisions about some models, and the clock that all leaders share.
const inputSQL = `
SELECT model, queues, running, waiting, urgent, online_running, arrived, arrivals, waits, counters, state, service,
       hour, calls, calls_before, busy_ms, busy_ms_before, gateway, gateway_age, online_calls, refused,
       cold_start, cold_start_p95, starts, starts_before, cold_seconds, cold_seconds_before, due, late, ready, starting,
       draining, unhealthy, unmanaged, unmanaged_starts, busy_a_minute, arrived_a_minute, busy_last_week, last_minute,
       off, zero_off, max_all, budget, clock_timestamp() AS at
  FROM penstock.scale_input
 WHERE model = ANY ($1)`

// input is a row of penstock.scale_input.
type input struct {
	At              time.Time
	Model           string
	Queues          []int32
	Running         int // at gateways too
	Waiting         int // in queues
	Urgent          int // at gateways
	OnlineRunning   int
	Arrived         int64               // in queues, a counter
	Arrivals        map[string]arrivals // by id of the queue
	Waits           map[string]int64    // of Waiting, by id of the queue; none where nothing may start
	Counters        []byte
	State           []byte
	Service         float64
	Hour            time.Time
	Calls           int64 // of Hour
	CallsBefore     int64 // of the hour before
	BusyMS          int64
	BusyMSBefore    int64
	Gateway         bool
	GatewayAge      float64
	OnlineCalls     int64 // that ended, a counter
	Refused         int64 // a counter
	ColdStart       float64
	ColdStartP95    float64
	BecameReady     int64 `db:"starts"` // starts that did so, of Hour
	ReadyBefore     int64 `db:"starts_before"`
	ColdSeconds     float64
	ColdBefore      float64 `db:"cold_seconds_before"`
	Due             int
	Late            int
	Ready           int
	Starting        []time.Time
	Draining        int
	Unhealthy       int
	Unmanaged       int         // instances that no deployment of the model started
	UnmanagedStarts []time.Time // of these, when those began that are not ready yet
	BusyAMinute     float64
	ArrivedAMinute  float64
	BusyLastWeek    float64
	LastMinute      *time.Time
	Off             bool
	ZeroOff         bool
	MaxAll          int
	Budget          float64
}

// arrivals is what came to a queue.
type arrivals struct {
	Inserted int64 `json:"inserted"` // rows, a counter
	Deleted  int64 `json:"deleted"`  // rows, a counter: an entry is deleted when it ends
	Running  int64 `json:"running"`
}

// begun is the requests of a queue that could ever start, and the most that there were in the last two spans. Entries
// that are delayed, paused or throttled are none of them. It falls when some are held back again, as by a throttle, and
// while the statistics of the database are behind: what makes up for that within a span is no arrival.
type begun struct {
	Inserted int64     `json:"inserted"`
	Deleted  int64     `json:"deleted"`
	Most     int64     `json:"most"` // since Since
	Before   int64     `json:"before"`
	Since    time.Time `json:"since"`
}

// begunSpan is how long a fall of begun is remembered at least, and half of how long it is at most.
const begunSpan = 30 * time.Second

// waitingMax is how many requests of a queue are counted as waiting, see penstock.scale_waiting_each.
const waitingMax = 10_000

// follow counts what could start first after the reading before, and returns what the next reading starts from. Where
// more wait than are counted, all that came counts.
func (b begun) follow(a arrivals, waits int64, at time.Time) (arrived int64, next begun) {
	sum := a.Deleted + a.Running + waits
	b.Since = notAfter(b.Since, at)
	next = begun{Inserted: a.Inserted, Deleted: a.Deleted, Most: sum, Before: sum, Since: at}
	if b.Since.IsZero() || a.Deleted < b.Deleted || a.Inserted < b.Inserted {
		return 0, next // the first reading, or the counters began again
	}
	arrived = max(0, sum-max(b.Most, b.Before))
	if waits >= waitingMax {
		arrived = a.Inserted - b.Inserted
	}
	if at.Sub(b.Since) < begunSpan {
		next.Most, next.Before, next.Since = max(b.Most, sum), b.Before, b.Since
	} else {
		next.Before = b.Most
	}
	return arrived, next
}

// counters are sums that grow, as of the decision before: a decision reads what was added to them since.
// They are stored with the state, so that a change of leaders counts nothing twice and loses nothing.
type counters struct {
	Hour        time.Time `json:"hour,omitzero"`
	Calls       int64     `json:"calls"` // of Hour
	BusyMS      int64     `json:"busy_ms"`
	Online      int64     `json:"online"` // online calls that ended, run or wait
	Refused     int64     `json:"refused"`
	BecameReady int64     `json:"starts"` // of Hour
	Cold        float64   `json:"cold"`   // of Hour

	Begun map[string]begun `json:"begun,omitempty"` // by id of the queue
}

// used is what happened since the decision before.
type used struct {
	queued      float64 // requests that came through queues
	online      float64 // and through gateways
	refused     float64
	calls       int64
	busy        float64 // slot-seconds
	becameReady int64   // instances that did
	cold        float64 // seconds that they took
}

func (in input) counters(before counters) counters {
	queues := make(map[string]begun, len(in.Arrivals))
	for id, a := range in.Arrivals {
		_, queues[id] = before.Begun[id].follow(a, in.Waits[id], in.At)
	}
	return counters{
		Begun: queues,
		Hour:  in.Hour, Calls: in.Calls, BusyMS: in.BusyMS, Refused: in.Refused, BecameReady: in.BecameReady,
		Cold:   in.ColdSeconds,
		Online: in.OnlineCalls + int64(in.OnlineRunning) + int64(in.Urgent),
	}
}

// since is what was added after the counters before were read. A counter that fell began again. An entry is an arrival
// when it may start: not while it is delayed, paused or throttled, and not where it was there before the first reading
// of its queue.
func (in input) since(before counters) used {
	grown := func(now, then int64) int64 {
		if now < then {
			return now
		}
		return now - then
	}
	var u used
	for id, a := range in.Arrivals {
		arrived, _ := before.Begun[id].follow(a, in.Waits[id], in.At)
		u.queued += float64(arrived)
	}
	now := in.counters(before)
	if before.Hour.IsZero() {
		return u
	}
	// Calls that end leave what runs: a fall of the sum is a request that was given up, and no arrival.
	u.online = float64(max(0, now.Online-before.Online))
	u.refused = float64(grown(now.Refused, before.Refused))
	switch calls, busy := in.Calls, in.BusyMS; {
	case in.Hour.Equal(before.Hour):
		u.calls, u.busy = max(0, calls-before.Calls), float64(max(0, busy-before.BusyMS))/1000
		u.becameReady, u.cold = max(0, in.BecameReady-before.BecameReady), max(0, in.ColdSeconds-before.Cold)
	case in.Hour.Sub(before.Hour) == time.Hour:
		u.calls = calls + max(0, in.CallsBefore-before.Calls)
		u.busy = float64(busy+max(0, in.BusyMSBefore-before.BusyMS)) / 1000
		u.becameReady = in.BecameReady + max(0, in.ReadyBefore-before.BecameReady)
		u.cold = in.ColdSeconds + max(0, in.ColdBefore-before.Cold)
	case in.Hour.Before(before.Hour): // the clock was ahead: what came in between is not known
	default:
		u.calls, u.busy = calls+in.CallsBefore, float64(busy+in.BusyMSBefore)/1000
		u.becameReady, u.cold = in.BecameReady+in.ReadyBefore, in.ColdSeconds+in.ColdBefore
	}
	return u
}

// past is what the decision before left.
type past struct {
	state    State
	counters counters
}

// stored is the past as the leader before stored it.
func (in input) stored() (past, error) {
	var p past
	if in.State != nil {
		if err := json.Unmarshal(in.State, &p.state); err != nil {
			return past{}, fmt.Errorf("read state: %w", err)
		}
	}
	if in.Counters != nil {
		if err := json.Unmarshal(in.Counters, &p.counters); err != nil {
			return past{}, fmt.Errorf("read counters: %w", err)
		}
	}
	return p, nil
}

// outlived says whether all deployments of the model were made since: the number was that of others, and is not to be
// started again. One with a time in the future may be older: it was made while the clock was ahead.
func (p past) outlived(deployments []deploymentRow) bool {
	before := func(s deploymentRow) bool { return s.CreatedAt.After(s.At) || !s.CreatedAt.After(p.state.At) }
	return !p.state.At.IsZero() && !slices.ContainsFunc(deployments, before)
}

// anew is what the past tells about the model, and not about its instances.
func (p past) anew() past {
	return past{state: State{LastUse: p.state.LastUse, WasReady: p.state.WasReady, Recent: p.state.Recent}}
}

// unmanaged is how many instances that no deployment started are a part of the number of the model. Starts of them that
// are stuck are none: they may never be ready, and nothing of ours replaces them.
func (in input) unmanaged(stuckAfter time.Duration) int {
	n := in.Unmanaged
	for _, began := range in.UnmanagedStarts {
		if in.At.Sub(began) > stuckAfter {
			n--
		}
	}
	return n
}

// starting are the starts of the model without those that are stuck and that nothing of ours can replace.
func (in input) starting(stuckAfter time.Duration) []time.Time {
	starts := slices.Clone(in.Starting)
	for _, began := range in.UnmanagedStarts {
		if i := slices.IndexFunc(starts, began.Equal); i >= 0 && in.At.Sub(began) > stuckAfter {
			starts = slices.Delete(starts, i, i+1)
		}
	}
	return starts
}

// observe is the observation for Decide. A start counts from its registration as an instance in state
// starting, or from the report of a backend: a number that is only published (backends advise and keda,
// mode advise) may have been followed by no start at all.
func (in input) observe(u used, deployments []deploymentRow, stuckAfter time.Duration) Obs {
	o := Obs{
		Waiting: in.Waiting + in.Urgent, Late: min(in.Late, in.Waiting), Urgent: in.Urgent,
		Running: in.Running, Due: in.Due,
		Arrived: u.queued + u.online, Online: u.online, Refused: u.refused, Gateway: in.Gateway,
		Service: in.Service, Ready: in.Ready, Draining: in.Draining, Unhealthy: in.Unhealthy,
		ColdStart: in.ColdStart, ColdStartP95: in.ColdStartP95,
		Busy: in.BusyAMinute, PerMin: in.ArrivedAMinute, Forecast: in.BusyLastWeek,
		Ages:     Ages{Gateway: Seconds(in.GatewayAge * float64(time.Second))},
		Switches: Switches{Off: in.Off, ZeroOff: in.ZeroOff, MaxAll: in.MaxAll * len(deployments)},
	}
	o.Starting = in.starting(stuckAfter)
	if in.LastMinute != nil {
		o.LastRequest = *in.LastMinute
	}
	o.Ages.Instances = instancesAge(deployments, in.At)
	for _, s := range deployments {
		o.Starting = append(o.Starting, s.unregistered()...)
		if len(deployments) > 1 {
			o.Deployments = append(o.Deployments, DeploymentStarts{
				Name: s.Name, Ready: s.Ready, Starting: s.underWay(),
				ByHand: s.overridden(in.At) || s.Mode == Manual,
			})
		}
	}
	sortTimes(o.Starting)
	if len(deployments) == 1 { // with the instances that nothing of ours started
		o.Deployments = []DeploymentStarts{{Name: deployments[0].Name, Ready: o.Ready, Starting: o.Starting}}
	}
	if len(deployments) == 1 && deployments[0].Override != nil {
		o.Switches.Override, o.Switches.OverrideUntil = deployments[0].Override, *deployments[0].OverrideUntil
	}
	return o
}
