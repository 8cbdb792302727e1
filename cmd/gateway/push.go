package main

import (
	"context"
	"fmt"
	"strconv"
	"sync"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/invalidation"
)

// pusher puts online requests into the queues of their models. It is a gateway.Pusher.
type pusher struct {
	db   postgres.DB
	base string

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
