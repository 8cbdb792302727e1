package webhook

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Handler delivers the entries of the webhook queue, one attempt a run. It is an invalidation.Handler.
type Handler struct {
	db        postgres.DB
	vault     Vault
	deliverer *Deliverer
	log       *slog.Logger
}

// NewHandler returns a handler that delivers as config says.
func NewHandler(config Config, db postgres.DB, log *slog.Logger) *Handler {
	log = cmp.Or(log, slog.Default())
	return &Handler{db: db, vault: config.Vault, deliverer: NewDeliverer(config), log: log}
}

// callback is the payload of an entry of the webhook queue, as penstock.call_back writes it.
type callback struct {
	URL  string          `json:"url"`
	Type string          `json:"type"`
	At   time.Time       `json:"at"`
	Data json.RawMessage `json:"data"`
}

// Error classes of callbacks that will not be tried again by themselves.
const (
	ClassDisabled  = "disabled"  // the receiver answered 410 once, or somebody disabled it
	ClassRefused   = "refused"   // the address is not allowed, or no attempt is left
	ClassMalformed = "malformed" // the entry is not a callback
)

// Handle makes one attempt. The message id is that of the entry, so that a receiver can tell a repetition.
func (h *Handler) Handle(ctx context.Context, r *invalidation.Run) (json.RawMessage, error) {
	var c callback
	if err := json.Unmarshal(r.Entry.Payload, &c); err != nil || c.URL == "" {
		return nil, refuse(ClassMalformed, errors.New("payload is not a callback: it needs url, type, at and data"))
	}
	body, err := NewBody(c.Type, c.At, c.Data)
	if err != nil {
		return nil, refuse(ClassMalformed, err)
	}
	e, err := FindEndpoint(ctx, h.db, h.vault, c.URL)
	if err != nil {
		return nil, invalidation.NoCapacity(10*time.Second, err) // the receiver is not to blame for our database
	}
	if e.Disabled {
		return nil, refuse(ClassDisabled, fmt.Errorf("receiver is disabled: %s", e.Reason))
	}
	o := h.deliverer.Deliver(ctx, Message{
		ID: "msg_" + strconv.FormatInt(int64(r.Entry.ID), 10), URL: c.URL, Body: body, Secrets: e.Secrets, Attempt: r.Entry.Attempt + 1,
	})
	return h.judge(ctx, c.URL, o)
}

func (h *Handler) judge(ctx context.Context, url string, o Outcome) (json.RawMessage, error) {
	switch o.Kind {
	case Delivered:
		return json.RawMessage(fmt.Sprintf(`{"status": %d, "took_ms": %d}`, o.StatusCode, o.Took.Milliseconds())), nil
	case Retry:
		return nil, invalidation.RetryIn(o.Wait, errors.New(o.Reason))
	case Deferred:
		return nil, invalidation.NoCapacity(max(o.Wait, 100*time.Millisecond), errors.New(o.Reason))
	case Disabled:
		if err := DisableEndpoint(ctx, h.db, url, invalidation.By{Actor: "receiver", Reason: o.Reason}); err != nil {
			h.log.Warn("disable webhook endpoint", "error", err) // the next delivery is answered 410 again
		}
		return nil, refuse(ClassDisabled, errors.New(o.Reason))
	default:
		return nil, refuse(ClassRefused, errors.New(o.Reason))
	}
}

func refuse(class string, err error) error {
	return invalidation.Permanent(invalidation.WithClass(class, err))
}
