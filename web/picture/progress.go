package picture

import (
	"html/template"
	"strings"

	"github.com/penstock/penstock/web/format"
)

// Progress is the parts of a batch or the matches of an operation by what became of them.
type Progress struct {
	Title string
	Total int64 // below 0 if it is not known
	Done  int64
	Bad   int64 // failed, expired or cancelled
	Going int64 // in the queue
}

// HTML draws a bar, and its numbers below it.
func (p Progress) HTML() template.HTML {
	total := max(p.Total, p.Done+p.Bad+p.Going)
	if p.Total < 0 {
		total = 0 // no part is drawn
	}
	var c canvas
	c.open("div", "class", "pic-progress")
	c.begin("", label(p.Title, 120), p.sentence(), 12)
	c.empty("rect", "class", "pic-track", "x", "0", "y", "0", "width", "100%", "height", "12", "rx", "6")
	x := 0.0
	for _, part := range []struct {
		class string
		n     int64
	}{{"pic-g-done", p.Done}, {"pic-g-bad", p.Bad}, {"pic-g-going", p.Going}} {
		if part.n <= 0 || total == 0 {
			continue
		}
		width := float64(part.n) / float64(total)
		c.empty("rect", "class", part.class, "x", percent(x), "y", "0", "width", percent(width), "height", "12",
			"rx", "2")
		x += width
	}
	c.close("svg")
	c.leaf("p", p.sentence())
	c.close("div")
	return c.html()
}

func (p Progress) sentence() string {
	if p.Total < 0 {
		return format.Count(p.Done) + " done, of a number that is not known"
	}
	parts := []string{format.Count(p.Done) + " of " + format.Count(p.Total) + " done"}
	if p.Total > 0 {
		parts[0] += " (" + format.Percent(float64(p.Done)/float64(p.Total)) + ")"
	}
	if p.Bad > 0 {
		parts = append(parts, format.Count(p.Bad)+" failed")
	}
	if p.Going > 0 {
		parts = append(parts, format.Count(p.Going)+" in the queue")
	}
	if rest := p.Total - p.Done - p.Bad - p.Going; rest > 0 {
		parts = append(parts, format.Count(rest)+" to come")
	}
	return strings.Join(parts, ", ")
}

// Table returns the numbers of the bar.
func (p Progress) Table() Table {
	all := format.Count(p.Total)
	if p.Total < 0 {
		all = "not known"
	}
	return Table{Caption: label(p.Title, 120), Head: []string{"Parts", "Number"}, Rows: [][]string{
		{"done", format.Count(p.Done)},
		{"failed", format.Count(p.Bad)},
		{"in the queue", format.Count(p.Going)},
		{"in all", all},
	}}
}

// Gauge is a reading of 0 to 1 with the mark above which no work is admitted.
type Gauge struct {
	Title string
	Value float64
	Mark  float64 // 0 for none
}

// HTML draws a bar with its mark.
func (g Gauge) HTML() template.HTML {
	class, verdict := "pic-g-level", ""
	if g.Over() {
		class, verdict = "pic-g-over", ", above the mark: no work is admitted"
	}
	var c canvas
	c.begin("pic-gauge", label(g.Title, 80), format.Percent(g.Value)+verdict, 14)
	c.empty("rect", "class", "pic-track", "x", "0", "y", "3", "width", "100%", "height", "8", "rx", "4")
	c.empty("rect", "class", class, "x", "0", "y", "3", "width", percent(g.Value), "height", "8", "rx", "4")
	if g.Mark > 0 {
		c.titled("line", "work is admitted below "+format.Percent(g.Mark),
			"class", "pic-limit", "x1", percent(g.Mark), "x2", percent(g.Mark), "y1", "0", "y2", "14")
	}
	c.close("svg")
	return c.html()
}

// Over reports whether the reading is at or above its mark.
func (g Gauge) Over() bool { return g.Mark > 0 && g.Value >= g.Mark }
