package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/invalidation"
)

// pusher puts online requests into the queues of their models. It is a gateway.Pusher.
type pusher struct {
	db     postgres.DB
	base   string
	hinter *invalidation.Hinter
	wait   func(ctx context.Context, queue int32, entry int64) // until the entry has ended, or ctx has

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
	entry := invalidation.Push{Payload: d.Body, Flow: d.Flow}
	if d.Key != "" {
		entry.IdempotencyKey = "online:" + d.Token + ":" + d.Key
	}
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
	ending, err := invalidation.Outcome(ctx, p.db, invalidation.EntryID(entry))
	switch {
	case errors.Is(err, invalidation.ErrEntryNotFound), errors.Is(err, invalidation.ErrState):
		return o, false, nil // its queue keeps no results, or ctx ends
	case err != nil:
		return o, false, err
	}
	return gateway.DurableOutcome{Outcome: ending.Outcome, Result: ending.Result, Reason: ending.Reason}, true, nil
}

// queue opens a queue, once for all pushes. Those to other queues do not wait for it.
func (p *pusher) queue(ctx context.Context, name string) (*invalidation.Queue, error) {
	p.mu.Lock()
	q := p.open[name]
	p.mu.Unlock()
	if q != nil {
		return q, nil
	}
	q, err := invalidation.Open(ctx, p.db, name)
	if err != nil {
		return nil, fmt.Errorf("open queue %q: %w", name, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open == nil {
		p.open = map[string]*invalidation.Queue{}
	}
	if p.open[name] == nil {
		p.open[name] = q.Hinting(p.hinter)
	}
	return p.open[name], nil
}
