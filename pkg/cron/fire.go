package cron

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// jobRow is a job as the engine reads it.
type jobRow struct {
	id       int64
	queue    int32
	name     string
	schedule Schedule
	overlap  Overlap
	runNow   *time.Time
	dueAgo   float64 // seconds since its due time
	memory
}

const jobColumns = `id, queue_id, name, spec, zone, jitter, starts_at, ends_at, catch_up, catch_up_max, grace,
       coalesce(gap, ''), coalesce(fold, ''), overlap, run_now_at, handled_at, catching_up_to, ended_at`

// waitingSQL locks up to $2 jobs whose waiting entry is due at $1.
const waitingSQL = `
SELECT ` + jobColumns + `, coalesce(extract(epoch FROM $1 - nullif(due_at, '-infinity')), 0)::float8
  FROM penstock.cron_job
 WHERE entry_id IS NOT NULL AND fired_at IS NULL AND due_at <= $1
   AND (paused_at IS NULL OR NOT penstock.paused_until(paused_until, $1) OR run_now_at IS NOT NULL)
 ORDER BY due_at
 LIMIT $2
   FOR UPDATE SKIP LOCKED`

// entrylessSQL locks up to $2 jobs that have no entry and want one at $1.
const entrylessSQL = `
SELECT ` + jobColumns + `, 0::float8
  FROM penstock.cron_job
 WHERE entry_id IS NULL AND check_at <= $1
   AND (paused_at IS NULL OR NOT penstock.paused_until(paused_until, $1) OR run_now_at IS NOT NULL)
 ORDER BY check_at
 LIMIT $2
   FOR UPDATE SKIP LOCKED`

func readJobs(ctx context.Context, db postgres.DB, sql string, args ...any) ([]jobRow, error) {
	jobs, err := pgx.CollectRows(postgres.Query(ctx, db, sql, args...),
		func(row pgx.CollectableRow) (j jobRow, err error) {
			var start, end, catching, ended *time.Time
			s := &j.schedule
			err = row.Scan(&j.id, &j.queue, &j.name, &s.Spec, &s.Zone, &s.Jitter, &start, &end, &s.CatchUp,
				&s.CatchUpMax,
				&s.Grace, &s.Gap, &s.Fold,
				&j.overlap, &j.runNow, &j.handled, &catching, &ended, &j.dueAgo)
			s.Start, s.End, j.catchingUpTo, j.ended = utc(start), utc(end), utc(catching), utc(ended)
			return j, err
		})
	if err != nil {
		return nil, fmt.Errorf("read cron jobs: %w", err)
	}
	return jobs, nil
}

// utc makes instants comparable with ==, as keys of the timetables must be. Null is the zero time.
func utc(at *time.Time) time.Time {
	if at == nil {
		return time.Time{}
	}
	return at.UTC()
}

// fireDue fires the jobs whose time has come, or moves them to the time that their policies name instead.
func (e *Engine) fireDue(ctx context.Context) error {
	queues := map[int32]bool{}
	defer func() { // after the commit
		for queue := range queues {
			e.cfg.Hint(queue)
		}
	}()
	return e.each(ctx, &e.toFire, func(tx pgx.Tx, now time.Time, limit int) (found, changed int, err error) {
		jobs, err := readJobs(ctx, tx, waitingSQL, now, limit)
		if err != nil || len(jobs) == 0 {
			return 0, 0, err
		}
		var fire, move changes
		broken := map[int64]string{}
		dropped, late := 0, 0.0
		for _, j := range jobs {
			t, err := e.timetables.of(j.schedule)
			if err != nil {
				broken[j.id] = err.Error()
				move.add(j.id, time.Time{}, time.Time{}, j.memory)
				continue
			}
			s := j.step(t, now)
			if s.dropped {
				dropped++
			}
			if !s.fire {
				move.add(j.id, s.nominal, t.fireAt(j.name, s.nominal), s.memory)
				continue
			}
			late = max(late, j.dueAgo)
			queues[j.queue] = true
			fire.add(j.id, s.nominal, time.Time{}, s.memory)
			fire.following = append(fire.following, j.following(t, s.handled, now))
			if next, ok := t.Next(s.handled); ok && !t.FireAt(j.name, next).After(now) {
				e.behind = true
			}
		}
		fired, err := fire.fire(ctx, tx, now)
		if err != nil {
			return 0, 0, err
		}
		e.count(func(s *EngineStatus) {
			s.Fired += int64(fired)
			s.Dropped += int64(dropped)
			s.Late = time.Duration(late * float64(time.Second))
		})
		moved, err := move.move(ctx, tx)
		if err != nil {
			return 0, 0, err
		}
		return len(jobs), fired + moved, e.report(ctx, tx, broken)
	})
}

// step returns the next step of the job.
func (j *jobRow) step(t *Timetable, now time.Time) step {
	if j.runNow != nil {
		return t.beside(j.name, j.overlap, j.memory, *j.runNow, now)
	}
	return t.plan(j.name, j.overlap, j.memory, now)
}

// following is when a run of the job that begins then is cancelled for the next, nil for never.
func (j *jobRow) following(t *Timetable, handled, begins time.Time) *time.Time {
	if j.overlap != OverlapCancel {
		return nil
	}
	next, ok := t.following(j.name, handled, begins)
	if !ok {
		return nil
	}
	return &next
}

// retriedSQL locks up to $1 jobs whose run was retried under cancel_running: resume_cron_run cannot read a schedule.
const retriedSQL = `
SELECT ` + jobColumns + `, 0::float8
  FROM penstock.cron_job
 WHERE following_at = 'infinity'
 LIMIT $1
   FOR UPDATE SKIP LOCKED`

const followSQL = `
UPDATE penstock.cron_job j SET following_at = f.at
  FROM unnest($1::bigint[], $2::timestamptz[]) f(job, at)
 WHERE j.id = f.job`

// followRetried records when runs that were retried are cancelled for the next.
func (e *Engine) followRetried(ctx context.Context) error {
	return e.each(ctx, &e.toFollow, func(tx pgx.Tx, _ time.Time, limit int) (found, changed int, err error) {
		jobs, err := readJobs(ctx, tx, retriedSQL, limit)
		if err != nil || len(jobs) == 0 {
			return 0, 0, err
		}
		ids, following := make([]int64, len(jobs)), make([]*time.Time, len(jobs))
		for i, j := range jobs {
			ids[i] = j.id
			if t, err := e.timetables.of(j.schedule); err == nil { // else it is reported when the run has ended
				following[i] = j.following(t, j.handled, j.catchingUpTo)
			}
		}
		if _, err := tx.Exec(ctx, followSQL, ids, following); err != nil {
			return 0, 0, fmt.Errorf("follow retried runs of cron jobs: %w", err)
		}
		return len(jobs), len(jobs), nil
	})
}

// createNext gives each job that has no entry its next one, due when its next nominal time comes. One that has come
// already is judged by the policies when it is fired, in the same pass.
func (e *Engine) createNext(ctx context.Context) error {
	return e.each(ctx, &e.toCreate, func(tx pgx.Tx, now time.Time, limit int) (found, changed int, err error) {
		jobs, err := readJobs(ctx, tx, entrylessSQL, now, limit)
		if err != nil || len(jobs) == 0 {
			return 0, 0, err
		}
		var create, rest changes
		broken := map[int64]string{}
		dropped := 0
		for _, j := range jobs {
			t, err := e.timetables.of(j.schedule)
			if err != nil {
				broken[j.id] = err.Error()
				continue
			}
			m, skipped := t.skipOverlapped(j.name, j.overlap, j.memory, now)
			if skipped {
				dropped++
			}
			nominal, ok := t.Next(m.handled)
			switch {
			case j.runNow != nil && !ok:
				create.add(j.id, now, now, m)
			case !ok:
				rest.add(j.id, time.Time{}, time.Time{}, m)
			default:
				create.add(j.id, nominal, t.fireAt(j.name, nominal), m)
			}
		}
		if err := create.create(ctx, tx); err != nil {
			return 0, 0, err
		}
		e.count(func(s *EngineStatus) { s.Dropped += int64(dropped) })
		if err := e.report(ctx, tx, broken); err != nil {
			return 0, 0, err
		}
		_, err = rest.move(ctx, tx) // no entry waits: none is kept
		return len(jobs), len(jobs), err
	})
}

// report records why jobs cannot fire. They are tried again after they were altered.
func (e *Engine) report(ctx context.Context, tx pgx.Tx, broken map[int64]string) error {
	e.count(func(s *EngineStatus) { s.Broken += int64(len(broken)) })
	for id, problem := range broken {
		e.cfg.Log.WarnContext(ctx, "cron job cannot fire", "job", id, "problem", problem)
		if _, err := tx.Exec(ctx, `UPDATE penstock.cron_job SET problem = $2, check_at = 'infinity' WHERE id = $1`, id,
			problem); err != nil {
			return fmt.Errorf("report problem of cron job %d: %w", id, err)
		}
	}
	return nil
}

// fireAt is FireAt; no time stays none.
func (t *Timetable) fireAt(job string, nominal time.Time) time.Time {
	if nominal.IsZero() {
		return nominal
	}
	return t.FireAt(job, nominal)
}

// changes are the updates of jobs in one transaction, one array a column. Zero times mean null.
type changes struct {
	ids                                   []int64
	nominals, dues, handled, catchingUpTo []*time.Time
	following                             []*time.Time // of jobs that are fired: when the run is cancelled for the next
}

func (c *changes) add(id int64, nominal, due time.Time, m memory) {
	c.ids = append(c.ids, id)
	c.nominals, c.dues = append(c.nominals, orNull(nominal)), append(c.dues, orNull(due))
	c.handled, c.catchingUpTo = append(c.handled, &m.handled), append(c.catchingUpTo, orNull(m.catchingUpTo))
}

func orNull(at time.Time) *time.Time {
	if at.IsZero() {
		return nil
	}
	return &at
}

func (c *changes) fire(ctx context.Context, tx pgx.Tx, now time.Time) (n int, err error) {
	if len(c.ids) == 0 {
		return 0, nil
	}
	err = tx.QueryRow(ctx, `SELECT penstock.fire_cron_jobs($1, $2, $3, $4, $5, $6)`,
		c.ids, c.nominals, c.handled, c.catchingUpTo, c.following, now).Scan(&n)
	if err != nil {
		return 0, fmt.Errorf("fire cron jobs: %w", err)
	}
	return n, nil
}

func (c *changes) create(ctx context.Context, tx pgx.Tx) error {
	if len(c.ids) == 0 {
		return nil
	}
	_, err := tx.Exec(ctx, `SELECT penstock.create_cron_entries($1, $2, $3, $4)`, c.ids, c.nominals, c.dues, c.handled)
	if err != nil {
		return fmt.Errorf("create entries of cron jobs: %w", err)
	}
	return nil
}

// move returns how many jobs it moved; the entries of the others are kept by other transactions.
func (c *changes) move(ctx context.Context, tx pgx.Tx) (n int, err error) {
	if len(c.ids) == 0 {
		return 0, nil
	}
	err = tx.QueryRow(ctx, `SELECT penstock.move_cron_entries($1, $2, $3, $4)`, c.ids, c.nominals, c.dues,
		c.handled).Scan(&n)
	if err != nil {
		return 0, fmt.Errorf("move cron jobs: %w", err)
	}
	return n, nil
}

// timetables caches parsed schedules: many jobs share one, and each firing needs one.
type timetables map[Schedule]*Timetable

const timetablesMax = 20_000

func (k timetables) of(s Schedule) (*Timetable, error) {
	if t := k[s]; t != nil {
		return t, nil
	}
	t, err := Parse(s)
	if err != nil {
		return nil, err
	}
	if len(k) >= timetablesMax {
		clear(k)
	}
	k[s] = t
	return t, nil
}
