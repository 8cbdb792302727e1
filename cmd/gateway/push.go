package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/invalidation"
)

// pusher puts online requests into the queues of their models. It is a gateway.Pusher.
type pusher struct {
	db   postgres.DB
	base string
	wait func(ctx context.Context, queue int32, entry int64) // until the entry has ended, or ctx has

	mu   sync.Mutex
	open map[string]*invalidation.Queue
}

// priorities of entries by class; default requests have the queue's own.
var (
	criticalPriority  int16 = 8
	sheddablePriority int16 = 2
)

// Push implements gateway.Pusher.
func (p *pusher) Push(ctx context.Context, d gateway.Durable) (id, location string, err error) {
	q, err := p.queue(ctx, d.Queue)
	if err != nil {
		return "", "", err
	}
	entry := invalidation.Push{Payload: d.Body, Flow: d.Flow, IdempotencyKey: "online:" + d.Token + ":" + d.ID}
	switch d.Class {
	case gateway.Critical:
		entry.Priority = &criticalPriority
	case gateway.Sheddable:
		entry.Priority = &sheddablePriority
	}
	pushed, err := q.Push(ctx, entry)
	if err != nil {
		return "", "", fmt.Errorf("push to queue %q: %w", d.Queue, err)
	}
	id = strconv.FormatInt(int64(pushed[0].ID), 10)
	return id, p.base + "/v1/entries/" + id, nil
}

// outcomeSQL reads what came of an entry. There is no row while it has not ended, or once its outcome is not kept.
const outcomeSQL = `
SELECT r.outcome::text AS outcome, r.result, coalesce(r.reason, '') AS reason
  FROM penstock.result r WHERE r.queue_id = $1 AND r.entry_id = $2
 UNION ALL
SELECT 'failed', NULL, f.error FROM penstock.failure f WHERE f.queue_id = $1 AND f.entry_id = $2
 LIMIT 1`

// Await implements gateway.Pusher.
func (p *pusher) Await(ctx context.Context, queue, id string) (o gateway.DurableOutcome, ended bool, err error) {
	q, err := p.queue(ctx, queue)
	if err != nil {
		return o, false, err
	}
	entry, err := strconv.ParseInt(id, 10, 64)
	if err != nil {
		return o, false, err
	}
	p.wait(ctx, q.ID, entry)
	if ctx.Err() != nil {
		return o, false, nil
	}
	err = p.db.QueryRow(ctx, outcomeSQL, q.ID, entry).Scan(&o.Outcome, &o.Result, &o.Reason)
	if errors.Is(err, pgx.ErrNoRows) {
		return o, false, nil // its queue keeps no results
	}
	if err != nil {
		return o, false, fmt.Errorf("read outcome of entry %s: %w", id, err)
	}
	return o, true, nil
}

func (p *pusher) queue(ctx context.Context, name string) (*invalidation.Queue, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if q := p.open[name]; q != nil {
		return q, nil
	}
	q, err := invalidation.Open(ctx, p.db, name)
	if err != nil {
		return nil, fmt.Errorf("open queue %q: %w", name, err)
	}
	if p.open == nil {
		p.open = map[string]*invalidation.Queue{}
	}
	p.open[name] = q
	return q, nil
}
