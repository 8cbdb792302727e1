package maintenance

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
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

// storage tells whether there is nearly no room. A measurement that a refusal is of counts until it is brakeGap below
// the share from which pushes are refused.
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

// depth tells whether a queue without a capacity of its own has as many entries as such a queue takes.
func (c BrakeConfig) depth(entries int64, held bool) *refusal {
	release := c.QueueEntriesMax - c.QueueEntriesMax/20
	if c.QueueEntriesMax <= 0 || entries < release || (!held && entries < c.QueueEntriesMax) {
		return nil
	}
	return &refusal{Reason: "depth", Capacity: c.QueueEntriesMax, Release: release}
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

	began     time.Time
	disk      question[float64]
	database  question[int64]
	bytes     *int64    // of the database; nil: it is not known
	sized     time.Time // when bytes was answered
	sizeAfter time.Time // the database is not asked for its size before
	depths    map[int32]queueDepth
	counted   int32               // the queue that was counted last
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
		writes:    duty.Wait{First: duty.AnswerMax},
		began:     time.Now(),
		depths:    map[int32]queueDepth{},
		notBefore: map[int32]time.Time{},
		failing:   map[string]bool{},
	}
}

// Run refuses pushes and takes them again until ctx ends. A pass that the database refuses is logged, and the next one
// tries again: it would fail under another leader as well.
func (b *Brake) Run(ctx context.Context) error {
	return b.cfg.loop("brake").Run(ctx, func(ctx context.Context) (time.Duration, error) {
		return b.cfg.BrakePause, b.cfg.tolerate(ctx, b.pass(ctx),
			"cannot set refusals of pushes; the next pass tries again")
	})
}

// brakedQueue is a queue to which others push, with its present refusal.
type brakedQueue struct {
	ID      int32
	Bounded bool   // it has a capacity of its own
	Held    string // the reason of its refusal; empty: it has none
	Of      string // the measurement of a refusal for storage
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
		if !known || r == nil && q.Held == "" || r != nil && r.Reason == q.Held && r.Of == q.Of {
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

const (
	// sizeEvery is how often the database is measured, for which the server reads the size of each of its files.
	sizeEvery = 15 * time.Second
	// measureMax bounds how long the database may measure itself.
	measureMax = 15 * time.Second
	// waitMax bounds the wait of a pass for a measurement.
	waitMax = time.Second
	// countsMax is how long a pass begins counts of queues, and countMax bounds each: it reads some 10,000 entries of
	// each state at most.
	countsMax = time.Second
	countMax  = 5 * time.Second
	// sampleOld is the age, in pauses between samples, from which the brake counts a queue itself.
	sampleOld = 3
)

// storageUse is the use of the storage.
type storageUse struct {
	bytes           int64   // of the database
	disk            float64 // share of its disk
	noBytes, noDisk bool    // it is not known, and zero
}

const databaseBytesSQL = `SELECT pg_catalog.pg_database_size(pg_catalog.current_database())`

// measure reads the share of the disk, and the size of the database unless that was done a moment ago. The size of a
// moment ago serves while the database takes its time to answer.
func (b *Brake) measure(ctx context.Context) (m storageUse) {
	if b.cfg.Brake.DatabaseBytesMax > 0 {
		if time.Now().After(b.sizeAfter) {
			b.measureDatabase(ctx)
		}
		m.bytes, m.noBytes = value(b.bytes), b.bytes == nil
	}
	if b.cfg.Brake.Disk != nil {
		disk, err := b.disk.ask(ctx, b.cfg.Brake.Disk)
		b.report(ctx, "use of the disk", err)
		m.disk, m.noDisk = disk, err != nil
	}
	return m
}

func (b *Brake) measureDatabase(ctx context.Context) {
	bytes, err := b.database.ask(ctx, func() (bytes int64, err error) {
		ctx, cancel := context.WithTimeout(ctx, measureMax)
		defer cancel()
		return bytes, b.db.QueryRow(ctx, databaseBytesSQL).Scan(&bytes)
	})
	if b.database.answered() {
		b.sizeAfter = time.Now().Add(sizeEvery)
	}
	switch {
	case err == nil:
		b.bytes, b.sized = &bytes, time.Now()
	case time.Since(b.sized) < sizeEvery+measureMax:
		return // a moment ago
	default:
		b.bytes = nil
	}
	b.report(ctx, "size of the database", err)
}

// question is a measurement that may take long, or hang, as a file system can. The passes go on beside it: it is not
// asked again until it has answered.
type question[T any] struct{ answer chan answer[T] }

type answer[T any] struct {
	value T
	err   error
}

func (q *question[T]) answered() bool { return q.answer == nil }

// ask asks, or waits for the answer to what was asked before, for waitMax. The value is zero with an error. read may
// outlive the pass, and uses a context of the term.
func (q *question[T]) ask(ctx context.Context, read func() (T, error)) (none T, err error) {
	if q.answer == nil {
		answered := make(chan answer[T], 1)
		q.answer = answered
		go func() {
			value, err := read()
			answered <- answer[T]{value, err}
		}()
	}
	select {
	case a := <-q.answer:
		q.answer = nil
		if a.err != nil {
			return none, a.err
		}
		return a.value, nil
	case <-time.After(waitMax):
		return none, fmt.Errorf("no answer within %v", waitMax)
	case <-ctx.Done():
		return none, ctx.Err()
	}
}

// report logs the first error of a measurement since it last succeeded.
func (b *Brake) report(ctx context.Context, measurement string, err error) {
	if err == nil {
		delete(b.failing, measurement)
		return
	}
	if !b.failing[measurement] && ctx.Err() == nil {
		b.cfg.Log.ErrorContext(ctx, "cannot measure the room for pushes; those that it refuses stay refused",
			"measurement", measurement, "error", err)
	}
	b.failing[measurement] = true
}

// update takes the depths of the queues from the newest sampling, and counts those that have an old sample or none.
func (b *Brake) update(ctx context.Context, queues []brakedQueue) {
	known := make(map[int32]queueDepth, len(queues))
	sampling := b.latest()
	for _, s := range sampling.Queues {
		known[s.QueueID] = queueDepth{s.Initial + s.Pending + s.Disabled, sampling.At}
	}
	until := time.Now().Add(countsMax)
	depths := make(map[int32]queueDepth, len(queues))
	// The counts of a pass go on behind those of the last one: there may be more queues than a pass has time for.
	next := max(0, slices.IndexFunc(queues, func(q brakedQueue) bool { return q.ID > b.counted }))
	for _, q := range slices.Concat(queues[next:], queues[:next]) {
		d := known[q.ID]
		if before := b.depths[q.ID]; before.at.After(d.at) {
			d = before
		}
		if b.old(q, d.at, sampling.Took) {
			d = b.count(ctx, until, q.ID, d)
		}
		if !d.at.IsZero() {
			depths[q.ID] = d
		}
	}
	b.depths = depths
	maps.DeleteFunc(b.notBefore, func(_ int32, until time.Time) bool { return time.Now().After(until) })
}

// old tells whether the depth of a queue, known at a time, is too old. A queue that is refused for its depth does not
// wait for a sampling that is slow. Another one does, and is counted where samplings do not end: it would take entries
// without a bound.
func (b *Brake) old(q brakedQueue, at time.Time, took time.Duration) bool {
	if q.Bounded || b.cfg.Brake.QueueEntriesMax <= 0 {
		return false
	}
	if q.Held == "depth" {
		return time.Since(at) > sampleOld*b.cfg.SamplePause
	}
	if at.Before(b.began) {
		at = b.began
	}
	return time.Since(at) > sampleOld*samplePause(b.cfg, took)
}

const countBrakedSQL = `
SELECT coalesce(max(c.initial + c.pending + c.disabled), 0)
  FROM penstock.queue q CROSS JOIN LATERAL penstock.count_queue(q) c WHERE q.id = $1`

// count counts a queue, unless it was counted a moment ago: the counts of one queue take as large a share of the time
// as samplings. It begins before until, and returns the depth that is known if there is no count.
func (b *Brake) count(ctx context.Context, until time.Time, queue int32, known queueDepth) queueDepth {
	start := time.Now()
	if start.Before(b.notBefore[queue]) || start.After(until) {
		return known
	}
	counted := queueDepth{at: start}
	b.counted = queue
	counting, cancel := context.WithTimeout(ctx, countMax)
	err := b.db.QueryRow(counting, countBrakedSQL, queue).Scan(&counted.entries)
	cancel()
	b.notBefore[queue] = start.Add(time.Duration(float64(time.Since(start)) / sampleShare))
	b.report(ctx, fmt.Sprintf("depth of queue %d", queue), err)
	if err != nil {
		return known
	}
	return counted
}
