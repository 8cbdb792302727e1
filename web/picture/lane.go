package picture

import (
	"fmt"
	"html/template"
	"time"

	"github.com/penstock/penstock/web/format"
)

// EventLane is changes of a number on a line of time.
type EventLane struct {
	Title    string
	From, To time.Time
	Events   []LaneEvent // oldest first
}

// LaneEvent is one change.
type LaneEvent struct {
	At            time.Time
	Before, After int
	Text          string // why
	Href          string
}

const (
	laneHeight = 34.0
	laneMiddle = 17.0
)

// HTML draws a triangle for each change, up or down, with the new number beside the last one.
func (l EventLane) HTML() template.HTML {
	if len(l.Events) == 0 {
		return none("The number did not change in this time.")
	}
	span := l.To.Sub(l.From)
	var c canvas
	c.open("svg", "class", "pic pic-lane", "role", "group", "aria-label", label(l.Title, 80), "width", "100%",
		"height", number(laneHeight))
	c.leaf("desc", l.sentence())
	c.empty("line", "class", "pic-axis", "x1", "0", "x2", "100%", "y1", number(laneMiddle), "y2", number(laneMiddle))
	for _, e := range l.Events {
		if e.At.Before(l.From) || span <= 0 {
			continue
		}
		l.mark(&c, e, min(1, float64(e.At.Sub(l.From))/float64(span)))
	}
	c.close("svg")
	return c.html()
}

// mark draws one change in an svg of its own, which is placed by a share of the width.
func (l EventLane) mark(c *canvas, e LaneEvent, x float64) {
	class, shape := "pic-up", "M0 -9L6 1L-6 1Z"
	if e.After < e.Before {
		class, shape = "pic-down", "M0 9L6 -1L-6 -1Z"
	}
	title := fmt.Sprintf("%s: %d to %d: %s", e.At.UTC().Format("15:04:05"), e.Before, e.After, label(e.Text, 240))
	c.open("svg", "x", percent(x), "y", number(laneMiddle), "class", "pic-stretch")
	closing := c.link(e.Href, title)
	c.open("g", "class", class)
	c.leaf("title", title)
	c.empty("path", "d", shape)
	c.close("g")
	c.close(closing...)
	c.close("svg")
}

func (l EventLane) sentence() string {
	up := 0
	for _, e := range l.Events {
		if e.After > e.Before {
			up++
		}
	}
	return fmt.Sprintf("%d changes over %s, %d of them up.", len(l.Events), format.Duration(l.To.Sub(l.From)), up)
}

// Table returns time, numbers and reason of each change.
func (l EventLane) Table() Table {
	t := Table{Caption: label(l.Title, 80), Head: []string{"At (UTC)", "Before", "After", "Why"}}
	for _, e := range l.Events {
		t.Rows = append(t.Rows, []string{
			e.At.UTC().Format("2 Jan 15:04:05"), format.Count(int64(e.Before)), format.Count(int64(e.After)),
			label(e.Text, 240),
		})
	}
	return t
}
