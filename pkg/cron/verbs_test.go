package cron

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// The verbs of the schema as the tests of the engine give them. Operators have them in pkg/operator.

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

// options are the job's settings as penstock.alter_cron_job takes them.
func (j Job) options(s Schedule) map[string]any {
	set := map[string]any{
		"spec": j.Spec, "zone": s.Zone, "jitter": interval(s.Jitter), "catch_up": s.CatchUp, "catch_up_max": s.CatchUpMax,
		"grace": interval(s.Grace), "gap": s.Gap, "fold": s.Fold, "starts_at": postgres.Given(s.Start), "ends_at": postgres.Given(s.End),
		"overlap": j.Overlap, "lock_key": postgres.Given(j.LockKey), "flow": postgres.Given(j.Flow), "priority": j.Priority,
	}
	if j.Overlap == "" {
		set["overlap"] = OverlapSkip
	}
	return set
}

func interval(d time.Duration) string { return fmt.Sprintf("%d microseconds", d.Microseconds()) }

func (j Job) payload() json.RawMessage {
	if j.Payload == nil {
		return json.RawMessage(`{}`)
	}
	return j.Payload
}

// Create makes a job. It refuses an invalid schedule, with an error that names valid values.
func Create(ctx context.Context, db postgres.DB, j Job, by invalidation.By) error {
	timetable, err := Parse(j.Schedule)
	if err != nil {
		return fmt.Errorf("create cron job %q: %w: %w", j.Name, err, invalidation.ErrInvalid)
	}
	const sql = `SELECT penstock.create_cron_job($1, $2, $3, $4, $5, $6, coalesce($7, current_user::text))`
	if _, err := db.Exec(ctx, sql, j.Name, j.Queue, j.Spec, j.payload(), j.options(timetable.schedule), by.Reason, postgres.Given(by.Actor)); err != nil {
		return fmt.Errorf("create cron job %q: %w", j.Name, postgres.Named(err, refusals))
	}
	return nil
}

// refusals are the SQLSTATEs by which the schema refuses a job.
var refusals = map[string]error{"PS001": invalidation.ErrQueueNotFound, "PS002": invalidation.ErrInvalid, "PS006": invalidation.ErrState}

// Alter replaces all settings of a job but its queue. A run that has begun goes on.
func Alter(ctx context.Context, db postgres.DB, j Job, by invalidation.By) error {
	timetable, err := Parse(j.Schedule)
	if err != nil {
		return fmt.Errorf("alter cron job %q: %w: %w", j.Name, err, invalidation.ErrInvalid)
	}
	set := j.options(timetable.schedule)
	set["payload"] = j.payload()
	return run(ctx, db, "alter", j.Name, `SELECT penstock.alter_cron_job($1, $4, $2, coalesce($3, current_user::text))`, by, set)
}

// Pause keeps a job from firing until it is resumed, or until a time to come if that is not zero.
// When it ends, the catch-up policy applies to the nominal times that passed meanwhile.
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
