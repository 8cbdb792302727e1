package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/cron"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func cronCommand(a *app) *cobra.Command {
	return noun("cron", "Cron jobs: schedules that fire entries",
		cronList(a), cronShow(a), cronCreate(a), cronAlter(a),
		cronVerb(a, operator.PauseCronJob, "pause", "Keep a job from firing; a run goes on"),
		cronVerb(a, operator.ResumeCronJob, "resume",
			"End a pause; the job's catch-up policy says what becomes of missed times"),
		cronVerb(a, operator.RunCronJob, "run", "Ask for one run beside the schedule; the elected leader starts it"),
		cronVerb(a, operator.DropCronJob, "drop", "Remove a job; a run goes on"),
	)
}

func (a *app) cronColumns() []column[operator.CronJob] {
	return []column[operator.CronJob]{
		{title: "JOB", text: func(j operator.CronJob) string { return j.Name }},
		{title: "QUEUE", text: func(j operator.CronJob) string { return j.Queue }},
		{title: "STATE", text: func(j operator.CronJob) string { return j.State }},
		{title: "SPEC", text: func(j operator.CronJob) string { return j.Spec }},
		{title: "ZONE", text: func(j operator.CronJob) string { return j.Zone }},
		{title: "NEXT", text: func(j operator.CronJob) string { return cmp.Or(stamp(j.NominalAt), "-") }},
		{title: "FIRED", right: true, text: func(j operator.CronJob) string {
			if j.LastFiredAt == nil {
				return "-"
			}
			return a.since(*j.LastFiredAt)
		}},
		{title: "ENTRY", wide: true, right: true, text: func(j operator.CronJob) string { return optional(j.EntryID) }},
		{title: "OVERLAP", wide: true, text: func(j operator.CronJob) string { return j.Overlap }},
		{title: "CATCH UP", wide: true, text: func(j operator.CronJob) string { return j.CatchUp }},
		{title: "WHY", text: func(j operator.CronJob) string {
			if j.State == "paused" {
				return short(j.PausedBy+after(": ", j.PausedReason), 60)
			}
			return short(j.Problem, 60)
		}},
	}
}

func cronList(a *app) *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "Cron jobs by name", Args: cobra.NoArgs}
	var queue string
	a.queueFlag(c, &queue, "of this queue")
	return listing(a, c, a.cronColumns(), func(ctx context.Context, api conn, _ []string) ([]operator.CronJob, error) {
		return everything[operator.CronJob](ctx, api, "/v1/cron", "queue", queue)
	})
}

// timetable reads the settings that say when a job fires, and refuses a spec that cannot be read.
func timetable(settings json.RawMessage) (*cron.Timetable, error) {
	var s struct {
		Spec     string    `json:"spec"`
		Zone     string    `json:"zone"`
		StartsAt time.Time `json:"starts_at"`
		EndsAt   time.Time `json:"ends_at"`
		Gap      cron.Gap  `json:"gap"`
		Fold     cron.Fold `json:"fold"`
	}
	if err := json.Unmarshal(settings, &s); err != nil {
		return nil, usagef("the schedule cannot be read: %w", err)
	}
	t, err := cron.Parse(cron.Schedule{
		Spec: s.Spec, Zone: s.Zone, Gap: s.Gap, Fold: s.Fold, Start: s.StartsAt,
		End: s.EndsAt,
	})
	if err != nil {
		return nil, usageError{err}
	}
	return t, nil
}

func cronShow(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "show JOB", Short: "One job: state, settings, and its next ten firings in words",
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeCron(),
	}
	read := func(ctx context.Context, api conn, args []string) (operator.CronJobDetail, error) {
		return get[operator.CronJobDetail](ctx, api, at("/v1/cron/%v", args[0]))
	}
	return showing(a, c, read, func(w io.Writer, j operator.CronJobDetail) {
		a.facts(w, "job", j.Name, "queue", j.Queue, "state", j.State, "problem", j.Problem,
			"paused by", j.PausedBy+after(": ", j.PausedReason)+after(", until ", stamp(j.PausedUntil)),
			"entry", optional(j.EntryID), "last fired", stamp(j.LastFiredAt))
		a.indented(w, "settings", j.Settings)
		if t, err := timetable(j.Settings); err == nil { // else the problem has been told above
			a.firings(w, t)
		}
	})
}

func (a *app) firings(w io.Writer, t *cron.Timetable) {
	fmt.Fprintf(w, "\n%s\n", a.paint(bold, "next"))
	for _, f := range t.Explain(a.now(), 10) {
		fmt.Fprintf(w, "  %s\n", f)
	}
}

// cronSettings are the options of create and alter.
var cronSettings = []string{
	"zone", "jitter", "starts_at", "ends_at", "catch_up", "catch_up_max", "grace", "gap", "fold", "overlap", "payload",
	"lock_key", "flow", "priority",
}

func cronCreate(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "create JOB QUEUE SPEC", Short: "Create a job that fires entries of a queue of kind cron",
		Args: cobra.ExactArgs(3),
		Example: "  penstock cron create nightly reports '30 2 * * *' --set zone=Europe/Berlin --set " +
			"'payload={\"all\": true}' --reason 'asked for by sales'",
	}
	var set []string
	settingFlag(c, &set, cronSettings)
	return changing(a, c, func(_ context.Context, api conn, args []string) (change, error) {
		options, err := readSettings(set)
		if err != nil {
			return change{}, err
		}
		spec, err := json.Marshal(map[string]string{"spec": args[2]})
		if err != nil {
			return change{}, fmt.Errorf("read spec: %w", err)
		}
		if err := checkSchedule(spec, options); err != nil {
			return change{}, err
		}
		return simple("create cron job "+args[0], args[2]+after(" ", described(options)), false,
			func(ctx context.Context, by invalidation.By) error {
				in := body(by, "name", args[0], "spec", args[2], "settings", options)
				return api.post(ctx, at("/v1/queues/%v/cron", args[1]), in)
			})
	})
}

// checkSchedule refuses options that, laid over the settings of a job, make a schedule that cannot be read.
func checkSchedule(settings json.RawMessage, options map[string]any) error {
	all := map[string]any{}
	if settings != nil {
		if err := json.Unmarshal(settings, &all); err != nil {
			return fmt.Errorf("read settings: %w", err)
		}
	}
	maps.Copy(all, options)
	text, err := json.Marshal(all)
	if err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	_, err = timetable(text)
	return err
}

func cronAlter(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "alter JOB", Short: "Change settings of a job; a run that has begun goes on", Args: cobra.ExactArgs(1),
		ValidArgsFunction: a.completeCron(),
		Example:           "  penstock cron alter nightly --set 'spec=0 3 * * *' --reason 'after the backup'",
	}
	var set []string
	settingFlag(c, &set, append([]string{"spec"}, cronSettings...))
	return changing(a, c, func(ctx context.Context, api conn, args []string) (change, error) {
		options, err := readSettings(set)
		if err != nil {
			return change{}, err
		}
		if len(options) == 0 {
			return change{}, usagef("nothing to change: give --set name=value")
		}
		j, err := get[operator.CronJobDetail](ctx, api, at("/v1/cron/%v", args[0]))
		if err != nil {
			return change{}, err
		}
		if err := checkSchedule(j.Settings, options); err != nil {
			return change{}, err
		}
		return simple("alter cron job "+j.Name, described(options), false,
			func(ctx context.Context, by invalidation.By) error {
				return api.overwrite(ctx, "PATCH", at("/v1/cron/%v", j.Name), body(by, "settings", options))
			})
	})
}

func cronVerb(a *app, v operator.Verb, use, help string) *cobra.Command {
	c := &cobra.Command{Use: use + " JOB", Short: help, ValidArgsFunction: a.completeCron()}
	return doing(a, c, v, v == operator.DropCronJob,
		func(ctx context.Context, api conn, arg string) (any, string, error) {
			j, err := get[operator.CronJobDetail](ctx, api, at("/v1/cron/%v", arg))
			return j.Name, "", err
		})
}
