package web

import (
	"cmp"
	"context"
	"encoding/json"
	"html/template"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/web/picture"
)

const (
	cronRows    = 100
	cronSpan    = 24 * time.Hour
	cronFires   = 1500             // of a job that are drawn
	cronAhead   = 5                // years in which the next firing is looked for
	cronLateAge = 10 * time.Second // from which a firing counts as late
)

// Timetable computes the fire times of a job: those after from, in the zone of the job, until to, at most most. Text is
// the schedule in words.
type Timetable func(j operator.CronSchedule, from, to time.Time, most int) (fires []time.Time, text string, err error)

// cronView is the cron jobs of the next day.
type cronView struct {
	Queue       string
	Strip, Data template.HTML
	Jobs        []cronRow
	After       string
}

// cronRow is a cron job in the table.
type cronRow struct {
	operator.CronSchedule
	Words string
	Next  *time.Time
	Runs  []cronRun
	Late  bool // the last firing came more than ten seconds after its time
}

// cronRun is a firing of a job.
type cronRun struct {
	NominalAt time.Time `json:"nominal_at"`
	FiredAt   time.Time `json:"fired_at"`
	EntryID   int64     `json:"entry_id"`
	Manual    bool      `json:"manual"`
}

// Delay is how long after its nominal time the run fired.
func (r cronRun) Delay() float64 { return max(0, r.FiredAt.Sub(r.NominalAt).Seconds()) }

func (d *Dashboard) cronPages() {
	d.page(page{
		path: "cron", nav: "Cron", section: "Policy", title: "Cron", template: "cron", live: true, read: d.cron,
	})
	for _, v := range []struct {
		verb                operator.Verb
		title, effect, done string
		destroys            bool
	}{
		{
			operator.RunCronJob, "Run job now", "Requests one run beside the schedule. The elected leader starts it; " +
				"while a run goes on, the overlap policy of the job applies.", "is requested to run", false,
		},
		{
			operator.PauseCronJob, "Pause job", "The job does not fire until it is resumed. A run goes on.",
			"is paused", false,
		},
		{
			operator.ResumeCronJob, "Resume job", "The job fires again. Its catch-up policy applies to the times " +
				"that were missed.", "is resumed", false,
		},
		{operator.DropCronJob, "Drop job", "Deletes the job with its firings. A run goes on.", "is dropped", true},
	} {
		role := operatorRole
		if v.destroys {
			role = administrator
		}
		d.verb(verb{
			name: string(v.verb), title: v.title, role: role, destroys: v.destroys,
			objects: []string{"job"}, effect: v.effect,
			preview: d.jobPreview,
			do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
				return d.do(ctx, v.verb, in.Get("job"), by, time.Time{}, "Cron job "+in.Get("job")+" "+v.done+".")
			},
		})
	}
}

func (d *Dashboard) jobPreview(ctx context.Context, in form) (preview, error) {
	j, err := d.db.CronJob(ctx, in.Get("job"))
	if err != nil {
		return preview{}, err
	}
	return preview{Facts: []fact{{"schedule", j.Spec + " " + j.Zone}, {"queue", j.Queue}, {"state", j.State}}}, nil
}

func (d *Dashboard) cron(ctx context.Context, q query) (any, error) {
	v := cronView{Queue: q.Get("queue")}
	after := q.Get("after")
	jobs, err := cached(ctx, d, keyOf("cron", v.Queue, after), 2*time.Second,
		func(ctx context.Context) ([]operator.CronSchedule, error) {
			return d.db.CronSchedules(ctx, operator.CronFilter{Queue: v.Queue, After: after, Limit: cronRows})
		})
	if err != nil {
		return nil, err
	}
	// By the minute, so that the picture does not change with each reading.
	from := time.Now().UTC().Truncate(time.Minute)
	strip := picture.CronStrip{From: from, Span: cronSpan}
	for _, j := range jobs {
		row := cronRow{CronSchedule: j}
		drawn := picture.CronRow{Job: j.Name, Href: d.cfg.Path + "cron#job-" + j.Name}
		drawn.Off = j.State == "paused" || j.State == "ended" || j.State == "broken"
		if d.cfg.Timetable != nil {
			if fires, text, err := d.cfg.Timetable(j, from, from.Add(cronSpan), cronFires); err == nil {
				row.Words, drawn.Fires, drawn.Cut = text, fires, len(fires) >= cronFires
				if len(fires) == 0 && !drawn.Off { // none in five years: it never fires again
					fires, _, _ = d.cfg.Timetable(j, from, from.AddDate(cronAhead, 0, 0), 1)
				}
				if len(fires) > 0 && !drawn.Off {
					row.Next = &fires[0]
				}
			}
		}
		if json.Unmarshal(j.Firings, &row.Runs) == nil && len(row.Runs) > 0 {
			row.Late = !row.Runs[0].Manual && row.Runs[0].FiredAt.Sub(row.Runs[0].NominalAt) > cronLateAge
		}
		row.Words = cmp.Or(row.Words, j.Spec)
		strip.Jobs = append(strip.Jobs, drawn)
		v.Jobs = append(v.Jobs, row)
	}
	if len(jobs) == cronRows {
		v.After = jobs[len(jobs)-1].Name
	}
	v.Strip, v.Data = strip.HTML(), picture.Data(strip.Table())
	return v, nil
}
