package cron

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Job is scheduled work: a row that can be changed at run time.
type Job struct {
	Name  string
	Queue string // of kind cron
	Schedule
	Overlap Overlap // what a nominal time does that comes during a run; default skip
	// Payload of each entry. Where it is an object, the entry's payload has "nominal_at" in it as well, unless it had
	// that before.
	Payload  json.RawMessage
	LockKey  string
	Flow     string
	Priority *int16 // 0 to 9; nil for the queue's default
}

// ErrJobNotFound says that there is no cron job of that name.
var ErrJobNotFound = errors.New("cron job not found")

// options are the job's settings as penstock.alter_cron_job takes them.
func (j Job) options(s Schedule) map[string]any {
	set := map[string]any{
		"spec": j.Spec, "zone": s.Zone, "jitter": interval(s.Jitter), "catch_up": s.CatchUp, "catch_up_max": s.CatchUpMax,
		"grace": interval(s.Grace), "gap": s.Gap, "fold": s.Fold, "starts_at": instant(s.Start), "ends_at": instant(s.End),
		"overlap": j.Overlap, "lock_key": text(j.LockKey), "flow": text(j.Flow), "priority": j.Priority,
	}
	if j.Overlap == "" {
		set["overlap"] = OverlapSkip
	}
	return set
}

func interval(d time.Duration) string { return fmt.Sprintf("%d microseconds", d.Microseconds()) }

func instant(at time.Time) any {
	if at.IsZero() {
		return nil
	}
	return at
}

func text(s string) any {
	if s == "" {
		return nil
	}
	return s
}

func (j Job) payload() json.RawMessage {
	if j.Payload == nil {
		return json.RawMessage(`{}`)
	}
	return j.Payload
}

// Create makes a job. It refuses a schedule that cannot be read, with an error that says what to write instead.
func Create(ctx context.Context, db postgres.DB, j Job, by invalidation.By) error {
	timetable, err := Parse(j.Schedule)
	if err != nil {
		return fmt.Errorf("create cron job %q: %w: %w", j.Name, err, invalidation.ErrInvalid)
	}
	return run(ctx, db, "create", j.Name, `SELECT penstock.create_cron_job($1, $4, $5, $6, $7, $2, coalesce($3, current_user::text))`,
		by, j.Queue, j.Spec, j.payload(), j.options(timetable.Schedule()))
}

// Alter replaces all settings of a job but its queue. A run that has begun goes on.
func Alter(ctx context.Context, db postgres.DB, j Job, by invalidation.By) error {
	timetable, err := Parse(j.Schedule)
	if err != nil {
		return fmt.Errorf("alter cron job %q: %w: %w", j.Name, err, invalidation.ErrInvalid)
	}
	set := j.options(timetable.Schedule())
	set["payload"] = j.payload()
	return run(ctx, db, "alter", j.Name, `SELECT penstock.alter_cron_job($1, $4, $2, coalesce($3, current_user::text))`, by, set)
}

// Pause keeps a job from firing until somebody resumes it, or until a time to come if that is not zero. When it ends,
// the catch-up policy says what to do about the nominal times that passed meanwhile.
func Pause(ctx context.Context, db postgres.DB, job string, by invalidation.By, until time.Time) error {
	return run(ctx, db, "pause", job, `SELECT penstock.pause_cron_job($1, $2, coalesce($3, current_user::text), $4)`, by, instant(until))
}

// Resume ends a pause.
func Resume(ctx context.Context, db postgres.DB, job string, by invalidation.By) error {
	return run(ctx, db, "resume", job, `SELECT penstock.resume_cron_job($1, $2, coalesce($3, current_user::text))`, by)
}

// RunNow asks for one run beside the schedule, even of a job that is paused. While a run is under way the overlap
// policy decides: skip refuses with ErrState, queue runs it afterwards, cancel_running cancels the run for it.
func RunNow(ctx context.Context, db postgres.DB, job string, by invalidation.By) error {
	return run(ctx, db, "run now", job, `SELECT penstock.run_cron_job_now($1, $2, coalesce($3, current_user::text))`, by)
}

// Drop removes a job. A run goes on.
func Drop(ctx context.Context, db postgres.DB, job string, by invalidation.By) error {
	return run(ctx, db, "drop", job, `SELECT penstock.drop_cron_job($1, $2, coalesce($3, current_user::text))`, by)
}

func run(ctx context.Context, db postgres.DB, verb, job, sql string, by invalidation.By, rest ...any) error {
	var actor *string
	if by.Actor != "" {
		actor = &by.Actor
	}
	if _, err := db.Exec(ctx, sql, append([]any{job, by.Reason, actor}, rest...)...); err != nil {
		return fmt.Errorf("%s cron job %q: %w", verb, job, translate(err))
	}
	return nil
}

// translate names the facts that the schema's functions tell by SQLSTATE.
func translate(err error) error {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return err
	}
	fact, known := map[string]error{
		"PS001": invalidation.ErrQueueNotFound, "PS002": invalidation.ErrInvalid, "PS006": invalidation.ErrState, "PS010": ErrJobNotFound,
	}[pg.Code]
	if !known {
		return err
	}
	return fmt.Errorf("%s. %s: %w", pg.Message, pg.Hint, fact)
}
