package scale

import "time"

// Obs is the observation of a model: its work, its instances and the prices of starting one.
// Counts of work leave out entries that may not start: paused, throttled, limited, governed.
type Obs struct {
	Waiting int `json:"waiting"`          // requests that may start and have no slot, in queues and at gateways
	Late    int `json:"late,omitempty"`   // of Waiting: the deadline comes before a start begun now is ready
	Running int `json:"running"`          // requests that hold a slot, at draining instances too
	Due     int `json:"due,omitempty"`    // entries that become ready within a cold start
	Urgent  int `json:"urgent,omitempty"` // of Waiting: at a gateway, where a caller waits

	Arrived float64 `json:"arrived"`           // requests since the observation before
	Online  float64 `json:"online,omitempty"`  // of Arrived: through a gateway
	Refused float64 `json:"refused,omitempty"` // requests turned away since then, not among Arrived
	Gateway bool    `json:"gateway,omitempty"` // a gateway serves the model

	Service     float64   `json:"service"` // mean seconds that a request holds a slot; 0 for unknown
	LastRequest time.Time `json:"last_request,omitzero"`

	Ready     int         `json:"ready"`               // instances that take requests
	Starting  []time.Time `json:"starting,omitempty"`  // when each start began, oldest first
	Draining  int         `json:"draining,omitempty"`  // instances that end their last requests
	Unhealthy int         `json:"unhealthy,omitempty"` // neither Ready nor Starting: failing probes, or quarantined
	// Starts of one deployment may be stuck while those of another are not. Empty: the model has one without a name.
	Deployments []DeploymentStarts `json:"deployments,omitempty"`

	ColdStart    float64 `json:"cold_start"`     // seconds, median; 0 for unknown
	ColdStartP95 float64 `json:"cold_start_p95"` // seconds; 0 for unknown

	Floor    int     `json:"floor,omitempty"`    // minimum of the schedules that hold now
	Busy     float64 `json:"busy,omitempty"`     // slot-seconds a minute, mean over 15 minutes
	PerMin   float64 `json:"per_min,omitempty"`  // requests a minute, mean over 15 minutes
	Forecast float64 `json:"forecast,omitempty"` // slot-seconds a minute at this time last week

	Ages     Ages     `json:"ages,omitzero"`
	Switches Switches `json:"switches,omitzero"`
}

// Ages says how old the sources of an observation are beside the database, which is read for each one.
type Ages struct {
	Gateway   Seconds `json:"gateway,omitempty"`   // the last report of a gateway
	Instances Seconds `json:"instances,omitempty"` // the newest report of a backend
}

// Switches are the orders of operators that hold at the time of an observation.
type Switches struct {
	Off     bool `json:"off,omitempty"`      // scaling is off everywhere
	ZeroOff bool `json:"zero_off,omitempty"` // no model goes to zero
	MaxAll  int  `json:"max_all,omitempty"`  // scale.max_all for each deployment of the model; 0 for none

	Override      *int      `json:"override,omitempty"` // instances, until OverrideUntil
	OverrideUntil time.Time `json:"override_until,omitzero"`
}

// State is the part of a model's history that Decide needs. It is stored, so that a new leader
// goes on with the windows of the one before. Decide does not change the state that it is given.
type State struct {
	At      time.Time `json:"at,omitzero"`       // of the last Decide
	Counted time.Time `json:"counted,omitzero"`  // of the last observation that was fresh
	Begun   Level     `json:"begun,omitzero"`    // what there was at the first Decide, and at the first after Advised
	Advised bool      `json:"advised,omitempty"` // in mode Advise: instances may not have followed the number

	Shadow []float64 `json:"shadow,omitempty"` // slot-seconds that would wait with 1, 2, ... instances
	Online []float64 `json:"online,omitempty"` // the same for online requests alone
	Bare   []float64 `json:"bare,omitempty"`   // of all requests, without the reserve; for Late
	Base   int       `json:"base,omitempty"`
	Late   []float64 `json:"late,omitempty"`   // requests that would have waited too long with 1, 2, ... instances
	Seen   float64   `json:"seen,omitempty"`   // requests over the same time; both decay
	SeenAt time.Time `json:"seen_at,omitzero"` // of the last of them
	Since  time.Time `json:"since,omitzero"`   // of the first of them
	Held   []Level   `json:"held,omitempty"`   // base levels of the hold, highest first
	Wanted []Level   `json:"wanted,omitempty"` // raw levels of the last half of a cold start, highest first

	Unused   time.Time `json:"unused,omitzero"`    // since then fewer requests run than instances are ready
	Unusable bool      `json:"unusable,omitempty"` // for so long that what runs limits the surge

	Unhealthy []Level `json:"unhealthy,omitempty"` // negative counts of unhealthy instances, the fewest first

	Rate    float64   `json:"rate,omitempty"`   // requests a second, over the last minute
	Recent  float64   `json:"recent,omitempty"` // requests, decayed over 30 minutes
	LastUse time.Time `json:"last_use,omitzero"`

	Desired  int       `json:"desired"`
	Changes  []Step    `json:"changes,omitempty"`  // of Desired, in the last minute
	Window   []Level   `json:"window,omitempty"`   // recommendations of replicate-v2 and hpa
	Synced   time.Time `json:"synced,omitzero"`    // last cycle of hpa and utilization
	WasReady time.Time `json:"was_ready,omitzero"` // an instance was ready then

	Stuck map[string]StuckHistory `json:"stuck,omitempty"` // by deployment
}

// DeploymentStarts are the instances of a deployment.
type DeploymentStarts struct {
	Name     string      `json:"name"`
	Ready    int         `json:"ready"`
	Starting []time.Time `json:"starting,omitempty"` // oldest first
	ByHand   bool        `json:"by_hand,omitempty"`  // its mode or an override sets its number
}

// StuckHistory is the history of the stuck starts of a deployment.
type StuckHistory struct {
	Replaced     int       `json:"replaced,omitempty"` // rounds of replacements
	ReplacedAt   time.Time `json:"replaced_at,omitzero"`
	Blocked      bool      `json:"blocked,omitempty"`      // until an instance more is ready than Ready
	BlockedUntil time.Time `json:"blocked_until,omitzero"` // nothing is started before
	Ready        int       `json:"ready,omitempty"`        // the least number since it was blocked
}

// Level is a number of instances that was wanted at a time.
type Level struct {
	At time.Time `json:"at"`
	N  int       `json:"n"`
}

// Step is a change of the desired number of instances.
type Step struct {
	At time.Time `json:"at"`
	By int       `json:"by"`
}

// Decision is the number of instances that a model should have, and how it was found.
type Decision struct {
	At      time.Time `json:"at"`
	Current int       `json:"current"` // desired before
	Desired int       `json:"desired"`

	Base       int `json:"base"`       // by shadow queues
	Surge      int `json:"surge"`      // by the backlog; 0 when it needs no more than there is
	Raw        int `json:"raw"`        // the larger of both, 1 if there is any work
	Stabilised int `json:"stabilised"` // after the hold

	Replace int    `json:"replace,omitempty"` // stuck starts to be started anew
	Apply   bool   `json:"apply"`             // the backend is to be told
	Notes   []Note `json:"notes,omitempty"`   // in the order of the steps
}
