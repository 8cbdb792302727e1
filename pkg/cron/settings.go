package cron

import (
	"errors"
	"fmt"
	"time"
)

// CheckSettings refuses settings of a job, named as the columns of penstock.cron_job, by which the engine could not
// fire it, and returns the one to change. What the schema checks itself is left to it.
func CheckSettings(settings map[string]any) (setting string, err error) {
	text := func(name string) string {
		if settings[name] == nil {
			return ""
		}
		return fmt.Sprint(settings[name])
	}
	s := Schedule{Spec: text("spec")}
	if _, err := Parse(s); err != nil {
		return "spec", err
	}
	s.Zone = text("zone")
	if _, err := Parse(s); err != nil {
		return "zone", err
	}
	for name, bound := range map[string]*time.Time{"starts_at": &s.Start, "ends_at": &s.End} {
		if text(name) == "" {
			continue
		}
		if *bound, err = time.Parse(time.RFC3339, text(name)); err != nil {
			return name, errors.New("want a time such as 2026-01-31T12:00:00Z")
		}
	}
	if _, err := Parse(s); err != nil {
		return "ends_at", err
	}
	return "", nil
}
