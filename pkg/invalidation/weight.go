package invalidation

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/penstock/penstock/internal/postgres"
)

// SetFlowWeight gives a flow a share beside other flows, 1 being what a flow has otherwise: in the queue of that name,
// or in all queues if it is empty. A weight of 0 takes it away. Nodes go by it within one heartbeat.
func SetFlowWeight(ctx context.Context, db postgres.DB, flow, queue string, weight float64, by By) error {
	const sql = `SELECT penstock.set_flow_weight($1, $2, $3, $4, coalesce($5, current_user::text))`
	return control(ctx, db, fmt.Sprintf("set weight of flow %q", flow), sql, flow, given(weight), given(queue), by.Reason, given(by.Actor))
}

// FlowWeight is the share of a flow beside the queue's other flows, as of when the queue was read.
func (q *Queue) FlowWeight(flow string) float64 {
	if w, set := q.weights[flow]; set {
		return w
	}
	return 1
}

// readWeights reads what penstock.queue_weights writes.
func readWeights(text []byte) (weights map[string]float64, err error) {
	if err = json.Unmarshal(text, &weights); err != nil {
		err = fmt.Errorf("read weights of flows: %w", err)
	}
	return weights, err
}
