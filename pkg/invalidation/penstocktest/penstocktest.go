// Package penstocktest helps to test programs that push to queues and handle their entries.
//
// Everything takes a pool or a transaction: a test that runs in a transaction which it rolls back sees the entries it
// pushed, runs them, and leaves nothing behind. No node, no leader and no waiting are needed.
//
//	tx := begin(t)
//	signUp(ctx, tx, "ann@example.org")
//	penstocktest.AssertPushed(t, tx, welcomeMail, Mail{To: "ann@example.org"})
//	ran := penstocktest.Drain(t, tx, "welcome_mail", welcomeMail.Handler(sendMail))
package penstocktest

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Queued is an entry that waits in a queue.
type Queued[P any] struct {
	ID       invalidation.EntryID
	Payload  P
	LockKey  string // empty for a solo entry
	Flow     string
	Priority int16 // -1 if it is disabled
	Name     string
	Deferred bool // it is not due yet
	Attempt  int
}

const entriesSQL = `
SELECT e.id, e.payload, coalesce(e.lock_key, ''), e.flow, e.priority, coalesce(e.name, ''), e.status = 'initial',
       e.attempt
  FROM penstock.entry e
  JOIN penstock.queue q ON q.id = e.queue_id
 WHERE q.name = $1
 ORDER BY e.id`

// Entries returns the entries of a queue, oldest first.
func Entries[P any](t testing.TB, db postgres.DB, d invalidation.Definition[P]) []Queued[P] {
	t.Helper()
	entries, err := pgx.CollectRows(postgres.Query(t.Context(), db, entriesSQL, d.Name),
		func(row pgx.CollectableRow) (Queued[P], error) {
			var e Queued[P]
			var payload []byte
			if err := row.Scan(&e.ID, &payload, &e.LockKey, &e.Flow, &e.Priority, &e.Name, &e.Deferred,
				&e.Attempt); err != nil {
				return e, err
			}
			return e, json.Unmarshal(payload, &e.Payload)
		})
	if err != nil {
		t.Fatalf("read queue %q: %v", d.Name, err)
	}
	return entries
}

// AssertPushed fails the test unless exactly one entry with this payload is in the queue, and returns it.
func AssertPushed[P any](t testing.TB, db postgres.DB, d invalidation.Definition[P], want P) Queued[P] {
	t.Helper()
	found, all := matching(t, db, d, want)
	if len(found) != 1 {
		t.Fatalf("queue %q has %d entries with payload %s, want one; it has %s", d.Name, len(found), text(t, want),
			text(t, all))
	}
	return found[0]
}

// AssertNotPushed fails the test if an entry with this payload is in the queue.
func AssertNotPushed[P any](t testing.TB, db postgres.DB, d invalidation.Definition[P], payload P) {
	t.Helper()
	if found, _ := matching(t, db, d, payload); len(found) > 0 {
		t.Fatalf("queue %q has %d entries with payload %s, want none", d.Name, len(found), text(t, payload))
	}
}

// matching returns the entries whose payload writes the same JSON, and the payloads of all.
func matching[P any](t testing.TB, db postgres.DB, d invalidation.Definition[P], want P) (found []Queued[P], all []P) {
	t.Helper()
	for _, e := range Entries(t, db, d) {
		all = append(all, e.Payload)
		if bytes.Equal(text(t, e.Payload), text(t, want)) {
			found = append(found, e)
		}
	}
	return found, all
}

func text(t testing.TB, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatalf("write payload: %v", err)
	}
	return b
}

// MakeDue lets time pass for a queue: everything that is deferred, retries too, comes due now. It returns how many.
func MakeDue(t testing.TB, db postgres.DB, queue string) int {
	t.Helper()
	q := open(t, db, queue)
	const dueSQL = `UPDATE penstock.entry SET due_at = clock_timestamp() WHERE queue_id = $1 AND status = 'initial'`
	if _, err := db.Exec(t.Context(), dueSQL, q.ID); err != nil {
		t.Fatalf("make entries of queue %q due: %v", queue, err)
	}
	n, err := q.Promote(t.Context(), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func open(t testing.TB, db postgres.DB, queue string) *invalidation.Queue {
	t.Helper()
	q, err := invalidation.Open(t.Context(), db, queue)
	if err != nil {
		t.Fatal(err)
	}
	return q
}
