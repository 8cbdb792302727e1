package slot

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/pkg/invalidation"
)

// warmMax bounds the time of Warm.
const warmMax = 5 * time.Second

// warmPreemptSQL preempts no run of a model that exists: of another one not even the plans are made.
const warmPreemptSQL = `SELECT penstock.preempt_durable(m.name, 0, 0) FROM penstock.model m LIMIT 1`

// warmSharesSQL has no row of a model that does not exist to compute a share for.
const warmSharesSQL = `SELECT penstock.slot_share('', 0), penstock.equal_share('', true, 0)`

// Warm lets a new session plan the statements of gateways, for a model that does not exist and so without effect: the
// first lease of a session takes 30 ms of CPU, the next ones 2.
func Warm(ctx context.Context, conn *pgx.Conn) error {
	const none = ""
	bounded, cancel := context.WithTimeout(ctx, warmMax)
	defer cancel()
	h := Holder{DB: conn, Node: func() invalidation.NodeID { return 0 }}
	_, leased := h.LeaseWithin(bounded, none, 0, Limited{Instances: []int32{}, Rooms: []int32{}})
	_, offered := h.Offer(bounded, none, nil)
	_, preempted := conn.Exec(bounded, warmPreemptSQL)
	_, shared := h.SharesAndShortages(bounded, nil)
	_, computed := conn.Exec(bounded, warmSharesSQL)
	_, held := h.Slots(bounded)
	handedOver, withdrawn := h.HandOver(bounded, none, nil), h.Withdraw(bounded, none)
	return errors.Join(leased, offered, handedOver, preempted, shared, computed, held, withdrawn)
}
