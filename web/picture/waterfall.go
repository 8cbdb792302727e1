package picture

import (
	"fmt"
	"html/template"
	"strconv"
	"time"

	"github.com/penstock/penstock/web/format"
)

// Waterfall is the way of one entry through the system, from push to callback.
type Waterfall struct {
	Phases []Phase
	Now    time.Time // the end of phases that have none
}

// PhaseKind decides how a phase is drawn.
type PhaseKind string

// The kinds of phases of an entry.
const (
	PhasePush     PhaseKind = "push"     // a moment
	PhaseWait     PhaseKind = "wait"     // not due, or no node has claimed it
	PhaseLock     PhaseKind = "lock"     // from the claim to the begin of the run
	PhaseSlot     PhaseKind = "slot"     // from the begin of the run to the slot of a model
	PhaseCall     PhaseKind = "call"     // from the call to the first byte of its answer, or its end
	PhaseStream   PhaseKind = "stream"   // from the first byte to the end of the answer
	PhaseFailed   PhaseKind = "failed"   // a run that ended in an error
	PhaseFinish   PhaseKind = "finish"   // a moment: the outcome
	PhaseCallback PhaseKind = "callback" // delivery of the callback
)

// Phase is one part of the way. An attempt of 0 belongs to none.
type Phase struct {
	Name    string
	Detail  string // the node, the slot, the error
	Kind    PhaseKind
	Start   time.Time
	End     time.Time // zero for a moment, and, if Open, for a phase that goes on
	Open    bool
	Attempt int
}

const (
	waterfallRow  = 26.0
	waterfallBar  = 14.0
	waterfallHead = 28.0
	waterfallAxis = 24.0
)

// HTML draws a row for each phase on one scale of time.
func (w Waterfall) HTML() template.HTML {
	if len(w.Phases) == 0 {
		return none("Nothing has been recorded about this entry yet.")
	}
	height := 6.0
	for i := range w.Phases {
		height += waterfallRow
		if w.headed(i) {
			height += waterfallHead
		}
	}
	var c canvas
	from, span := w.span()
	c.begin("pic-waterfall pic-gutter-wide", "Timeline of the entry", w.sentence(), height+waterfallAxis)
	for _, share := range []float64{0, 0.25, 0.5, 0.75, 1} {
		c.empty("line", "class", "pic-grid", "x1", percent(share), "x2", percent(share), "y1", "0", "y2",
			number(height))
	}
	y := 6.0
	for i, p := range w.Phases {
		if w.headed(i) {
			c.leaf("text", "attempt "+strconv.Itoa(p.Attempt), "class", "pic-tick pic-strong", "x", "-104", "y",
				number(y+19))
			c.empty("line", "class", "pic-axis", "x1", "-30", "x2", "100%", "y1", number(y+15.5), "y2", number(y+15.5))
			y += waterfallHead
		}
		w.phase(&c, p, y, from, span)
		y += waterfallRow
	}
	c.text("pic-tick", "0", number(height+17), "0 s")
	c.text("pic-tick pic-middle pic-roomy", "50%", number(height+17), "+"+format.Duration(span/2))
	c.text("pic-tick pic-end", "100%", number(height+17), "+"+format.Duration(span))
	c.close("svg")
	return c.html()
}

// headed reports whether an attempt begins with phase i.
func (w Waterfall) headed(i int) bool {
	attempt := w.Phases[i].Attempt
	return attempt > 0 && (i == 0 || w.Phases[i-1].Attempt != attempt)
}

func (w Waterfall) phase(c *canvas, p Phase, y float64, from time.Time, span time.Duration) {
	start := share(p.Start.Sub(from), span)
	end := share(w.end(p).Sub(from), span)
	middle := number(y + waterfallRow/2)
	title := label(p.Name, 60) + ": " + format.Duration(w.end(p).Sub(p.Start))
	if p.Detail != "" {
		title += ", " + label(p.Detail, 200)
	}
	c.open("g", "class", "pic-phase pic-k-"+kindClass(p.Kind))
	c.leaf("title", title)
	c.text("pic-tick pic-end pic-mid", "-10", middle, label(p.Name, 15))
	if w.moment(p) {
		c.empty("circle", "cx", percent(start), "cy", middle, "r", "5.5")
	} else {
		class := ""
		if p.Open {
			class = "pic-open"
		}
		c.empty("rect", "class", class, "x", percent(start), "y", number(y+(waterfallRow-waterfallBar)/2),
			"width", percent(end-start), "height", number(waterfallBar), "rx", "2")
		duration := format.Duration(w.end(p).Sub(p.Start))
		if p.Open {
			duration += " …"
		}
		c.leaf("text", duration, "class", "pic-tick pic-mid", "x", "100%", "dx", "9", "y", middle)
	}
	w.detail(c, p, start, end, middle)
	c.close("g")
}

// roomMin is the part of the width that a detail needs beside its bar.
const roomMin = 0.3

// detail writes the detail of a phase behind its bar, before it, or where neither has room within it.
func (w Waterfall) detail(c *canvas, p Phase, start, end float64, middle string) {
	if p.Detail == "" {
		return
	}
	class, at, distance := "pic-note pic-mid pic-halo pic-roomy", end, "9"
	switch {
	case 1-end >= roomMin:
	case start >= roomMin:
		class, at, distance = class+" pic-end", start, "-9"
	case p.Open || p.Kind == PhaseWait || p.Kind == PhaseStream:
		class, at = "pic-note pic-mid pic-strong pic-roomy", start
	default:
		class, at = "pic-note pic-mid pic-on pic-roomy", start
	}
	c.leaf("text", label(p.Detail, 48), "class", class, "x", percent(at), "dx", distance, "y", middle)
}

func (w Waterfall) moment(p Phase) bool { return p.End.IsZero() && !p.Open }

func (w Waterfall) end(p Phase) time.Time {
	switch {
	case p.Open && w.Now.After(p.Start):
		return w.Now
	case p.End.After(p.Start):
		return p.End
	}
	return p.Start
}

func (w Waterfall) span() (from time.Time, span time.Duration) {
	from = w.Phases[0].Start
	to := from
	for _, p := range w.Phases {
		if p.Start.Before(from) {
			from = p.Start
		}
		if end := w.end(p); end.After(to) {
			to = end
		}
	}
	return from, max(to.Sub(from), time.Microsecond)
}

func share(d, of time.Duration) float64 { return clamp(float64(d) / float64(of)) }

// kindClass keeps a kind that is not one of the constants out of the markup's classes.
func kindClass(k PhaseKind) string {
	switch k {
	case PhasePush, PhaseWait, PhaseLock, PhaseSlot, PhaseCall, PhaseStream, PhaseFailed, PhaseFinish, PhaseCallback:
		return string(k)
	}
	return "other"
}

func (w Waterfall) sentence() string {
	_, span := w.span()
	return fmt.Sprintf("%d phases over %s.", len(w.Phases), format.Duration(span))
}

// Table returns begin, duration and detail of each phase.
func (w Waterfall) Table() Table {
	t := Table{
		Caption: "Timeline of the entry", Head: []string{"Phase", "Attempt", "Begin (UTC)", "Duration", "Detail"},
	}
	for _, p := range w.Phases {
		attempt, duration := "–", "–"
		if p.Attempt > 0 {
			attempt = strconv.Itoa(p.Attempt)
		}
		if !w.moment(p) {
			duration = format.Duration(w.end(p).Sub(p.Start))
		}
		t.Rows = append(t.Rows, []string{
			label(p.Name, 60), attempt, p.Start.UTC().Format("2 Jan 15:04:05.000"), duration, label(p.Detail, 200),
		})
	}
	return t
}
