package fairness

import "github.com/penstock/penstock/internal/pgtest"

// seeds is how many times the largest simulation is run.
var seeds = pgtest.Long(1, 3)
