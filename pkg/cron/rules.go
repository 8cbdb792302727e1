package cron

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// The rules of zones change: a country moves its clocks on other days, and the next release of a program, or of the
// machine's zone database, knows of it. Entries wait meanwhile for times that were computed by the rules of before, of
// yearly jobs for up to a year. So each term judges once where all of them wait. One that waits for too early a time
// would find its place by itself when that comes; one that waits for too late a time would be late then, and under
// CatchUpNone be dropped.

// aheadColumns and aheadWhere read jobs whose waiting entry is due after $1.
const (
	aheadColumns = `SELECT ` + jobColumns + `, extract(epoch FROM $1 - due_at)::float8 FROM penstock.cron_job`
	aheadWhere   = ` AND entry_id IS NOT NULL AND fired_at IS NULL AND run_now_at IS NULL
   AND due_at > $1 AND due_at < 'infinity' AND (paused_at IS NULL OR NOT penstock.paused_until(paused_until, $1))`
)

// aheadSQL reads those after job $2 up to job $3.
const aheadSQL = aheadColumns + `
 WHERE id > $2 AND id <= $3` + aheadWhere

// misplacedSQL locks those of jobs $2.
const misplacedSQL = aheadColumns + `
 WHERE id = ANY ($2)` + aheadWhere + `
   FOR UPDATE SKIP LOCKED`

// judgeAgain moves the waiting entries of the jobs after one up to another that wait for a time which the rules of this
// process do not name. It writes nothing where there is none.
func (e *Engine) judgeAgain(ctx context.Context, after, upTo int64) error {
	now, err := e.now(ctx, e.db)
	if err != nil {
		return err
	}
	jobs, err := readJobs(ctx, e.db, aheadSQL, now, after, upTo)
	if err != nil {
		return err
	}
	var misplaced []int64
	for _, j := range jobs {
		if _, _, wrong := e.place(&j, now); wrong {
			misplaced = append(misplaced, j.id)
		}
	}
	if len(misplaced) == 0 {
		return nil
	}
	var moved, dropped int
	err = e.fence.InTx(ctx, func(tx pgx.Tx) error {
		jobs, err := readJobs(ctx, tx, misplacedSQL, now, misplaced)
		if err != nil {
			return err
		}
		var move changes
		dropped = 0
		for _, j := range jobs {
			s, due, wrong := e.place(&j, now)
			if !wrong {
				continue
			}
			move.add(j.id, s.nominal, due, s.memory)
			if s.dropped {
				dropped++
			}
		}
		moved, err = move.move(ctx, tx)
		return err
	})
	if err != nil {
		return fmt.Errorf("judge due times of cron jobs again: %w", err)
	}
	e.done.Add(func(s *EngineStatus) { s.Dropped += int64(dropped) })
	e.cfg.Log.InfoContext(ctx, "cron jobs that waited by other rules of their zones were moved", "jobs", moved)
	return nil
}

// place is where the waiting entry of a job belongs, and whether it is elsewhere. One that is to fire now is due as of
// its time, and is fired by the next pass.
func (e *Engine) place(j *jobRow, now time.Time) (s step, due time.Time, wrong bool) {
	t, err := e.timetables.of(j.schedule)
	if err != nil {
		return step{}, time.Time{}, false // reported when it is due
	}
	s = t.plan(j.name, j.overlap, j.memory, now)
	if s.fire {
		s.memory, s.dropped = j.memory, false // fireDue drops and records
	}
	due = t.fireAt(j.name, s.nominal)
	waits := now.Add(-time.Duration(j.dueAgo * float64(time.Second)))
	return s, due, due.IsZero() || due.Sub(waits).Abs() > time.Millisecond
}
