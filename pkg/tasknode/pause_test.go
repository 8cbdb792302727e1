package tasknode_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// A pause of a flow or a node takes effect on a running node with its next heartbeats, and so does its end.
func TestPauseOfFlowAndNodeIsObeyedByARunningNode(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	start(t, pool, tasknode.Config{Name: "gpu-7", Threads: 4, Beat: 50 * time.Millisecond, Poll: 20 * time.Millisecond}, map[string]invalidation.HandlerFunc{
		"work": func(context.Context, *invalidation.Run) (json.RawMessage, error) { return nil, nil },
	})
	const beats = `SELECT coalesce(max(beat), 0) >= $1 FROM penstock.node`
	eventually(t, pool, "the node to be registered", beats, 1)
	for _, subject := range []invalidation.Subject{
		{Scope: invalidation.ByFlow, Value: "a"},
		{Scope: invalidation.ByNode, Value: "gpu-7"},
	} {
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		must(invalidation.Pause(t.Context(), pool, subject, invalidation.By{Actor: "ada"}, time.Time{}))
		twoBeats(t, pool)
		held := push(t, q, invalidation.Push{Flow: "a", Payload: json.RawMessage(`{}`)})[0].ID
		if subject.Scope == invalidation.ByFlow {
			other := push(t, q, invalidation.Push{Flow: "b", Payload: json.RawMessage(`{}`)})[0].ID
			eventually(t, pool, "the other flow to go on", `SELECT EXISTS (SELECT FROM penstock.result WHERE entry_id = $1)`, other)
		}
		twoBeats(t, pool)
		var waits bool
		must(pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM penstock.ready WHERE entry_id = $1)`, held).Scan(&waits))
		if !waits {
			t.Errorf("%v is paused, and its entry was claimed", subject)
		}
		must(invalidation.Resume(t.Context(), pool, subject, invalidation.By{}))
		eventually(t, pool, "the entry to run after "+subject.String(), `SELECT EXISTS (SELECT FROM penstock.result WHERE entry_id = $1)`, held)
	}
}

// twoBeats waits until the node has renewed its lease twice: the second was asked for after this was called.
func twoBeats(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	var n int64
	if err := pool.QueryRow(t.Context(), `SELECT max(beat) FROM penstock.node`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	eventually(t, pool, "two heartbeats", `SELECT max(beat) >= $1 FROM penstock.node`, n+2)
}
