package maintenance

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
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

// Brake is the duty that refuses pushes where there is nearly no room, and takes them again where there is. It has a
// loop of its own: a sampling that is slow, hangs or fails does not delay it, and each measurement of its own that
// hangs delays a pass by a second.
type Brake struct {
	cfg    Config
	db     postgres.DB
	fence  Fence
	latest func() Sampling
	writes duty.Wait

	// Of the storage; see measure.
	disk      question[float64]
	database  question[int64]
	bytes     *int64    // of the database; nil: it is not known
	sized     time.Time // when bytes was answered
	sizeAfter time.Time // the database is not asked for its size before

	// Of the queues; see update.
	began     time.Time
	depths    map[int32]queueDepth
	counted   int32               // the queue that was counted last
	notBefore map[int32]time.Time // when a queue may be counted again
}

// NewBrake returns the duty for one term. It reads through db and writes through fence. latest returns the newest
// sampling, from which it takes the depths of queues.
func NewBrake(db postgres.DB, fence Fence, cfg Config, latest func() Sampling) *Brake {
	return &Brake{
		cfg: cfg.withDefaults(), db: db, fence: fence, latest: latest,
		writes:    duty.Wait{First: duty.AnswerMax},
		began:     time.Now(),
		depths:    map[int32]queueDepth{},
		notBefore: map[int32]time.Time{},
	}
}

// Run refuses pushes and takes them again until ctx ends. A pass that the database refuses is logged, and the next one
// tries again: it would fail under another leader as well.
func (b *Brake) Run(ctx context.Context) error {
	return b.cfg.loop("brake").Run(ctx, func(ctx context.Context) (time.Duration, error) {
		return b.cfg.BrakePause, b.cfg.tolerate(ctx, b.pass(ctx), "set refusals of pushes")
	})
}

// brakedQueue is a queue to which others push, with its present refusal.
type brakedQueue struct {
	ID      int32
	Bounded bool   // it has a capacity of its own
	Held    string // the reason of its refusal; empty: it has none
	Of      string // the measurement of a refusal for storage
}

// has reports whether r is the present refusal, or nil and there is none. The text of a refusal stays that of its
// beginning.
func (q brakedQueue) has(r *refusal) bool {
	if r == nil {
		return q.Held == ""
	}
	return r.Reason == q.Held && r.Of == q.Of
}

const brakedSQL = `
SELECT q.id, q.capacity IS NOT NULL, coalesce(q.refusal->>'reason', ''), coalesce(q.refusal->>'of', '')
  FROM penstock.queue q WHERE q.kind <> 'webhook' ORDER BY q.id`

// pass sets the refusals of all queues by what is known of disk, database and depths.
func (b *Brake) pass(ctx context.Context) error {
	measured := b.measure(ctx)
	queues, err := b.read(ctx)
	if err != nil {
		return err
	}
	b.update(ctx, queues)
	var ids []int32
	var refusals []json.RawMessage
	for _, q := range queues {
		r, known := b.judge(q, measured)
		if !known || q.has(r) {
			continue
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
	return b.set(ctx, ids, refusals)
}

func (b *Brake) read(ctx context.Context) ([]brakedQueue, error) {
	ctx, cancel := context.WithTimeout(ctx, duty.AnswerMax)
	defer cancel()
	queues, err := pgx.CollectRows(postgres.Query(ctx, b.db, brakedSQL), pgx.RowToStructByPos[brakedQueue])
	if err != nil {
		return nil, fmt.Errorf("read refusals of pushes: %w", err)
	}
	return queues, nil
}

// judge returns the refusal that a queue should have, nil for none. known is false where a measurement failed that
// could end its present refusal, which then stays.
func (b *Brake) judge(q brakedQueue, m storageUse) (r *refusal, known bool) {
	if q.Held == "storage" && (m.noDisk && q.Of != "database" || m.noBytes && q.Of != "disk") {
		return nil, false
	}
	if r := b.cfg.Brake.storage(m, q.Of); r != nil {
		return r, true
	}
	if q.Bounded || b.cfg.Brake.QueueEntriesMax <= 0 {
		return nil, true
	}
	d, counted := b.depths[q.ID]
	if !counted {
		return nil, q.Held != "depth"
	}
	return b.cfg.Brake.depth(d.entries, q.Held == "depth"), true
}

// brakeGap is how far below BrakeConfig.At pushes are taken again, so that they are not refused and taken in turns.
const brakeGap = 0.03

// refusal is why pushes to a queue are refused: a row's penstock.queue.refusal.
type refusal struct {
	Reason   string `json:"reason"`             // storage or depth
	Of       string `json:"of,omitempty"`       // storage: disk or database, the measurement that says so
	Text     string `json:"text,omitempty"`     // of storage
	Capacity int64  `json:"capacity,omitempty"` // of depth, in entries
	Release  int64  `json:"release,omitempty"`  // the depth from which pushes are taken again
}

// storage returns the refusal for a full disk or database, nil where there is room. refusedFor is the measurement of
// the present refusal, which lasts until that is brakeGap below the share from which pushes are refused.
func (c BrakeConfig) storage(m storageUse, refusedFor string) *refusal {
	at := func(measurement string) float64 {
		if refusedFor == measurement {
			return cmp.Or(max(0, c.At), 0.95) - brakeGap
		}
		return cmp.Or(max(0, c.At), 0.95)
	}
	switch share := float64(m.bytes) / float64(max(1, c.DatabaseBytesMax)); {
	case m.disk >= at("disk"):
		return &refusal{
			Reason: "storage", Of: "disk",
			Text: fmt.Sprintf("%.0f %% of the database's disk is in use", 100*m.disk),
		}
	case c.DatabaseBytesMax > 0 && share >= at("database"):
		return &refusal{
			Reason: "storage", Of: "database",
			Text: fmt.Sprintf("the database has %.0f %% of the %d bytes that it may take", 100*share,
				c.DatabaseBytesMax),
		}
	}
	return nil
}

// depth returns the refusal for a queue without a capacity of its own that has so many entries, nil where it has room.
// held says that it is refused now, which lasts until it is a twentieth below the capacity.
func (c BrakeConfig) depth(entries int64, held bool) *refusal {
	release := c.QueueEntriesMax - c.QueueEntriesMax/20
	if c.QueueEntriesMax <= 0 || entries < release || (!held && entries < c.QueueEntriesMax) {
		return nil
	}
	return &refusal{Reason: "depth", Capacity: c.QueueEntriesMax, Release: release}
}

// setRefusalsSQL sets the refusals $2 of queues $1, null for none. A queue whose row another transaction has locked is
// left for the next pass: the disk does not wait for that transaction.
const setRefusalsSQL = `
WITH free AS MATERIALIZED (
    SELECT ctid AS row FROM penstock.queue WHERE id = ANY ($1::integer[]) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE penstock.queue q SET refusal = w.refusal
  FROM unnest($1::integer[], $2::jsonb[]) w(id, refusal)
 WHERE q.ctid = ANY (ARRAY(SELECT row FROM free)) AND q.id = w.id AND q.refusal IS DISTINCT FROM w.refusal`

func (b *Brake) set(ctx context.Context, ids []int32, refusals []json.RawMessage) error {
	ctx, end := b.writes.Context(ctx, len(ids))
	err := b.fence.InTx(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, setRefusalsSQL, ids, refusals)
		return err
	})
	end(err)
	if err != nil {
		return fmt.Errorf("set refusals of pushes: %w", err)
	}
	return nil
}
