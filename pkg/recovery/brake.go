package recovery

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
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

// Brake is the duty that refuses pushes where there is nearly no room, and takes them again where there is. It has a
// loop of its own: sampling that is slow, hangs or fails delays it in nothing.
type Brake struct {
	cfg    Config
	db     postgres.DB
	fence  Fence
	latest func() Sampling
	writes patience

	sized     time.Time    // when the database was measured, or the measurement failed
	bytes     *int64       // of the database; nil: not measured yet
	disk      chan diskUse // of the question to the disk that is under way; nil: there is none
	depths    map[int32]queueDepth
	notBefore map[int32]time.Time // when a queue may be counted again
	failing   map[string]bool     // measurements of which an error was logged
}

// queueDepth is the number of entries of a queue at a time of this process's clock.
type queueDepth struct {
	entries int64
	at      time.Time
}

// NewBrake returns the duty for one term. It reads through db and writes through fence. latest returns the newest
// sampling, from which it takes the depths of queues.
func NewBrake(db postgres.DB, fence Fence, cfg Config, latest func() Sampling) *Brake {
	return &Brake{
		cfg: cfg.withDefaults(), db: db, fence: fence, latest: latest,
		writes:    patience{first: answerMax, now: answerMax},
		depths:    map[int32]queueDepth{},
		notBefore: map[int32]time.Time{},
		failing:   map[string]bool{},
	}
}

// Run refuses pushes and takes them again until ctx ends. A pass that the database refuses is logged, and the next one
// tries again: it would fail under another leader as well.
func (b *Brake) Run(ctx context.Context) error {
	return loop(ctx, b.cfg, "brake", func(ctx context.Context) (time.Duration, error) {
		err := b.pass(ctx)
		if err != nil && !general(err) && ctx.Err() == nil {
			b.cfg.Log.ErrorContext(ctx, "cannot set refusals of pushes; the next pass tries again", "error", err)
			err = nil
		}
		return b.cfg.BrakePause, err
	})
}

// brakedQueue is a queue to which others push, with its present refusal.
type brakedQueue struct {
	ID      int32
	Bounded bool   // it has a capacity of its own
	Held    string // the reason of its refusal; empty: it has none
}

const brakedSQL = `
SELECT q.id, q.capacity IS NOT NULL, coalesce(q.refusal->>'reason', '')
  FROM penstock.queue q WHERE q.kind <> 'webhook' ORDER BY q.id`

// pass sets the refusals of all queues by what is known of disk, database and depths.
func (b *Brake) pass(ctx context.Context) error {
	room := b.measure(ctx)
	queues, err := b.read(ctx)
	if err != nil {
		return err
	}
	b.update(ctx, queues)
	var ids []int32
	var refusals []json.RawMessage
	for _, q := range queues {
		r, known := b.judge(q, room)
		if !known || r == nil && q.Held == "" || r != nil && r.Reason == q.Held {
			continue // a refusal's text stays that of the beginning
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
	ctx, cancel := context.WithTimeout(ctx, answerMax)
	defer cancel()
	queues, err := pgx.CollectRows(postgres.Query(ctx, b.db, brakedSQL), pgx.RowToStructByPos[brakedQueue])
	if err != nil {
		return nil, fmt.Errorf("read refusals of pushes: %w", err)
	}
	return queues, nil
}

// judge returns the refusal that a queue should have, nil for none. known is false where a measurement failed that
// could end its present refusal, which then stays.
func (b *Brake) judge(q brakedQueue, m room) (r *refusal, known bool) {
	if r := b.cfg.Brake.storage(m.bytes, m.disk, q.Held == "storage"); r != nil {
		return r, true
	}
	if q.Held == "storage" && m.partial {
		return nil, false
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
	ctx, end := b.writes.bound(ctx, len(ids))
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

const (
	// sizeEvery is how often the database is measured, for which the server reads the size of each of its files.
	sizeEvery = 15 * time.Second
	// measureMax bounds the wait for the size of the database, and that for the counts of one pass.
	measureMax = 15 * time.Second
	// diskMax bounds the wait for the use of the disk.
	diskMax = time.Second
	// sampleOld is the age, in pauses between samples, of a sample that ends no refusal any more.
	sampleOld = 3
)

// room is the use of the storage.
type room struct {
	bytes   int64   // of the database
	disk    float64 // share of its disk
	partial bool    // one of them is not known, and zero
}

const databaseBytesSQL = `SELECT pg_catalog.pg_database_size(pg_catalog.current_database())`

// measure reads the share of the disk, and the size of the database unless that was done a moment ago. A measurement
// that fails ends nothing: the other one can still refuse pushes.
func (b *Brake) measure(ctx context.Context) (m room) {
	if b.cfg.Brake.DatabaseBytesMax > 0 {
		if time.Since(b.sized) >= sizeEvery {
			sizing, cancel := context.WithTimeout(ctx, measureMax)
			var bytes int64
			err := b.db.QueryRow(sizing, databaseBytesSQL).Scan(&bytes)
			cancel()
			if b.report(ctx, "size of the database", err); err == nil {
				b.bytes = &bytes
			}
			b.sized = time.Now()
		}
		m.bytes, m.partial = value(b.bytes), b.bytes == nil
	}
	if b.cfg.Brake.Disk != nil {
		disk, err := b.diskUse(ctx)
		if b.report(ctx, "use of the disk", err); err != nil {
			disk, m.partial = 0, true
		}
		m.disk = disk
	}
	return m
}

// diskUse is the answer of BrakeConfig.Disk.
type diskUse struct {
	share float64
	err   error
}

// diskUse asks for the use of the disk, and waits a second. A file system that hangs answers later or never: until it
// does it is not asked again, and the other measurements go on.
func (b *Brake) diskUse(ctx context.Context) (float64, error) {
	if b.disk == nil {
		answer := make(chan diskUse, 1)
		b.disk = answer
		go func() {
			share, err := b.cfg.Brake.Disk()
			answer <- diskUse{share, err}
		}()
	}
	select {
	case use := <-b.disk:
		b.disk = nil
		return use.share, use.err
	case <-time.After(diskMax):
		return 0, fmt.Errorf("the file system has not answered within %v", diskMax)
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// report logs the first error of a measurement since it last succeeded.
func (b *Brake) report(ctx context.Context, measurement string, err error) {
	if err != nil && !b.failing[measurement] && ctx.Err() == nil {
		b.cfg.Log.ErrorContext(ctx, "cannot measure the room for pushes; those that are refused stay refused",
			"measurement", measurement, "error", err)
	}
	if b.failing[measurement] = true; err == nil {
		delete(b.failing, measurement)
	}
}

// update takes the depths of the queues from the newest sampling. A queue that is refused for its depth and has only
// an old sample, or none yet in this term, is counted, so that it does not stay refused while sampling is slow or
// fails. A queue that is not refused waits for the next sample: the storage is measured apart.
func (b *Brake) update(ctx context.Context, queues []brakedQueue) {
	known := make(map[int32]queueDepth, len(queues))
	sampling := b.latest()
	for _, s := range sampling.Queues {
		known[s.QueueID] = queueDepth{s.Initial + s.Pending + s.Disabled, sampling.At}
	}
	until := time.Now().Add(measureMax)
	depths := make(map[int32]queueDepth, len(queues))
	for _, q := range queues {
		d := known[q.ID]
		if before := b.depths[q.ID]; before.at.After(d.at) {
			d = before
		}
		if q.Held == "depth" && !q.Bounded && time.Since(d.at) > sampleOld*b.cfg.SamplePause {
			d = b.count(ctx, until, q.ID, d)
		}
		if !d.at.IsZero() {
			depths[q.ID] = d
		}
	}
	b.depths = depths
	maps.DeleteFunc(b.notBefore, func(_ int32, until time.Time) bool { return time.Now().After(until) })
}

const countHeldSQL = `
SELECT coalesce(max(c.initial + c.pending + c.disabled), 0)
  FROM penstock.queue q CROSS JOIN LATERAL penstock.count_queue(q) c WHERE q.id = $1`

// count counts a queue, unless it was counted a moment ago: counting takes as large a share of the time as sampling.
// It waits no longer than until, and returns the depth that is known if there is no count.
func (b *Brake) count(ctx context.Context, until time.Time, queue int32, known queueDepth) queueDepth {
	start := time.Now()
	if start.Before(b.notBefore[queue]) || start.After(until) {
		return known
	}
	counted := queueDepth{at: start}
	counting, cancel := context.WithDeadline(ctx, until)
	err := b.db.QueryRow(counting, countHeldSQL, queue).Scan(&counted.entries)
	cancel()
	b.notBefore[queue] = start.Add(time.Duration(float64(time.Since(start)) / sampleShare))
	b.report(ctx, fmt.Sprintf("depth of queue %d", queue), err)
	if err != nil {
		return known
	}
	return counted
}
