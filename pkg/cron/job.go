package cron

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

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

// Create makes a job. It refuses a schedule that cannot be read, with an error that says what to write instead.
func Create(ctx context.Context, db postgres.DB, j Job, by invalidation.By) error {
	timetable, err := Parse(j.Schedule)
	if err != nil {
		return fmt.Errorf("create cron job %q: %w: %w", j.Name, err, invalidation.ErrInvalid)
	}
	const sql = `SELECT penstock.create_cron_job($1, $2, $3, $4, $5, $6, coalesce($7, current_user::text))`
	if _, err := db.Exec(ctx, sql, j.Name, j.Queue, j.Spec, j.payload(), j.options(timetable.Schedule()), by.Reason, postgres.Given(by.Actor)); err != nil {
		return fmt.Errorf("create cron job %q: %w", j.Name, postgres.Named(err, refusals))
	}
	return nil
}

// refusals are the SQLSTATEs by which the schema refuses a job.
var refusals = map[string]error{"PS001": invalidation.ErrQueueNotFound, "PS002": invalidation.ErrInvalid, "PS006": invalidation.ErrState}
