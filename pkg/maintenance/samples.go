package maintenance

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Samples is the duty that records the state of each queue every few seconds. Status pages and
// metrics read these samples and do not count themselves.
type Samples struct {
	cfg      Config
	db       postgres.DB
	fence    Fence
	prepared bool      // there are partitions for today
	rolledUp time.Time // to the minute

	limit  duty.Limit    // queues of one statement
	budget time.Duration // how long a pass begins statements
	after  int32         // the queue behind which the next statement begins
	spent  time.Duration // by the passes of this round of the queues
	took   time.Duration // by those of the last round

	latest duty.Tally[Sampling]
}

// Sampling is what the last pass read: the server, the models, and the newest sample of each queue. A pass ends within
// a bounded time: where there are many queues, some samples are of passes before it.
type Sampling struct {
	At     time.Time     // by this process's clock; zero before the first pass
	Took   time.Duration // for all queues, in one pass or several
	Queues []Sample      // in the order of their ids
	Server ServerStatus
	Models []ModelSlots
	// Degraded lists the rows of penstock.degradations, which explains them.
	Degraded []Degradation
}

// Degradation is a condition that stops or slows work although every process runs.
type Degradation struct {
	Code, Object string
	Critical     bool // nothing of the object goes on
}

// Sample is the state of a queue at one time: a row of penstock.sample, which explains the columns.
type Sample struct {
	QueueID      int32     `json:"queue_id"`
	Queue        string    `json:"-"`
	Read         time.Time `json:"-" db:"-"` // by this process's clock
	At           time.Time `json:"at"`
	Initial      int64     `json:"initial"`
	Pending      int64     `json:"pending"`
	Disabled     int64     `json:"disabled"`
	Computing    int64     `json:"computing"`
	Failed       int64     `json:"failed"`
	Estimated    bool      `json:"estimated"`
	Serving      int       `json:"serving"`
	HeadAge      *float64  `json:"head_age"` // seconds
	Blocked      *string   `json:"blocked"`
	Accepted     int64     `json:"accepted"`
	Gone         int64     `json:"gone"`
	DeadTuples   int64     `json:"dead_tuples"`
	InPerSecond  *float64  `json:"in_per_second"`
	OutPerSecond *float64  `json:"out_per_second"`
}

// ServerStatus is the row of penstock.server_status.
type ServerStatus struct {
	Connections    int
	MaxConnections int
	HorizonAge     float64 // seconds
	NotifyUsage    float64 // 0 to 1
	DeadTuples     int64
}

// ModelSlots counts the slots of a model's usable instances and those of them that are held, and the held slots of all
// its instances and those of them that are in doubt.
type ModelSlots struct {
	Model             string
	Slots, HeldUsable int64
	Held, Doubtful    int64
}

// NewSamples returns the duty for one term. It reads through db and writes through fence.
func NewSamples(db postgres.DB, fence Fence, cfg Config) *Samples {
	cfg = cfg.withDefaults()
	return &Samples{
		cfg: cfg, db: db, fence: fence, budget: sampleBudget,
		limit: duty.Limit{First: min(sampleQueues, cfg.QueuesAtOnce), Max: cfg.QueuesAtOnce, Aim: sampleAim},
	}
}

// Run samples until ctx ends. A failed pass is logged and does not end the term: no other duty
// depends on samples.
func (s *Samples) Run(ctx context.Context) error {
	return s.cfg.loop("samples").Run(ctx, func(ctx context.Context) (time.Duration, error) {
		bounded, cancel := context.WithTimeout(ctx, samplingMax)
		defer cancel()
		next, err := s.pass(bounded)
		late := bounded.Err() != nil // a pass that is too long may have only much to count
		if err != nil && !late && postgres.Unavailable(err) {
			return next, err
		}
		s.cfg.failing.Note(ctx, s.cfg.Log, slog.LevelError, "sample the queues", "sample", err)
		if err != nil {
			return s.cfg.SamplePause, nil
		}
		return next, nil
	})
}

// Latest returns the last sampling of this term.
func (s *Samples) Latest() Sampling { return s.latest.Read() }

// sampleShare is the share of the time that sampling may take: a pass of one second runs every ten
// seconds.
const sampleShare = 0.1

const (
	sampleBudget = 10 * time.Second
	sampleAim    = 2 * time.Second // for one statement
	sampleQueues = 50              // of the first statement
	// samplingMax bounds a pass: a connection may freeze without an error.
	samplingMax = 2 * time.Minute
)

// samplePause is the pause after a pass that took so long.
func samplePause(cfg Config, took time.Duration) time.Duration {
	return max(cfg.SamplePause, time.Duration(float64(took)/sampleShare))
}

func (s *Samples) inTerm(ctx context.Context, fn func(pgx.Tx) error) error {
	return inTerm(ctx, s.db, s.fence, fn)
}

func (s *Samples) pass(ctx context.Context) (time.Duration, error) {
	if !s.prepared {
		if _, err := invalidation.EnsurePartitions(ctx, s.db, s.inTerm, 1); err != nil {
			return 0, err
		}
		s.prepared = true
	}
	found := Sampling{At: time.Now(), Queues: s.Latest().Queues}
	all, err := s.measure(ctx, &found)
	if err != nil {
		return 0, err
	}
	if err := s.read(ctx, &found); err != nil {
		return 0, err
	}
	took := time.Since(found.At)
	s.spent += took
	if all {
		s.took, s.spent = s.spent, 0
	}
	found.Took = max(s.took, s.spent)
	s.latest.Add(func(l *Sampling) { *l = found })
	return samplePause(s.cfg, took), s.rollUp(ctx)
}

const measureSQL = `
SELECT m.queue_id, q.name, m.at, m.initial, m.pending, m.disabled, m.computing, m.failed, m.estimated,
       m.serving, m.head_age, m.blocked, m.accepted, m.gone, m.dead_tuples, m.in_per_second, m.out_per_second
  FROM (SELECT x FROM penstock.queue x WHERE x.id > $1 ORDER BY x.id LIMIT $2) s
 CROSS JOIN LATERAL (SELECT (s.x).id, (s.x).name) q
 CROSS JOIN LATERAL penstock.measure(s.x) m
 ORDER BY q.id`

// measure measures queues and stores their samples, behind those of the pass before, until it has reached the last
// queue, and returns true, or the time of the pass is over.
func (s *Samples) measure(ctx context.Context, found *Sampling) (all bool, err error) {
	for {
		rows := s.limit.Rows()
		start := time.Now()
		some, err := pgx.CollectRows(postgres.Query(ctx, s.db, measureSQL, s.after, rows), pgx.RowToStructByPos[Sample])
		s.limit.Done(time.Since(start), err)
		if err != nil {
			return false, fmt.Errorf("sample queues: %w", err)
		}
		for i := range some {
			some[i].Read = start
		}
		rate(found.Queues, some)
		if err := s.write(ctx, some); err != nil { // what is not stored is not sampled: lists and degradations lack it
			s.prepared = false // perhaps a partition is missing
			return false, err
		}
		after, last := s.after, int32(math.MaxInt32)
		if all = len(some) < rows; !all {
			last = some[rows-1].QueueID
		}
		found.Queues = replaced(found.Queues, some, after, last)
		if s.after = last; all {
			s.after = 0
		}
		if all || time.Since(found.At) > s.budget {
			return all, nil
		}
	}
}

// replaced returns samples with those of the queues behind one, up to another, in place of the earlier ones: queues
// that were dropped have none.
func replaced(earlier, now []Sample, behind, to int32) []Sample {
	kept := func(keep func(id int32) bool) []Sample {
		return slices.DeleteFunc(slices.Clone(earlier), func(q Sample) bool { return !keep(q.QueueID) })
	}
	before, after := kept(func(id int32) bool { return id <= behind }), kept(func(id int32) bool { return id > to })
	return slices.Concat(before, now, after)
}

const serverSQL = `
SELECT connections, max_connections, horizon_age, notify_usage, dead_tuples FROM penstock.server_status`

const modelSlotsSQL = `
SELECT model, coalesce(sum(slots) FILTER (WHERE usable), 0)::bigint,
       coalesce(sum(held) FILTER (WHERE usable), 0)::bigint, sum(held)::bigint, sum(doubtful)::bigint
  FROM penstock.instance_status GROUP BY model ORDER BY model`

const degradedSQL = `SELECT code, object, critical FROM penstock.degradations()`

// read reads all but the queues.
func (s *Samples) read(ctx context.Context, found *Sampling) (err error) {
	if found.Server, err = pgx.CollectExactlyOneRow(postgres.Query(ctx, s.db, serverSQL),
		pgx.RowToStructByPos[ServerStatus]); err != nil {
		return fmt.Errorf("sample server: %w", err)
	}
	if found.Models, err = pgx.CollectRows(postgres.Query(ctx, s.db, modelSlotsSQL),
		pgx.RowToStructByPos[ModelSlots]); err != nil {
		return fmt.Errorf("sample slots: %w", err)
	}
	// Those of queues are found by the samples that are stored.
	found.Degraded, err = pgx.CollectRows(postgres.Query(ctx, s.db, degradedSQL), pgx.RowToStructByPos[Degradation])
	if err != nil {
		return fmt.Errorf("sample degradations: %w", err)
	}
	return nil
}

// rate fills in the rates of entries in and out, per second between two passes. A counter that
// decreased was reset, and gives no rate.
func rate(earlier, now []Sample) {
	before := make(map[int32]Sample, len(earlier))
	for _, q := range earlier {
		before[q.QueueID] = q
	}
	for i := range now {
		q := &now[i]
		was, known := before[q.QueueID]
		seconds := q.At.Sub(was.At).Seconds()
		if !known || seconds <= 0 || q.Accepted < was.Accepted || q.Gone < was.Gone {
			continue
		}
		in, out := float64(q.Accepted-was.Accepted)/seconds, float64(q.Gone-was.Gone)/seconds
		q.InPerSecond, q.OutPerSecond = &in, &out
	}
}

// writeSampleSQL writes samples $1. Losing a sample in a crash is acceptable.
const writeSampleSQL = `
WITH written AS (
    INSERT INTO penstock.sample
    SELECT s.* FROM jsonb_populate_recordset(NULL::penstock.sample, $1) s
    ON CONFLICT DO NOTHING
)
SELECT set_config('synchronous_commit', 'off', true) IS NOT NULL`

func (s *Samples) write(ctx context.Context, samples []Sample) error {
	text, err := json.Marshal(samples)
	if err != nil {
		return fmt.Errorf("write samples as JSON: %w", err)
	}
	err = s.fence.InTx(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, writeSampleSQL, text)
		return err
	})
	if err != nil {
		return fmt.Errorf("write samples: %w", err)
	}
	return nil
}

const rollUpSQL = `SELECT penstock.roll_up_samples()`

// rollUp rolls complete minutes up, once a minute. It may have an hour of all queues to read, for which it has a
// transaction of its own: if that fails, samples are written all the same.
func (s *Samples) rollUp(ctx context.Context) error {
	minute := time.Now().Truncate(time.Minute)
	if minute.Equal(s.rolledUp) {
		return nil
	}
	err := s.inTerm(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, rollUpSQL)
		return err
	})
	if err != nil {
		return fmt.Errorf("roll samples up: %w", err)
	}
	s.rolledUp = minute
	return nil
}
