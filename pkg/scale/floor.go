package scale

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/cron"
)

// check returns an error for a floor that can never hold.
func (f Floor) check() error {
	_, err := f.timetable()
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

// timetables has those that were parsed, by the expression and the zone: floors are read once a second.
var timetables sync.Map

// timetable has the times at which the floor begins, by the rules of cron jobs: one of a daily schedule that the clocks
// leave out begins after the gap, and one that comes twice begins once.
func (f Floor) timetable() (*cron.Timetable, error) {
	key := [2]string{f.Cron, f.Zone}
	known, _ := timetables.Load(key)
	if t, parsed := known.(*cron.Timetable); parsed {
		return t, nil
	}
	t, err := cron.Parse(cron.Schedule{Spec: f.Cron, Zone: f.Zone})
	if err != nil {
		return nil, fmt.Errorf("cron %q: %w", f.Cron, err)
	}
	timetables.Store(key, t)
	return t, nil
}

// floorOf is the minimum of a model by the schedules of its deployments: the sum of what each is to have at least, or 0
// where no schedule holds.
func floorOf(deployments []deploymentRow, now time.Time) int {
	sum, holds := 0, false
	for _, s := range deployments {
		floor := floorAt(s.policy.Floors, now)
		holds = holds || floor > 0
		sum += max(floor, s.policy.Min)
	}
	if !holds {
		return 0
	}
	return min(sum, maxInstances)
}

// floorAt is the largest minimum of the schedules that hold at a time: those that began no longer ago than
// they last. A floor that cannot be read is none, see readPolicy.
func floorAt(floors []Floor, now time.Time) int {
	most := 0
	for _, f := range floors {
		t, err := f.timetable()
		if err != nil {
			continue
		}
		began, comes := t.Next(now.Add(-time.Duration(f.Lasts)))
		if comes && !began.After(now) {
			most = max(most, f.Min)
		}
	}
	return most
}
