package slot

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

const preemptSQL = `SELECT penstock.preempt_durable($1, $2, $3)`

// Preempt orders the end of up to want runs of durable entries of a model, and returns how many were ordered. The node
// is a gateway: what is preempted for it are runs of task nodes.
func (h *Holder) Preempt(ctx context.Context, model string, want int) (ordered int, err error) {
	if err := h.DB.QueryRow(ctx, preemptSQL, model, h.Node(), want).Scan(&ordered); err != nil {
		return 0, fmt.Errorf("preempt %d runs of model %q: %w", want, model, err)
	}
	return ordered, nil
}

const takePreemptionsSQL = `SELECT run_token FROM penstock.take_preemptions($1)`

// TakePreemptions returns the tokens of the locks of those runs of the node whose end was ordered, each once.
func (h *Holder) TakePreemptions(ctx context.Context) (tokens []int64, err error) {
	tokens, err = pgx.CollectRows(postgres.Query(ctx, h.DB, takePreemptionsSQL, h.Node()), pgx.RowTo[int64])
	if err != nil {
		return nil, fmt.Errorf("take preemptions: %w", err)
	}
	return tokens, nil
}
