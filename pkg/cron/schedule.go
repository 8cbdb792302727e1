package cron

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	// For machines without a zone database, as in our image. Where there is one it comes first: it may
	// know newer rules.
	_ "time/tzdata"
)

// Schedule says when a job runs, as a person writes it. Only Spec is needed.
type Schedule struct {
	// Spec is five fields (minute, hour, day of month, month, day of week), six with seconds
	// in front, or @hourly, @daily, @weekly, @monthly, @yearly, or "@every 90m".
	Spec string
	// Zone is an IANA name such as Europe/Berlin. Default UTC.
	Zone string
	// Jitter spreads firings: each is late by less than this, always the same for a job and a
	// nominal time, and never past the next nominal time. At most 24 h.
	Jitter time.Duration
	// Start is the first instant a nominal time may have, End the first it may not. Zero means no bound.
	Start, End time.Time
	// CatchUp is the policy for nominal times that passed while no leader fired them. Default last.
	CatchUp CatchUp
	// CatchUpMax is how many of them CatchUpAll fires at most, the latest ones. Default 100, at most 1000.
	CatchUpMax int
	// Grace is how late CatchUpNone still fires: long enough for another leader to take over. Default 1 min.
	Grace time.Duration
	// Gap and Fold are the policies for clock changes. The defaults depend on the hour field, see
	// the package comment.
	Gap  Gap
	Fold Fold
}

// CatchUp is the policy for missed nominal times.
type CatchUp string

// The policies for missed nominal times.
const (
	CatchUpNone CatchUp = "none" // they are dropped
	CatchUpLast CatchUp = "last" // the latest is fired
	CatchUpAll  CatchUp = "all"  // the latest CatchUpMax are fired, in order
)

// Gap is the policy for a wall time that does not exist because clocks go forward.
type Gap string

// The policies for a gap.
const (
	GapFire Gap = "fire" // once, at the first instant after the gap
	GapSkip Gap = "skip" // not at all
)

// Fold is the policy for a wall time that exists twice because clocks go back.
type Fold string

// The policies for a fold.
const (
	FoldFirst Fold = "first" // the first of the two
	FoldBoth  Fold = "both"  // each of the two
)

const (
	maxJitter         = 24 * time.Hour
	maxCatchUp        = 1000
	defaultCatchUpMax = 100
	defaultGrace      = time.Minute
)

// Timetable is a parsed schedule. It is immutable and safe for concurrent use.
type Timetable struct {
	schedule Schedule
	zone     *time.Location
	spec     spec
}

// Parse checks a schedule. Its error names every invalid field and a valid form.
func Parse(s Schedule) (*Timetable, error) {
	spec, specErr := parseSpec(s.Spec)
	zone, zoneErr := parseZone(s.Zone)
	s, restErr := s.withDefaults(spec)
	if err := errors.Join(specErr, zoneErr, restErr); err != nil {
		return nil, err
	}
	t := &Timetable{schedule: s, zone: zone, spec: spec}
	if _, ok := t.search(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)); !ok {
		return nil, fmt.Errorf("spec %q never comes: no year has such a day; change the day of month or the month",
			s.Spec)
	}
	return t, nil
}

func parseZone(name string) (*time.Location, error) {
	if strings.EqualFold(name, "local") {
		return nil, fmt.Errorf(
			"zone %q depends on the leader's machine; use an IANA name such as Europe/Berlin, or UTC", name)
	}
	zone, err := time.LoadLocation(name)
	if err != nil {
		return nil, fmt.Errorf("zone %q is unknown; use an IANA name such as Europe/Berlin, or UTC", name)
	}
	return zone, nil
}

func (s Schedule) withDefaults(spec spec) (Schedule, error) {
	gap, fold := GapFire, FoldFirst
	if spec.everyHour {
		gap, fold = GapSkip, FoldBoth
	}
	err := errors.Join(
		choice("catch up", &s.CatchUp, CatchUpLast, CatchUpNone, CatchUpLast, CatchUpAll),
		choice("gap", &s.Gap, gap, GapFire, GapSkip),
		choice("fold", &s.Fold, fold, FoldFirst, FoldBoth),
	)
	if s.Jitter < 0 || s.Jitter > maxJitter {
		err = errors.Join(err, fmt.Errorf("jitter %v: use 0 to %v", s.Jitter, maxJitter))
	}
	if s.CatchUpMax < 0 || s.CatchUpMax > maxCatchUp {
		err = errors.Join(err, fmt.Errorf("catch up max %d: use 1 to %d", s.CatchUpMax, maxCatchUp))
	}
	if s.Grace < 0 {
		err = errors.Join(err, fmt.Errorf("grace %v: use a duration above zero", s.Grace))
	}
	if !s.End.IsZero() && !s.End.After(s.Start) {
		err = errors.Join(err, fmt.Errorf("end %s is not after start %s", s.End.Format(time.RFC3339),
			s.Start.Format(time.RFC3339)))
	}
	s.CatchUpMax = cmp.Or(s.CatchUpMax, defaultCatchUpMax)
	s.Grace = cmp.Or(s.Grace, defaultGrace)
	s.Zone = cmp.Or(s.Zone, "UTC")
	return s, err
}

func choice[T ~string](name string, value *T, fallback T, allowed ...T) error {
	if *value == "" {
		*value = fallback
	}
	if slices.Contains(allowed, *value) {
		return nil
	}
	return fmt.Errorf("%s %q: use one of %q", name, *value, allowed)
}
