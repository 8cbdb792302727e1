package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/client"
	"github.com/penstock/penstock/pkg/invalidation"
)

// sentEntry is an entry in the body of a push.
type sentEntry struct {
	Payload        json.RawMessage           `json:"payload"`
	LockKey        string                    `json:"lock_key,omitempty"`
	Flow           string                    `json:"flow,omitempty"`
	Priority       *int16                    `json:"priority,omitempty"`
	DueAt          time.Time                 `json:"due_at,omitzero"`
	StartBy        time.Time                 `json:"start_by,omitzero"`
	FinishBy       time.Time                 `json:"finish_by,omitzero"`
	Cost           float64                   `json:"cost,omitempty"`
	Weight         int32                     `json:"weight,omitempty"`
	Name           string                    `json:"name,omitempty"`
	IdempotencyKey string                    `json:"idempotency_key,omitempty"`
	UniqueKey      string                    `json:"unique_key,omitempty"`
	UniquePolicy   invalidation.UniquePolicy `json:"unique_policy,omitempty"`
	Trace          string                    `json:"trace,omitempty"`
	Callback       json.RawMessage           `json:"callback,omitempty"`
}

// push sends one entry as an object and several as an array, all or none of which are accepted. The client sends the
// request again where there is no answer, if each entry has a key of its own, or none has one: then the request has.
func (c conn) push(ctx context.Context, queue string, pushes ...invalidation.Push) ([]invalidation.Pushed, error) {
	entries := make([]sentEntry, len(pushes))
	for i, p := range pushes {
		entries[i] = sentEntry(p)
	}
	call := client.RawRequest{Method: "POST", Path: at("/v1/queues/%v/entries", queue), In: entries}
	keyless := func(p invalidation.Push) bool { return p.IdempotencyKey == "" }
	call.Again = !slices.ContainsFunc(pushes, keyless)
	if !slices.ContainsFunc(pushes, func(p invalidation.Push) bool { return !keyless(p) }) {
		call.Key = rand.Text()
	}
	if len(pushes) == 1 {
		var one invalidation.Pushed
		call.In = entries[0]
		err := c.do(ctx, call, &one)
		return []invalidation.Pushed{one}, err
	}
	var answer struct {
		Entries []invalidation.Pushed `json:"entries"`
	}
	err := c.do(ctx, call, &answer)
	return answer.Entries, err
}
