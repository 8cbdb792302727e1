package operator

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Lock is a lock record: a node that runs a key.
type Lock struct {
	Queue      string    `json:"queue"`
	LockKey    string    `json:"lock_key"`
	Flow       string    `json:"flow,omitempty"`
	Priority   int16     `json:"priority"`
	Entries    int32     `json:"entries"`
	Weight     int16     `json:"weight"` // times the units of each limit of the queue
	Token      int64     `json:"token"`
	NodeID     NodeID    `json:"node_id"`
	Node       string    `json:"node"`
	ClaimedAt  time.Time `json:"claimed_at"`
	AgeSeconds float64   `json:"age_seconds"`
}

// LockFilter chooses locks; all fields that are set must match.
type LockFilter struct {
	Queue  string
	NodeID NodeID
	After  int64 // tokens above this one
	Limit  int
}

// locksSQL reads all lock records, whose number is that of the work in flight. Tokens grow with the
// claims.
const locksSQL = `
SELECT queue, lock_key, flow, priority, entries, weight, token, node_id, coalesce(node, '') AS node, claimed_at,
       extract(epoch FROM age)::float8 AS age_seconds
  FROM penstock.lock_status
 WHERE ($1::text IS NULL OR queue = $1) AND ($2::bigint IS NULL OR node_id = $2) AND token > $3
 ORDER BY token
 LIMIT $4`

// Locks returns lock records, the oldest first.
func (d *Database) Locks(ctx context.Context, f LockFilter) ([]Lock, error) {
	return list[Lock](ctx, d.db, "locks", locksSQL, given(f.Queue), given(f.NodeID), f.After, page(f.Limit))
}

// Suspect is a lock that is stuck or inconsistent.
type Suspect struct {
	Queue      string  `json:"queue"`
	LockKey    string  `json:"lock_key"`
	Token      int64   `json:"token"`
	NodeID     NodeID  `json:"node_id"`
	Node       string  `json:"node"`
	AgeSeconds float64 `json:"age_seconds"`
	Problem    string  `json:"problem"` // several are divided by "; "
}

// suspectsSQL checks each lock against its node and its entries. It skips locks claimed within the
// last two heartbeats (a lease has five): their node may not yet have listed the token, or not yet
// have released a lock that came too late.
const suspectsSQL = `
SELECT l.queue, l.lock_key, l.token, l.node_id, coalesce(l.node, '') AS node,
       extract(epoch FROM l.age)::float8 AS age_seconds, string_agg(p.problem, '; ' ORDER BY p.place) AS problem
  FROM penstock.lock_status l
  LEFT JOIN penstock.node n ON n.id = l.node_id
 CROSS JOIN LATERAL (VALUES
       (1, CASE WHEN n.id IS NULL THEN 'its node is not registered' END),
       (2, CASE WHEN n.beat_at + n.lease < clock_timestamp()
             THEN 'its node has been silent for ' || penstock.ago(clock_timestamp() - n.beat_at) END),
       (3, CASE WHEN n.beat_at + n.lease >= clock_timestamp() AND n.beat_at > l.claimed_at + n.lease * 0.4
              AND NOT l.token = ANY (n.tokens)
             THEN 'its node lives and does not list its token' END),
       (4, CASE WHEN l.age > coalesce(n.lease, '10 seconds') * 0.4 AND NOT EXISTS (
                  SELECT FROM penstock.entry e WHERE penstock.is_solo(l.lock_key) AND e.queue_id = l.queue_id
                         AND e.id = l.last_entry_id
                  UNION ALL
                  SELECT FROM penstock.entry e WHERE NOT penstock.is_solo(l.lock_key) AND e.queue_id = l.queue_id
                         AND e.lock_key = l.lock_key)
             THEN 'it has no entries' END)) p(place, problem)
 WHERE p.problem IS NOT NULL AND l.token > $1
 GROUP BY l.queue, l.lock_key, l.token, l.node_id, l.node, l.age
 ORDER BY l.token
 LIMIT $2`

// VerifyLocks returns the locks that are stuck or inconsistent, with tokens above the given one, the oldest first;
// normally none.
func (d *Database) VerifyLocks(ctx context.Context, after int64, limit int) ([]Suspect, error) {
	return list[Suspect](ctx, d.db, "suspicious locks", suspectsSQL, after, page(limit))
}

// Unlock is a request to end one lock by hand. Queue, key and token must all match.
type Unlock struct {
	Queue   string
	LockKey string
	Token   int64
	// EvenListed ends the lock although its node lives and lists it: the run goes on, its ending is refused by the
	// token, and the entry runs a second time. A node that claims the key again while it runs ends that run first.
	EvenListed bool
	invalidation.By
}

// ForceUnlock ends a lock and makes its key ready at its old position. Without EvenListed it ends only a
// lock that recovery would end, and returns invalidation.ErrState for a lock that a live node lists,
// invalidation.ErrNotFound if there is no such lock any more.
func (d *Database) ForceUnlock(ctx context.Context, u Unlock) error {
	q, err := invalidation.Open(ctx, d.db, u.Queue)
	if err != nil {
		return err
	}
	return postgres.InTx(ctx, d.db, func(tx pgx.Tx) error {
		if err := q.ForceUnlock(ctx, tx, u.LockKey, invalidation.Token(u.Token), u.EvenListed); err != nil {
			return err
		}
		detail := map[string]any{"lock_key": u.LockKey, "token": u.Token, "even_listed": u.EvenListed}
		return record(ctx, tx, u.By, "force_unlock", u.Queue, detail)
	})
}

// HeldKey is a lock key that a node holds.
type HeldKey struct {
	LockKey     string    `json:"lock_key"`
	LastEntryID int64     `json:"last_entry_id"` // later entries of the key wait
	NodeID      NodeID    `json:"node_id"`
	Node        string    `json:"node"`
	ClaimedAt   time.Time `json:"claimed_at"`
}

// heldKeysSQL looks up each key by the primary key of the locks.
const heldKeysSQL = `
SELECT l.lock_key, l.last_entry_id, l.node_id, coalesce(n.name, '') AS node, l.claimed_at
  FROM unnest($2::text[]) k(lock_key)
 CROSS JOIN LATERAL (SELECT lock_key, last_entry_id, node_id, claimed_at FROM penstock.lock
                      WHERE queue_id = $1 AND lock_key = k.lock_key OFFSET 0) l
  LEFT JOIN LATERAL (SELECT name FROM penstock.node WHERE id = l.node_id OFFSET 0) n ON true`

// HeldKeys returns those of some lock keys of a queue that nodes hold.
func (d *Database) HeldKeys(ctx context.Context, queue string, keys []string) ([]HeldKey, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	id, err := d.queueID(ctx, queue)
	if err != nil {
		return nil, err
	}
	return list[HeldKey](ctx, d.db, "held lock keys of queue "+queue, heldKeysSQL, id, keys)
}
