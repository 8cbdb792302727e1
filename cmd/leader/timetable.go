package main

import (
	"time"

	"github.com/penstock/penstock/pkg/cron"
	"github.com/penstock/penstock/pkg/operator"
)

// timetable computes when a cron job fires, for the dashboard.
func timetable(j operator.CronSchedule, from, to time.Time, most int) (fires []time.Time, words string, err error) {
	s := cron.Schedule{Spec: j.Spec, Zone: j.Zone, Gap: cron.Gap(j.Gap), Fold: cron.Fold(j.Fold)}
	if j.StartsAt != nil {
		s.Start = *j.StartsAt
	}
	if j.EndsAt != nil {
		s.End = *j.EndsAt
	}
	t, err := cron.Parse(s)
	if err != nil {
		return nil, "", err
	}
	for at, more := t.Next(from); more && at.Before(to) && len(fires) < most; at, more = t.Next(at) {
		fires = append(fires, at)
	}
	return fires, t.Words(), nil
}
