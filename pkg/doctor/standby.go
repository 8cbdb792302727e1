package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// standbySQL reads the synchronous standbys, the sessions whose commits wait for one, the number of these and the time
// that the first of them has waited, in seconds. A role without pg_read_all_stats sees no state of other sessions.
const standbySQL = `
SELECT current_setting('synchronous_standby_names'),
       (SELECT count(*) FROM pg_stat_replication WHERE coalesce(sync_state, 'sync') IN ('sync', 'quorum')) > 0,
       count(*), coalesce(extract(epoch FROM max(clock_timestamp() - state_change)), 0)::float8
  FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND backend_type = 'client backend'`

// standbyMax is how long a commit may wait for a standby that works.
const standbyMax = 5 * time.Second

// checkStandby looks for commits that wait for a synchronous standby that does not answer: each statement that writes
// ends at its deadline then, and no error says why.
func checkStandby(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	var names string
	var connected bool
	var waiting int
	var longest float64
	if err := tx.QueryRow(ctx, standbySQL).Scan(&names, &connected, &waiting, &longest); err != nil {
		return Finding{}, err
	}
	wait := time.Duration(longest * float64(time.Second)).Round(time.Second)
	switch {
	case names == "":
		return Finding{Summary: "commits wait for no standby"}, nil
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
	if waiting > 0 {
		who := many(waiting, "session waits", "sessions wait")
		f.Details = append(f.Details, fmt.Sprintf("%s, for up to %s", who, wait))
	}
	return f, nil
}
