package scale

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/penstock/penstock/internal/duration"
)

// Method names the arithmetic of a policy.
type Method string

// The algorithms. Penstock is the default.
const (
	Penstock    Method = "penstock"     // shadow queues, surge and hold
	ReplicateV2 Method = "replicate-v2" // current instances x backlog of one / target, damped
	HPA         Method = "hpa"          // Kubernetes' horizontal pod autoscaler on waiting + computing
	Utilization Method = "utilization"  // busy seconds a minute against bounds, with a forecast
)

// Mode says how far a deployment may be changed.
type Mode string

// The modes. Full is the default.
const (
	Full     Mode = "full"
	UpOnly   Mode = "up-only"  // never fewer instances
	Manual   Mode = "manual"   // the number that an operator set, and no other
	Advise   Mode = "advise"   // decided and published, not applied
	Disabled Mode = "disabled" // not even decided
)

// applies says whether instances follow the number of a deployment in the mode.
func (m Mode) applies() bool { return m != Disabled && m != Advise }

// Seconds is a duration that JSON writes as a number of seconds.
type Seconds = duration.Seconds

// Policy says how the instances of a model are scaled. A field that is zero takes its default.
type Policy struct {
	Algorithm Method `json:"algorithm,omitempty"`
	Mode      Mode   `json:"-"` // a setting of the deployment, with a column of its own

	Min   int `json:"min,omitempty"`   // instances; default 0
	Max   int `json:"max,omitempty"`   // instances; default 10
	Slots int `json:"slots,omitempty"` // requests that one instance runs at a time; default 1

	SLO       Seconds `json:"slo_seconds,omitempty"`        // wait in the queue; default 30 s
	OnlineSLO Seconds `json:"online_slo_seconds,omitempty"` // wait at a gateway; default 5 s
	Theta     float64 `json:"theta,omitempty"`              // share of the SLO that a shadow queue may wait
	Rho       float64 `json:"rho,omitempty"`                // utilisation of a large fleet
	Beta      float64 `json:"beta,omitempty"`               // reserve of a small one, in square roots
	Phi       float64 `json:"phi,omitempty"`                // share of the slots' work that does not wait
	Tolerated float64 `json:"tolerated,omitempty"`          // share of the requests that may wait longer than the SLO
	Drain     Seconds `json:"drain_seconds,omitempty"`      // a backlog is worked off in it; default max(60 s, 2 SLO)

	// of levels of 2 and more; default 600 s, 300 s with one slot
	Hold        Seconds `json:"hold_seconds,omitempty"`
	IdleMin     Seconds `json:"idle_min_seconds,omitempty"` // level 1 is kept at least; default 5 min
	IdleMax     Seconds `json:"idle_max_seconds,omitempty"` // and at most; default 2 h
	ColdPrice   float64 `json:"cold_price,omitempty"`       // idle seconds that one second of a cold start is worth
	ScaleToZero *bool   `json:"scale_to_zero,omitempty"`    // default true
	SlowStart   int     `json:"slow_start,omitempty"`       // instances until the first one is ready; default 5
	// a start is stuck after max(3 x p95, this); default 10 min
	StuckMin     Seconds `json:"stuck_min_seconds,omitempty"`
	BlockedFor   Seconds `json:"blocked_for_seconds,omitempty"` // after three replacements; default 10 min
	EmergencyMax int     `json:"emergency_max,omitempty"`       // above every other bound; 0 for none
	Floors       []Floor `json:"floors,omitempty"`              // minimum by schedule

	Replicate   ReplicatePolicy   `json:"replicate,omitzero"`
	HPA         HPAPolicy         `json:"hpa,omitzero"`
	Utilization UtilizationPolicy `json:"utilization,omitzero"`
}

// Floor is a minimum that begins at the times of a cron expression and lasts.
type Floor struct {
	Cron  string  `json:"cron"`
	Zone  string  `json:"zone,omitempty"` // of the expression; default UTC
	Lasts Seconds `json:"lasts_seconds"`
	Min   int     `json:"min"`
}

// ErrPolicy wraps each error about a policy.
var ErrPolicy = errors.New("policy of a deployment is invalid")

// ParsePolicy reads a policy that is to be set. A field that is not known, or out of its range, is an error that wraps
// ErrPolicy. One that is stored is read by readPolicy.
func ParsePolicy(text []byte) (p Policy, err error) {
	reader := json.NewDecoder(bytes.NewReader(text))
	reader.DisallowUnknownFields()
	if err := reader.Decode(&p); err != nil {
		return p, fmt.Errorf("%w: %w", ErrPolicy, err)
	}
	return p, p.Check()
}

// Check returns an error about the first field that is out of its range, which wraps ErrPolicy.
func (p Policy) Check() error {
	if _, flaws := p.nearest(); len(flaws) > 0 {
		return fmt.Errorf("%s: %w", flaws[0].problem, ErrPolicy)
	}
	return nil
}

// maxInstances bounds a deployment; Workers AI has the same bound for an application.
const maxInstances = 1400

// maxSlots bounds the slots of an instance, as its registration does.
const maxSlots = 100_000

// WithDefaults fills in the fields that are zero.
func (p Policy) WithDefaults() Policy {
	set(&p.Algorithm, Penstock)
	set(&p.Mode, Full)
	set(&p.Max, max(10, p.Min))
	set(&p.Slots, 1)
	set(&p.SLO, Seconds(30*time.Second))
	set(&p.OnlineSLO, Seconds(5*time.Second))
	set(&p.Drain, max(Seconds(time.Minute), 2*p.SLO))
	set(&p.IdleMin, Seconds(5*time.Minute))
	set(&p.IdleMax, Seconds(2*time.Hour))
	set(&p.SlowStart, 5)
	set(&p.StuckMin, Seconds(10*time.Minute))
	set(&p.BlockedFor, Seconds(10*time.Minute))
	set(&p.ColdPrice, 14)
	if p.ScaleToZero == nil {
		p.ScaleToZero = new(true)
	}
	if p.Slots == 1 {
		// Beta is 0 then: the reserve of a square root assumes that slots share their load.
		set(&p.Theta, 0.5)
		set(&p.Rho, 1)
		set(&p.Phi, 1)
		set(&p.Hold, Seconds(5*time.Minute))
		return p
	}
	set(&p.Theta, 0.25)
	set(&p.Rho, 0.85)
	set(&p.Beta, 1)
	set(&p.Phi, 0.5)
	set(&p.Tolerated, 0.08)
	set(&p.Hold, Seconds(10*time.Minute))
	return p
}

func set[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}
