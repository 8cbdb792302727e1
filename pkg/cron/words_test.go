package cron

import "testing"

func TestWordsDescribeASchedule(t *testing.T) {
	for spec, want := range map[string]string{
		"30 2 * * *":            "at 02:30",
		"0 9,17 * * 1-5":        "at 09:00 and 17:00 on weekdays",
		"* * * * *":             "every minute",
		"*/5 * * * *":           "every 5 minutes",
		"*/5 9-17 * * *":        "every 5 minutes from 09:00 to 17:59",
		"0 * * * *":             "every hour",
		"15 * * * *":            "at minute 15 of every hour",
		"@hourly":               "every hour",
		"@daily":                "at 00:00",
		"@weekly":               "at 00:00 on Sundays",
		"@monthly":              "at 00:00 on day 1 of the month",
		"@yearly":               "at 00:00 on day 1 of the month in January",
		"@every 90m":            "every 1 h 30 min",
		"0 */2 * * *":           "every 2 hours at minute 0",
		"0 12 1,15 * mon":       "at 12:00 on day 1 and 15 of the month or on Mondays",
		"30 8 * jun-aug 6,0":    "at 08:30 on weekends in June, July and August",
		"*/10 * * * * *":        "every minute, every 10 seconds of it",
		"30 0 2 * * *":          "at 02:00 at second 30",
		"5,20 0,6,12,18 * * 0":  "at minute 5 and 20 of every hour in the hours 0, 6, 12 and 18 on Sundays",
		"1-59/2 0-23 * * *":     "at minute 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57 and 59 of every hour",
		"0 0 29 2 *":            "at 00:00 on day 29 of the month in February",
		"0 8-10 * * *":          "at 08:00, 09:00 and 10:00",
		"0 6-13 * * *":          "every hour from 06:00 to 13:59",
		"0,30 8-10 * * tue,thu": "at 08:00, 08:30, 09:00, 09:30, 10:00 and 10:30 on Tuesdays and Thursdays",
	} {
		timetable, err := Parse(Schedule{Spec: spec})
		if err != nil {
			t.Fatal(err)
		}
		if got := timetable.Words(); got != want {
			t.Errorf("%s: got %q, want %q", spec, got, want)
		}
	}
}
