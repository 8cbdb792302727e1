// Package format writes numbers, durations and texts for the dashboard: with units, with separators of thousands, and
// in one way on every page and in every picture.
package format

import (
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// none is shown where a number is not known.
const none = "–"

// Count writes a whole number with separators of thousands: 1,284,300.
func Count(n int64) string {
	digits := strconv.FormatInt(n, 10)
	sign := ""
	if n < 0 {
		sign, digits = "−", digits[1:]
	}
	var b strings.Builder
	b.WriteString(sign)
	for i, digit := range digits {
		if i > 0 && (len(digits)-i)%3 == 0 {
			b.WriteByte(',')
		}
		b.WriteRune(digit)
	}
	return b.String()
}

// Bounded writes a number that was counted up to a bound: 10,000+ from the bound on.
func Bounded(n, bound int64) string {
	if n >= bound {
		return Count(bound) + "+"
	}
	return Count(n)
}

// Compact writes a number in at most four significant characters and a suffix: 950, 12.3 k, 1.28 M.
func Compact(v float64) string {
	if !finite(v) {
		return none
	}
	for _, unit := range []struct {
		size   float64
		suffix string
	}{{1e9, " G"}, {1e6, " M"}, {1e3, " k"}} {
		if math.Abs(v) >= unit.size*0.9995 {
			return significant(v/unit.size) + unit.suffix
		}
	}
	return significant(v)
}

// Rate writes entries a second: 0.05 /s, 12 /s, 1.2 k/s.
func Rate(perSecond float64) string {
	if !finite(perSecond) {
		return none
	}
	number, suffix, scaled := strings.Cut(Compact(perSecond), " ")
	if scaled {
		return number + " " + suffix + "/s"
	}
	return number + " /s"
}

// Duration writes a duration in its two largest units, or one unit with a fraction below a minute: 340 µs, 1.2 s,
// 3 min 20 s, 2 h 5 min, 3 d 4 h.
func Duration(d time.Duration) string {
	if d < 0 {
		return "−" + Duration(-d)
	}
	switch {
	case d == 0:
		return "0 s"
	case d < time.Millisecond:
		return significant(float64(d)/float64(time.Microsecond)) + " µs"
	case d < time.Second:
		return significant(float64(d)/float64(time.Millisecond)) + " ms"
	case d < time.Minute:
		return significant(d.Seconds()) + " s"
	case d < time.Hour:
		return two(d.Round(time.Second), time.Minute, "min", time.Second, "s")
	case d < 24*time.Hour:
		return two(d.Round(time.Minute), time.Hour, "h", time.Minute, "min")
	}
	return two(d.Round(time.Hour), 24*time.Hour, "d", time.Hour, "h")
}

// Seconds writes a number of seconds as Duration does.
func Seconds(s float64) string {
	if !finite(s) || math.Abs(s) > math.MaxInt64/float64(time.Second) {
		return none
	}
	return Duration(time.Duration(s * float64(time.Second)))
}

// Bytes writes a size by powers of 1024: 512 B, 1.5 KiB, 20.3 GiB.
func Bytes(n int64) string {
	units := []string{" B", " KiB", " MiB", " GiB", " TiB", " PiB"}
	size, unit := float64(n), 0
	for math.Abs(size) >= 1024 && unit < len(units)-1 {
		size /= 1024
		unit++
	}
	return significant(size) + units[unit]
}

// Percent writes a share of 0 to 1: 0.4 %, 62 %.
func Percent(share float64) string {
	if !finite(share * 100) {
		return none
	}
	return significant(share*100) + " %"
}

// Label makes a text of a user fit for a line of a page: at most max runes, without characters that are not printed or
// that change the direction of what follows.
func Label(text string, most int) string {
	var b strings.Builder
	n := 0
	for _, r := range text {
		if n == most {
			return strings.TrimRight(b.String(), " ") + "…"
		}
		if !unicode.IsPrint(r) {
			r = '\uFFFD'
		}
		b.WriteRune(r)
		n++
	}
	return b.String()
}

// two writes d in two units, without the second one where it is zero.
func two(d, large time.Duration, largeName string, small time.Duration, smallName string) string {
	text := Count(int64(d/large)) + " " + largeName
	if rest := d % large / small; rest > 0 {
		text += " " + strconv.FormatInt(int64(rest), 10) + " " + smallName
	}
	return text
}

// significant writes about three significant digits, without zeros behind the point.
func significant(v float64) string {
	decimals := 0
	switch size := math.Abs(v); {
	case size >= 1e15:
		return strconv.FormatFloat(v, 'e', 1, 64)
	case size < 0.1:
		decimals = 3
	case size < 9.995:
		decimals = 2
	case size < 99.95:
		decimals = 1
	}
	text := strconv.FormatFloat(v, 'f', decimals, 64)
	if strings.Contains(text, ".") {
		text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	}
	if text == "-0" {
		text = "0"
	}
	return strings.Replace(text, "-", "−", 1)
}

func finite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }
