package duration_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/duration"
)

func TestSecondsAreReadAsNumbersAndInGosNotation(t *testing.T) {
	for text, want := range map[string]time.Duration{
		`1.5`: 1500 * time.Millisecond, `0`: 0, `-2`: -2 * time.Second, `"10m30s"`: 630 * time.Second,
		`1000000000`: 1e9 * time.Second, `null`: 0,
	} {
		var s duration.Seconds
		if err := json.Unmarshal([]byte(text), &s); err != nil || s.Duration() != want {
			t.Errorf("%s is %s, %v: want %s", text, s.Duration(), err, want)
		}
	}
	for text, want := range map[string]string{
		`"soon"`: "want a number of seconds", `true`: "want a number of seconds", `1e10`: "at most 1e+09 seconds",
		`"2562047h"`: "at most 277777h46m40s",
	} {
		var s duration.Seconds
		if err := json.Unmarshal([]byte(text), &s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s gives %s, %v: want an error with %q", text, s.Duration(), err, want)
		}
	}
	written, err := json.Marshal(duration.Seconds(1500 * time.Millisecond))
	if err != nil || string(written) != "1.5" {
		t.Errorf("1.5 s is written as %s, %v", written, err)
	}
}

func TestRetryAfterIsReadInBothFormsUpToABound(t *testing.T) {
	now := time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)
	date := func(d time.Duration) string { return now.Add(d).Format(http.TimeFormat) }
	for _, c := range []struct {
		after, sent string
		want        time.Duration
	}{
		{"", "", 0},
		{"7", "", 7 * time.Second},
		{" 0.5 ", "", 500 * time.Millisecond},
		{"-1", "", 0},
		{"NaN", "", 0},
		{"later", "", 0},
		{"99999999999", "", time.Hour},
		{"1" + strings.Repeat("0", 400), "", time.Hour},
		{"1e300", "", 0},
		{"inf", "", 0},
		{"0x1p4", "", 0},
		{"1.5.0", "", 0},
		{date(time.Minute), "", time.Minute},
		{date(-time.Minute), "", 0},
		{date(48 * time.Hour), "", time.Hour},
		{date(time.Minute), date(time.Minute - 9*time.Second), 9 * time.Second},
	} {
		header := http.Header{"Retry-After": {c.after}}
		if c.sent != "" {
			header.Set("Date", c.sent)
		}
		if d := duration.RetryAfter(header, now, time.Hour); d != c.want {
			t.Errorf("Retry-After %q, Date %q is %s: want %s", c.after, c.sent, d, c.want)
		}
	}
}
