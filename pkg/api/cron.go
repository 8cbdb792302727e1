package api

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"

	"github.com/penstock/penstock/pkg/operator"
)

// InName is the input of requests about one cron job.
type InName struct {
	Name string `path:"name" maxLength:"200"`
}

func (a *API) cronRoutes() {
	const one = "/v1/cron/{name}"
	add(a, route{
		method: "GET", path: "/v1/cron", id: "list-cron-jobs", summary: "Cron jobs by name",
		scope: read, of: ofQueue,
	}, a.listCronJobs)
	change(a, route{
		path: "/v1/queues/{queue}/cron", status: http.StatusCreated, id: "create-cron-job",
		summary: "Make a cron job whose entries go into this queue",
		scope:   admin, of: ofQueue,
	}, a.createCronJob)
	add(a, route{
		method: "GET", path: one, id: "show-cron-job", summary: "One cron job with its settings",
		scope: read, of: ofCron,
	}, func(ctx context.Context, in *InName) (*tagged[operator.CronJobDetail], error) {
		found, err := a.operator.CronJob(ctx, in.Name)
		return &tagged[operator.CronJobDetail]{etag(found.Settings), found}, err
	})
	change(a, route{
		method: "PATCH", path: one, id: "alter-cron-job",
		summary: "Change settings of a cron job; a run that has begun goes on",
		scope:   admin, of: ofCron,
	}, a.alterCronJob)
	verb[nameRemoval](a, operator.DropCronJob, route{
		method: "DELETE", path: one, id: "drop-cron-job", summary: "Remove a cron job; a run goes on",
		scope: admin, of: ofCron,
	})
	pauseVerb[namePause](a, operator.PauseCronJob, route{
		path: one + "/pause", id: "pause-cron-job", summary: "Pause a cron job",
		scope: operate, of: ofCron,
	})
	verb[nameVerb](a, operator.ResumeCronJob, route{
		path: one + "/resume", id: "resume-cron-job",
		summary: "Resume a cron job; its catch-up policy decides about the times that passed meanwhile",
		scope:   operate, of: ofCron,
	})
	verb[nameVerb](a, operator.RunCronJob, route{
		path: one + "/run", id: "run-cron-job", summary: "Fire a cron job once now, beside its schedule",
		scope: operate, of: ofCron, status: http.StatusAccepted,
	})
}

type cronFilter struct {
	Paging
	OfOneQueue
}

func (a *API) listCronJobs(ctx context.Context, in *cronFilter) (*answer[list[operator.CronJob]], error) {
	return paged(in.Paging, func(after string, limit int) ([]operator.CronJob, error) {
		return a.operator.CronJobs(ctx, operator.CronFilter{Queue: in.Queue, After: after, Limit: limit})
	}, func(j operator.CronJob) string { return j.Name })
}

type cronCreation struct {
	InQueue
	Body struct {
		ReasonBody
		Name     string         `json:"name" minLength:"1" maxLength:"200"`
		Spec     string         `json:"spec" minLength:"1" doc:"As in crontab, with seconds in front if there are six fields, @daily and the like, or @every 90m."`
		Settings map[string]any `json:"settings,omitempty" doc:"As the columns of penstock.cron_job are named, and payload."`
	}
}

func (a *API) createCronJob(ctx context.Context, in *cronCreation) error {
	if err := addressable("name", in.Body.Name); err != nil {
		return err
	}
	settings := map[string]any{"spec": in.Body.Spec}
	maps.Copy(settings, in.Body.Settings)
	if setting, err := a.cfg.CheckSchedule(settings); err != nil {
		if setting != "spec" {
			setting = "settings." + setting
		}
		return flaw(setting, err)
	}
	return a.operator.CreateCronJob(ctx, in.Body.Name, in.Queue, in.Body.Spec, in.Body.Settings, in.Body.by(ctx))
}

type cronAlteration struct {
	InName
	Conditional
	Body settingsBody
}

func (a *API) alterCronJob(ctx context.Context, in *cronAlteration) error {
	var settings map[string]any // as they will be
	return a.alter(ctx, in.Conditional, ofCron, in.Name,
		func(d *operator.Database) (string, error) {
			found, err := d.CronJob(ctx, in.Name)
			if err != nil {
				return "", err
			}
			if err := json.Unmarshal(found.Settings, &settings); err != nil {
				return "", fmt.Errorf("read settings of cron job %q: %w", in.Name, err)
			}
			return etag(found.Settings), nil
		},
		func(d *operator.Database) error {
			if settings != nil {
				maps.Copy(settings, in.Body.Settings)
				if setting, err := a.cfg.CheckSchedule(settings); err != nil {
					return flaw("settings."+setting, err)
				}
			}
			return d.AlterCronJob(ctx, in.Name, in.Body.Settings, in.Body.by(ctx))
		})
}
