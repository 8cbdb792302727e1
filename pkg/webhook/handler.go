package webhook

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Handler delivers the entries of the webhook queue, one attempt a run. It is an invalidation.Handler.
type Handler struct {
	db        postgres.DB
	vault     Vault
	issuer    string
	deliverer *deliverer
	log       *slog.Logger

	logged atomic.Int64 // when the log last had why deliveries wait, in Unix seconds
}

// NewHandler returns a handler that delivers as config says.
func NewHandler(config Config, db postgres.DB, log *slog.Logger) *Handler {
	log = cmp.Or(log, slog.Default())
	return &Handler{db: db, vault: config.Vault, issuer: config.Issuer, deliverer: newDeliverer(config), log: log}
}

// callback is the payload of an entry of the webhook queue, as penstock.call_back and pkg/gateway/prediction write
// it.
type callback struct {
	Signer *string         `json:"signer"` // the client whose secret signs; nil: the secret of the address does
	URL    string          `json:"url"`
	Format Format          `json:"format"`
	Type   string          `json:"type"`
	At     time.Time       `json:"at"`
	Data   json.RawMessage `json:"data"`
}

// body writes the body in the format that the pusher chose.
func (c callback) body(issuer string) ([]byte, error) {
	e := envelope{Type: c.Type, At: c.At, Issuer: issuer, Audience: c.URL, Data: c.Data}
	switch c.Format {
	case FormatStandard:
		return newBody(e)
	case FormatJob:
		return newJobBody(e)
	case FormatBare:
		return c.Data, nil
	default:
		return nil, fmt.Errorf("callback.format is %q: want none, or %q", c.Format, FormatJob)
	}
}

// Error classes of callbacks that will not be tried again by themselves.
const (
	ClassDisabled  = "disabled"  // the receiver answered 410 once, or an operator disabled it
	ClassRefused   = "refused"   // the address is not allowed, or no attempt is left
	ClassMalformed = "malformed" // the entry is not a callback
	ClassSecret    = "secret"    // a secret that signs it could not be read for the time of all attempts
)

// Handle makes one attempt. The message id is that of the entry, so that a receiver can tell a repetition.
func (h *Handler) Handle(ctx context.Context, r *invalidation.Run) (json.RawMessage, error) {
	var c callback
	if err := json.Unmarshal(r.Entry.Payload, &c); err != nil || c.URL == "" {
		return nil, refuse(ClassMalformed, errors.New("payload is not a callback: it needs url, type, at and data"))
	}
	// No secret can be derived for what is not an address.
	if err := h.deliverer.config.Policy.Check(c.URL); err != nil {
		return nil, refuse(ClassRefused, err)
	}
	e, err := FindEndpoint(ctx, h.db, h.vault, c.URL)
	if err != nil {
		return nil, h.unsigned(ctx, r, err)
	}
	if e.Disabled {
		return nil, refuse(ClassDisabled, fmt.Errorf("receiver is disabled: %s", e.Reason))
	}
	if c.Signer != nil {
		if e.Secrets, err = ClientSecrets(ctx, h.db, h.vault, *c.Signer); err != nil {
			return nil, h.unsigned(ctx, r, err)
		}
	}
	body, err := c.body(cmp.Or(h.issuer, e.Keys[0].Public().Fingerprint()))
	if err != nil {
		return nil, refuse(ClassMalformed, err)
	}
	age, err := h.age(ctx, r)
	if err != nil {
		return nil, h.databaseAway(err)
	}
	o := h.deliverer.deliver(ctx, message{
		ID: "msg_" + strconv.FormatInt(int64(r.Entry.ID), 10), URL: c.URL, Body: body,
		Secrets: e.Secrets, Keys: e.Keys, Attempt: r.Entry.Attempt + 1, Age: age, At: e.At,
	})
	return h.judge(ctx, c.URL, o)
}

// unsigned is the answer for a message whose secrets could not be read. The first time is its first attempt, unless it
// has had one: its history keeps when that was. From then on it waits, and uses up no other attempt, for as long as the
// attempts of a message to a receiver that is down may take. An error of the database is none of the message.
func (h *Handler) unsigned(ctx context.Context, r *invalidation.Run, err error) error {
	if !errors.Is(err, errSecret) {
		return h.databaseAway(err)
	}
	if h.mayLog() {
		h.log.Warn("callbacks wait: the secret of a receiver cannot be read", "error", err)
	}
	err = invalidation.WithClass(ClassSecret, err)
	if r.Entry.Attempt == 0 {
		return invalidation.RetryIn(secretWaitMin, err)
	}
	tried, away := h.sinceFirstAttempt(ctx, r)
	if away != nil {
		return h.databaseAway(away)
	}
	left := scheduleEnd() - tried
	if left <= 0 {
		return invalidation.Permanent(err)
	}
	return invalidation.Snooze(min(jittered(secretWait(tried)), left))
}

// databaseAway is the answer where the database refused a read: the queue waits for a second, and no message is to
// blame.
func (h *Handler) databaseAway(err error) error {
	if h.mayLog() {
		h.log.Warn("callbacks wait: the database cannot be read", "error", err)
	}
	return invalidation.ThrottleQueue(time.Second, err)
}

// mayLog is true once in ten seconds. The log has why deliveries wait, since an entry that is handed back keeps no
// error.
func (h *Handler) mayLog() bool {
	now, last := time.Now().Unix(), h.logged.Load()
	return now-last >= 10 && h.logged.CompareAndSwap(last, now)
}

// firstAttemptSQL reads how many seconds ago the first attempt of entry $2 of queue $1 ended in an error, since it was
// accepted or an operator had it tried again. One of a time to come was made while the clock was ahead: its age is not
// known.
const firstAttemptSQL = `
SELECT extract(epoch FROM clock_timestamp() - max((h.note->>'at')::timestamptz))::float8
  FROM penstock.entry e
 CROSS JOIN LATERAL jsonb_array_elements(e.history) h(note)
 WHERE e.queue_id = $1 AND e.id = $2 AND h.note->>'attempt' = '1'
   AND (h.note->>'at')::timestamptz <= clock_timestamp()`

// sinceFirstAttempt is the time since the first attempt of a message, 0 before it. Where its history does not tell when
// that was, it is the time since it was accepted.
func (h *Handler) sinceFirstAttempt(ctx context.Context, r *invalidation.Run) (time.Duration, error) {
	if r.Entry.Attempt == 0 {
		return 0, nil
	}
	var seconds *float64
	if err := h.db.QueryRow(ctx, firstAttemptSQL, r.Queue.ID, r.Entry.ID).Scan(&seconds); err != nil {
		return 0, fmt.Errorf("read the first attempt of a callback: %w", err)
	}
	if seconds == nil {
		return r.Entry.Waited, nil
	}
	return time.Duration(*seconds * float64(time.Second)), nil
}

// age is where the message is in its schedule. Until the end that is the time since it was accepted, whenever it was
// tried.
func (h *Handler) age(ctx context.Context, r *invalidation.Run) (time.Duration, error) {
	if r.Entry.Waited <= scheduleEnd() {
		return r.Entry.Waited, nil
	}
	tried, err := h.sinceFirstAttempt(ctx, r)
	return age(r.Entry.Waited, tried), err
}

// delayedMax is the longest time for which a message is deferred by a delay of its ready row, as where its receiver has
// enough in flight (fullWait). Claims pass over delayed ready rows, and there may be very many messages to a receiver
// that is down: these have none, and the leader makes them pending when their time has come.
const delayedMax = 2 * fullWait

func (h *Handler) judge(ctx context.Context, address string, o deliveryOutcome) (json.RawMessage, error) {
	switch o.Kind {
	case delivered:
		return json.RawMessage(fmt.Sprintf(`{"status": %d, "took_ms": %d}`, o.StatusCode, o.Took.Milliseconds())), nil
	case retry:
		return nil, invalidation.RetryIn(o.Wait, errors.New(o.Reason))
	case deferred:
		if o.Wait > delayedMax {
			return nil, invalidation.Snooze(o.Wait)
		}
		return nil, invalidation.NoCapacity(max(o.Wait, 100*time.Millisecond), errors.New(o.Reason))
	case disabled:
		if err := markGone(ctx, h.db, address); err != nil {
			h.log.Warn("receiver was not disabled", "error", err) // the next delivery is answered 410 again
		}
		return nil, refuse(ClassDisabled, errors.New(o.Reason))
	default:
		return nil, refuse(ClassRefused, errors.New(o.Reason))
	}
}

func refuse(class string, err error) error {
	return invalidation.Permanent(invalidation.WithClass(class, err))
}
