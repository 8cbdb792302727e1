package picture

import (
	"fmt"
	"html/template"
	"time"

	"github.com/penstock/penstock/web/format"
)

// CronStrip is the fire times of cron jobs over the next hours.
type CronStrip struct {
	From time.Time // in the zone that the axis shows
	Span time.Duration
	Jobs []CronRow
}

// CronRow is a job with its fire times within the strip, growing.
type CronRow struct {
	Job   string
	Href  string
	Off   bool // paused or ended: it will not fire
	Fires []time.Time
	Cut   bool // there are more after the last of Fires
}

const (
	cronRow  = 26.0
	cronHead = 20.0
	// cronGap is the part of the strip below which two fires are drawn as one bar.
	cronGap = 1.0 / 120
)

// HTML draws a row for each job, with a mark for each fire and a bar where fires are close together.
func (s CronStrip) HTML() template.HTML {
	if len(s.Jobs) == 0 {
		return none("There is no cron job. Create one with `penstock cron create`.")
	}
	bottom := cronHead + cronRow*float64(len(s.Jobs))
	var c canvas
	c.open("svg", "class", "pic pic-cron pic-gutter-left", "role", "group",
		"aria-label", "Runs of the next "+format.Duration(s.Span), "width", "100%", "height", number(bottom+4))
	c.leaf("desc", fmt.Sprintf("Fire times of %d cron jobs from %s on.", len(s.Jobs), s.From.Format("2 Jan 15:04 MST")))
	s.hours(&c, bottom)
	for i, job := range s.Jobs {
		s.row(&c, job, cronHead+cronRow*float64(i))
	}
	c.close("svg")
	return c.html()
}

// hours draws a line every three hours of the zone's clock and labels every sixth.
func (s CronStrip) hours(c *canvas, bottom float64) {
	first := time.Date(s.From.Year(), s.From.Month(), s.From.Day(), 0, 0, 0, 0, s.From.Location())
	for hour := 0; hour <= 48; hour += 3 {
		// By the clock, not by addition: a day of a change to summer time has 23 hours.
		at := time.Date(first.Year(), first.Month(), first.Day(), hour, 0, 0, 0, first.Location())
		x := share(at.Sub(s.From), s.Span)
		if at.Before(s.From) || at.After(s.From.Add(s.Span)) {
			continue
		}
		c.empty("line", "class", "pic-grid", "x1", percent(x), "x2", percent(x), "y1", number(cronHead-4), "y2",
			number(bottom))
		if hour%6 != 0 || x > 0.95 {
			continue
		}
		text := at.Format("15:04")
		if at.Hour() == 0 {
			text = at.Format("Mon 2")
		}
		class := "pic-tick pic-middle"
		if x < 0.05 {
			class = "pic-tick"
		}
		if hour%12 != 0 {
			class += " pic-roomy"
		}
		c.text(class, percent(x), "11", text)
	}
}

func (s CronStrip) row(c *canvas, job CronRow, y float64) {
	class := "pic-fires"
	if job.Off {
		class += " pic-off"
	}
	c.empty("line", "class", "pic-axis", "x1", "0", "x2", "100%", "y1", number(y+cronRow/2), "y2", number(y+cronRow/2))
	closing := c.link(job.Href, job.Job)
	c.text("pic-tick pic-end pic-mid", "-10", number(y+cronRow/2), label(job.Job, 15))
	c.close(closing...)
	c.open("g", "class", class)
	switch {
	case job.Off:
		c.text("pic-note pic-middle pic-mid pic-halo", "50%", number(y+cronRow/2), "off")
	case len(job.Fires) == 0:
		c.text("pic-note pic-middle pic-mid pic-halo", "50%", number(y+cronRow/2), "not in this time")
	default:
		for _, run := range s.runs(job.Fires) {
			s.mark(c, run, y)
		}
		if job.Cut {
			s.cut(c, job.Fires[len(job.Fires)-1], y)
		}
	}
	c.close("g")
}

// cut says that no fire after the last one is drawn.
func (s CronStrip) cut(c *canvas, last time.Time, y float64) {
	x, class := share(last.Sub(s.From), s.Span)+0.01, "pic-note pic-mid pic-halo"
	if x > 0.7 {
		x, class = 0.99, class+" pic-end"
	}
	c.text(class, percent(x), number(y+cronRow/2), "later runs are not drawn")
}

// fireRun is fires that are close together.
type fireRun struct {
	from, to time.Time
	n        int
}

func (s CronStrip) runs(fires []time.Time) []fireRun {
	gap := time.Duration(float64(s.Span) * cronGap)
	var runs []fireRun
	for _, at := range fires {
		if n := len(runs); n > 0 && at.Sub(runs[n-1].to) <= gap {
			runs[n-1].to = at
			runs[n-1].n++
			continue
		}
		runs = append(runs, fireRun{at, at, 1})
	}
	return runs
}

func (s CronStrip) mark(c *canvas, run fireRun, y float64) {
	from, to := share(run.from.Sub(s.From), s.Span), share(run.to.Sub(s.From), s.Span)
	zone := s.From.Location() // that of the axis; fires are in the zones of their jobs
	if run.n == 1 {
		c.open("circle", "cx", percent(from), "cy", number(y+cronRow/2), "r", "4")
		c.leaf("title", run.from.In(zone).Format("Mon 15:04:05"))
		c.close("circle")
		return
	}
	c.titled("rect", fmt.Sprintf("%d runs from %s to %s", run.n, run.from.In(zone).Format("Mon 15:04"),
		run.to.In(zone).Format("Mon 15:04")),
		"x", percent(from), "y", number(y+cronRow/2-4), "width", percent(to-from), "height", "8", "rx", "2")
}

// Table returns the next fire and the number of fires of each job.
func (s CronStrip) Table() Table {
	t := Table{Caption: "Runs of the next " + format.Duration(s.Span), Head: []string{"Job", "Next run", "Runs"}}
	for _, job := range s.Jobs {
		next := "–"
		if len(job.Fires) > 0 && !job.Off {
			next = job.Fires[0].In(s.From.Location()).Format("Mon 2 Jan 15:04:05 MST")
		}
		runs := format.Count(int64(len(job.Fires)))
		if job.Cut {
			runs += "+"
		}
		t.Rows = append(t.Rows, []string{label(job.Job, 80), next, runs})
	}
	return t
}
