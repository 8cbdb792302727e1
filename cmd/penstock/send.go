package main

import (
	"context"
	"crypto/rand"
	"slices"

	"github.com/penstock/penstock/pkg/client"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// newEntry is an entry to be, whose times may be durations: they count from its acceptance, by the database's clock.
type newEntry struct {
	invalidation.Push
	DueAt    operator.Moment `json:"due_at,omitzero"`
	StartBy  operator.Moment `json:"start_by,omitzero"`
	FinishBy operator.Moment `json:"finish_by,omitzero"`
}

// push sends one entry as an object and several as an array, all or none of which are accepted. The client sends the
// request again where there is no answer, if each entry has a key of its own, or none has one: then the request has.
func (c conn) push(ctx context.Context, queue string, pushes ...newEntry) ([]invalidation.Pushed, error) {
	call := client.RawRequest{Method: "POST", Path: at("/v1/queues/%v/entries", queue), In: pushes}
	keyless := func(p newEntry) bool { return p.IdempotencyKey == "" }
	call.Again = !slices.ContainsFunc(pushes, keyless)
	if !slices.ContainsFunc(pushes, func(p newEntry) bool { return !keyless(p) }) {
		call.Key = rand.Text()
	}
	if len(pushes) == 1 {
		var one invalidation.Pushed
		call.In = pushes[0]
		err := c.do(ctx, call, &one)
		return []invalidation.Pushed{one}, err
	}
	var answer struct {
		Entries []invalidation.Pushed `json:"entries"`
	}
	err := c.do(ctx, call, &answer)
	return answer.Entries, err
}
