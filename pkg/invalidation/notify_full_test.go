package invalidation

import (
	"encoding/json"
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

// A commit with a notification fails when the server's queue of them is full. A cancel is done without one: the node finds
// it with its next heartbeat.
func TestARunningEntryIsCancelledWhileTheQueueOfNotifyIsFull(t *testing.T) {
	var version int
	if err := pgtest.New(t).QueryRow(t.Context(), `SELECT current_setting('server_version_num')::int`).Scan(&version); err != nil {
		t.Fatal(err)
	}
	if version < 170000 {
		t.Skip("before Postgres 17 the queue of NOTIFY has eight gigabytes; make race tests with a newer one")
	}
	pool := pgtest.ServerWith(t, map[string]string{"max_notify_queue_pages": "64"}).Pool()
	q, err := Create(t.Context(), pool, "work", Config{})
	if err != nil {
		t.Fatal(err)
	}
	pushed, err := q.Push(t.Context(), Push{Payload: json.RawMessage(`1`)})
	if err != nil {
		t.Fatal(err)
	}
	claimed, err := q.Claim(t.Context(), ClaimRequest{Node: here, ClaimID: 1, Lane: usual, Limit: 1})
	if err != nil || len(claimed.Locks) != 1 {
		t.Fatalf("claimed %v: %v", claimed.Locks, err)
	}
	deaf, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer deaf.Release()
	if _, err := deaf.Exec(t.Context(), `LISTEN elsewhere`); err != nil {
		t.Fatal(err)
	}
	if _, err := deaf.Exec(t.Context(), `BEGIN`); err != nil {
		t.Fatal(err)
	}
	for n := 0; ; n++ {
		_, err := pool.Exec(t.Context(), `SELECT pg_notify('elsewhere', $1::int || repeat('x', 7900))`, n)
		if postgres.Code(err) == notificationsFull {
			break
		}
		if err != nil || n > 1000 {
			t.Fatalf("the queue is not full after %d notifications: %v", n, err)
		}
	}
	var answer string
	err = pool.QueryRow(t.Context(), `SELECT penstock.cancel_one($1, $2, '', '')`, q.ID, pushed[0].ID).Scan(&answer)
	if err != nil || answer != "requested" {
		t.Errorf("the cancel is %q: %v", answer, err)
	}
	if _, err := deaf.Exec(t.Context(), `ROLLBACK`); err != nil {
		t.Fatal(err)
	}
}
