package format_test

import (
	"math"
	"testing"
	"time"

	"github.com/penstock/penstock/web/format"
)

func TestNumbersHaveUnitsAndSeparators(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{format.Count(0), "0"},
		{format.Count(999), "999"},
		{format.Count(1284300), "1,284,300"},
		{format.Count(-12345), "−12,345"},
		{format.Count(math.MinInt64), "−9,223,372,036,854,775,808"},
		{format.Bounded(9999, 10000), "9,999"},
		{format.Bounded(10000, 10000), "10,000+"},
		{format.Compact(950), "950"},
		{format.Compact(999.7), "1 k"},
		{format.Compact(12345), "12.3 k"},
		{format.Compact(1284300), "1.28 M"},
		{format.Compact(math.NaN()), "–"},
		{format.Rate(0), "0 /s"},
		{format.Rate(0.05), "0.05 /s"},
		{format.Rate(1234), "1.23 k/s"},
		{format.Rate(math.Inf(1)), "–"},
		{format.Bytes(512), "512 B"},
		{format.Bytes(1536), "1.5 KiB"},
		{format.Bytes(21_800_000_000), "20.3 GiB"},
		{format.Percent(0.004), "0.4 %"},
		{format.Percent(0.617), "61.7 %"},
		{format.Percent(1), "100 %"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
}

func TestDurationsHaveTheirTwoLargestUnits(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0:                                "0 s",
		340 * time.Microsecond:           "340 µs",
		1500 * time.Microsecond:          "1.5 ms",
		1234 * time.Millisecond:          "1.23 s",
		42 * time.Second:                 "42 s",
		time.Minute:                      "1 min",
		200 * time.Second:                "3 min 20 s",
		2*time.Hour + 5*time.Minute:      "2 h 5 min",
		76 * time.Hour:                   "3 d 4 h",
		24000*time.Hour + 30*time.Minute: "1,000 d 1 h",
		-90 * time.Second:                "−1 min 30 s",
	} {
		if got := format.Duration(d); got != want {
			t.Errorf("%d ns: got %q, want %q", d, got, want)
		}
	}
	if got := format.Seconds(1e300); got != "–" {
		t.Errorf("got %q for more seconds than a duration holds", got)
	}
}

func TestLabelIsShortAndPrintable(t *testing.T) {
	for text, want := range map[string]string{
		"plain":              "plain",
		"a very long name":   "a very lon…",
		"tab\there":          "tab\uFFFDhere",
		"\u202Eevil":         "\uFFFDevil",
		"é漢字":                "é漢字",
		"exactly 10":         "exactly 10",
		"bad \xff byte":      "bad \uFFFD byte",
		"nine plus  blank x": "nine plus…",
	} {
		if got := format.Label(text, 10); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}
