package recovery

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/pkg/invalidation"
)

// takeBack uncounts the crashes of nodes whose lease had lapsed and that are heard again: they were
// stopped, preempted or cut off, and had not died. Their locks were freed and are not restored.
func (l *Locks) takeBack(ctx context.Context, nodes []Node) error {
	for _, n := range nodes {
		if !n.Blamed || n.dead() {
			continue
		}
		if err := l.takeBackOne(ctx, n.ID); err != nil {
			return err
		}
		l.answer()
	}
	return nil
}

func (l *Locks) takeBackOne(ctx context.Context, node invalidation.NodeID) error {
	var n int64
	err := l.write(ctx, 1, func(ctx context.Context, tx pgx.Tx) error {
		return tx.QueryRow(ctx, `SELECT penstock.take_back_crashes($1)`, node).Scan(&n)
	})
	if err != nil {
		return fmt.Errorf("take back the crashes of node %d: %w", node, err)
	}
	if n > 0 {
		l.done.Add(func(s *LocksStatus) { s.TakenBack += n })
		l.cfg.Log.InfoContext(ctx, "a node is heard again after its lease: its entries count no crash",
			"node", node, "entries", n)
	}
	return nil
}
