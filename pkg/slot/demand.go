package slot

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

const sharesSQL = `SELECT name, penstock.slot_share(name, $2) FROM unnest($1::text[]) m(name)`

// Shares reads how many slots the node may hold of those models of which other nodes go without. Models of which no
// other node does are left out.
func (h *Holder) Shares(ctx context.Context, models []string) (map[string]int, error) {
	shares := map[string]int{}
	var name string
	var share *int
	_, err := pgx.ForEachRow(postgres.Query(ctx, h.DB, sharesSQL, models, h.Node()),
		[]any{&name, &share}, func() error {
			if share != nil {
				shares[name] = *share
			}
			return nil
		})
	if err != nil {
		return nil, fmt.Errorf("read shares of slots: %w", err)
	}
	return shares, nil
}

// Share is what a node may hold of a model of which other nodes go without.
type Share struct {
	Slots    int
	Shortage int // slots that other nodes, gateways and task nodes, miss below their own shares
}

const sharesAndShortagesSQL = `
SELECT m.name, m.share,
       coalesce((SELECT sum(least(h.missing, h.share - h.held))
                   FROM penstock.hungry_shares(m.name) h
                  WHERE h.node_id <> $2 AND h.held < h.share), 0)
  FROM (SELECT n.name, penstock.slot_share(n.name, $2) AS share FROM unnest($1::text[]) n(name)) m
 WHERE m.share IS NOT NULL`

// SharesAndShortages is Shares with what the other nodes miss. A gateway gives up busy slots too, when their calls end,
// but no more of them than that. A task node gives up whatever is beyond its share: it is spared the second part of the
// statement, which reads the shares of the nodes that go without.
func (h *Holder) SharesAndShortages(ctx context.Context, models []string) (map[string]Share, error) {
	shares := map[string]Share{}
	var name string
	var share Share
	_, err := pgx.ForEachRow(postgres.Query(ctx, h.DB, sharesAndShortagesSQL, models, h.Node()),
		[]any{&name, &share.Slots, &share.Shortage}, func() error {
			shares[name] = share
			return nil
		})
	if err != nil {
		return nil, fmt.Errorf("read shares of slots: %w", err)
	}
	return shares, nil
}

const unpressedSQL = `SELECT name, penstock.unpressed_room(name) FROM unnest($1::text[]) m(name)`

// Unpressed counts the free slots of those instances of models that are not pressed: slots of the others may be
// exchanged for them.
func (h *Holder) Unpressed(ctx context.Context, models []string) (map[string]int, error) {
	rooms := map[string]int{}
	var name string
	var room int
	_, err := pgx.ForEachRow(postgres.Query(ctx, h.DB, unpressedSQL, models), []any{&name, &room}, func() error {
		rooms[name] = room
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("count free slots of instances that are not pressed: %w", err)
	}
	return rooms, nil
}

// withdrawSQL does not wait for the disk: after a crash the demand lapses by itself.
const withdrawSQL = `
UPDATE penstock.slot_demand SET missing = 0
 WHERE model = $1 AND node_id = $2 AND missing > 0 AND set_config('synchronous_commit', 'off', true) <> ''`

// Withdraw ends the demand of the node for slots of a model.
func (h *Holder) Withdraw(ctx context.Context, model string) error {
	if _, err := h.DB.Exec(ctx, withdrawSQL, model, h.Node()); err != nil {
		return fmt.Errorf("withdraw the demand for slots of model %q: %w", model, err)
	}
	return nil
}

const sweepDemandSQL = `
DELETE FROM penstock.slot_demand
 WHERE wanted_at < clock_timestamp() - interval '1 minute' OR wanted_at > clock_timestamp()`

// SweepDemand deletes old demands of all nodes, and those of a time in the future, from before the clock was set back.
func SweepDemand(ctx context.Context, db postgres.DB) error {
	if _, err := db.Exec(ctx, sweepDemandSQL); err != nil {
		return fmt.Errorf("sweep demands for slots: %w", err)
	}
	return nil
}
