package scale

import (
	"fmt"
	"testing"
	"time"
)

// The deployments of other models are no neighbours: a leader reads all of them once a second.
func TestTimedNeighboursTakeNoLongerForEachOfManyModels(t *testing.T) {
	each := func(n int) time.Duration {
		deployments := make([]applied, n)
		for i := range deployments {
			deployments[i].Model, deployments[i].Backend = fmt.Sprintf("model-%06d", i), backendKubernetes
		}
		best := time.Hour
		for range 5 {
			began := time.Now()
			neighbours(deployments, noon)
			best = min(best, time.Since(began))
		}
		return best / time.Duration(n)
	}
	few, many := each(200), each(4000)
	t.Logf("%s for each of 200 deployments, %s for each of 4,000", few, many)
	if many > 5*few+time.Microsecond {
		t.Errorf("%s for each of 4,000 deployments, %s for each of 200", many, few)
	}
}
