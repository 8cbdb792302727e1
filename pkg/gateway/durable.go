package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// DurablePayload returns the body of a request as the payload of an entry: with the operation that its worker is
// asked for, which the worker does not get to see. The body must be a JSON object. A member operation of its own
// is the first of two, and without effect.
func DurablePayload(body json.RawMessage, operation string) json.RawMessage {
	text := bytes.TrimRight(body, " \t\r\n")
	inner := bytes.TrimRight(text[:len(text)-1], " \t\r\n")
	payload := make([]byte, 0, len(inner)+len(operation)+20)
	payload = append(payload, inner...)
	if inner[len(inner)-1] != '{' {
		payload = append(payload, ',')
	}
	payload = append(payload, `"operation":"`...)
	payload = append(payload, operation...)
	return append(payload, `"}`...)
}

// QueuePusher is the Pusher that puts requests into the queues of their models. Its statements are bounded: while the
// database does not answer, requests that came later would wait for each other's connections.
type QueuePusher struct {
	config QueuePusherConfig
	db     postgres.DB
	queues *invalidation.Handles
}

// QueuePusherConfig of a QueuePusher. Hinter and Wait are required.
type QueuePusherConfig struct {
	Base   string // URL of the API, which has the states of entries
	Hinter *invalidation.Hinter
	Wait   func(ctx context.Context, queue int32, entry int64) // until the entry has ended, or ctx has
}

// NewQueuePusher returns a pusher that has opened no queue yet.
func NewQueuePusher(config QueuePusherConfig, db postgres.DB) *QueuePusher {
	return &QueuePusher{config: config, db: db, queues: invalidation.NewHandles(db, config.Hinter)}
}

// Priorities of entries by criticality. Default requests have the queue's own: 1, unless it was changed.
const (
	criticalPriority  int16 = 8
	sheddablePriority int16 = 0
)

// priority is that of the entry of a request; nil: the one that the queue gives to entries that ask for none, which no
// token limits. A critical request gets the highest that its token may ask for, unless it gets more by not asking.
func (d Durable) priority(unasked int) *int16 {
	switch d.Criticality {
	case Critical:
		p := criticalPriority
		if d.PriorityMax != nil {
			p = min(p, *d.PriorityMax)
		}
		if int(p) > unasked {
			return &p
		}
	case Sheddable:
		return new(sheddablePriority)
	}
	return nil
}

// finishBySQL is a deadline by the clock by which entries expire.
const finishBySQL = `SELECT clock_timestamp() + $1::interval`

// push is the entry of a request, without the deadline and the priority.
func (d Durable) push() invalidation.Push {
	p := invalidation.Push{Payload: d.Body, Flow: d.Flow, Trace: d.Trace}
	if d.Key != "" {
		p.IdempotencyKey = "online:" + d.Token + ":" + d.Key
	}
	return p
}

// AcceptedBefore implements Pusher.
func (p *QueuePusher) AcceptedBefore(ctx context.Context, d Durable) (bool, error) {
	ctx, cancel := postgres.Bounded(ctx)
	defer cancel()
	q, err := p.queues.Get(ctx, d.Queue)
	if err != nil {
		return false, err
	}
	n, err := q.AcceptedBefore(ctx, d.push())
	return n == 1, err
}

// Push implements Pusher.
func (p *QueuePusher) Push(ctx context.Context, d Durable) (id, location string, err error) {
	ctx, cancel := postgres.Bounded(ctx)
	defer cancel()
	q, err := p.queues.Get(ctx, d.Queue)
	if err != nil {
		return "", "", err
	}
	entry := d.push()
	if d.Within > 0 {
		if err := p.db.QueryRow(ctx, finishBySQL, d.Within).Scan(&entry.FinishBy); err != nil {
			return "", "", fmt.Errorf("read deadline of entry: %w", err)
		}
	}
	entry.Priority = d.priority(q.Config.EntryPriority)
	pushed, err := q.Push(ctx, entry)
	if err != nil {
		return "", "", fmt.Errorf("push to queue %q: %w", d.Queue, err)
	}
	id = strconv.FormatInt(int64(pushed[0].ID), 10)
	return id, p.config.Base + "/v1/entries/" + id, nil
}

// Await implements Pusher.
func (p *QueuePusher) Await(ctx context.Context, queue, id string) (o DurableOutcome, ended bool, err error) {
	q, err := p.queues.Get(ctx, queue)
	if err != nil {
		return o, false, err
	}
	entry, err := strconv.ParseInt(id, 10, 64)
	if err != nil {
		return o, false, err
	}
	p.config.Wait(ctx, q.ID, entry)
	if ctx.Err() != nil {
		return o, false, nil
	}
	ending, err := invalidation.OutcomeIn(ctx, p.db, q.Name, invalidation.EntryID(entry))
	switch {
	case errors.Is(err, invalidation.ErrEntryNotFound), errors.Is(err, invalidation.ErrState):
		return o, false, nil // its queue keeps no results, or ctx ends
	case err != nil:
		return o, false, err
	}
	return DurableOutcome{Outcome: ending.Outcome, Result: ending.Result, Reason: ending.Reason}, true, nil
}
