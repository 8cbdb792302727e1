package cron

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// The verbs of the schema as the tests of the engine give them. Operators have them in pkg/operator.

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
	return run(ctx, db, "pause", job, `SELECT penstock.pause_cron_job($1, $2, coalesce($3, current_user::text), $4)`, by, postgres.Given(until))
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

var ErrJobNotFound = errors.New("cron job not found")

func run(ctx context.Context, db postgres.DB, verb, job, sql string, by invalidation.By, rest ...any) error {
	if _, err := db.Exec(ctx, sql, append([]any{job, by.Reason, postgres.Given(by.Actor)}, rest...)...); err != nil {
		known := maps.Clone(refusals)
		known["PS010"] = ErrJobNotFound
		return fmt.Errorf("%s cron job %q: %w", verb, job, postgres.Named(err, known))
	}
	return nil
}
