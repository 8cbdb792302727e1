package picture

import (
	"fmt"
	"html/template"
	"math"
	"time"

	"github.com/penstock/penstock/web/format"
)

// Sparkline is a small line of recent values. Second is another line on the same scale, dashed; it may be empty.
type Sparkline struct {
	Title  string
	Unit   string // behind the last value in the description
	Values []float64
	Second []float64
}

const sparkHeight = 28.0

// HTML draws the line. Its width is given by the style of pic-spark.
func (s Sparkline) HTML() template.HTML {
	var c canvas
	c.begin("pic-spark", label(s.Title, 120), s.sentence(), sparkHeight)
	largest := 0.0
	for _, v := range append(append([]float64{}, s.Values...), s.Second...) {
		if !math.IsNaN(v) && !math.IsInf(v, 0) {
			largest = max(largest, v)
		}
	}
	c.stretch(2, sparkHeight-4)
	c.line("pic-base", [][2]float64{{0, 100}, {100, 100}})
	points := sparkPoints(s.Values, largest)
	if len(points) > 1 && !hasGap(points) {
		area := append([][2]float64{{0, 100}}, points...)
		c.line("pic-area", append(area, [2]float64{100, 100}))
	}
	c.line("pic-line", points)
	c.line("pic-line pic-second", sparkPoints(s.Second, largest))
	c.close("svg")
	if n := len(points); n > 0 && !math.IsNaN(points[n-1][1]) {
		c.empty("circle", "class", "pic-dot", "cx", "100%", "cy", number(2+points[n-1][1]/100*(sparkHeight-4)), "r",
			"2.25")
	}
	c.close("svg")
	return c.html()
}

func sparkPoints(values []float64, largest float64) [][2]float64 {
	points := make([][2]float64, 0, len(values))
	for i, v := range values {
		x := 100.0
		if len(values) > 1 {
			x = float64(i) / float64(len(values)-1) * 100
		}
		y := 100.0
		if largest > 0 {
			y = 100 - v/largest*100
		}
		points = append(points, [2]float64{x, y})
	}
	return points
}

func hasGap(points [][2]float64) bool {
	for _, p := range points {
		if math.IsNaN(p[1]) || math.IsInf(p[1], 0) {
			return true
		}
	}
	return false
}

func (s Sparkline) sentence() string {
	if len(s.Values) == 0 {
		return "No values yet."
	}
	last := s.Values[len(s.Values)-1]
	return "Now " + format.Compact(last) + label(s.Unit, 20) + "."
}

// Table returns the values, oldest first.
func (s Sparkline) Table() Table {
	t := Table{Caption: label(s.Title, 120), Head: []string{"Sample", "Value"}}
	for i, v := range s.Values {
		t.Rows = append(t.Rows, []string{format.Count(int64(i + 1)), format.Compact(v)})
	}
	return t
}

// JainLine is the Jain index of fairness over time: 1 if every flow gets its share, 1/n if one of n gets all.
// Source: Jain, Chiu, Hawe, A quantitative measure of fairness, DEC TR-301, 1984.
type JainLine struct {
	Title  string
	Points []JainPoint
}

// JainPoint is the index at one time, NaN if nothing ran.
type JainPoint struct {
	At    time.Time
	Index float64
}

const (
	jainTop    = 10.0
	jainPlot   = 110.0
	jainBottom = 22.0
)

// HTML draws the index on a scale of 0 to 1.
func (j JainLine) HTML() template.HTML {
	if len(j.Points) == 0 {
		return none("No flow has used any time in this period, so there is no index yet.")
	}
	var c canvas
	c.begin("pic-jain pic-gutter-short", j.Title, j.sentence(), jainTop+jainPlot+jainBottom)
	for _, v := range []float64{0, 0.25, 0.5, 0.75, 1} {
		y := jainTop + jainPlot*(1-v)
		c.empty("line", "class", "pic-grid", "x1", "0", "x2", "100%", "y1", number(y), "y2", number(y))
		if v*2 == math.Trunc(v*2) {
			c.text("pic-tick pic-end pic-mid", "-8", number(y), number(v))
		}
	}
	points := make([][2]float64, 0, len(j.Points))
	for i, p := range j.Points {
		x := 100.0
		if len(j.Points) > 1 {
			x = float64(i) / float64(len(j.Points)-1) * 100
		}
		points = append(points, [2]float64{x, 100 - clampNaN(p.Index)*100})
	}
	c.stretch(jainTop, jainPlot)
	c.line("pic-line", points)
	c.close("svg")
	last := j.Points[len(j.Points)-1]
	if y := points[len(points)-1][1]; !math.IsNaN(y) {
		c.empty("circle", "class", "pic-dot", "cx", "100%", "cy", number(jainTop+y/100*jainPlot), "r", "3")
	}
	period := last.At.Sub(j.Points[0].At)
	c.text("pic-tick", "0", number(jainTop+jainPlot+16), clock(j.Points[0].At, period))
	c.text("pic-tick pic-end", "100%", number(jainTop+jainPlot+16), clock(last.At, period))
	c.close("svg")
	return c.html()
}

func clampNaN(v float64) float64 {
	if math.IsNaN(v) {
		return v
	}
	return clamp(v)
}

func (j JainLine) sentence() string {
	last := j.Points[len(j.Points)-1].Index
	if math.IsNaN(last) {
		return "Nothing runs now."
	}
	return fmt.Sprintf("The index is %s now; 1 is fair.", number(last))
}

// Table returns the index at each time.
func (j JainLine) Table() Table {
	t := Table{Caption: j.Title, Head: []string{"Time (UTC)", "Index"}}
	for _, p := range j.Points {
		index := "–"
		if !math.IsNaN(p.Index) {
			index = number(p.Index)
		}
		t.Rows = append(t.Rows, []string{p.At.UTC().Format("15:04:05"), index})
	}
	return t
}
