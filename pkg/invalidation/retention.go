package invalidation

import (
	"context"
	"fmt"

	"github.com/penstock/penstock/internal/postgres"
)

// EnsurePartitions gives results and failures a partition for today and each of the days ahead, and
// returns how many it made. It waits at most 200 ms for a lock; partitions that it cannot make are
// left to the next call.
func EnsurePartitions(ctx context.Context, db postgres.DB, daysAhead int) (int, error) {
	var n int
	if err := db.QueryRow(ctx, `SELECT penstock.ensure_partitions($1)`, daysAhead).Scan(&n); err != nil {
		return 0, fmt.Errorf("make partitions: %w", err)
	}
	return n, nil
}

// DropOldPartitions drops partitions of results and failures that are past the longest retention of any queue, each
// in a transaction of its own, and returns how many.
func DropOldPartitions(ctx context.Context, db postgres.DB) (int, error) {
	for total := 0; ; total++ {
		var n int
		if err := db.QueryRow(ctx, `SELECT penstock.drop_old_partitions()`).Scan(&n); err != nil {
			return total, fmt.Errorf("drop old partitions: %w", err)
		}
		if n == 0 {
			return total, nil
		}
	}
}

// Each of these statements deletes up to $1 rows without a purpose and returns how many. They skip
// rows that another transaction has locked.

// tidyResultsSQL deletes results that have passed the retention of their own queue.
const tidyResultsSQL = `SELECT penstock.tidy_outcomes('result', $1)`

// tidyFailuresSQL is the same for failures.
const tidyFailuresSQL = `SELECT penstock.tidy_outcomes('failure', $1)`

// tidyIdempotencySQL forgets idempotency keys that are older than a day and than their queue keeps results, once
// their entry is gone and so are its failure, which may be retried, and its result, which is kept from the end on and
// not from the push: until then the same push must find it.
const tidyIdempotencySQL = `
WITH old AS (
    DELETE FROM penstock.idempotency
     WHERE ctid = ANY (ARRAY(
           SELECT k.ctid FROM penstock.idempotency k
            WHERE k.created_at < now() - interval '1 day'
              AND k.created_at < now() - coalesce((SELECT q.result_retention FROM penstock.queue q WHERE q.id = k.queue_id), '0')
              AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = k.queue_id AND e.id = k.entry_id)
              AND NOT EXISTS (SELECT FROM penstock.failure f WHERE f.queue_id = k.queue_id AND f.entry_id = k.entry_id)
              AND NOT EXISTS (
                  SELECT FROM penstock.result r JOIN penstock.queue q ON q.id = r.queue_id
                   WHERE r.queue_id = k.queue_id AND r.entry_id = k.entry_id
                     AND penstock.kept(r.finished_at, q.result_retention))
            LIMIT $1 FOR UPDATE SKIP LOCKED))
    RETURNING 1
)
SELECT count(*) FROM old`

// tidyUniquenessSQL forgets unique keys whose entry is gone, and its failure too: when that is retried, the entry has
// its key again unless a later one has taken it. A push that takes such a row over locks it, and is passed by.
const tidyUniquenessSQL = `
WITH old AS (
    DELETE FROM penstock.uniqueness
     WHERE ctid = ANY (ARRAY(
           SELECT u.ctid FROM penstock.uniqueness u
            WHERE NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = u.queue_id AND e.id = u.entry_id)
              AND NOT EXISTS (SELECT FROM penstock.failure f WHERE f.queue_id = u.queue_id AND f.entry_id = u.entry_id)
            LIMIT $1 FOR UPDATE SKIP LOCKED))
    RETURNING 1
)
SELECT count(*) FROM old`

// tidyProgressSQL deletes the progress of entries that are gone.
const tidyProgressSQL = `
WITH old AS (
    DELETE FROM penstock.progress
     WHERE ctid = ANY (ARRAY(
           SELECT p.ctid FROM penstock.progress p
            WHERE NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = p.queue_id AND e.id = p.entry_id)
            LIMIT $1 FOR UPDATE SKIP LOCKED))
    RETURNING 1
)
SELECT count(*) FROM old`

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
            WHERE coalesce(penstock.bucket_level(b.units, b.at, g.rate, g.burst) >= g.burst, true)
            LIMIT $1 FOR UPDATE OF b SKIP LOCKED))
    RETURNING 1
)
SELECT count(*) FROM old`

// Tidied counts the rows that a pass deleted.
type Tidied struct {
	Results, Failures, IdempotencyKeys, UniqueKeys, Progress, Throttles, Buckets int
}

// Total is how many rows were deleted.
func (t Tidied) Total() int {
	return t.Results + t.Failures + t.IdempotencyKeys + t.UniqueKeys + t.Progress + t.Throttles + t.Buckets
}

// Tidy deletes up to limit rows of each kind that have no purpose any more, each kind in a short transaction of
// its own. A pass that deleted limit of some kind has probably left more: call again after a pause.
func Tidy(ctx context.Context, db postgres.DB, limit int) (Tidied, error) {
	var t Tidied
	for _, step := range []struct {
		what, sql string
		n         *int
	}{
		{"results", tidyResultsSQL, &t.Results},
		{"failures", tidyFailuresSQL, &t.Failures},
		{"idempotency keys", tidyIdempotencySQL, &t.IdempotencyKeys},
		{"unique keys", tidyUniquenessSQL, &t.UniqueKeys},
		{"progress", tidyProgressSQL, &t.Progress},
		{"throttles", tidyThrottlesSQL, &t.Throttles},
		{"token buckets", tidyBucketSQL, &t.Buckets},
	} {
		if err := db.QueryRow(ctx, step.sql, limit).Scan(step.n); err != nil {
			return t, fmt.Errorf("tidy %s: %w", step.what, err)
		}
	}
	return t, nil
}
