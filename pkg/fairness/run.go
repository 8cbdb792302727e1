package fairness

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
)

// RankerConfig sets the application whose usage a ranker shares. A zero field means its default.
type RankerConfig struct {
	Config
	Application string // of the node: "default"
	Log         *slog.Logger
}

const (
	// shareEvery is the time between exchanges, where they are cheap.
	shareEvery = time.Second
	// shareNodes is how many nodes may have an exchange in progress for a twentieth of the time each, so that the
	// exchanges of all nodes take one session's time.
	shareNodes = 20
	shareMax   = time.Minute
)

// sharePause is the pause after an exchange that took so long, with so many live nodes.
func sharePause(took time.Duration, nodes int) time.Duration {
	return max(shareEvery, min(took*time.Duration(max(shareNodes, nodes)), shareMax))
}

// NewRanker returns a ranker that shares usage through db.
func NewRanker(c RankerConfig, db postgres.DB) *Ranker {
	if c.Application == "" {
		c.Application = "default"
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	c.Config = c.withDefaults()
	return &Ranker{book: New(c.Config), share: exchange{c, db}}
}

// exchange is the part of a ranker that talks to the database.
type exchange struct {
	RankerConfig
	db postgres.DB
}

// Run exchanges usage with the other nodes until ctx ends. While it fails the node goes on by its
// own book. A node that has ranked no lane and has no usage to report makes no exchange.
func (r *Ranker) Run(ctx context.Context) error {
	pause, nodes := shareEvery, 1
	var failing, forgetting duty.Failing
	for round := 1; ; round++ {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Duration(float64(pause) * (0.9 + 0.2*rand.Float64()))):
		}
		start := time.Now()
		n, err := r.swap(ctx)
		nodes = cmp.Or(n, nodes)
		failing.Note(ctx, r.share.Log, slog.LevelError, "share usage", err)
		if round%60 == 0 {
			_, err := r.share.db.Exec(ctx, forgetSQL, r.share.HalfLife.Seconds())
			forgetting.Note(ctx, r.share.Log, slog.LevelError, "forget usage", err)
		}
		pause = sharePause(time.Since(start), nodes)
	}
}

// swap reports this node's usage and adopts the usage of all nodes. It returns how many there are, 0 where there was
// nothing to exchange.
func (r *Ranker) swap(ctx context.Context) (nodes int, err error) {
	r.mu.Lock()
	used := r.used
	r.used = false
	r.mu.Unlock()
	report := r.book.Report(time.Now())
	if len(report) == 0 && !used {
		return 0, nil
	}
	snapshot, nodes, err := r.share.swap(ctx, report)
	if err == nil {
		r.book.Adopt(snapshot, nodes, time.Now())
	}
	return nodes, err
}

// Usage needs no durability, and a short lock timeout is enough: a failed report is part of the
// next one.
const hastilySQL = `SELECT set_config('synchronous_commit', 'off', true), set_config('lock_timeout', '200ms', true)`

// foldSQL adds a node's deltas to the shared usage, as Fold does; $7 is the half-life in seconds. All nodes
// take the rows in the order of their keys, so that none waits for another one that waits for it.
const foldSQL = `
INSERT INTO penstock.usage AS u (queue_id, priority, whole, flow, service, lift, at)
SELECT d.queue_id, d.priority, d.whole, d.flow, d.service, d.lift, clock_timestamp()
  FROM unnest($1::int[], $2::smallint[], $3::boolean[], $4::text[], $5::float8[], $6::float8[])
       AS d(queue_id, priority, whole, flow, service, lift)
 WHERE EXISTS (SELECT FROM penstock.queue q WHERE q.id = d.queue_id)
 ORDER BY d.queue_id, d.priority, d.whole, d.flow COLLATE "C"
ON CONFLICT (queue_id, priority, whole, flow) DO UPDATE
   SET service = greatest(0, penstock.usage_left(u.service, u.at, $7::float8) + excluded.service),
       lift = greatest(penstock.usage_left(u.lift, u.at, $7::float8), excluded.lift),
       at = clock_timestamp()`

// usageSQL is the usage in the queues of application $1 by now. That of online calls, which has the priority -1, is of
// the queue's usual priority here.
const usageSQL = `
SELECT u.queue_id, CASE WHEN u.priority < 0 THEN q.entry_priority ELSE u.priority END, u.whole, u.flow,
       greatest(0, penstock.usage_left(u.service, u.at, $2::float8)), penstock.usage_left(u.lift, u.at, $2::float8),
       u.priority < 0
  FROM penstock.queue q
 CROSS JOIN LATERAL (SELECT * FROM penstock.usage WHERE queue_id = q.id OFFSET 0) u
 WHERE q.application = $1 OR q.kind = 'webhook'`

// peersSQL counts the live task nodes of application $1.
const peersSQL = `
SELECT count(*)::int FROM penstock.node
 WHERE application = $1 AND kind = 'task' AND draining_at IS NULL AND beat_at + lease > clock_timestamp()`

// forgetSQL removes what has decayed to less than a millisecond.
const forgetSQL = `
DELETE FROM penstock.usage
 WHERE ctid = ANY (ARRAY(
       SELECT ctid FROM penstock.usage u
        WHERE penstock.usage_left(u.service + u.lift, u.at, $1::float8) < 0.001
        LIMIT 10000 FOR UPDATE SKIP LOCKED))`

// swap is one round trip and one short transaction.
func (x *exchange) swap(
	ctx context.Context, report []AttainedService,
) (snapshot []AttainedService, nodes int, err error) {
	b := &pgx.Batch{}
	b.Queue(hastilySQL)
	b.Queue(foldSQL, append(columns(report), x.HalfLife.Seconds())...)
	var online []AttainedService
	b.Queue(usageSQL, x.Application, x.HalfLife.Seconds()).Query(func(rows pgx.Rows) error {
		var u AttainedService
		var ofCalls bool
		_, err := pgx.ForEachRow(rows,
			[]any{&u.Queue, &u.Priority, &u.Whole, &u.Flow, &u.Service, &u.Lift, &ofCalls}, func() error {
				if ofCalls {
					online = append(online, u)
				} else {
					snapshot = append(snapshot, u)
				}
				return nil
			})
		return err
	})
	b.Queue(peersSQL, x.Application).QueryRow(func(row pgx.Row) error { return row.Scan(&nodes) })
	if err := x.db.SendBatch(ctx, b).Close(); err != nil {
		return nil, 0, fmt.Errorf("swap usage of %d flows: %w", len(report), err)
	}
	return withOnline(snapshot, online), nodes, nil
}

// withOnline adds the use of online calls to that of their flow at each priority of the snapshot, and at the usual one
// of the queue, which it has. Calls have no priority: a flow that used its share by them comes later with all its
// entries.
func withOnline(snapshot, online []AttainedService) []AttainedService {
	type flowOf struct {
		queue int32
		flow  string
	}
	calls, missing := make(map[flowOf]float64, len(online)), make(map[Key]bool, len(online))
	for _, u := range online {
		calls[flowOf{u.Queue, u.Flow}], missing[u.Key] = u.Service, true
	}
	for i := range snapshot {
		if u := &snapshot[i]; !u.Whole {
			u.Service += calls[flowOf{u.Queue, u.Flow}]
			delete(missing, u.Key)
		}
	}
	for _, u := range online {
		if missing[u.Key] {
			snapshot = append(snapshot, u)
		}
	}
	return snapshot
}

// columns turns a report into the arguments of foldSQL.
func columns(report []AttainedService) []any {
	n := len(report)
	queues, priorities, wholes, flows := make([]int32, n), make([]int16, n), make([]bool, n), make([]string, n)
	services, lifts := make([]float64, n), make([]float64, n)
	for i, u := range report {
		queues[i], priorities[i], wholes[i], flows[i] = u.Queue, u.Priority, u.Whole, u.Flow
		services[i], lifts[i] = u.Service, u.Lift
	}
	return []any{queues, priorities, wholes, flows, services, lifts}
}
