package picture

import (
	"html/template"
	"math"

	"github.com/penstock/penstock/web/format"
)

// Shares is what each flow should get and got.
type Shares struct {
	Title string
	Flows []Share
}

// Share is a flow with the share that its weight gives it and the one that it got, 0 to 1.
type Share struct {
	Flow        string
	Wanted, Got float64
}

const shareRow = 30.0

// shareTolerance is the difference from which a share counts as too large or too small.
const shareTolerance = 0.1

// HTML draws two bars for each flow: wanted as an outline, got filled.
func (s Shares) HTML() template.HTML {
	if len(s.Flows) == 0 {
		return none("No flow has used any time in this period.")
	}
	largest := 0.0
	for _, f := range s.Flows {
		largest = max(largest, clamp(f.Wanted), clamp(f.Got))
	}
	largest = max(largest, 0.01)
	var c canvas
	c.open("div", "class", "pic-frame")
	c.begin("pic-shares pic-gutter-names", s.Title, "Share wanted and got of each flow.",
		shareRow*float64(len(s.Flows)))
	for i, f := range s.Flows {
		y := shareRow * float64(i)
		c.open("g")
		c.leaf("title", label(f.Flow, 120)+": wanted "+format.Percent(f.Wanted)+", got "+
			format.Percent(f.Got)+f.verdict())
		c.text("pic-tick pic-end pic-mid", "-10", number(y+shareRow/2), label(f.name(), 22))
		c.empty("rect", "class", "pic-wanted", "x", "0", "y", number(y+5.5), "width", percent(clamp(f.Wanted)/largest),
			"height", number(shareRow-11), "rx", "3")
		c.empty("rect", "class", "pic-got"+f.class(), "x", "0", "y", number(y+9.5), "width",
			percent(clamp(f.Got)/largest),
			"height", number(shareRow-19), "rx", "2")
		c.leaf("text", format.Percent(f.Got)+f.arrow(), "class", "pic-tick pic-mid", "x", "100%", "dx", "9", "y",
			number(y+shareRow/2))
		c.close("g")
	}
	c.close("svg")
	c.legend([]key{
		{"pic-wanted", "", "share wanted by weight"},
		{"pic-got", "", "share got"},
		{"pic-got pic-less", "", "▼ at least a tenth less than wanted"},
	})
	c.close("div")
	return c.html()
}

func (f Share) name() string {
	if f.Flow == "" {
		return "(no flow)"
	}
	return f.Flow
}

// off is how far the share got is from the one wanted, as a part of the latter.
func (f Share) off() float64 {
	if f.Wanted <= 0 {
		return 0
	}
	return (f.Got - f.Wanted) / f.Wanted
}

func (f Share) class() string {
	if f.off() <= -shareTolerance {
		return " pic-less"
	}
	return ""
}

func (f Share) arrow() string {
	switch off := f.off(); {
	case off <= -shareTolerance:
		return " ▼"
	case off >= shareTolerance:
		return " ▲"
	}
	return ""
}

func (f Share) verdict() string {
	if math.Abs(f.off()) < shareTolerance {
		return ""
	}
	if f.off() < 0 {
		return ", " + format.Percent(-f.off()) + " less than wanted"
	}
	return ", " + format.Percent(f.off()) + " more than wanted"
}

// Table returns both shares of each flow.
func (s Shares) Table() Table {
	t := Table{Caption: s.Title, Head: []string{"Flow", "Wanted", "Got"}}
	for _, f := range s.Flows {
		t.Rows = append(t.Rows, []string{label(f.name(), 120), format.Percent(f.Wanted), format.Percent(f.Got)})
	}
	return t
}
