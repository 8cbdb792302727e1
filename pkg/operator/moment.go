package operator

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Moment is a time that an operator gives, such as the end of a pause: the time itself, or the one that comes after a
// duration. At tells which time that is. Its zero value is no time.
type Moment struct {
	Time time.Time
	In   time.Duration // from now on, in place of Time; above 0
}

// ErrMoment says that a text is no Moment.
var ErrMoment = errors.New("want a time such as 2026-01-31T12:00:00Z, or a duration above 0 from now such as 30m")

// IsZero reports whether it is no time.
func (m Moment) IsZero() bool { return m.Time.IsZero() && m.In == 0 }

// UnmarshalText reads a time as RFC 3339 has it, or a duration above 0 in Go's notation.
func (m *Moment) UnmarshalText(text []byte) error {
	if d, err := time.ParseDuration(string(text)); err == nil {
		if d <= 0 {
			return ErrMoment
		}
		*m = Moment{In: d}
		return nil
	}
	t, err := time.Parse(time.RFC3339, string(text))
	if err != nil {
		return ErrMoment
	}
	*m = Moment{Time: t}
	return nil
}

// MarshalText writes what UnmarshalText reads; nothing for no time.
func (m Moment) MarshalText() ([]byte, error) {
	switch {
	case m.In != 0:
		return []byte(m.In.String()), nil
	case m.Time.IsZero():
		return nil, nil
	}
	return m.Time.MarshalText()
}

// At returns the time that is meant. A duration counts from now by the database's clock, by which everything that has
// an end or a due time is judged: the clock of the process that was told the duration may differ from it.
func (d *Database) At(ctx context.Context, m Moment) (time.Time, error) {
	if m.In == 0 {
		return m.Time, nil
	}
	now, err := d.Now(ctx)
	if err != nil {
		return time.Time{}, err
	}
	return now.Add(m.In), nil
}

// Now returns the time by the database's clock.
func (d *Database) Now(ctx context.Context) (time.Time, error) {
	var now time.Time
	if err := d.db.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now); err != nil {
		return time.Time{}, fmt.Errorf("read the database's clock: %w", invalidation.Translate(err))
	}
	return now, nil
}
