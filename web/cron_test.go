package web

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/operator"
)

// The table has the next firing of a job that does not fire today, and the strip says where it ends.
func TestCronNamesFiringsBeyondTheStrip(t *testing.T) {
	s := newSite(t)
	s.fill()
	s.web.cfg.Timetable = func(j operator.CronSchedule, from, to time.Time, most int) (fires []time.Time, words string, err error) {
		step := 10 * time.Second
		if j.Name == "monthly" {
			step = 20 * 24 * time.Hour
		}
		for at := from.Add(step); at.Before(to) && len(fires) < most; at = at.Add(step) {
			fires = append(fires, at)
		}
		return fires, "now and then", nil
	}
	if err := s.change.CreateQueue(t.Context(), "reports", map[string]any{"kind": "cron"}, tester); err != nil {
		t.Fatal(err)
	}
	for name, spec := range map[string]string{"monthly": "0 3 1 * *", "often": "@every 10s"} {
		if err := s.change.CreateCronJob(t.Context(), name, "reports", spec, nil, tester); err != nil {
			t.Fatal(err)
		}
	}
	page := s.as(viewer).get("cron").text
	if !regexp.MustCompile(`id="job-monthly".*in (19|20) d`).MatchString(page) {
		t.Errorf("the next firing of a job that fires in 20 days: %s", page)
	}
	if n := strings.Count(page, "later runs are not drawn"); n != 1 || !strings.Contains(page, "1,500&#43;") && !strings.Contains(page, "1,500+") {
		t.Errorf("%d of two jobs have firings that are not drawn: %s", n, page)
	}
}
