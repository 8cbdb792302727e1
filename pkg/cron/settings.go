package cron

import (
	"fmt"
	"time"
)

// CheckSettings refuses settings of a job, named as the columns of penstock.cron_job, by which the engine could not
// fire it, and returns the one to change. What the schema checks itself is left to it, and bounds that are not written
// as in RFC 3339 are not compared.
func CheckSettings(settings map[string]any) (setting string, err error) {
	text := func(name string) string {
		if settings[name] == nil {
			return ""
		}
		return fmt.Sprint(settings[name])
	}
	instant := func(name string) time.Time {
		at, err := time.Parse(time.RFC3339, text(name))
		if err != nil {
			return time.Time{}
		}
		return at
	}
	s := Schedule{Spec: text("spec")}
	if _, err := Parse(s); err != nil {
		return "spec", err
	}
	s.Zone = text("zone")
	if _, err := Parse(s); err != nil {
		return "zone", err
	}
	s.Start, s.End = instant("starts_at"), instant("ends_at")
	if _, err := Parse(s); err != nil {
		return "ends_at", err
	}
	return "", nil
}
