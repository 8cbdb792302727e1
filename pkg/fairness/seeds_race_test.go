//go:build race

package fairness

// seeds is less under the race detector: a simulation has one goroutine, and takes ten times as long.
const seeds = 1
