package invalidation

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// Beat is one heartbeat of a node.
type Beat struct {
	Tokens []Token // every lock that the node holds, running or waiting for a thread
	// Running lists those of Tokens under which an entry has begun to run: these count a crash if the node dies.
	Running []Token
	// RunningEntries has, for each of Running, the entry that runs; of several that run together the first.
	RunningEntries []EntryID
	Load           map[string]any // the governor's readings, for status output
	// Again asks for all requested cancels: the answer to the heartbeat before did not arrive.
	Again bool
}

// Orders are the instructions in the answer to a heartbeat.
type Orders struct {
	Draining bool   // claim nothing more, finish, hand back the rest
	Reason   string // of the drain
	Paused   bool   // claim nothing until a later answer has it false; running entries go on
	// Lapsed says that the lease was over by the database's clock when this heartbeat renewed it: locks may have been
	// freed.
	Lapsed bool
	// Cancel lists the entries of this node whose cancel is requested: those that it was not told under a lock of
	// Beat.Tokens, and each eighth time all.
	Cancel []CancelRequest
	// RegistryVersion is another number, in no order, when any queue's settings, pauses or limits changed, or the set
	// of queues did: read the queues again.
	RegistryVersion int64
}

// CancelRequest is a requested cancel of a running entry.
type CancelRequest struct {
	QueueID int32
	Entry   EntryID
	Reason  string
}

// ActFor is how long a node acts on the last renewal of its lease. Recovery waits for the whole lease: the quarter
// between is for runs to end.
func ActFor(lease time.Duration) time.Duration { return lease * 3 / 4 }

// Node is a process as it registers itself.
type Node struct {
	ID          NodeID
	Name        string
	Application string
	Lease       time.Duration
	Threads     int
	Queues      []int32
}

// registerSQL begins the lease of a node. It is sent again where its answer was lost, and the node counts its lease
// from the last time: until the first heartbeat it begins anew.
const registerSQL = `
INSERT INTO penstock.node AS n (id, name, application, lease, threads, queue_ids)
VALUES ($1, $2, $3, $4, $5, coalesce($6::int[], '{}'))
ON CONFLICT (id) DO UPDATE
   SET queue_ids = excluded.queue_ids, threads = excluded.threads,
       beat_at = CASE WHEN n.beat = 0 THEN excluded.beat_at ELSE n.beat_at END`

// Register makes the node known, or changes which queues it serves. Before its first heartbeat it begins the node's
// lease, each time.
func Register(ctx context.Context, db postgres.DB, n Node) error {
	_, err := db.Exec(ctx, registerSQL, n.ID, n.Name, n.Application, n.Lease, n.Threads, n.Queues)
	return err
}

// beatSQL renews the lease of node $1 and reads, in the same round trip, what it must know. Whether the lease was over
// is read from the row as it was before, which is what the statement's snapshot has. RegistryVersion is a
// hash of the versions of all queues with their ids, which are never used again: drops and makes between two
// heartbeats could leave a sum of versions as it was.
//
// A requested cancel is delivered when it was in the answer to a node that knew the lock, and is not looked up
// again then, but for each eighth heartbeat: the request stays until the run has ended, and thousands of runs of other
// nodes may end slowly. Where the key comes to another node before a leader settles the request, the leader has it
// delivered again (penstock.settle_cancel_requests); without a leader the eighth heartbeat finds it.
const beatSQL = `
WITH beat AS (
    UPDATE penstock.node
       SET beat_at = clock_timestamp(), beat = beat + 1, tokens = $2::bigint[], running = $3::bigint[],
           running_entries = $5::bigint[], load = $4::jsonb
     WHERE id = $1
    RETURNING draining_at IS NOT NULL AS draining, coalesce(drain_reason, '') AS reason, beat % 8 = 0 AS again,
              penstock.node_paused(id, name) AS paused
), wished AS MATERIALIZED (
    SELECT c.ctid AS row, c.queue_id, c.entry_id, c.reason,
           c.delivered_at IS NULL AND l.token IN (SELECT unnest($2::bigint[])) AS arrives
      FROM penstock.cancel_request c
     CROSS JOIN LATERAL (SELECT l.token FROM penstock.lock l
                          WHERE l.queue_id = c.queue_id AND l.lock_key = penstock.record_key(c.lock_key, c.entry_id)
                            AND l.node_id = $1 AND c.entry_id <= l.last_entry_id
                         OFFSET 0) l
     WHERE c.delivered_at IS NULL OR $6::boolean OR (SELECT again FROM beat)
), delivered AS (
    UPDATE penstock.cancel_request c
       SET delivered_at = clock_timestamp()
     WHERE c.ctid = ANY (ARRAY(SELECT row FROM wished WHERE arrives))
)
SELECT b.draining, b.reason, b.paused, (SELECT coalesce(bit_xor(hashint8extended(version, id)), 0) FROM penstock.queue),
       (SELECT coalesce(jsonb_agg(jsonb_build_object('QueueID', queue_id, 'Entry', entry_id, 'Reason', reason)), '[]')
           FROM wished),
       (SELECT n.beat_at + n.lease < clock_timestamp() FROM penstock.node n WHERE n.id = $1)
  FROM beat b`

// Renew renews the node's lease and returns its orders. It returns ErrNodeGone if the node's row
// was removed: its locks are gone, and the process must start anew under another incarnation.
func Renew(ctx context.Context, db postgres.DB, id NodeID, b Beat) (Orders, error) {
	var o Orders
	var cancels []byte
	if b.Load == nil {
		b.Load = map[string]any{}
	}
	if b.Tokens == nil {
		b.Tokens = []Token{} // none held; a null would be refused
	}
	if b.Running == nil {
		b.Running = []Token{}
	}
	if b.RunningEntries == nil {
		b.RunningEntries = []EntryID{}
	}
	err := db.QueryRow(ctx, beatSQL, id, b.Tokens, b.Running, b.Load, b.RunningEntries, b.Again).Scan(&o.Draining,
		&o.Reason, &o.Paused, &o.RegistryVersion, &cancels, &o.Lapsed)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return Orders{}, ErrNodeGone
	case err != nil:
		return Orders{}, err
	}
	return o, json.Unmarshal(cancels, &o.Cancel)
}

const removeNodeSQL = `
DELETE FROM penstock.node n
 WHERE n.id = $1 AND NOT EXISTS (SELECT FROM penstock.lock l WHERE l.node_id = n.id)`

// RemoveNode forgets a node, unless it still holds locks, of which its row is evidence for recovery.
func RemoveNode(ctx context.Context, db postgres.DB, id NodeID) (bool, error) {
	tag, err := db.Exec(ctx, removeNodeSQL, id)
	return err == nil && tag.RowsAffected() > 0, err
}
