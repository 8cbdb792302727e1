package picture

import (
	"fmt"
	"html/template"
	"math"
	"strconv"
	"time"

	"github.com/penstock/penstock/web/format"
)

// HeatMap is how long entries waited: columns of time, rows of durations, darker where more entries were.
type HeatMap struct {
	Title  string
	Bounds []float64 // upper bounds of the rows in seconds, growing; the last one may be +Inf
	Cells  []HeatColumn
}

// HeatColumn is one interval of time. Percentiles are in seconds, NaN if not known.
type HeatColumn struct {
	At            time.Time
	Counts        []int64 // as many as HeatMap.Bounds
	P50, P95, P99 float64
}

const (
	heatSteps  = 6
	heatRow    = 18.0
	heatTop    = 8.0
	heatBottom = 22.0
)

// HTML draws the heat map with a line for each percentile.
func (h HeatMap) HTML() template.HTML {
	if len(h.Cells) == 0 || len(h.Bounds) == 0 {
		return none("No entry has started in this period, so there are no waiting times yet.")
	}
	rows := len(h.Bounds)
	plot := heatRow * float64(rows)
	var c canvas
	c.open("div", "class", "pic-frame")
	c.begin("pic-heat pic-gutter", h.Title, h.sentence(), heatTop+plot+heatBottom)
	for i, column := range h.Cells {
		h.column(&c, i, column)
	}
	for i, b := range h.Bounds {
		if i%2 == 0 || rows <= 6 {
			y := heatTop + plot - heatRow*float64(i) - heatRow/2
			c.text("pic-tick pic-end pic-mid", "-8", number(y), bound(b))
		}
	}
	h.times(&c, heatTop+plot)
	c.stretch(heatTop, plot)
	for _, line := range h.lines() {
		c.line("pic-halo-line", line.points)
		c.line("pic-"+line.name, line.points)
	}
	c.close("svg", "svg")
	c.open("ul", "class", "pic-legend")
	for _, line := range h.lines() {
		c.open("li")
		c.open("svg", "class", "pic pic-key", "width", "24", "height", "16", "aria-hidden", "true")
		c.empty("path", "class", "pic-"+line.name, "d", "M0 8H24")
		c.close("svg")
		c.leaf("span", line.name+" "+format.Seconds(line.last))
		c.close("li")
	}
	c.open("li", "class", "pic-ramp")
	c.leaf("span", "fewer")
	c.open("svg", "class", "pic pic-key", "width", strconv.Itoa(heatSteps*14), "height", "16", "aria-hidden", "true")
	for step := 1; step <= heatSteps; step++ {
		c.empty("rect", "class", "pic-h"+strconv.Itoa(step), "x", strconv.Itoa((step-1)*14), "y", "2", "width", "13",
			"height", "12", "rx", "2")
	}
	c.close("svg")
	c.leaf("span", "more entries")
	c.close("li", "ul", "div")
	return c.html()
}

func (h HeatMap) column(c *canvas, i int, column HeatColumn) {
	n := float64(len(h.Cells))
	plot := heatRow * float64(len(h.Bounds))
	for row, count := range column.Counts {
		if row >= len(h.Bounds) {
			break
		}
		c.titled("rect",
			fmt.Sprintf("%s: %s entries waited %s", clock(column.At, h.period()), format.Count(count), h.interval(row)),
			"class", "pic-h"+strconv.Itoa(level(count, h.most(), heatSteps)),
			"x", percent(float64(i)/n), "y", number(heatTop+plot-heatRow*float64(row+1)+0.5),
			"width", percent(1/n), "height", number(heatRow-1))
	}
}

func (h HeatMap) interval(row int) string {
	if row == 0 {
		return "up to " + bound(h.Bounds[0])
	}
	if math.IsInf(h.Bounds[row], 1) {
		return "more than " + bound(h.Bounds[row-1])
	}
	return bound(h.Bounds[row-1]) + " to " + bound(h.Bounds[row])
}

func (h HeatMap) times(c *canvas, bottom float64) {
	n := float64(len(h.Cells))
	for _, i := range spread(len(h.Cells), 4) {
		x := percent((float64(i) + 0.5) / n)
		class := "pic-tick pic-middle"
		if i == 0 {
			x, class = "0", "pic-tick"
		}
		c.text(class, x, number(bottom+16), clock(h.Cells[i].At, h.period()))
	}
}

type heatLine struct {
	name   string
	points [][2]float64
	last   float64
}

func (h HeatMap) lines() []heatLine {
	lines := []heatLine{{name: "p50"}, {name: "p95"}, {name: "p99"}}
	for i, column := range h.Cells {
		for k, v := range []float64{column.P50, column.P95, column.P99} {
			x := (float64(i) + 0.5) / float64(len(h.Cells)) * 100
			lines[k].points = append(lines[k].points, [2]float64{x, h.height(v)})
			if !math.IsNaN(v) || i == 0 {
				lines[k].last = v
			}
		}
	}
	return lines
}

// height is where a duration is on the scale of the rows: 100 at the bottom, 0 at the top.
func (h HeatMap) height(seconds float64) float64 {
	if math.IsNaN(seconds) {
		return math.NaN()
	}
	lower := 0.0
	for row, upper := range h.Bounds {
		if seconds <= upper || row == len(h.Bounds)-1 {
			inside := 0.5
			if !math.IsInf(upper, 1) {
				inside = clamp((seconds - lower) / (upper - lower))
			}
			return 100 - (float64(row)+inside)/float64(len(h.Bounds))*100
		}
		lower = upper
	}
	return math.NaN()
}

func (h HeatMap) most() int64 {
	var most int64
	for _, column := range h.Cells {
		for _, n := range column.Counts {
			most = max(most, n)
		}
	}
	return most
}

func (h HeatMap) period() time.Duration {
	if len(h.Cells) == 0 {
		return 0
	}
	return h.Cells[len(h.Cells)-1].At.Sub(h.Cells[0].At)
}

func (h HeatMap) sentence() string {
	last := h.Cells[len(h.Cells)-1]
	return fmt.Sprintf("Waiting times from %s to %s; at the end p50 %s, p95 %s, p99 %s.",
		clock(h.Cells[0].At, h.period()), clock(last.At, h.period()),
		format.Seconds(last.P50), format.Seconds(last.P95), format.Seconds(last.P99))
}

// Table returns the percentiles and the number of entries of each interval.
func (h HeatMap) Table() Table {
	t := Table{Caption: h.Title, Head: []string{"Time (UTC)", "Entries", "p50", "p95", "p99"}}
	for _, column := range h.Cells {
		var sum int64
		for _, n := range column.Counts {
			sum += n
		}
		t.Rows = append(t.Rows, []string{
			clock(column.At, h.period()), format.Count(sum),
			format.Seconds(column.P50), format.Seconds(column.P95), format.Seconds(column.P99),
		})
	}
	return t
}
