package prediction

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/gateway"
)

// Events of predictions. Of output and logs clients are not told: see docs/gateway.md.
const (
	eventStart     = "start"
	eventOutput    = "output"
	eventLogs      = "logs"
	eventCompleted = "completed"
)

var eventNames = []string{eventStart, eventOutput, eventLogs, eventCompleted}

// notifies says whether a filter lets an event through; an empty one lets all through.
func notifies(filter []string, event string) bool {
	return len(filter) == 0 || slices.Contains(filter, event)
}

// delivery is the payload of an entry of the queue of webhooks. Its data is sent as it is.
type delivery struct {
	URL    string    `json:"url"`
	Format string    `json:"format"`
	Signer string    `json:"signer"`
	Type   string    `json:"type"`
	At     time.Time `json:"at"`
	Data   view      `json:"data"`
}

// deliveryBytesMax is what the queue of webhooks takes at least; a larger output is left out.
const deliveryBytesMax = 900 << 10

const pushSQL = `
SELECT ids FROM penstock.push_many('webhook', ARRAY[$1::jsonb], flows => ARRAY[$2::text], inside => true)`

// push makes the delivery of an event an entry, in the transaction of its caller.
func push(ctx context.Context, tx pgx.Tx, p row, event, base string) error {
	d := delivery{
		URL: *p.Webhook, Format: "bare", Signer: p.Owner, Type: "prediction." + event, At: time.Now(),
		Data: p.view(base),
	}
	text, err := json.Marshal(d)
	if err == nil && len(text) > deliveryBytesMax {
		d.Data.Output, d.Data.Input, d.Data.DataRemoved = json.RawMessage("null"), json.RawMessage("{}"), true
		text, err = json.Marshal(d)
	}
	if err != nil {
		return fmt.Errorf("write webhook of prediction %s: %w", p.ID, err)
	}
	if _, err := tx.Exec(ctx, pushSQL, text, hostOf(*p.Webhook)); err != nil {
		return fmt.Errorf("push webhook of prediction %s: %w", p.ID, err)
	}
	return nil
}

// flowBytesMax bounds the flow of a delivery.
const flowBytesMax = 64

// hostOf is the flow of deliveries to an address: its host in lower case, in at most flowBytesMax bytes. Lower case may
// have more bytes than the host as it was written, or fewer, so that the bound holds for the lower case.
func hostOf(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return ""
	}
	return gateway.ClipText(strings.ToLower(u.Host), flowBytesMax)
}

// webhookMax bounds the address of a webhook, in bytes.
const webhookMax = 2048

// checkWebhook returns why an address cannot be that of a webhook; nil: it can. A host is in ASCII: internationalized
// names have a form in it, and every part of the way of a delivery reads that form alike.
func checkWebhook(address string) error {
	u, err := url.Parse(address)
	switch {
	case len(address) > webhookMax:
		return invalid("webhook", "webhook has %d bytes, more than %d", len(address), webhookMax)
	case err != nil || (u.Scheme != "https" && u.Scheme != "http") || u.Host == "":
		return invalid("webhook", "webhook must be an http or https address")
	case strings.ContainsFunc(u.Host, func(c rune) bool { return c <= ' ' || c > '~' }):
		return invalid("webhook", "the host of webhook must be in ASCII: give an internationalized name as xn--...")
	}
	return nil
}

// duePredictionsSQL locks predictions that have ended and of whose end nobody was told.
const duePredictionsSQL = `
SELECT p.id, p.owner
  FROM penstock.prediction p
 WHERE p.webhook IS NOT NULL AND p.notified_at IS NULL
   AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = p.queue_id AND e.id = p.entry_id)
 ORDER BY p.created_at
 LIMIT 100
   FOR UPDATE OF p SKIP LOCKED`

const notedSQL = `UPDATE penstock.prediction SET notified_at = clock_timestamp() WHERE id = $1`

// notify pushes the deliveries of predictions that have ended, each once, by whichever gateway comes first.
func (s *Predictions) notify(ctx context.Context) error {
	return postgres.InTx(ctx, s.db, func(tx pgx.Tx) error {
		rows := postgres.Query(ctx, tx, duePredictionsSQL)
		due, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct{ ID, Owner string }])
		if err != nil {
			return fmt.Errorf("read predictions that have ended: %w", err)
		}
		for _, d := range due {
			p, err := find(ctx, tx, d.Owner, d.ID)
			if err == nil {
				err = push(ctx, tx, p, eventCompleted, s.config.Base)
			}
			if err != nil && !errors.Is(err, errNone) {
				return err
			}
			if _, err := tx.Exec(ctx, notedSQL, d.ID); err != nil {
				return fmt.Errorf("note webhook of prediction %s: %w", d.ID, err)
			}
		}
		return nil
	})
}
