package prediction

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/invalidation"
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

const pushSQL = `
SELECT ids FROM penstock.push_many('webhook', ARRAY[$1::jsonb], flows => ARRAY[$2::text], inside => true)`

// push makes the delivery of an event an entry, in the transaction of its caller. Where the queue of webhooks refuses
// it for its data, the delivery has none of input and output: the client reads them at the address in it.
func push(ctx context.Context, tx pgx.Tx, p row, event, base string) error {
	d := delivery{
		URL: *p.Webhook, Format: "bare", Signer: p.Owner, Type: "prediction." + event, At: time.Now(),
		Data: p.view(base),
	}
	err := d.push(ctx, tx)
	if invalidation.RefusesPush(err) {
		d.Data.Output, d.Data.Input, d.Data.DataRemoved = json.RawMessage("null"), json.RawMessage("{}"), true
		err = d.push(ctx, tx)
	}
	if err != nil {
		return fmt.Errorf("push webhook of prediction %s: %w", p.ID, err)
	}
	return nil
}

// push pushes within a savepoint, so that a refusal leaves the transaction as it was.
func (d delivery) push(ctx context.Context, tx pgx.Tx) error {
	text, err := json.Marshal(d)
	if err != nil {
		return fmt.Errorf("write delivery: %w", err)
	}
	return pgx.BeginFunc(ctx, tx, func(inner pgx.Tx) error {
		_, err := inner.Exec(ctx, pushSQL, text, hostOf(d.URL))
		return err
	})
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
func (s *Predictions) checkWebhook(address string) error {
	u, err := url.Parse(address)
	switch {
	case len(address) > webhookMax:
		return invalid("webhook", "webhook has %d bytes, more than %d", len(address), webhookMax)
	case err != nil || (u.Scheme != "https" && u.Scheme != "http") || u.Host == "":
		return invalid("webhook", "webhook must be an http or https address")
	case strings.ContainsFunc(u.Host, func(c rune) bool { return c <= ' ' || c > '~' }):
		return invalid("webhook", "the host of webhook must be in ASCII: give an internationalized name as xn--...")
	}
	if s.config.CheckWebhook == nil {
		return nil
	}
	if err := s.config.CheckWebhook(address); err != nil {
		return invalid("webhook", "webhook is refused: %s", err)
	}
	return nil
}

// notices pushes deliveries of webhooks until ctx ends, and forgets old predictions.
func (s *Predictions) notices(ctx context.Context) {
	swept := time.Now()
	var pushing, sweeping duty.Failing
	for {
		pause := noticeIdle
		owed, err := s.owesNotices(ctx)
		if owed {
			pause, err = s.notify(ctx)
		}
		pushing.Note(ctx, s.log, slog.LevelError, "push webhooks", err)
		if err != nil {
			pause = failedPause
		}
		if time.Since(swept) > sweepEvery {
			swept = time.Now()
			sweeping.Note(ctx, s.log, slog.LevelError, "sweep predictions", s.sweep(ctx))
		}
		clock, rung := time.NewTimer(pause), s.owed.heard()
		if owed {
			rung = nil // it is read again in any case
		}
		select {
		case <-ctx.Done():
			clock.Stop()
			return
		case <-rung:
			clock.Stop()
		case <-clock.C:
		}
	}
}

// endedSQL finds the oldest predictions that have ended, and whose end was not yet reported. It reads each that runs
// and is older than the last of them.
const endedSQL = `
SELECT p.id
  FROM penstock.prediction p
 WHERE p.webhook IS NOT NULL AND p.notified_at IS NULL
   AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = p.queue_id AND e.id = p.entry_id)
 ORDER BY p.created_at
 LIMIT $1`

// dueSQL locks one of them, unless another gateway has it or its entry has come back.
const dueSQL = `
SELECT p.owner
  FROM penstock.prediction p
 WHERE p.id = $1 AND p.notified_at IS NULL
   AND NOT penstock.entry_lives(p.queue_id, p.entry_id)
   FOR UPDATE OF p SKIP LOCKED`

// owedSQL says whether the end of a prediction is still to be reported.
const owedSQL = `SELECT EXISTS (SELECT FROM penstock.prediction WHERE webhook IS NOT NULL AND notified_at IS NULL)`

func (s *Predictions) owesNotices(ctx context.Context) (owed bool, err error) {
	if err := s.db.QueryRow(ctx, owedSQL).Scan(&owed); err != nil {
		return false, fmt.Errorf("read whether webhooks are owed: %w", err)
	}
	return owed, nil
}

const notedSQL = `UPDATE penstock.prediction SET notified_at = clock_timestamp() WHERE id = $1`

// noticesMax is how many deliveries are pushed after one search for predictions that have ended.
const noticesMax = 100

// noticeShare bounds the part of the time in which a gateway searches: a pause is so many times as long as the search
// before it.
const noticeShare = 20

// noticePause is how long after a search the next one comes.
func noticePause(took time.Duration) time.Duration {
	return min(max(noticeEvery, noticeShare*took), noticeIdle)
}

// notify pushes the deliveries of predictions that have ended, each once, by whichever gateway comes first. Each is a
// transaction of its own: one that fails is tried again at the next call. It returns when to call it again.
func (s *Predictions) notify(ctx context.Context) (pause time.Duration, err error) {
	began := time.Now()
	ended, err := pgx.CollectRows(postgres.Query(ctx, s.db, endedSQL, noticesMax), pgx.RowTo[string])
	if err != nil {
		return 0, fmt.Errorf("read predictions that have ended: %w", err)
	}
	took := time.Since(began)
	pause = noticePause(took)
	if len(ended) == noticesMax { // there may be more
		pause = min(noticeShare*took, noticeIdle)
	}
	for _, id := range ended {
		err := s.notifyOne(ctx, id)
		if postgres.Unavailable(err) && !errors.Is(err, gateway.ErrPanicked) {
			return pause, err
		}
		s.notifying.Note(ctx, s.log, slog.LevelWarn, "push webhook of prediction", id, err, "prediction", id)
	}
	return pause, nil
}

// notifyOne pushes the delivery of a prediction that has ended, unless another gateway does.
func (s *Predictions) notifyOne(ctx context.Context, id string) (err error) {
	defer gateway.Recover(&err)
	return postgres.InTx(ctx, s.db, func(tx pgx.Tx) error {
		var owner string
		err := tx.QueryRow(ctx, dueSQL, id).Scan(&owner)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("lock prediction %s: %w", id, err)
		}
		p, err := find(ctx, tx, owner, id)
		if err == nil {
			err = push(ctx, tx, p, eventCompleted, s.config.Base)
		}
		if invalidation.RefusesPush(err) || errors.Is(err, errNone) { // or its outcome is not kept any more
			s.log.Warn("webhook of prediction is left out", "prediction", id, "error", err)
			err = nil
		}
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, notedSQL, id); err != nil {
			return fmt.Errorf("note webhook of prediction %s: %w", id, err)
		}
		return nil
	})
}
