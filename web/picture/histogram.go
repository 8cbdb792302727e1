package picture

import (
	"fmt"
	"html/template"
	"math"

	"github.com/penstock/penstock/web/format"
)

// Histogram is how many entries took how long.
type Histogram struct {
	Title   string
	Bounds  []float64 // upper bounds of the bars in seconds, growing; the last one may be +Inf
	Counts  []int64   // as many as Bounds
	Markers []Marker  // percentiles
}

// Marker is a named value on the scale of a histogram, in seconds.
type Marker struct {
	Name  string
	Value float64
}

const (
	histogramTop    = 46.0
	histogramPlot   = 120.0
	histogramBottom = 22.0
)

// HTML draws the histogram.
func (h Histogram) HTML() template.HTML {
	total := h.total()
	if total == 0 {
		return none("No entry has run in this period, so there are no run times yet.")
	}
	n := float64(len(h.Bounds))
	var most int64
	for _, count := range h.Counts {
		most = max(most, count)
	}
	var c canvas
	c.begin("pic-histogram", h.Title, fmt.Sprintf("Run times of %s entries.", format.Count(total)),
		histogramTop+histogramPlot+histogramBottom)
	bottom := histogramTop + histogramPlot
	for i, count := range h.Counts {
		if i >= len(h.Bounds) {
			break
		}
		height := histogramPlot * float64(count) / float64(most)
		if count > 0 {
			height = max(height, 2)
		}
		c.titled("rect", fmt.Sprintf("%s entries, %s of all, ran up to %s",
			format.Count(count), format.Percent(float64(count)/float64(total)), bound(h.Bounds[i])),
			"class", "pic-column", "x", percent((float64(i)+0.08)/n), "y", number(bottom-height),
			"width", percent(0.84/n), "height", number(height), "rx", "2")
	}
	c.empty("line", "class", "pic-axis", "x1", "0", "x2", "100%", "y1", number(bottom+0.5), "y2", number(bottom+0.5))
	for _, i := range spread(len(h.Bounds), 6) {
		c.text("pic-tick pic-middle", percent((float64(i)+0.5)/n), number(bottom+16), bound(h.Bounds[i]))
	}
	for i, m := range h.Markers {
		h.marker(&c, m, i, bottom)
	}
	c.close("svg")
	return c.html()
}

func (h Histogram) marker(c *canvas, m Marker, i int, bottom float64) {
	share := h.share(m.Value)
	if math.IsNaN(share) {
		return
	}
	y := 11 + float64(i%3)*14
	class := "pic-tick pic-strong pic-halo"
	if share > 0.6 {
		class += " pic-end"
	}
	c.empty("line", "class", "pic-marker", "x1", percent(share), "x2", percent(share), "y1", number(y+3), "y2",
		number(bottom))
	c.text(class, percent(share), number(y), m.Name+" "+format.Seconds(m.Value))
}

// share is where a value is on the scale of the bars, 0 to 1.
func (h Histogram) share(seconds float64) float64 {
	lower := 0.0
	for i, upper := range h.Bounds {
		if seconds <= upper {
			inside := 0.5
			if !math.IsInf(upper, 1) {
				inside = clamp((seconds - lower) / (upper - lower))
			}
			return (float64(i) + inside) / float64(len(h.Bounds))
		}
		lower = upper
	}
	return math.NaN()
}

func (h Histogram) total() int64 {
	var sum int64
	for _, count := range h.Counts {
		sum += count
	}
	return sum
}

// Table returns the number and the share of entries of each bar.
func (h Histogram) Table() Table {
	t := Table{Caption: h.Title, Head: []string{"Up to", "Entries", "Share"}}
	total := h.total()
	for i, count := range h.Counts {
		if i >= len(h.Bounds) || total == 0 {
			break
		}
		t.Rows = append(t.Rows, []string{
			bound(h.Bounds[i]), format.Count(count),
			format.Percent(float64(count) / float64(total)),
		})
	}
	return t
}
