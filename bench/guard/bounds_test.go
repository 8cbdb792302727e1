package guard

// bounds is what an entry may cost on each path, as it was measured on Postgres 15; it does not depend on the machine.
// A figure above its bound times the margin fails the test. Whoever makes an entry dearer raises the bound here and
// says why in the commit; whoever makes it cheaper lowers it, so that the gain is kept.
var bounds = []struct {
	path   string
	cost   cost
	margin float64 // 0: usualMargin
}{
	// Of the allocations, 5 are for the hint in the push's own transaction (ADR 21).
	{path: "push single", cost: cost{WAL: 404, Buffers: 9.1, Statements: 1, Commits: 1, Allocs: 25}},
	// Nine commits for 9,000 entries, and room for two that are of the measurement: which readings of the counters fall
	// into it depends on how busy the machine is.
	{path: "push bulk", cost: cost{WAL: 363, Buffers: 7.1, Statements: 0.001, Commits: 0.00112, Allocs: 4}},
	{path: "solo drain", cost: cost{WAL: 392, Buffers: 16.1, Statements: 0.004, Commits: 0.004, Allocs: 3.3}},
	{path: "push groups", cost: cost{WAL: 336, Buffers: 6.2, Statements: 0.001, Commits: 0.001, Allocs: 18.1}},
	// Two of the seven statements find out that the lane has keys.
	{path: "groups of 50", cost: cost{WAL: 66, Buffers: 3.9, Statements: 0.0007, Commits: 0.0006, Allocs: 1.6}},
	// How many endings share a transaction depends on how fast the machine is.
	{path: "node drain", cost: cost{WAL: 401, Buffers: 16.9, Statements: 0.0103, Commits: 0.0127, Allocs: 9}, margin: 2},
	// Statements and commits are exact: the insert and the hint of the push, the claim, the ending, and the first two
	// are one transaction. Of the buffers 1.6 are those of the eight idle connections, which report themselves once
	// in five entries.
	{path: "lone pick-up", cost: cost{WAL: 861, Buffers: 29.6, Statements: 4, Commits: 3, Allocs: 204}},
}

const (
	usualMargin = 1.1

	// The targets for the whole life of an entry, pushed in bulk and drained, in bytes of WAL.
	soloLifeWALMax, groupLifeWALMax = 900, 500
)
