package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Announcement is the registration of an instance for a time.
type Announcement struct {
	Model, Server, Endpoint string
	Slots                   int32
	Labels                  json.RawMessage // an object; nil for none
	TTL                     time.Duration
	Deployment              string // that started it; empty for none
}

const announceSQL = `
SELECT penstock.announce_instance($1, $2, $3, $4, coalesce($5::jsonb, '{}'), $6, $7, NULL, NULL, $8)`

// Announce registers an instance for a time, or renews that, and returns the order for the
// instance: serve, drain (its calls end, and it gets no new ones), or stop (none runs any more).
func (d *Database) Announce(ctx context.Context, a Announcement, by invalidation.By) (order string, err error) {
	err = d.db.QueryRow(ctx, announceSQL, a.Model, a.Server, a.Endpoint, a.Slots, a.Labels, a.TTL,
		given(a.Deployment), given(by.Actor)).Scan(&order)
	if err != nil {
		return "", fmt.Errorf("announce instance %s of model %q: %w", a.Server, a.Model, invalidation.Translate(err))
	}
	return order, nil
}

// neighboursSQL lists the other models that have an instance at the host and port of endpoint $3, or in the device
// group of labels $4, where instance $2 of model $1 is new there. Default ports of http and https count as one.
const neighboursSQL = `
SELECT DISTINCT i.model
  FROM penstock.instance i
 WHERE i.model <> $1
   AND (regexp_replace(lower(substring(i.endpoint FROM '://([^/?#]+)')), ':(80|443)$', '')
        = regexp_replace(lower(substring($3::text FROM '://([^/?#]+)')), ':(80|443)$', '')
        OR i.device_group = $4::jsonb->>'device_group')
   AND NOT EXISTS (SELECT FROM penstock.instance own
                    WHERE own.model = $1 AND own.server = $2 AND own.endpoint = $3
                      AND own.device_group IS NOT DISTINCT FROM $4::jsonb->>'device_group')
 ORDER BY i.model`

// Neighbours returns the other models whose worker or devices an instance would share that is to be announced: those
// with an instance at its host and port, or in its device group. Where the instance is registered already as it would
// be, it returns none.
func (d *Database) Neighbours(ctx context.Context, a Announcement) (models []string, err error) {
	rows := postgres.Query(ctx, d.db, neighboursSQL, a.Model, a.Server, a.Endpoint, a.Labels)
	models, err = pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("find models beside instance %s of model %q: %w", a.Server, a.Model, err)
	}
	return models, nil
}
