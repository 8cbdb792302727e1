package recovery

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// BrakeConfig says when pushes are refused. The zero value refuses none.
type BrakeConfig struct {
	// DatabaseBytesMax is the largest size of the database; 0: any.
	DatabaseBytesMax int64
	// Disk returns the share, 0 to 1, of the database's disk that is in use; nil: it is not known.
	Disk func() (float64, error)
	// At is the share of either from which pushes are refused; default 0.95. They are taken again from 0.03 below it.
	At float64
	// QueueEntriesMax is the capacity of queues that have none of their own, by samples; 0: none. Pushes are taken
	// again from a twentieth below it.
	QueueEntriesMax int64
}

// brakeGap is how far below BrakeConfig.At pushes are taken again, so that they are not refused and taken in turns.
const brakeGap = 0.03

// refusal is why pushes to a queue are refused: a row's penstock.queue.refusal.
type refusal struct {
	Reason   string `json:"reason"`             // storage or depth
	Text     string `json:"text,omitempty"`     // of storage
	Capacity int64  `json:"capacity,omitempty"` // of depth, in entries
	Release  int64  `json:"release,omitempty"`  // the depth from which pushes are taken again
}

// storage tells whether there is nearly no room, for a database of so many bytes on a disk of which a share is in use.
// It was so before if held.
func (c BrakeConfig) storage(bytes int64, disk float64, held bool) *refusal {
	at := c.At
	if at <= 0 {
		at = 0.95
	}
	if held {
		at -= brakeGap
	}
	switch share := float64(bytes) / float64(max(1, c.DatabaseBytesMax)); {
	case disk >= at:
		return &refusal{Reason: "storage", Text: fmt.Sprintf("%.0f %% of the database's disk is in use", 100*disk)}
	case c.DatabaseBytesMax > 0 && share >= at:
		return &refusal{
			Reason: "storage",
			Text: fmt.Sprintf("the database has %.0f %% of the %d bytes that it may take", 100*share,
				c.DatabaseBytesMax),
		}
	}
	return nil
}

// depth tells whether a queue without a capacity of its own has as many entries as such a queue takes.
func (c BrakeConfig) depth(entries int64, held bool) *refusal {
	release := c.QueueEntriesMax - c.QueueEntriesMax/20
	if c.QueueEntriesMax <= 0 || entries < release || (!held && entries < c.QueueEntriesMax) {
		return nil
	}
	return &refusal{Reason: "depth", Capacity: c.QueueEntriesMax, Release: release}
}

// brakedQueue is what the brake reads of a queue.
type brakedQueue struct {
	ID      int32
	Bounded bool // it has a capacity of its own
	Held    *string
}

// brakedSQL reads the queues to which others push, and the bytes of the database.
const brakedSQL = `
SELECT q.id, q.capacity IS NOT NULL, q.refusal->>'reason' FROM penstock.queue q WHERE q.kind <> 'webhook' ORDER BY q.id`

const databaseBytesSQL = `SELECT pg_catalog.pg_database_size(pg_catalog.current_database())`

// setRefusalsSQL sets the refusals $2 of queues $1, null for none. A queue whose row another transaction has locked is
// left for the next sampling: the disk does not wait for that transaction.
const setRefusalsSQL = `
WITH free AS MATERIALIZED (
    SELECT ctid AS row FROM penstock.queue WHERE id = ANY ($1::integer[]) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE penstock.queue q SET refusal = w.refusal
  FROM unnest($1::integer[], $2::jsonb[]) w(id, refusal)
 WHERE q.ctid = ANY (ARRAY(SELECT row FROM free)) AND q.id = w.id AND q.refusal IS DISTINCT FROM w.refusal`

// brake refuses pushes where there is nearly no room, and takes them again where there is.
type brake struct {
	cfg   BrakeConfig
	db    postgres.DB
	fence Fence
	sized time.Time // when the database was measured
	bytes int64
}

// sizeEvery is how often the database is measured, for which the server reads the size of each of its files.
const sizeEvery = 15 * time.Second

// apply sets the refusals by the samples of all queues.
func (b *brake) apply(ctx context.Context, samples []Sample) error {
	disk, err := b.measure(ctx)
	if err != nil {
		return err
	}
	queues, err := pgx.CollectRows(postgres.Query(ctx, b.db, brakedSQL), pgx.RowToStructByPos[brakedQueue])
	if err != nil {
		return fmt.Errorf("read refusals of pushes: %w", err)
	}
	depths := make(map[int32]int64, len(samples))
	for _, s := range samples {
		depths[s.QueueID] = s.Initial + s.Pending + s.Disabled
	}
	var ids []int32
	var refusals []json.RawMessage
	for _, q := range queues {
		held := ""
		if q.Held != nil {
			held = *q.Held
		}
		r := b.cfg.storage(b.bytes, disk, held == "storage")
		if r == nil && !q.Bounded {
			r = b.cfg.depth(depths[q.ID], held == "depth")
		}
		if r == nil && held == "" || r != nil && r.Reason == held {
			continue // its text stays that of the beginning
		}
		var text json.RawMessage
		if r != nil {
			if text, err = json.Marshal(r); err != nil {
				return fmt.Errorf("write refusal of pushes: %w", err)
			}
		}
		ids, refusals = append(ids, q.ID), append(refusals, text)
	}
	if len(ids) == 0 {
		return nil
	}
	err = b.fence.InTx(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, setRefusalsSQL, ids, refusals)
		return err
	})
	if err != nil {
		return fmt.Errorf("set refusals of pushes: %w", err)
	}
	return nil
}

// measure reads the size of the database, unless that was done a moment ago, and the share of its disk.
func (b *brake) measure(ctx context.Context) (disk float64, err error) {
	if b.cfg.DatabaseBytesMax > 0 && time.Since(b.sized) >= sizeEvery {
		if err := b.db.QueryRow(ctx, databaseBytesSQL).Scan(&b.bytes); err != nil {
			return 0, fmt.Errorf("read size of the database: %w", err)
		}
		b.sized = time.Now()
	}
	if b.cfg.Disk == nil {
		return 0, nil
	}
	if disk, err = b.cfg.Disk(); err != nil {
		return 0, fmt.Errorf("read use of the disk: %w", err)
	}
	return disk, nil
}
