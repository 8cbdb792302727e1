package fairness

import (
	"math"
	"time"
)

// Key names whose service is counted: one flow in one band of a queue, or that queue's band as a whole.
type Key struct {
	Queue    int32
	Priority int16
	Whole    bool // the queue: Flow is empty then
	Flow     string
}

// AttainedService is service attained by a key, decayed to the moment of the report or the snapshot
// that has it. Service is in the unit of cost: seconds of a processing thread, or the unit that a
// queue declares. A delta may be negative, when entries cost less than estimated.
type AttainedService struct {
	Key
	Service float64
	// Lift is service that was never given: it brings a flow that was away to the level of
	// those that stayed. All nodes lift the same flow for the same reason, so lifts are
	// not added up; the largest holds.
	Lift float64
}

// Decay returns the remaining service after some time: half of it after each half-life.
func Decay(service float64, elapsed, halfLife time.Duration) float64 {
	return service * math.Exp2(-elapsed.Seconds()/halfLife.Seconds())
}

// Fold is how the exchange stores a node's delta: shared as it was elapsed ago, plus delta
// as of now. The statement that does it in the database must agree with it.
func Fold(shared, delta AttainedService, elapsed, halfLife time.Duration) AttainedService {
	shared.Service = math.Max(0, Decay(shared.Service, elapsed, halfLife)+delta.Service)
	shared.Lift = math.Max(Decay(shared.Lift, elapsed, halfLife), delta.Lift)
	return shared
}

// Merge estimates the service attained on all nodes by now: the last snapshot, and since
// then the node's own delta times the number of nodes that are taken to do the same.
func Merge(snapshot, ownDelta, nodes float64) float64 {
	return math.Max(0, snapshot+nodes*ownDelta)
}
