// Package simulate plays traces of requests against autoscalers: scale.Decide, the rivals with their published
// constants, fixed numbers of instances, and a bound that knows the future.
//
// The model of a fleet: one queue, first in, first out; an instance has slots and takes a request when one is
// free; a start takes a cold start; a removed instance ends what it runs. Time moves in steps of a second for
// the autoscaler and exactly for requests. GPU-hours are the time of all instances, starting and draining
// ones included. All scalers see fresh figures: rivals are given no delay of metrics.
package simulate
