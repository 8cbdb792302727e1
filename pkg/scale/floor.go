package scale

import (
	"errors"
	"fmt"
	"time"

	"github.com/robfig/cron/v3"
)

// check returns an error for a floor that can never hold.
func (f Floor) check() error {
	_, _, err := f.schedule()
	switch {
	case err != nil:
		return err
	case f.Lasts <= 0:
		return errors.New("lasts_seconds must be above 0")
	case f.Min < 1 || f.Min > maxInstances:
		return fmt.Errorf("min is %d: want 1 to %d", f.Min, maxInstances)
	}
	return nil
}

func (f Floor) schedule() (cron.Schedule, *time.Location, error) {
	zone, err := time.LoadLocation(f.Zone)
	if err != nil {
		return nil, nil, fmt.Errorf("zone %q is not known: %w", f.Zone, err)
	}
	schedule, err := cron.ParseStandard(f.Cron)
	if err != nil {
		return nil, nil, fmt.Errorf("cron %q: %w", f.Cron, err)
	}
	return schedule, zone, nil
}

// floorAt is the largest minimum of the schedules that hold at a time: those that began no longer ago than
// they last. A floor that cannot be read is none; Policy.Check refuses it before.
func floorAt(floors []Floor, now time.Time) int {
	most := 0
	for _, f := range floors {
		schedule, zone, err := f.schedule()
		if err != nil {
			continue
		}
		began := schedule.Next(now.In(zone).Add(-time.Duration(f.Lasts)))
		if !began.IsZero() && !began.After(now) {
			most = max(most, f.Min)
		}
	}
	return most
}
