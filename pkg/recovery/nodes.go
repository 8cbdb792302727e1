package recovery

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/pkg/invalidation"
)

// lapseSQL corrects the time of heartbeat $2 of node $1, which was written before the database's clock was set back: it
// is at least $3 old. All that ask whether a lease has lapsed read this time.
const lapseSQL = `
UPDATE penstock.node SET beat_at = clock_timestamp() - $3::interval
 WHERE id = $1 AND beat = $2 AND beat_at + lease > clock_timestamp()`

// lapse makes the leases of overdue nodes lapse in the database as they did on the nodes.
func (l *Locks) lapse(ctx context.Context, overdue []Overdue) error {
	if len(overdue) == 0 {
		return nil
	}
	var corrected []Overdue
	err := l.write(ctx, len(overdue), func(ctx context.Context, tx pgx.Tx) error {
		corrected = nil
		for _, o := range overdue {
			tag, err := tx.Exec(ctx, lapseSQL, o.ID, o.Beat, o.Unheard)
			if err != nil {
				return err
			}
			if tag.RowsAffected() > 0 {
				corrected = append(corrected, o)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("correct the heartbeats of overdue nodes: %w", err)
	}
	for _, o := range corrected {
		l.cfg.Log.WarnContext(ctx, "the database's clock was set back, and a node is not heard since",
			"node", o.ID, "unheard", o.Unheard.Round(time.Millisecond))
	}
	return nil
}

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

// removeNodesSQL deletes those of nodes $1 that have been dead for longer than $2 and hold no lock
// and no slot: while they hold one, their row is evidence. It checks the lease again, so a node
// that has just come back keeps its row: the delete would be safe outside the term as well.
const removeNodesSQL = `
DELETE FROM penstock.node n
 WHERE n.id = ANY ($1::bigint[]) AND n.beat_at + n.lease + $2::interval < clock_timestamp()
   AND NOT EXISTS (SELECT FROM penstock.lock l WHERE l.node_id = n.id)
   AND NOT EXISTS (SELECT FROM penstock.slot s WHERE s.node_id = n.id)`

func (l *Locks) removeNodes(ctx context.Context, nodes []Node) error {
	var old []invalidation.NodeID
	for _, n := range nodes {
		if n.Silent > n.Lease+l.cfg.NodeRetention {
			old = append(old, n.ID)
		}
	}
	if len(old) == 0 {
		return nil
	}
	var removed int64
	err := l.write(ctx, len(old), func(ctx context.Context, tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, removeNodesSQL, old, l.cfg.NodeRetention)
		removed = tag.RowsAffected()
		return err
	})
	if err != nil {
		return fmt.Errorf("remove dead nodes: %w", err)
	}
	l.done.Add(func(s *LocksStatus) { s.Removed += removed })
	return nil
}
