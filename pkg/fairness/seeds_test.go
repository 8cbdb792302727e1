//go:build !race

package fairness

// seeds is how many times the largest simulation is run.
const seeds = 3
