package tasknode_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// upstreamError is an error whose methods panic where the pointer is nil.
type upstreamError struct{ text string }

func (e *upstreamError) Error() string { return e.text }

// answering answers each entry with the error that its payload names, one by one or together.
type answering struct{}

func (answering) Handle(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
	switch string(r.Entry.Payload) {
	case `"panics"`:
		var none *upstreamError
		return nil, none
	case `"permanent"`:
		return nil, invalidation.Permanent(nil)
	case `"full"`:
		return nil, invalidation.NoCapacity(time.Hour, nil)
	default:
		return nil, invalidation.WithClass("upstream", nil)
	}
}

type answeringTogether struct{ answering }

func (h answeringTogether) HandleBatch(ctx context.Context, runs []*invalidation.Run) []invalidation.BatchAnswer {
	answers := make([]invalidation.BatchAnswer, len(runs))
	for i, r := range runs {
		answers[i].Result, answers[i].Err = h.Handle(ctx, r)
	}
	return answers
}

func TestAnErrorThatCannotBeReadEndsItsEntryAlone(t *testing.T) {
	pool := open(t)
	one := invalidation.Config{Retry: invalidation.RetryPolicy{MaxAttempts: 1}}
	single, grouped := create(t, pool, "single", one), create(t, pool, "grouped", one)
	for _, p := range []string{`"panics"`, `"permanent"`, `"full"`, `"fine"`} {
		push(t, single, invalidation.Push{Payload: json.RawMessage(p)})
		push(t, grouped, invalidation.Push{Payload: json.RawMessage(p), LockKey: "k"})
	}
	n := tasknode.New(tasknode.Config{Threads: 2}, pool, pool)
	n.Handle("single", answering{})
	n.Handle("grouped", answeringTogether{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	for _, queue := range []string{"single", "grouped"} {
		eventually(t, pool, "the entries of "+queue+" have ended", `
SELECT (SELECT string_agg(f.class, ', ' ORDER BY f.entry_id)
          FROM penstock.failure f JOIN penstock.queue q ON q.id = f.queue_id WHERE q.name = $1) = 'panic, error'
   AND EXISTS (SELECT FROM penstock.result r JOIN penstock.queue q ON q.id = r.queue_id WHERE q.name = $1)`, queue)
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("run node: %v", err)
	}
}
