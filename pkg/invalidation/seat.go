package invalidation

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/jackc/pgx/v5"
)

// HandOver is a hint of its own kind, in JSON, which nodes that know of no seats drop: a push has handed an entry over to the
// seat that a node offered under a claim id. The lock record stands; the node is to read it.
type HandOver struct {
	Queue int32
	Node  NodeID
	Claim int32
	Entry EntryID
}

const handOverSQL = `SELECT id, coalesce(node, 0), coalesce(claim, 0), next FROM penstock.hand_over($1, $2, $3, $4, $5)`

// pushSeated is for the push of one entry that needs nothing but a thread, if it may be hinted at right away: it hands it over if there
// is a seat, and hints. It returns neither answer nor error where that is not for it.
func (q *Queue) pushSeated(ctx context.Context, pushes []Push) ([]Pushed, error) {
	if len(pushes) != 1 || q.hinter == nil || q.inside() || len(pushes[0].Flow) > 256 || q.Config.Grouping != "" || q.Config.Capacity != 0 {
		return nil, nil
	}
	p, bare := pushes[0], pushes[0]
	bare.Flow, bare.Trace = "", ""
	if !plain([]Push{bare}) || !q.hinter.spend(q.ID, 0) {
		return nil, nil
	}
	h, next := HandOver{Queue: q.ID}, int64(0)
	err := q.db.QueryRow(ctx, handOverSQL, q.ID, p.Payload, p.Flow, p.Trace, q.seat.Load()).Scan(&h.Entry, &h.Node, &h.Claim, &next)
	switch {
	case errors.Is(err, pgx.ErrNoRows) || rolledBack(err):
		return nil, nil // another push says why, or does it
	case err != nil:
		return nil, err
	}
	if q.seat.Store(next); h.Node == 0 {
		q.hinter.hint(q.ID, q.lanes(pushes))
	} else {
		q.hinter.spend(q.ID, 1)
		text, _ := json.Marshal(h) //nolint:errchkjson // four numbers
		go q.hinter.send(context.WithoutCancel(ctx), []string{string(text)})
	}
	return answers([]EntryID{h.Entry}, nil), nil
}

// TakesSeats says that a node may offer seats in the queue, so far as its settings tell: where it is bounded they would be in the way.
func (q *Queue) TakesSeats() bool {
	c := &q.Config
	return c.Algorithm == "fair" && c.Grouping == "" && c.Capacity == 0 && c.Model == "" && c.MaxConcurrentPerNode == 0 && len(q.limits) == 0
}

// TendSeat offers the seat of h, keeps it or withdraws it, unless a push is just taking it. Taken says that it is not there any more: Handed
// has the lock while it stands.
func (q *Queue) TendSeat(ctx context.Context, h HandOver, do string) (withdrawn, taken bool, err error) {
	err = q.db.QueryRow(ctx, `SELECT withdrawn, taken FROM penstock.tend_seat($1, $2, $3, $4)`, q.ID, h.Node, h.Claim, do).Scan(&withdrawn, &taken)
	return withdrawn, taken, q.errorf("tend a seat in", err)
}
