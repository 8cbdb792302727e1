package operator

import (
	"context"
	"fmt"
	"time"
)

// WebhookEndpoint is a receiver of callbacks, without its secrets.
type WebhookEndpoint struct {
	URL            string     `json:"url"`
	Signed         bool       `json:"signed"`   // it has a secret of its own
	Rotating       bool       `json:"rotating"` // an older secret signs beside it
	DisabledAt     *time.Time `json:"disabled_at,omitempty"`
	DisabledReason string     `json:"disabled_reason,omitempty"`
	CreatedAt      time.Time  `json:"created_at"`
}

const webhookEndpointsSQL = `
SELECT url, secret IS NOT NULL AS signed, coalesce(old_until > clock_timestamp(), false) AS rotating, disabled_at,
       coalesce(disabled_reason, '') AS disabled_reason, created_at
  FROM penstock.webhook_endpoint
 WHERE url > $1
 ORDER BY url
 LIMIT $2`

// WebhookEndpoints returns the receivers of callbacks by address, from the first after the given
// one.
func (d *Database) WebhookEndpoints(ctx context.Context, after string, limit int) ([]WebhookEndpoint, error) {
	return list[WebhookEndpoint](ctx, d.db, "webhook endpoints", webhookEndpointsSQL, after, page(limit))
}

// SentCallback is the callback that reports an end of an entry: an entry of the queue webhook.
type SentCallback struct {
	ID int64     `json:"id"`
	At time.Time `json:"at"` // of its push
}

const callbacksSQL = `
SELECT callback_id AS id, at FROM penstock.callback_sent WHERE entry_id = $1 ORDER BY at DESC LIMIT $2`

// Callbacks returns the callbacks that report the ends of an entry, the newest first. They are known for
// seven days.
func (d *Database) Callbacks(ctx context.Context, entry int64, limit int) ([]SentCallback, error) {
	return list[SentCallback](ctx, d.db, fmt.Sprintf("callbacks of entry %d", entry), callbacksSQL, entry, page(limit))
}
