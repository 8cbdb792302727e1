package cron

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
)

// The rules of zones change: a country moves its clocks on other days, and the next release of a program, or of the
// machine's zone database, knows of it. Entries wait meanwhile for times that were computed by earlier rules, of yearly
// jobs for up to a year. So each term judges once where all of them wait, a part of them a pass. One that waits for too
// early a time would find its place by itself when that comes; one that waits for too late a time would be late then,
// and under CatchUpNone be dropped.

// judging is how far a term has come with that. A round that left a job, because another session kept it or because the
// time did not suffice, is followed by another one.
type judging struct {
	after int64          // the round goes on behind this job
	left  bool           // this round has left a job
	over  bool           // a round has left none
	told  map[int64]bool // jobs that took too long alone, of which the log has a line: each round meets them again
}

// tell reports whether the log has no line yet about this job, and notes that it has.
func (j *judging) tell(job int64) bool {
	if j.told[job] {
		return false
	}
	if j.told == nil {
		j.told = map[int64]bool{}
	}
	j.told[job] = true
	return true
}

// passed goes on behind a job; 0: there is none behind the last one.
func (j *judging) passed(upTo int64) {
	j.after = upTo
	if upTo == 0 {
		j.left, j.over = false, !j.left
	}
}

// judgedMax is how many jobs a pass judges.
const judgedMax = 1000

// judgedSQL reads up to which job the $2 jobs after job $1 are.
const judgedSQL = `
SELECT coalesce(max(id), 0) FROM (SELECT id FROM penstock.cron_job WHERE id > $1 ORDER BY id LIMIT $2) part`

// aheadColumns and aheadWhere read jobs whose waiting entry is due after $1.
const (
	aheadColumns = `SELECT ` + jobColumns + `, extract(epoch FROM $1 - due_at)::float8 FROM penstock.cron_job`
	aheadWhere   = ` AND entry_id IS NOT NULL AND fired_at IS NULL AND run_now_at IS NULL
   AND due_at > $1 AND due_at < 'infinity' AND (paused_at IS NULL OR NOT penstock.paused_until(paused_until, $1))`
)

// aheadSQL reads those after job $2 up to job $3.
const aheadSQL = aheadColumns + `
 WHERE id > $2 AND id <= $3` + aheadWhere + `
 ORDER BY id`

// misplacedSQL locks those of jobs $2.
const misplacedSQL = aheadColumns + `
 WHERE id = ANY ($2)` + aheadWhere + `
   FOR UPDATE SKIP LOCKED`

// judgeAgain judges the next jobs of the round, and moves the waiting entries of those that wait for a time which the
// rules of this process do not name. It writes nothing where there is none. It is the last stage of a pass, one
// transaction, and one that its deadline has ended is no failure of the pass: firing and new entries never wait for it
// to succeed.
func (e *Engine) judgeAgain(ctx context.Context) error {
	now, err := e.now(ctx, e.db)
	if err != nil {
		return err
	}
	ids, upTo, err := e.misplaced(ctx, now)
	if err != nil {
		return err
	}
	e.toMove.First, e.toMove.Max, e.toMove.Aim = judgedMax, judgedMax, e.batchTime
	limit := e.toMove.Rows()
	if len(ids) > limit {
		ids, upTo = ids[:limit], ids[limit-1]
	}
	if len(ids) > 0 {
		start := time.Now()
		moved, err := e.moveMisplaced(ctx, now, ids)
		took := time.Since(start)
		if err != nil || len(ids) >= limit || took > e.batchTime { // few jobs say nothing about a full batch
			e.toMove.Done(took, err)
		}
		if duty.Late(err) {
			if len(ids) > 1 {
				e.cfg.Log.WarnContext(ctx, "moving cron jobs took too long; trying again, fewer", "jobs", len(ids),
					"error", err)
				return nil // the next pass begins with the same
			}
			if e.judging.tell(ids[0]) {
				e.cfg.Log.WarnContext(ctx, "moving a cron job took too long; each round of this term tries again",
					"job", ids[0], "error", err)
			}
		} else if err != nil {
			return err
		}
		e.judging.left = e.judging.left || moved < len(ids)
	}
	e.judging.passed(upTo)
	return nil
}

// misplaced returns which of the next jobs of the round wait for another time than they should, in order, and up to
// which job it has looked.
func (e *Engine) misplaced(ctx context.Context, now time.Time) (ids []int64, upTo int64, err error) {
	if err = e.db.QueryRow(ctx, judgedSQL, e.judging.after, judgedMax).Scan(&upTo); err != nil {
		return nil, 0, fmt.Errorf("read cron jobs to judge: %w", err)
	}
	jobs, err := readJobs(ctx, e.db, aheadSQL, now, e.judging.after, upTo)
	if err != nil {
		return nil, 0, err
	}
	for _, j := range jobs {
		if _, _, wrong := e.place(&j, now); wrong {
			ids = append(ids, j.id)
		}
	}
	return ids, upTo, nil
}

// moveMisplaced moves the entries of jobs that wait for another time than they should, and returns how many it moved;
// other sessions keep the others, or their entries.
func (e *Engine) moveMisplaced(ctx context.Context, now time.Time, ids []int64) (moved int, err error) {
	var drops int // moved jobs whose policies drop nominal times
	err = e.fence.InTx(ctx, func(tx pgx.Tx) error {
		jobs, err := readJobs(ctx, tx, misplacedSQL, now, ids)
		if err != nil {
			return err
		}
		var keep, drop changes
		for _, j := range jobs {
			s, due, wrong := e.place(&j, now)
			switch {
			case !wrong:
			case s.dropped:
				drop.add(j.id, s.nominal, due, s.memory)
			default:
				keep.add(j.id, s.nominal, due, s.memory)
			}
		}
		if drops, err = drop.move(ctx, tx); err != nil {
			return err
		}
		moved, err = keep.move(ctx, tx)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("judge due times of cron jobs again: %w", err)
	}
	if moved += drops; moved > 0 {
		e.done.Add(func(s *EngineStatus) { s.Dropped += int64(drops) })
		e.cfg.Log.InfoContext(ctx, "cron jobs that waited by other rules of their zones were moved", "jobs", moved)
	}
	return moved, nil
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
