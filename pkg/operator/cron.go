package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// CronJob is a cron job with its state, a row of penstock.cron_status.
type CronJob struct {
	Name         string     `json:"name"`
	Queue        string     `json:"queue"`
	State        string     `json:"state" doc:"waiting, running, paused, ended or broken."`
	Spec         string     `json:"spec"`
	Zone         string     `json:"zone"`
	Overlap      string     `json:"overlap" doc:"skip, queue or cancel_running."`
	CatchUp      string     `json:"catch_up" doc:"none, last or all."`
	NominalAt    *time.Time `json:"nominal_at,omitempty"` // of its entry
	EntryID      *int64     `json:"entry_id,omitempty"`
	LastFiredAt  *time.Time `json:"last_fired_at,omitempty"`
	Problem      string     `json:"problem,omitempty"`
	PausedBy     string     `json:"paused_by,omitempty"`
	PausedReason string     `json:"paused_reason,omitempty"`
	PausedUntil  *time.Time `json:"paused_until,omitempty"`
}

// CronJobDetail is a job with its settings, named as AlterCronJob takes them.
type CronJobDetail struct {
	CronJob
	Settings json.RawMessage `json:"settings"`
}

const cronColumns = `
SELECT s.job AS name, s.queue, s.state, s.spec, s.zone, s.overlap, s.catch_up, s.nominal_at, s.entry_id,
       s.last_fired_at,
       coalesce(s.problem, '') AS problem, coalesce(s.paused_by, '') AS paused_by,
       coalesce(s.paused_reason, '') AS paused_reason, penstock.json_time(s.paused_until) AS paused_until`

// CronFilter chooses cron jobs; all fields that are set must match.
type CronFilter struct {
	Queue string
	After string // names after this one
	Limit int
}

// CronJobs returns the cron jobs by name.
func (d *Database) CronJobs(ctx context.Context, f CronFilter) ([]CronJob, error) {
	const sql = cronColumns + `
  FROM penstock.cron_status s
 WHERE ($1::text IS NULL OR s.queue = $1) AND s.job > $2
 ORDER BY s.job LIMIT $3`
	return list[CronJob](ctx, d.db, "cron jobs", sql, given(f.Queue), f.After, page(f.Limit))
}

// CronJob returns one job, or invalidation.ErrNotFound.
func (d *Database) CronJob(ctx context.Context, name string) (CronJobDetail, error) {
	const sql = cronColumns + `,
       to_jsonb(j) - ARRAY['id', 'queue_id', 'name', 'paused_at', 'paused_by', 'paused_reason', 'paused_until',
              'problem', 'run_now_at',
                           'handled_at', 'catching_up_to', 'nominal_at', 'due_at', 'entry_id', 'fired_at',
                                  'following_at', 'ended_at',
                           'check_at', 'created_at'] AS settings
  FROM penstock.cron_status s JOIN penstock.cron_job j ON j.name = s.job
 WHERE s.job = $1`
	return show[CronJobDetail](ctx, d.db, fmt.Sprintf("cron job %q", name), invalidation.ErrNotFound, sql, name)
}

// CronSchedule is a job with the settings by which its fire times are computed, and its last firings.
type CronSchedule struct {
	CronJob
	StartsAt *time.Time      `json:"starts_at,omitempty"`
	EndsAt   *time.Time      `json:"ends_at,omitempty"`
	Gap      string          `json:"gap,omitempty"`
	Fold     string          `json:"fold,omitempty"`
	Firings  json.RawMessage `json:"firings"` // up to 5, newest first: nominal_at, fired_at, entry_id, manual
}

// cronSchedulesSQL reads the last firings of each job by the primary key.
const cronSchedulesSQL = cronColumns + `,
       penstock.json_time(j.starts_at) AS starts_at, penstock.json_time(j.ends_at) AS ends_at,
       coalesce(j.gap, '') AS gap, coalesce(j.fold, '') AS fold, coalesce(f.firings, '[]') AS firings
  FROM (SELECT * FROM penstock.cron_job c
         WHERE c.name > $2 AND ($1::text IS NULL OR c.queue_id = (SELECT id FROM penstock.queue WHERE name = $1))
         ORDER BY c.name LIMIT $3) j
 CROSS JOIN LATERAL (SELECT * FROM penstock.cron_status x WHERE x.job = j.name OFFSET 0) s
  LEFT JOIN LATERAL (
       SELECT jsonb_agg(to_jsonb(x) ORDER BY x.nominal_at DESC) AS firings
         FROM (SELECT nominal_at, fired_at, entry_id, manual FROM penstock.cron_firing
                WHERE job_id = j.id ORDER BY nominal_at DESC LIMIT 5) x) f ON true
 ORDER BY s.job`

// CronSchedules returns cron jobs by name with their schedules and last firings.
func (d *Database) CronSchedules(ctx context.Context, f CronFilter) ([]CronSchedule, error) {
	return list[CronSchedule](ctx, d.db, "cron schedules", cronSchedulesSQL, given(f.Queue), f.After, page(f.Limit))
}

// CreateCronJob makes a job that fires entries of a queue of kind cron. Options are named as the columns of
// penstock.cron_job.
func (d *Database) CreateCronJob(ctx context.Context, name, queue, spec string, options map[string]any,
	by invalidation.By,
) error {
	const sql = `
SELECT penstock.create_cron_job($3, $4, $5, coalesce($6::jsonb->'payload', '{}'), $6::jsonb - 'payload', $1,
                                coalesce($2, current_user))`
	return d.change(ctx, fmt.Sprintf("create cron job %q", name), sql, by, name, queue, spec, options)
}

// AlterCronJob changes settings of a job. A run that has begun goes on.
func (d *Database) AlterCronJob(ctx context.Context, name string, options map[string]any, by invalidation.By) error {
	return d.change(ctx, fmt.Sprintf("alter cron job %q", name),
		`SELECT penstock.alter_cron_job($3, $4, $1, coalesce($2, current_user))`, by, name, options)
}
