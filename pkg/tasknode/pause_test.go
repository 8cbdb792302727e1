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

// A pause at any level takes effect on a running node with its next heartbeats, without hints, and so does its end.
func TestPauseAtEachLevelIsObeyedByARunningNode(t *testing.T) {
	pool := open(t)
	q := create(t, pool, "work", invalidation.Config{})
	n, _ := start(t, pool, slowBeats(tasknode.Config{Name: "gpu-7", Threads: 4, Poll: 20 * time.Millisecond}), map[string]invalidation.HandlerFunc{
		"work": func(context.Context, *invalidation.Run) (json.RawMessage, error) { return nil, nil },
	})
	eventually(t, pool, "the node to be registered", `SELECT coalesce(max(beat), 0) >= $1 FROM penstock.node`, 1)
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	const ran = `SELECT EXISTS (SELECT FROM penstock.result WHERE entry_id = $1)`
	for _, level := range []struct {
		scope, value string
		all          bool // nothing else runs either
	}{
		{"queue", "work", true}, {"application", "default", true}, {"node", "gpu-7", true}, {"flow", "a", false}, {"name", "letter", false}, {"lock_key", "k", false},
	} {
		if level.scope == "queue" {
			exec(`SELECT penstock.pause_queue('work', 'month end', 'ada')`)
		} else {
			exec(`SELECT penstock.pause($1, $2, CASE WHEN $1 IN ('name', 'lock_key') THEN 'work' END, 'month end', 'ada')`, level.scope, level.value)
		}
		askedBeats(t, pool, n)
		held := push(t, q, invalidation.Push{Flow: "a", Name: "letter", LockKey: "k", Payload: json.RawMessage(`{}`)})[0].ID
		if !level.all {
			other := push(t, q, invalidation.Push{Flow: "b", Payload: json.RawMessage(`{}`)})[0].ID
			eventually(t, pool, "what is not paused to go on beside a pause by "+level.scope, ran, other)
		}
		askedBeats(t, pool, n)
		var begun bool
		if err := pool.QueryRow(t.Context(), `SELECT NOT EXISTS (SELECT FROM penstock.entry WHERE id = $1) OR EXISTS (SELECT FROM penstock.lock)`, held).Scan(&begun); err != nil {
			t.Fatal(err)
		}
		if begun {
			t.Errorf("%s %s is paused, and its entry was claimed", level.scope, level.value)
		}
		if level.scope == "queue" {
			exec(`SELECT penstock.resume_queue('work')`)
		} else {
			exec(`SELECT penstock.resume($1, $2, CASE WHEN $1 IN ('name', 'lock_key') THEN 'work' END)`, level.scope, level.value)
		}
		askedBeats(t, pool, n)
		eventually(t, pool, "the entry to run after a pause by "+level.scope, ran, held)
	}
}

// slowBeats are heartbeats whose answers have time on a busy machine: one that comes after the next heartbeat is due is
// not read. askedBeats asks for those that a test waits for.
func slowBeats(c tasknode.Config) tasknode.Config {
	c.Lease, c.Beat = 4*time.Minute, time.Minute
	return c
}

// askedBeats waits until a node has done as the answer to a heartbeat said that it sent after this was called: one may
// be on its way, the next one is sent then, and another one only when that has been answered.
func askedBeats(t *testing.T, pool *pgxpool.Pool, n *tasknode.Node) {
	t.Helper()
	beat := func() (beat int64) {
		if err := pool.QueryRow(t.Context(), `SELECT max(beat) FROM penstock.node`).Scan(&beat); err != nil {
			t.Fatal(err)
		}
		return beat
	}
	before := beat()
	eventuallyTrue(t, "three heartbeats", func() bool {
		n.Cancelled(n.ID())
		return beat() >= before+3
	})
}
