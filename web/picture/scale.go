package picture

import (
	"math"
	"time"

	"github.com/penstock/penstock/web/format"
)

// level ranks n among most in steps of a logarithmic scale: 0 for none, 1 to steps.
func level(n, most int64, steps int) int {
	if n <= 0 || most <= 0 {
		return 0
	}
	share := math.Log1p(float64(n)) / math.Log1p(float64(most))
	return max(1, min(steps, int(math.Ceil(share*float64(steps)-1e-9))))
}

// bound writes the upper end of a bucket of seconds.
func bound(seconds float64) string {
	if math.IsInf(seconds, 1) {
		return "more"
	}
	return format.Seconds(seconds)
}

// clock writes a time of an axis in UTC, with the day where a period is longer than a day, and with seconds where it is
// short.
func clock(at time.Time, period time.Duration) string {
	at = at.UTC()
	switch {
	case period > 36*time.Hour:
		return at.Format("2 Jan 15:04")
	case period < 5*time.Minute: // a minute would be written several times
		return at.Format("15:04:05")
	default:
		return at.Format("15:04")
	}
}

// spread picks at most most of n positions, evenly, with the first one.
func spread(n, most int) []int {
	if n == 0 || most == 0 {
		return nil
	}
	step := (n + most - 1) / most
	var picked []int
	for i := 0; i < n; i += step {
		picked = append(picked, i)
	}
	return picked
}
