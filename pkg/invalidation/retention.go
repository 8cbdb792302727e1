package invalidation

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// InTx runs fn in a transaction of its own, and commits it unless fn returns an error.
type InTx func(ctx context.Context, fn func(pgx.Tx) error) error

// EnsurePartitions gives results, failures and the other tables of penstock.retention a partition for today and each of
// the days ahead, each in a transaction of its own, and returns how many it made. It waits at most 200 ms for the lock
// of a table; tables that it cannot have are left to the next call.
func EnsurePartitions(ctx context.Context, db postgres.DB, inTx InTx, daysAhead int) (int, error) {
	rows, _ := db.Query(ctx, `SELECT parent FROM penstock.retention`)
	parents, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return 0, fmt.Errorf("list tables with partitions: %w", err)
	}
	made := 0
	for _, parent := range parents {
		n, err := countCalls(ctx, inTx, "make partitions", `SELECT penstock.make_partition($1, $2)`, parent, daysAhead)
		made += n
		if err != nil {
			return made, err
		}
	}
	return made, nil
}

// DropOldPartitions drops partitions of results and failures that are past the longest retention of any queue, each
// in a transaction of its own, and returns how many.
func DropOldPartitions(ctx context.Context, inTx InTx) (int, error) {
	return countCalls(ctx, inTx, "drop old partitions", `SELECT penstock.drop_old_partitions()`)
}

// countCalls repeats a statement that does one thing in a transaction, and returns 1, until it returns 0 because
// nothing is left.
func countCalls(ctx context.Context, inTx InTx, what, sql string, args ...any) (int, error) {
	for total := 0; ; total++ {
		var n int
		err := inTx(ctx, func(tx pgx.Tx) error { return tx.QueryRow(ctx, sql, args...).Scan(&n) })
		if err != nil {
			return total, fmt.Errorf("%s: %w", what, err)
		}
		if n == 0 {
			return total, nil
		}
	}
}

// Each of these statements deletes up to $1 rows without a purpose and returns how many. They skip
// rows that another transaction has locked, where any does.
//
// Keys, progress, buckets and firings that are kept may be millions. Their statements read the pages of the table
// from the one with tid $2 to before that of $3, and return how many pages there are as well: what one reads does not
// grow with what is kept. They look up entries and failures row by row, in any plan: subqueries of one value are not
// made joins.

// tidyResultsSQL deletes results that have passed the retention of their own queue.
const tidyResultsSQL = `SELECT penstock.tidy_outcomes('result', $1)`

// tidyFailuresSQL is the same for failures.
const tidyFailuresSQL = `SELECT penstock.tidy_outcomes('failure', $1)`

// tidyDefaultsSQL deletes rows of other tables of penstock.retention that are not in the partition of a day.
const tidyDefaultsSQL = `SELECT penstock.tidy_defaults($1)`

// tidyIdempotencySQL forgets idempotency keys that are older than a day and than their queue keeps results, once
// their entry is gone and so are its failure, which may be retried, and its result, which is kept from the end on and
// not from the push: until then the same push must find it.
const tidyIdempotencySQL = `
WITH old AS (
    DELETE FROM penstock.idempotency
     WHERE ctid = ANY (ARRAY(
           SELECT k.ctid FROM penstock.idempotency k
            WHERE k.ctid >= $2::text::tid AND k.ctid < $3::text::tid
              AND k.created_at < now() - interval '1 day'
              AND k.created_at < now() - coalesce((SELECT q.result_retention FROM penstock.queue q
                                                    WHERE q.id = k.queue_id), '0')
              AND (SELECT min(e.id) FROM penstock.entry e WHERE e.queue_id = k.queue_id AND e.id = k.entry_id) IS NULL
              AND (SELECT min(f.entry_id) FROM penstock.failure f
                    WHERE f.queue_id = k.queue_id AND f.entry_id = k.entry_id) IS NULL
              AND (SELECT min(r.entry_id) FROM penstock.result r
                    WHERE r.queue_id = k.queue_id AND r.entry_id = k.entry_id
                      AND penstock.kept(r.finished_at, (SELECT q.result_retention FROM penstock.queue q
                                                         WHERE q.id = r.queue_id))) IS NULL
            LIMIT $1 FOR UPDATE SKIP LOCKED))
    RETURNING 1
)
SELECT count(*), pg_relation_size('penstock.idempotency') / current_setting('block_size')::int FROM old`

// tidyUniquenessSQL forgets unique keys whose entry is gone, and its failure too: when that is retried, the entry has
// its key again unless a later one has taken it. A push that takes such a row over locks it, and is passed by.
const tidyUniquenessSQL = `
WITH old AS (
    DELETE FROM penstock.uniqueness
     WHERE ctid = ANY (ARRAY(
           SELECT u.ctid FROM penstock.uniqueness u
            WHERE u.ctid >= $2::text::tid AND u.ctid < $3::text::tid
              AND (SELECT min(e.id) FROM penstock.entry e WHERE e.queue_id = u.queue_id AND e.id = u.entry_id) IS NULL
              AND (SELECT min(f.entry_id) FROM penstock.failure f
                    WHERE f.queue_id = u.queue_id AND f.entry_id = u.entry_id) IS NULL
            LIMIT $1 FOR UPDATE SKIP LOCKED))
    RETURNING 1
)
SELECT count(*), pg_relation_size('penstock.uniqueness') / current_setting('block_size')::int FROM old`

// tidyProgressSQL deletes the progress of entries that are gone, and their failure too: when that is retried, the run
// goes on from its checkpoint.
const tidyProgressSQL = `
WITH old AS (
    DELETE FROM penstock.progress
     WHERE ctid = ANY (ARRAY(
           SELECT p.ctid FROM penstock.progress p
            WHERE p.ctid >= $2::text::tid AND p.ctid < $3::text::tid
              AND (SELECT min(e.id) FROM penstock.entry e WHERE e.queue_id = p.queue_id AND e.id = p.entry_id) IS NULL
              AND (SELECT min(f.entry_id) FROM penstock.failure f
                    WHERE f.queue_id = p.queue_id AND f.entry_id = p.entry_id) IS NULL
            LIMIT $1 FOR UPDATE SKIP LOCKED))
    RETURNING 1
)
SELECT count(*), pg_relation_size('penstock.progress') / current_setting('block_size')::int FROM old`

// tidyThrottlesSQL deletes throttles that ended an hour ago.
const tidyThrottlesSQL = `
WITH old AS (
    DELETE FROM penstock.throttle
     WHERE ctid = ANY (ARRAY(
           SELECT p.ctid FROM penstock.throttle p WHERE p.until < clock_timestamp() - interval '1 hour'
            LIMIT $1 FOR UPDATE SKIP LOCKED))
    RETURNING 1
)
SELECT count(*) FROM old`

// tidyBucketSQL forgets token buckets that are full again (one that is missing is full), and those of no limit.
const tidyBucketSQL = `
WITH old AS (
    DELETE FROM penstock.bucket
     WHERE ctid = ANY (ARRAY(
           SELECT b.ctid FROM penstock.bucket b LEFT JOIN penstock."limit" g ON g.id = b.limit_id
            WHERE b.ctid >= $2::text::tid AND b.ctid < $3::text::tid
              AND coalesce(penstock.bucket_level(b.units, b.at, g.rate, g.burst) >= g.burst, true)
            LIMIT $1 FOR UPDATE OF b SKIP LOCKED))
    RETURNING 1
)
SELECT count(*), pg_relation_size('penstock.bucket') / current_setting('block_size')::int FROM old`

// tidyOperationsSQL deletes bulk operations that ended 30 days ago.
const tidyOperationsSQL = `
WITH old AS (
    DELETE FROM penstock.operation
     WHERE ctid = ANY (ARRAY(
           SELECT o.ctid FROM penstock.operation o
            WHERE o.ctid >= $2::text::tid AND o.ctid < $3::text::tid
              AND o.status <> 'running' AND o.ended_at < clock_timestamp() - interval '30 days'
            LIMIT $1))
    RETURNING 1
)
SELECT count(*), pg_relation_size('penstock.operation') / current_setting('block_size')::int FROM old`

// tidyFiringsSQL deletes firings of cron jobs of 30 days ago.
const tidyFiringsSQL = `
WITH old AS (
    DELETE FROM penstock.cron_firing
     WHERE ctid = ANY (ARRAY(
           SELECT f.ctid FROM penstock.cron_firing f
            WHERE f.ctid >= $2::text::tid AND f.ctid < $3::text::tid
              AND f.fired_at < clock_timestamp() - interval '30 days'
            LIMIT $1 FOR UPDATE SKIP LOCKED))
    RETURNING 1
)
SELECT count(*), pg_relation_size('penstock.cron_firing') / current_setting('block_size')::int FROM old`

// tidyTokensSQL deletes tokens of the API that ended 400 days ago: each rotation of a token adds one.
//
//nolint:gosec // a statement
const tidyTokensSQL = `
WITH old AS (
    DELETE FROM penstock.api_token
     WHERE ctid = ANY (ARRAY(
           SELECT t.ctid FROM penstock.api_token t
            WHERE t.ctid >= $2::text::tid AND t.ctid < $3::text::tid
              AND least(t.expires_at, t.revoked_at) < clock_timestamp() - interval '400 days'
            LIMIT $1 FOR UPDATE SKIP LOCKED))
    RETURNING 1
)
SELECT count(*), pg_relation_size('penstock.api_token') / current_setting('block_size')::int FROM old`

// Tidied counts the rows that a pass deleted.
type Tidied struct {
	Results, Failures, Defaults, IdempotencyKeys, UniqueKeys, Progress, Throttles, Buckets int
	Operations, Firings, Tokens                                                            int
}

// Total is how many rows were deleted.
func (t Tidied) Total() int {
	return t.Results + t.Failures + t.Defaults + t.IdempotencyKeys + t.UniqueKeys + t.Progress + t.Throttles +
		t.Buckets + t.Operations + t.Firings + t.Tokens
}

// Tidier deletes rows without a purpose, a part of each large table at a time. Its zero value is ready to use.
type Tidier struct {
	idempotency, uniqueness, progress, buckets, operations, firings, tokens postgres.PageWalk

	done [11]bool // kinds of which this pass needs no further step
}

// Begin begins a pass: its next step is of every kind again. A pass whose last step left nothing has ended by itself.
func (d *Tidier) Begin() { d.done = [len(d.done)]bool{} }

// Tidy makes a step: it deletes up to limit rows of each kind that have no purpose any more, each kind in a short
// transaction of its own, and reports whether a later step of the same pass may find more. A step is of those kinds of
// which the one before may have left some. A kind whose statement the database refuses keeps no other from its step,
// and goes on in the next pass, behind the pages that it could not do.
func (d *Tidier) Tidy(ctx context.Context, inTx InTx, limit int) (t Tidied, more bool, err error) {
	var refused []error
	for i, step := range [len(d.done)]struct {
		kind, sql string
		n         *int
		walk      *postgres.PageWalk // nil: the statement finds such rows without reading those that stay
	}{
		{"results", tidyResultsSQL, &t.Results, nil},
		{"failures", tidyFailuresSQL, &t.Failures, nil},
		{"default partitions", tidyDefaultsSQL, &t.Defaults, nil},
		{"idempotency keys", tidyIdempotencySQL, &t.IdempotencyKeys, &d.idempotency},
		{"unique keys", tidyUniquenessSQL, &t.UniqueKeys, &d.uniqueness},
		{"progress", tidyProgressSQL, &t.Progress, &d.progress},
		{"throttles", tidyThrottlesSQL, &t.Throttles, nil},
		{"token buckets", tidyBucketSQL, &t.Buckets, &d.buckets},
		{"operations", tidyOperationsSQL, &t.Operations, &d.operations},
		{"firings", tidyFiringsSQL, &t.Firings, &d.firings},
		{"tokens", tidyTokensSQL, &t.Tokens, &d.tokens},
	} {
		if d.done[i] {
			continue
		}
		var left bool
		var err error
		if step.walk == nil {
			err = inTx(ctx, func(tx pgx.Tx) error { return tx.QueryRow(ctx, step.sql, limit).Scan(step.n) })
			left = *step.n == limit
		} else {
			left, err = tidyPart(ctx, inTx, step.sql, limit, step.n, step.walk)
		}
		switch {
		case err == nil:
			d.done[i] = !left
			more = more || left
		case postgres.Unavailable(err):
			return t, false, fmt.Errorf("tidy %s: %w", step.kind, err)
		default:
			d.done[i] = true
			refused = append(refused, fmt.Errorf("tidy %s: %w", step.kind, err))
		}
	}
	if !more {
		d.Begin()
	}
	return t, more, errors.Join(refused...)
}

// tidyPart does a step of a walk, which stays at the pages of the step if they may have more such rows.
func tidyPart(
	ctx context.Context, inTx InTx, sql string, limit int, n *int, walk *postgres.PageWalk,
) (more bool, err error) {
	var pages int64
	first, end := walk.Range()
	err = inTx(ctx, func(tx pgx.Tx) error { return tx.QueryRow(ctx, sql, limit, first, end).Scan(n, &pages) })
	switch {
	case err != nil:
		walk.Skip()
		return false, err
	case *n == limit:
		return true, nil
	}
	return walk.Next(pages), nil
}
