package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// waiting is an entry that has not ended when the faults end.
type waiting struct {
	Queue string
	Key   *string
	MS    int           // how long its run takes
	DueIn time.Duration // until it may run
}

// backlog reads what has not ended. Work that no worker runs (statements, parts of batches, callbacks) counts as an
// entry whose run takes as long as a statement.
func (s *site) backlog(ctx context.Context) ([]waiting, error) {
	const sql = `
SELECT CASE WHEN q.name = ANY ($1) THEN q.name ELSE 'solo' END,
       CASE WHEN q.name = ANY ($1) THEN e.lock_key END,
       coalesce((e.payload ->> 'ms')::int, 5),
       greatest(interval '0', coalesce(
           least(e.due_at, CASE WHEN e.due_at IS NOT NULL THEN least(e.start_by, e.finish_by) END) - clock_timestamp(),
           interval '0'))
  FROM penstock.entry e JOIN penstock.queue q ON q.id = e.queue_id
 WHERE q.kind <> 'cron' AND NOT (q.kind = 'webhook' AND e.attempt > 0) -- a delivery that was refused waits for minutes
 ORDER BY e.id`
	rows, err := s.db.pool.Query(ctx, sql, models)
	if err != nil {
		return nil, fmt.Errorf("read the backlog: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[waiting])
	if err != nil {
		return nil, fmt.Errorf("read the backlog: %w", err)
	}
	return list, nil
}

// runWithoutFaults pushes a backlog anew, with no fault and nothing else to do. It returns how long that takes to end,
// or, for the judges, what has not ended. Entries of one transaction come in line together when it commits: with all
// of them in one, those that are due first would be late by the time that it takes.
func (s *site) runWithoutFaults(ctx context.Context, list []waiting) (left []string, took time.Duration, err error) {
	const sql = `
SELECT penstock.push(w.queue, jsonb_build_object('op', 0, 'ms', w.ms), w.key, due_at => clock_timestamp() + w.due)
  FROM unnest($1::text[], $2::text[], $3::int[], $4::interval[]) AS w (queue, key, ms, due)`
	began := time.Now()
	for part := range slices.Chunk(list, 100) {
		var queues []string
		var keys []*string
		var times []int
		var dues []time.Duration
		for _, w := range part {
			queues, keys = append(queues, w.Queue), append(keys, w.Key)
			times, dues = append(times, w.MS), append(dues, w.DueIn)
		}
		if _, err := s.db.pool.Exec(ctx, sql, queues, keys, times, dues); err != nil {
			return nil, 0, fmt.Errorf("push the backlog again: %w", err)
		}
	}
	pushing := time.Since(began) // the first ones run meanwhile
	d := s.drain(ctx, "drain-without-faults.txt")
	d.took += pushing
	left, took = faultFree(slices.Concat(d.left, d.doubtful), d.took)
	return left, took, nil
}

// faultFree is the result of a run without faults: what is left of it is told from what the faults left, and where
// anything is left the time is not known.
func faultFree(left []string, took time.Duration) ([]string, time.Duration) {
	if len(left) == 0 {
		return nil, took
	}
	named := make([]string, len(left))
	for i, what := range left {
		named[i] = "without faults: " + what
	}
	return named, 0
}

// endedWithin is that result in words.
func endedWithin(left []string, took time.Duration) string {
	if len(left) > 0 {
		return fmt.Sprintf("%d have not ended", len(left))
	}
	return "within " + round(took).String()
}
