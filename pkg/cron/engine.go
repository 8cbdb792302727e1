package cron

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
)

// Config sets the engine's intervals and batch sizes. Its zero value means the defaults.
type Config struct {
	// Pause is the longest time between two passes. Default 500 ms.
	Pause time.Duration
	// BatchJobsMax bounds the jobs changed in one transaction. Default 2000.
	BatchJobsMax int
	// Hint is called with a queue after entries of it became ready. It must not block. Default: no
	// call.
	Hint func(queue int32)
	// Clock judges the database's clock across terms: while that is ahead by more than jumpMax the engine does nothing.
	// Default: one for this term.
	Clock *duty.Clock
	// Log receives warnings and errors. Default: discarded.
	Log *slog.Logger
}

// jumpMax is for how long a jump of the database's clock may silence a job once the clock is set right. Behind a longer
// one nothing fires until the clock is believed, which takes some minutes: what fires, or is dropped, moves a job to
// the time of the clock, and it waits there until that has come.
const jumpMax = 30 * time.Minute

func (c Config) withDefaults() Config {
	c.Pause = cmp.Or(max(c.Pause, 0), 500*time.Millisecond)
	c.BatchJobsMax = cmp.Or(max(c.BatchJobsMax, 0), 2000)
	if c.Hint == nil {
		c.Hint = func(int32) {}
	}
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	if c.Clock == nil {
		c.Clock = &duty.Clock{}
	}
	return c
}

// Engine is the duty of the elected leader that fires cron jobs. Each job has one entry: initial
// until its time comes, then pending; when it has ended, with any outcome, the engine makes the
// next one.
//
// A firing is a row (job, nominal time), unique, written in the transaction that turns the entry pending and advances
// the job. So even two engines at once fire each nominal time once. All times are the database's, as long as its clock
// is believed.
type Engine struct {
	cfg   Config
	db    postgres.DB
	fence duty.Fence
	clock func(ctx context.Context, db postgres.DB) (time.Time, error)

	believe func(now time.Time) error // duty.ErrClock where nothing may be done by this time
	held    bool                      // the last pass did nothing for that reason

	timetables timetables
	endedAfter time.Time     // when the next check for ended runs is due
	swept      int64         // the sweep goes on behind this job
	judging    judging       // of due times that another term computed
	behind     bool          // a job was fired in this pass whose next nominal time has come as well
	soon       time.Duration // pause of a pass that waits for the end of such a run; 0: none does

	batchTime time.Duration // how long a batch should take

	// Jobs that one transaction may change, by what it does with them.
	toFire, toFollow, toCancel, toEnd, toCreate, toMove duty.Limit

	done   duty.Tally[EngineStatus]
	counts []func(*EngineStatus) // of the transaction that runs
}

// EngineStatus has the counters of the engine in this term.
type EngineStatus struct {
	Fired   int64         // entries turned pending
	Dropped int64         // times that the catch-up or overlap policy dropped nominal times
	Broken  int64         // jobs whose schedule could not be read
	Late    time.Duration // greatest lateness of a firing in the last pass that fired
}

// New returns the engine for one term. It reads through db and writes through fence.
func New(db postgres.DB, fence duty.Fence, cfg Config) *Engine {
	e := &Engine{
		cfg: cfg.withDefaults(), db: db, fence: fence, clock: databaseTime, timetables: timetables{},
		batchTime: batchTime,
	}
	e.believe = func(now time.Time) error { return e.cfg.Clock.CheckWithin(now, jumpMax) }
	return e
}

func databaseTime(ctx context.Context, db postgres.DB) (now time.Time, err error) {
	err = db.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now)
	return now, err
}

// count changes the counters once the transaction is committed: one that fails is made again.
func (e *Engine) count(change func(*EngineStatus)) { e.counts = append(e.counts, change) }

// Status is safe to call at any time.
func (e *Engine) Status() EngineStatus { return e.done.Read() }

// Run fires jobs until ctx ends. It returns an error when passes go on failing, see duty.Loop.
func (e *Engine) Run(ctx context.Context) error {
	return duty.Loop{Name: "cron", Pause: e.cfg.Pause, Log: e.cfg.Log}.Run(ctx, e.pass)
}

// now is the database's clock, unless it is so far ahead that nothing may be done by it.
func (e *Engine) now(ctx context.Context, db postgres.DB) (time.Time, error) {
	now, err := e.clock(ctx, db)
	if err != nil {
		return time.Time{}, err
	}
	return now, e.believe(now)
}

// pass makes a pass, and does nothing while the clock is not believed. That is no failure: another leader would wait as
// well.
func (e *Engine) pass(ctx context.Context) (time.Duration, error) {
	pause, err := e.work(ctx)
	held := errors.Is(err, duty.ErrClock)
	if held && !e.held {
		e.cfg.Log.WarnContext(ctx, "cron jobs wait until the database's clock is believed", "error", err)
	}
	if e.held = held; held {
		return e.cfg.Pause, nil
	}
	return pause, err
}

// work fires what is due and gives jobs without an entry their next one, and asks to be called again when the next job
// is due. Firing goes first: what is due must not wait for what is to come. A pass that finds nothing writes nothing.
func (e *Engine) work(ctx context.Context) (time.Duration, error) {
	o, err := e.peek(ctx)
	if err != nil {
		return 0, err
	}
	renew := o.ended || o.entryless
	e.behind = false
	for _, stage := range []struct {
		wanted bool
		run    func(context.Context) error
	}{
		{o.due, e.fireDue},
		{o.retried, e.followRetried},
		{o.retried || o.overlapped, e.cancelOverlapped},
		{o.ended, e.endRuns},
		{true, e.sweep},
		{renew, e.createNext},
		{renew, e.fireDue}, // the next nominal time may have come already
		{!e.judging.over, e.judgeAgain},
	} {
		if !stage.wanted {
			continue
		}
		if err := stage.run(ctx); err != nil {
			return 0, err
		}
	}
	if o.due || renew {
		if o, err = e.peek(ctx); err != nil {
			return 0, err
		}
	}
	return e.pause(o.next), nil
}

// behindFirst is the pause after a job was fired whose next nominal time has come as well.
const behindFirst = 20 * time.Millisecond

// pause is the time until the next pass; due is the time until the next job is due. A job that is behind fires its
// next nominal time when its run has ended, and runs may be short: with the usual pause after each, a schedule of
// every second that was away for a minute would never catch up. While the run lasts, the pause doubles.
func (e *Engine) pause(due time.Duration) time.Duration {
	switch {
	case e.behind:
		e.soon = behindFirst
	case e.soon > 0:
		e.soon *= 2
	}
	if e.soon > e.cfg.Pause {
		e.soon = 0
	}
	if e.soon > 0 {
		due = min(due, e.soon)
	}
	return min(due, e.cfg.Pause)
}

// dueWork is the work that peek found.
type dueWork struct {
	due, retried, overlapped, ended, entryless bool
	next                                       time.Duration // until the next job is due
}

// peekSQL reads only the first entries of partial indexes.
const peekSQL = `
SELECT EXISTS (SELECT FROM penstock.cron_job
                WHERE entry_id IS NOT NULL AND fired_at IS NULL AND due_at <= $1
                  AND (paused_at IS NULL OR NOT penstock.paused_until(paused_until, $1) OR run_now_at IS NOT NULL)),
       EXISTS (SELECT FROM penstock.cron_job WHERE following_at = 'infinity'),
       EXISTS (SELECT FROM penstock.cron_job WHERE following_at <= $1),
       EXISTS (SELECT FROM penstock.cron_job
                WHERE entry_id IS NULL AND check_at <= $1
                  AND (paused_at IS NULL OR NOT penstock.paused_until(paused_until, $1) OR run_now_at IS NOT NULL)),
       (SELECT extract(epoch FROM min(due_at) - $1)::float8 FROM penstock.cron_job
         WHERE entry_id IS NOT NULL AND fired_at IS NULL AND due_at > $1)`

// endedSQL reads whether a running job exists whose entry is gone.
const endedSQL = `
SELECT EXISTS (SELECT FROM penstock.cron_job j
                WHERE j.entry_id IS NOT NULL AND j.fired_at IS NOT NULL
                  AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = j.queue_id AND e.id = j.entry_id))`

// peekEnded may use a tenth of the time, since its cost grows with the running jobs. The pause is
// bounded: after one check that was slow because the database stalled, ended runs must not wait ten
// times as long.
func (e *Engine) peekEnded(ctx context.Context) (ended bool, err error) {
	start := time.Now()
	if start.Before(e.endedAfter) {
		return false, nil
	}
	if err := e.db.QueryRow(ctx, endedSQL).Scan(&ended); err != nil {
		return false, fmt.Errorf("find ended runs of cron jobs: %w", err)
	}
	if took := time.Since(start); took > e.cfg.Pause/10 {
		e.endedAfter = time.Now().Add(min(10*took, 5*time.Second))
	}
	return ended, nil
}

func (e *Engine) peek(ctx context.Context) (dueWork, error) {
	now, err := e.now(ctx, e.db)
	if err != nil {
		return dueWork{}, err
	}
	o := dueWork{next: e.cfg.Pause}
	var seconds *float64
	err = e.db.QueryRow(ctx, peekSQL, now).Scan(&o.due, &o.retried, &o.overlapped, &o.entryless, &seconds)
	if err != nil {
		return dueWork{}, fmt.Errorf("find due cron jobs: %w", err)
	}
	if o.ended, err = e.peekEnded(ctx); err != nil {
		return dueWork{}, err
	}
	if seconds != nil && *seconds < e.cfg.Pause.Seconds() {
		o.next = time.Duration(*seconds*float64(time.Second)) + time.Millisecond
	}
	return o, nil
}

// batchTime is how long a batch should take: half of what a statement has.
const batchTime = time.Second

// each repeats a batch until one finds fewer jobs than it may take: as many as it can change in batchTime, BatchJobsMax
// at most. A batch that its deadline has ended has changed nothing: it is tried again with half the jobs, and the ones
// after it have no more. Jobs that another session keeps from being changed are found again by the next batch, whose
// limit is larger by their number: they keep no other job from its turn, as long as there are no more than BatchJobsMax
// of them.
func (e *Engine) each(ctx context.Context, rows *duty.Limit,
	batch func(tx pgx.Tx, now time.Time, limit int) (found, changed int, err error),
) error {
	rows.First, rows.Max, rows.Aim = e.cfg.BatchJobsMax, e.cfg.BatchJobsMax, e.batchTime
	for limit := rows.Rows(); ; {
		var found, changed int
		wanted, start := rows.Rows(), time.Now()
		err := e.fence.InTx(ctx, func(tx pgx.Tx) error {
			e.counts = nil
			now, err := e.now(ctx, tx)
			if err != nil {
				return err
			}
			found, changed, err = batch(tx, now, limit)
			return err
		})
		took := time.Since(start)
		if err == nil {
			for _, change := range e.counts {
				e.done.Add(change)
			}
		}
		if err != nil || found >= limit || took > e.batchTime { // few jobs say nothing about a full batch
			rows.Done(took, err)
		}
		switch {
		case duty.Late(err) && wanted > 1:
			e.cfg.Log.WarnContext(ctx, "a batch of cron jobs took too long; trying fewer", "jobs", limit, "error", err)
			limit = rows.Rows()
			rows.Max = limit
			continue
		case err != nil:
			return err
		case found < limit:
			return nil
		}
		next := rows.Rows() + min(found-changed, e.cfg.BatchJobsMax)
		if changed == 0 && next <= limit {
			return nil
		}
		limit = next
	}
}

// endRuns records which runs have ended.
func (e *Engine) endRuns(ctx context.Context) error {
	return e.each(ctx, &e.toEnd, func(tx pgx.Tx, now time.Time, limit int) (n, _ int, err error) {
		err = tx.QueryRow(ctx, `SELECT penstock.end_cron_runs($1, $2)`, now, limit).Scan(&n)
		return n, n, err
	})
}

// cancelOverlapped requests the cancel of runs whose next nominal time has fallen due.
func (e *Engine) cancelOverlapped(ctx context.Context) error {
	return e.each(ctx, &e.toCancel, func(tx pgx.Tx, now time.Time, limit int) (n, _ int, err error) {
		err = tx.QueryRow(ctx, `SELECT penstock.cancel_cron_runs($1, $2)`, now, limit).Scan(&n)
		if err != nil {
			return 0, 0, fmt.Errorf("cancel overlapped runs: %w", err)
		}
		return n, n, nil
	})
}

// lostSQL lists, of the $2 jobs after job $1, those whose waiting entry is gone because it was
// cancelled.
const lostSQL = `
WITH part AS MATERIALIZED (
    SELECT id, queue_id, entry_id, fired_at FROM penstock.cron_job WHERE id > $1 ORDER BY id LIMIT $2
)
SELECT coalesce((SELECT max(id) FROM part), 0), ARRAY(
       SELECT p.id FROM part p
        WHERE p.entry_id IS NOT NULL AND p.fired_at IS NULL
          AND NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = p.queue_id AND e.id = p.entry_id))`

// dropLostSQL checks jobs $1 again under their row locks.
const dropLostSQL = `
WITH held AS MATERIALIZED (
    SELECT id FROM penstock.cron_job WHERE id = ANY ($1) FOR UPDATE SKIP LOCKED
)
SELECT penstock.drop_missing_cron_entries(ARRAY(SELECT id FROM held))`

// sweep finds waiting jobs whose entry was cancelled, a thousand jobs a call, so that they get
// another entry.
func (e *Engine) sweep(ctx context.Context) error {
	var lost []int64
	var upTo int64
	if err := e.db.QueryRow(ctx, lostSQL, e.swept, 1000).Scan(&upTo, &lost); err != nil {
		return fmt.Errorf("find cancelled entries of cron jobs: %w", err)
	}
	e.swept = upTo
	if len(lost) == 0 {
		return nil
	}
	return e.fence.InTx(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, dropLostSQL, lost); err != nil {
			return fmt.Errorf("drop cancelled entries of cron jobs: %w", err)
		}
		return nil
	})
}
