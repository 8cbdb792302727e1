package doctor

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// standbySQL reads the synchronous standbys, and whether one is connected.
const standbySQL = `
SELECT current_setting('synchronous_standby_names'),
       (SELECT count(*) FROM pg_stat_replication WHERE coalesce(sync_state, 'sync') IN ('sync', 'quorum')) > 0`

// commitsSQL reads the commits that wait for a synchronous standby, and since when their statements run, in seconds: 0
// where it is not known, as of a session with track_activities off. A role without pg_read_all_stats sees no state of
// other sessions.
const commitsSQL = `
SELECT pid, coalesce(backend_xid::text, '') AS xid, coalesce(state_change, 'epoch') AS began,
       coalesce(extract(epoch FROM clock_timestamp() - state_change), 0)::float8 AS age
  FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND backend_type = 'client backend'`

// commit is one that waits for a standby.
type commit struct {
	PID   int32
	XID   string
	Began time.Time // of its statement
	Age   float64   // of its statement, in seconds
}

func (c commit) same(d commit) bool {
	return c.PID == d.PID && c.XID == d.XID && c.Began.Equal(d.Began)
}

// standbyMax is how long a commit may wait for a standby that works.
var standbyMax = 5 * time.Second

// standbyPause passes the time between two readings of the commits that wait, more than a standby that works takes.
var standbyPause = func(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(time.Second):
		return nil
	}
}

// checkStandby looks for commits that wait for a synchronous standby that does not answer: each statement that writes
// ends at its deadline then, and no error says why.
func checkStandby(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	var names string
	var connected bool
	if err := tx.QueryRow(ctx, standbySQL).Scan(&names, &connected); err != nil {
		return Finding{}, err
	}
	if names == "" {
		return Finding{Summary: "commits wait for no standby"}, nil
	}
	commits, err := waitingCommits(ctx, tx)
	if err == nil && connected && longest(commits) > standbyMax {
		commits, err = remaining(ctx, tx, commits)
	}
	wait := longest(commits)
	switch {
	case err != nil:
		return Finding{}, err
	case connected && wait <= standbyMax:
		return Finding{Summary: "synchronous standbys follow"}, nil
	}
	f := Finding{
		Severity: Critical,
		Summary:  fmt.Sprintf("commits wait for a synchronous standby (%s) that does not answer", names),
		Advice: "Start the standby, or name one that follows in synchronous_standby_names. Empty that setting (ALTER " +
			"SYSTEM, then SELECT pg_reload_conf()) only where the standby is not going to be promoted. Do not cancel " +
			"sessions that wait (pg_cancel_backend): their commits are acknowledged then, and lost in a failover.",
	}
	if !connected {
		f.Details = append(f.Details, "none is connected")
	}
	if len(commits) > 0 {
		who := many(len(commits), "session waits", "sessions wait")
		f.Details = append(f.Details, fmt.Sprintf("%s, in statements of up to %s", who, wait.Round(time.Second)))
	}
	return f, nil
}

// remaining returns which of the commits still wait a moment later. The age of a statement is that of all its work: one
// that worked for long may have been read in the milliseconds in which it waited.
func remaining(ctx context.Context, tx pgx.Tx, before []commit) ([]commit, error) {
	if err := standbyPause(ctx); err != nil {
		return nil, err
	}
	// A transaction reads the activity once, and keeps it.
	if _, err := tx.Exec(ctx, `SELECT pg_stat_clear_snapshot()`); err != nil {
		return nil, err
	}
	now, err := waitingCommits(ctx, tx)
	return slices.DeleteFunc(now, func(c commit) bool { return !slices.ContainsFunc(before, c.same) }), err
}

func waitingCommits(ctx context.Context, tx pgx.Tx) ([]commit, error) {
	rows, err := tx.Query(ctx, commitsSQL)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByName[commit])
}

// longest is the age of the oldest of the statements.
func longest(commits []commit) time.Duration {
	var most float64
	for _, c := range commits {
		most = max(most, c.Age)
	}
	return time.Duration(most * float64(time.Second))
}
