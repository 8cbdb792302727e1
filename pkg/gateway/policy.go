package gateway

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// PoolPolicy holds the settings of one pool. It is stored as JSON in penstock.gateway_policy; a field that
// is absent takes its default, all of which are in DefaultPolicy.
type PoolPolicy struct {
	Total     int            `json:"total"`      // requests that may wait in the pool
	FlowTotal int            `json:"flow_total"` // of one flow
	QueueTTL  worker.Seconds `json:"queue_ttl"`  // longest wait of a request that names none

	// Holdback is the part of the ceiling up to which a criticality passes the queue by. It does not keep
	// slots idle: a request that waits gets an idle slot whatever its criticality.
	Holdback ByCriticality `json:"holdback"`
	// Floors are shares of the service of late (10 s or 20 calls) below which a criticality with waiters goes first.
	Floors ByCriticality `json:"floors"`

	// Watermark is the wanted number of calls to an instance, in flight and waiting, and Deviation the distance of the
	// bounds around it at which the mode changes. A watermark of 0 puts the upper bound at the ceiling.
	Watermark float64 `json:"watermark_per_instance"`
	Deviation float64 `json:"deviation"`
	// StrictBand dispatches only while fewer calls than the lower bound are in flight. It keeps a tenth to a quarter of
	// the slots idle under load, and exists for comparison.
	StrictBand bool `json:"strict_band"`

	// MayStart says whether requests wait for an instance while there is none. Nil: if the autoscaler may start one.
	MayStart *bool          `json:"may_start,omitempty"`
	ColdTTL  worker.Seconds `json:"cold_ttl"` // longest wait for that; 0: 3 x p95 of cold starts, 300 s while unknown

	Reserved      float64 `json:"reserved"`       // part of the slots for online calls alone
	BatchReserved float64 `json:"batch_reserved"` // part of the slots for durable entries alone

	Preempt       bool           `json:"preempt"`        // end runs of durable entries for requests that wait
	PreemptAfter  worker.Seconds `json:"preempt_after"`  // how long the oldest request has waited by then
	StrictSlots   bool           `json:"strict_slots"`   // slots held end with the lease while Postgres is away
	FairScope     string         `json:"fair_scope"`     // shared: it counts in the order of entries; separate
	OnFull        string         `json:"on_full"`        // refuse, or push for callers that prefer respond-async
	RefuseStatus  int            `json:"refuse_status"`  // 429 or 503 for a full pool and a wait that is over
	FirstByteMax  worker.Seconds `json:"first_byte_max"` // for the head of a worker's answer; 0: the model's run limit
	SilenceMax    worker.Seconds `json:"silence_max"`    // between two bytes of an answer
	ClientStall   worker.Seconds `json:"client_stall"`   // for a client that does not read
	AffinityBound float64        `json:"affinity_bound"` // x mean + 4: load beyond which affinity ends

	// TPOTMax is the time per output token, in the mean over a stream behind its first token, beyond which a call is
	// too slow to be of use: instances that make such calls get fewer at once. 0: no such limit.
	TPOTMax worker.Seconds `json:"tpot_max"`
}

// ByCriticality is a number for each criticality.
type ByCriticality struct {
	Critical  float64 `json:"critical"`
	Default   float64 `json:"default"`
	Sheddable float64 `json:"sheddable"`
}

func (b ByCriticality) of(c Criticality) float64 {
	return [criticalityCount]float64{b.Critical, b.Default, b.Sheddable}[c]
}

// What a pool does for a caller that cannot be admitted.
const (
	OnFullRefuse = "refuse"
	OnFullPush   = "push"
)

// Whether online use counts in the order of durable entries.
const (
	FairShared   = "shared"
	FairSeparate = "separate"
)

// DefaultPolicy returns the settings of a pool without a row of its own.
func DefaultPolicy() PoolPolicy {
	return PoolPolicy{
		Total: 1000, FlowTotal: 100, QueueTTL: worker.Seconds(30 * time.Second),
		Holdback: ByCriticality{Critical: 1, Default: 0.95, Sheddable: 0.80},
		Floors:   ByCriticality{Default: 0.20, Sheddable: 0.05}, Deviation: 0.1,
		Reserved: 0.20, BatchReserved: 0.10,
		Preempt: true, PreemptAfter: worker.Seconds(100 * time.Millisecond),
		FairScope: FairShared, OnFull: OnFullRefuse, RefuseStatus: 429,
		SilenceMax: worker.Seconds(5 * time.Minute), ClientStall: worker.Seconds(30 * time.Second),
		AffinityBound: 1.25,
	}
}

// ReadPolicy lays the stored fields over the defaults. Unknown fields are left out: a newer version may
// know them.
func ReadPolicy(config []byte) (PoolPolicy, error) {
	p := DefaultPolicy()
	if len(bytes.TrimSpace(config)) == 0 {
		return p, nil
	}
	if err := json.Unmarshal(config, &p); err != nil {
		return DefaultPolicy(), fmt.Errorf("read policy: %w", err)
	}
	return p, p.validate()
}

func (p PoolPolicy) validate() error {
	var errs []error
	check := func(ok bool, field string, value any, want string) {
		if !ok {
			errs = append(errs, fmt.Errorf("%s is %v: want %s", field, value, want))
		}
	}
	share := func(field string, v float64) { check(v >= 0 && v <= 1, field, v, "0 to 1") }
	check(p.Total >= 0, "total", p.Total, "0 or more")
	check(p.FlowTotal >= 0, "flow_total", p.FlowTotal, "0 or more")
	check(p.QueueTTL > 0, "queue_ttl", p.QueueTTL.Duration(), "more than 0")
	check(p.ColdTTL >= 0, "cold_ttl", p.ColdTTL.Duration(), "0 or more")
	check(p.PreemptAfter >= 0, "preempt_after", p.PreemptAfter.Duration(), "0 or more")
	check(p.Watermark >= 0, "watermark_per_instance", p.Watermark, "0 or more")
	check(p.Deviation >= 0 && p.Deviation < 1, "deviation", p.Deviation, "0 to 1, 1 excluded")
	for c := range Criticality(criticalityCount) {
		share("holdback."+c.String(), p.Holdback.of(c))
		share("floors."+c.String(), p.Floors.of(c))
	}
	share("reserved", p.Reserved)
	share("batch_reserved", p.BatchReserved)
	check(p.Reserved+p.BatchReserved <= 1, "reserved + batch_reserved", p.Reserved+p.BatchReserved, "1 at most")
	check(p.FairScope == FairShared || p.FairScope == FairSeparate, "fair_scope", p.FairScope, "shared or separate")
	check(p.OnFull == OnFullRefuse || p.OnFull == OnFullPush, "on_full", p.OnFull, "refuse or push")
	check(p.RefuseStatus == 429 || p.RefuseStatus == 503, "refuse_status", p.RefuseStatus, "429 or 503")
	check(p.TPOTMax >= 0, "tpot_max", p.TPOTMax.Duration(), "0 or more")
	check(p.AffinityBound >= 1, "affinity_bound", p.AffinityBound, "1 or more")
	return errors.Join(errs...)
}
