package invalidation

import (
	"encoding/json"
	"fmt"
)

// FlowWeight is the share of a flow beside the queue's other flows, as of when the queue was read.
func (q *Queue) FlowWeight(flow string) float64 {
	for _, weights := range []map[string]float64{q.weights, q.everywhere.weights} {
		if w, set := weights[flow]; set {
			return w
		}
	}
	return 1
}

// readWeights reads what penstock.queue_weights writes.
func readWeights(text []byte) (weights map[string]float64, err error) {
	if text == nil {
		return nil, nil
	}
	if err = json.Unmarshal(text, &weights); err != nil {
		err = fmt.Errorf("read weights of flows: %w", err)
	}
	return weights, err
}
