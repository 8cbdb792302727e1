package doctor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

const leaderSQL = `
SELECT holder, term, renewed_at + lease > clock_timestamp(), penstock.ago(clock_timestamp() - renewed_at),
       penstock.ago(clock_timestamp() - elected_at)
  FROM penstock.leader
 WHERE renewed_at IS NOT NULL
 ORDER BY renewed_at DESC
 LIMIT 1`

func checkLeader(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	const advice = "Start a leader. Until then due entries wait, deadlines pass, and what dead nodes held stays " +
		"locked; nodes go on with pending entries."
	var holder, silent, since string
	var term int64
	var live bool
	err := tx.QueryRow(ctx, leaderSQL).Scan(&holder, &term, &live, &silent, &since)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return Finding{Severity: Warning, Summary: "no leader leads", Advice: advice}, nil
	case err != nil:
		return Finding{}, err
	case !live:
		return Finding{Severity: Critical, Summary: fmt.Sprintf("no leader leads: %s (term %d) fell silent %s ago",
			holder, term, silent), Advice: advice}, nil
	}
	return Finding{Summary: fmt.Sprintf("%s leads since %s (term %d)", holder, since, term)}, nil
}

// lateSQL finds the entry that came due first and is not pending, one lookup a queue.
const lateSQL = `
SELECT format('queue %s: entry %s came due %s ago', q.name, e.id, penstock.ago(clock_timestamp() - e.due_at)),
       e.due_at < clock_timestamp() - interval '1 minute'
  FROM penstock.queue q CROSS JOIN LATERAL (
       SELECT x.id, x.due_at FROM penstock.entry x
        WHERE x.queue_id = q.id AND x.status = 'initial' AND x.priority >= 0 ORDER BY x.due_at, x.id LIMIT 1) e
 WHERE e.due_at < clock_timestamp() - interval '10 seconds'
 ORDER BY e.due_at`

func checkLate(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	return judged(ctx, tx, lateSQL, "due entries are in line", "queues with entries that are due and not in line: %d",
		"The elected leader puts them into line within a second: see the check leader and the leader's log.")
}

// stuckSQL lists locks that recovery should have freed: critical when it is late by more than 30 seconds.
const stuckSQL = `
SELECT format('queue %s, key %s (token %s): %s%s', queue, lock_key, token, reason,
       coalesce(', silent for ' || penstock.ago(silent_for), '')),
       coalesce(silent_for, age) > interval '40 seconds'
  FROM penstock.stuck
 ORDER BY coalesce(silent_for, age) DESC`

func checkStuck(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	return judged(ctx, tx, stuckSQL, "no lock is held by a dead node", "locks held by dead nodes: %d",
		"The elected leader frees them within the lease and two seconds, unless it has suspended itself because "+
			"many leases lapsed at once: "+
			"see the check leader, its log, and penstock lock verify.")
}

// unservedSQL lists queues with pending entries that no live node would claim: critical when the oldest has
// waited for a while.
const unservedSQL = `
SELECT format('queue %s of application %s: the first entry has waited %s', q.name, q.application,
       penstock.ago(clock_timestamp() - h.since)),
       h.since < clock_timestamp() - interval '15 minutes'
  FROM penstock.queue q CROSS JOIN LATERAL (
       SELECT greatest(e.created_at, e.due_at) AS since
         FROM (SELECT r.* FROM penstock.ready r WHERE r.queue_id = q.id ORDER BY r.priority, r.flow, r.pos LIMIT 1) r
        CROSS JOIN LATERAL (
              (SELECT x.created_at, x.due_at FROM penstock.entry x WHERE x.queue_id = q.id AND x.id = r.entry_id)
              UNION ALL
              (SELECT x.created_at, x.due_at FROM penstock.entry x
                WHERE x.queue_id = q.id AND x.lock_key = r.lock_key AND penstock.claimable(x.status, x.priority)
                       ORDER BY x.id LIMIT 1)) e) h
 WHERE NOT EXISTS (SELECT FROM penstock.queue_stops(q))
   AND NOT EXISTS (SELECT FROM penstock.serving(q.id)) AND h.since < clock_timestamp() - interval '10 seconds'
 ORDER BY h.since`

func checkUnserved(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	return judged(ctx, tx, unservedSQL, "every queue with work has a node", "queues with work and no live node: %d",
		"Start a task node of that application with a handler for the queue, or disable the queue so that people know.")
}

// pausedSQL lists pauses without an end that are older than a day.
const pausedSQL = `
SELECT format('%s %s: by %s %s ago%s', scope, value, actor, penstock.ago(clock_timestamp() - since),
       coalesce(', ' || nullif(reason, ''), '')), false
  FROM (SELECT 'queue' AS scope, name AS value, paused_by AS actor, paused_reason AS reason, paused_at AS since
          FROM penstock.queue WHERE paused_until IS NULL
        UNION ALL
        SELECT scope, value, actor, reason, created_at FROM penstock.pause WHERE until IS NULL) p
 WHERE since < clock_timestamp() - interval '1 day'
 ORDER BY since`

func checkPaused(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	return judged(ctx, tx, pausedSQL, "no pause without an end is older than a day",
		"pauses of more than a day, without an end: %d",
		"Ask the actor named here; penstock queue resume and penstock pause end do what they say, --until gives a "+
			"pause an end.")
}

// linesMax bounds the details of a finding that is judged.
const linesMax = 50

// judged turns the rows of a query, each a line and whether it is critical, into a finding. Its summary and severity
// are those of all rows, its details are the first linesMax.
func judged(ctx context.Context, tx pgx.Tx, sql, fine, many, advice string, args ...any) (Finding, error) {
	counted := fmt.Sprintf(`
WITH found (line, critical) AS MATERIALIZED (%s)
SELECT line, count(*) OVER (), bool_or(critical) OVER () FROM found LIMIT %d`, sql, linesMax)
	var lines []string
	var line string
	var n int
	var critical bool
	_, err := pgx.ForEachRow(postgres.Query(ctx, tx, counted, args...), []any{&line, &n, &critical}, func() error {
		lines = append(lines, line)
		return nil
	})
	if n == 0 {
		return Finding{Summary: fine}, err
	}
	f := Finding{Severity: Warning, Summary: fmt.Sprintf(many, n), Details: lines, Advice: advice}
	if critical {
		f.Severity = Critical
	}
	return f, err
}

// rowsSQL estimates what the check of the invariants must read.
const rowsSQL = `
SELECT coalesce(sum(penstock.live_rows(c.oid)), 0)::bigint
  FROM pg_class c
 WHERE c.relnamespace = 'penstock'::regnamespace AND c.relkind = 'r'
   AND (c.relname IN ('ready', 'lock') OR c.relname ~ '^(entry|result|failure)_')`

const invariantsSQL = `SELECT invariant || ': ' || detail, true FROM penstock.check_invariants('10 seconds')`

func checkInvariants(ctx context.Context, tx pgx.Tx, cfg Config) (Finding, error) {
	var rows int64
	if err := tx.QueryRow(ctx, rowsSQL).Scan(&rows); err != nil {
		return Finding{}, err
	}
	if rows > cfg.RowsMax && !cfg.Deep {
		return Finding{
			Severity: Skipped, Summary: fmt.Sprintf("not checked: about %d rows would be read", rows),
			Advice: "Run penstock doctor --deep when the database has time for it.",
		}, nil
	}
	start := time.Now()
	f, err := judged(ctx, tx, invariantsSQL, "", "broken: %d",
		"This is a defect, or the tables were edited by hand: pause the queue, keep these lines, and report them.")
	if f.Severity == "" {
		f.Summary = fmt.Sprintf("all hold (about %d rows read in %s)", rows, time.Since(start).Round(time.Millisecond))
	}
	return f, err
}
