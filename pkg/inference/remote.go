package inference

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
)

// remoteRun is a run that a worker has accepted, as stored: the next claimer of its entry follows
// it on.
type remoteRun struct {
	Queue  int32
	Entry  invalidation.EntryID
	Token  int64         // under which the worker was asked
	Slot   slot.Held     // that it is counted on
	Remote string        // empty: the worker's answer never came
	Ran    time.Duration // charged to its limit, as far as a node that handed it over has said
	Age    time.Duration // since the worker was first asked, until it reported or the run was found
	Found  time.Time
	Report json.RawMessage // how it ended, as the worker reported
}

// saveRunSQL stores a run. An older one of the entry is over: its lock was. One under the same token is the same run,
// and may have reported already. A unique index refuses a second run under one id of an instance.
const saveRunSQL = `
INSERT INTO penstock.remote_run (queue_id, entry_id, token, instance_id, slot_number, slot_token, remote_id, ran_ms)
VALUES ($1, $2, $3, $4, $5, $6, nullif($7, ''), $8)
ON CONFLICT (queue_id, entry_id) DO UPDATE
   SET token = excluded.token, instance_id = excluded.instance_id, slot_number = excluded.slot_number,
       slot_token = excluded.slot_token, remote_id = excluded.remote_id, ran_ms = excluded.ran_ms,
       started_at = CASE WHEN remote_run.token = excluded.token THEN remote_run.started_at ELSE clock_timestamp() END,
       report = CASE WHEN remote_run.token = excluded.token THEN remote_run.report END,
       reported_at = CASE WHEN remote_run.token = excluded.token THEN remote_run.reported_at END
 WHERE remote_run.token <= excluded.token`

func saveRun(ctx context.Context, db postgres.DB, r remoteRun) error {
	_, err := db.Exec(ctx, saveRunSQL, r.Queue, r.Entry, r.Token, r.Slot.Instance, r.Slot.Number, r.Slot.Token,
		r.Remote, r.Ran.Milliseconds())
	switch {
	case postgres.Code(err) == postgres.UniqueViolation:
		return fmt.Errorf("store run of entry %d: %w %q", r.Entry, worker.ErrSharedID, r.Remote)
	case err != nil:
		return fmt.Errorf("store run of entry %d: %w", r.Entry, err)
	}
	return nil
}

const findRunSQL = `
SELECT token, instance_id, slot_number, slot_token, coalesce(remote_id, ''), ran_ms, report,
       coalesce(reported_at, clock_timestamp()) - started_at
  FROM penstock.remote_run
 WHERE queue_id = $1 AND entry_id = $2`

// findRun returns the run of an entry that a worker may still know, nil if there is none.
func findRun(ctx context.Context, db postgres.DB, queue int32, entry invalidation.EntryID) (*remoteRun, error) {
	r := remoteRun{Queue: queue, Entry: entry}
	var ranMS int64
	err := db.QueryRow(ctx, findRunSQL, queue, entry).Scan(&r.Token, &r.Slot.Instance, &r.Slot.Number, &r.Slot.Token,
		&r.Remote, &ranMS, &r.Report, &r.Age)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("find run of entry %d: %w", entry, err)
	}
	r.Ran, r.Found = time.Duration(ranMS)*time.Millisecond, time.Now()
	return &r, nil
}

const moveRunSQL = `
UPDATE penstock.remote_run SET slot_number = $4, slot_token = $5
 WHERE queue_id = $1 AND entry_id = $2 AND token = $3`

// moveRun notes which slot a run is counted on now.
func moveRun(ctx context.Context, db postgres.DB, r remoteRun) error {
	_, err := db.Exec(ctx, moveRunSQL, r.Queue, r.Entry, r.Token, r.Slot.Number, r.Slot.Token)
	if err != nil {
		return fmt.Errorf("move run of entry %d: %w", r.Entry, err)
	}
	return nil
}

const chargeRunSQL = `
UPDATE penstock.remote_run SET ran_ms = $5
 WHERE queue_id = $1 AND entry_id = $2 AND token = $3 AND slot_token = $4`

// chargeRun notes how much of a run that is handed over was charged, unless another node follows it already.
func chargeRun(ctx context.Context, db postgres.DB, r remoteRun) error {
	_, err := db.Exec(ctx, chargeRunSQL, r.Queue, r.Entry, r.Token, r.Slot.Token, r.Ran.Milliseconds())
	if err != nil {
		return fmt.Errorf("charge run of entry %d: %w", r.Entry, err)
	}
	return nil
}

const forgetRunSQL = `DELETE FROM penstock.remote_run WHERE queue_id = $1 AND entry_id = $2 AND token = $3`

// forgetRun drops a run that is over. What is not dropped is swept once its entry is gone.
func forgetRun(ctx context.Context, db postgres.DB, r remoteRun) error {
	_, err := db.Exec(ctx, forgetRunSQL, r.Queue, r.Entry, r.Token)
	if err != nil {
		return fmt.Errorf("forget run of entry %d: %w", r.Entry, err)
	}
	return nil
}

// sweepRunsSQL drops the runs whose entries have ended while no node followed them, and returns those whose end their
// worker has not reported.
const sweepRunsSQL = `
WITH swept AS (
    DELETE FROM penstock.remote_run r
     WHERE r.started_at < clock_timestamp() - interval '1 minute'
       AND NOT penstock.entry_lives(r.queue_id, r.entry_id)
    RETURNING r.*
)
SELECT instance_id, entry_id, token, coalesce(remote_id, entry_id::text) FROM swept WHERE report IS NULL`

// endedRun is a run that may go on at the worker although its entry has ended.
type endedRun struct {
	Instance int32
	Entry    invalidation.EntryID
	Token    int64
	Remote   string // a worker that knows entries by their id is asked by that
}

func sweepRuns(ctx context.Context, db postgres.DB) ([]endedRun, error) {
	return pgx.CollectRows(postgres.Query(ctx, db, sweepRunsSQL), pgx.RowToStructByPos[endedRun])
}

// stopRuns asks the workers to stop runs whose entries have ended. An instance that does not answer one request gets
// none for the others: those end by themselves, as do runs that a worker does not stop.
func (p *Prober) stopRuns(ctx context.Context, runs []endedRun) {
	stopped, unheard := 0, map[int32]bool{}
	for _, r := range runs {
		e, err := p.endpoint(ctx, r.Instance)
		if e == nil || err != nil || unheard[r.Instance] {
			continue
		}
		c := e.adapter.Cancel(ctx, worker.RunRef{
			Entry: strconv.FormatInt(int64(r.Entry), 10), Token: r.Token, Remote: r.Remote,
		})
		unheard[r.Instance] = c.NoAnswer
		if c.Delivered {
			stopped++
		}
	}
	if len(runs) > 0 {
		p.log.Info("runs of entries that have ended are to stop", "runs", len(runs), "delivered", stopped)
	}
}

// reportSQL keeps the first word on the end of a run: what comes late, or again, changes nothing.
const reportSQL = `
UPDATE penstock.remote_run
   SET report = coalesce(report, $4),
       reported_at = CASE WHEN report IS NULL THEN clock_timestamp() ELSE reported_at END
 WHERE queue_id = $1 AND entry_id = $2 AND token = $3`

// saveReport keeps the report of a worker for the follower of the run. False: there is no such run
// any more.
func saveReport(ctx context.Context, db postgres.DB, r remoteRun, body json.RawMessage) (bool, error) {
	tag, err := db.Exec(ctx, reportSQL, r.Queue, r.Entry, r.Token, body)
	if err != nil {
		return false, fmt.Errorf("keep report on entry %d: %w", r.Entry, err)
	}
	return tag.RowsAffected() > 0, nil
}

// save stores a run that the worker has accepted, of which ran was charged. If the database cannot be reached, the run
// goes on all the same: followAndStore tries again meanwhile, and keepOrForget when the run is handed over.
func (d *dispatch) save(ctx context.Context, remote string, ran time.Duration) error {
	r := remoteRun{
		Queue: d.run.Queue.ID, Entry: d.run.Entry.ID, Token: d.reportsUnder(), Slot: d.held.slot.Held, Remote: remote,
		Ran: ran,
	}
	err := saveRun(ctx, d.db, r)
	d.stored = err == nil
	if err != nil && ctx.Err() == nil {
		d.log.Warn("store accepted run", "queue", d.run.Queue.Name, "entry", r.Entry, "token", r.Token, "error", err)
	}
	if !errors.Is(err, worker.ErrSharedID) {
		d.saved = &r
	}
	return err
}

// saveAgain repeats save until the run is stored or ctx ends. The error is that the worker gave it the id of another.
// A statement that was sent is waited for, as long as its own timeout allows: one that was cut off might be committed
// after the run is forgotten, and the next claim would follow a run that is over. It runs in a goroutine of its own,
// and so recovers from a panic itself.
func (d *dispatch) saveAgain(ctx context.Context, remote string) error {
	defer func() {
		if v := recover(); v != nil {
			d.log.Error("store accepted run panicked", "queue", d.run.Queue.Name, "entry", d.run.Entry.ID,
				"panic", v, "stack", string(debug.Stack()))
		}
	}()
	for wait := storeRetryMin; ; wait = min(2*wait, storeRetryMax) {
		pause(ctx, wait)
		if ctx.Err() != nil {
			return nil
		}
		if err := d.save(context.WithoutCancel(ctx), remote, 0); err == nil || errors.Is(err, worker.ErrSharedID) {
			return err
		}
	}
}

// charge stores how long the run was followed that the next node follows on.
func (d *dispatch) charge(ctx context.Context, ran time.Duration) {
	d.saved.Ran = max(d.saved.Ran, ran)
	if err := chargeRun(context.WithoutCancel(ctx), d.db, *d.saved); err != nil {
		d.log.Warn("charge run", "entry", d.saved.Entry, "error", err)
	}
}

func (d *dispatch) forget(ctx context.Context, r *remoteRun) {
	if err := forgetRun(context.WithoutCancel(ctx), d.db, *r); err != nil {
		d.log.Warn("forget run", "entry", r.Entry, "error", err)
	}
}
