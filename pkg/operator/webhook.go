package operator

import (
	"context"
	"fmt"
	"time"
)

// Receiver is a receiver of callbacks that was registered or disabled, without its secrets.
type Receiver struct {
	URL            string     `json:"url" doc:"Empty: the root secret, from which those of all others are derived."`
	OwnSecret      bool       `json:"own_secret"`
	OldSecretUntil *time.Time `json:"old_secret_until,omitempty" doc:"Until when the secret before signs as well."`
	CreatedAt      time.Time  `json:"created_at"`
	DisabledAt     *time.Time `json:"disabled_at,omitempty"`
	DisabledReason string     `json:"disabled_reason,omitempty"`
}

const receiversSQL = `
SELECT url, secret IS NOT NULL AS own_secret,
       CASE WHEN old_until > clock_timestamp() THEN old_until END AS old_secret_until, created_at, disabled_at,
       coalesce(disabled_reason, '') AS disabled_reason
  FROM penstock.webhook_endpoint
 WHERE $1 = '' OR url > $1
 ORDER BY url
 LIMIT $2`

// Receivers returns the receivers of callbacks by address, those after the given one. The first is the root secret.
func (d *Database) Receivers(ctx context.Context, after string, limit int) ([]Receiver, error) {
	return list[Receiver](ctx, d.db, "receivers of callbacks", receiversSQL, after, page(limit))
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
