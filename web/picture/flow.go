package picture

import (
	"html/template"

	"github.com/penstock/penstock/web/format"
)

// StateFlow is the number of entries in each state and what moves between them.
type StateFlow struct {
	Initial   State // not due yet
	Waiting   State // pending and not covered by a lock
	Computing State // pending and covered by a lock
	Disabled  State
	Done      State
	Failed    State

	// Rates in entries a second; nil if not known.
	In, Promoted, Claimed, Retried, Finished, FailedRate *float64

	// Estimated says that counts are estimates or reach a bound.
	Estimated bool
	// DoneNote says over which time Done counts, and what else is in it: "last hour".
	DoneNote string
	// Awaiting is the number of entries in initial and pending that no lock covers, counted apart: the picture checks
	// that initial + pending = computing + awaiting compute.
	Awaiting int64
}

// State is a node of the state flow.
type State struct {
	Count int64
	Href  string // a path below the dashboard, empty for no link
}

// Pending is the number of pending entries.
func (f StateFlow) Pending() int64 { return f.Waiting.Count + f.Computing.Count }

// Balanced reports whether initial + pending = computing + awaiting compute.
func (f StateFlow) Balanced() bool {
	return f.Initial.Count+f.Pending() == f.Computing.Count+f.Awaiting
}

// box is where a node of the diagram is.
type box struct{ x, y, w, h float64 }

// flowLayout places the nodes and edges of the diagram.
type flowLayout struct {
	class         string
	width, height float64
	top           float64 // where the drawing begins
	boxes         map[string]box
	panel         box
	panelLabel    [2]float64
	bracket       [3]float64 // y, from x, to x of the span of awaiting compute
	push          [2]float64
	edges         []edge
}

// edge is an arrow: a path, the point and the direction of its head, and its label.
type edge struct {
	class, path  string
	headX, headY float64
	direction    string // right, down, up, left
	rate         string // which rate of StateFlow it carries
	labelX       float64
	labelY       float64
	words        string
}

var wideFlow = flowLayout{
	class: "pic-wide", width: 960, height: 292,
	boxes: map[string]box{
		"initial": {110, 84, 152, 74}, "waiting": {316, 84, 152, 74}, "computing": {546, 84, 152, 74},
		"done": {800, 36, 152, 74}, "failed": {800, 136, 152, 74}, "disabled": {316, 200, 152, 66},
	},
	panel: box{298, 44, 418, 130}, panelLabel: [2]float64{316, 68}, bracket: [3]float64{18, 110, 468},
	push: [2]float64{8, 118},
	edges: []edge{
		{path: "M72 134 H104", headX: 110, headY: 134, direction: "right"},
		{path: "M72 108 H86 V62 H280 V104 H310", headX: 316, headY: 104, direction: "right"},
		{path: "M262 134 H310", headX: 316, headY: 134, direction: "right", rate: "promoted", labelX: 289, labelY: 150},
		{path: "M468 121 H540", headX: 546, headY: 121, direction: "right", rate: "claimed", labelX: 505, labelY: 112},
		{
			path: "M698 105 H742 V73 H794", headX: 800, headY: 73, direction: "right", rate: "finished", labelX: 768,
			labelY: 64,
		},
		{
			path: "M698 137 H742 V173 H794", headX: 800, headY: 173, direction: "right", rate: "failed", labelX: 768,
			labelY: 192,
		},
		{
			path: "M622 158 V278 H186 V164", headX: 186, headY: 158, direction: "up",
			rate: "retried", labelX: 545, labelY: 271, words: "retry",
		},
		{class: "pic-dotted", path: "M392 158 V194", headX: 392, headY: 200, direction: "down"},
	},
}

var narrowFlow = flowLayout{
	class: "pic-narrow", width: 340, height: 424, top: 34,
	boxes: map[string]box{
		"initial": {178, 40, 136, 66}, "waiting": {16, 166, 136, 66}, "computing": {184, 166, 136, 66},
		"disabled": {16, 268, 136, 62}, "done": {184, 268, 136, 66}, "failed": {184, 348, 136, 66},
	},
	panel: box{4, 130, 328, 116}, panelLabel: [2]float64{184, 153}, bracket: [3]float64{0, 0, 0},
	push: [2]float64{16, 64},
	edges: []edge{
		{path: "M84 62 H172", headX: 178, headY: 62, direction: "right"},
		{path: "M40 88 V160", headX: 40, headY: 166, direction: "down"},
		{
			path: "M200 106 V118 H104 V160", headX: 104, headY: 166, direction: "down", rate: "promoted", labelX: 150,
			labelY: 113,
		},
		{path: "M152 199 H178", headX: 184, headY: 199, direction: "right"},
		{path: "M252 232 V262", headX: 252, headY: 268, direction: "down", rate: "finished", labelX: 290, labelY: 259},
		{
			path: "M196 232 V254 H166 V381 H178", headX: 184, headY: 381, direction: "right", rate: "failed",
			labelX: 124, labelY: 385,
		},
		{
			path: "M320 199 H336 V73 H320", headX: 314, headY: 73, direction: "left", rate: "retried", labelX: 292,
			labelY: 122, words: "retry",
		},
		{class: "pic-dotted", path: "M84 232 V262", headX: 84, headY: 268, direction: "down"},
	},
}

// HTML draws the flow of entries through their states.
func (f StateFlow) HTML() template.HTML {
	var c canvas
	c.open("div", "class", "pic-flow")
	f.draw(&c, wideFlow)
	f.draw(&c, narrowFlow)
	f.identity(&c)
	c.close("div")
	return c.html()
}

func (f StateFlow) draw(c *canvas, layout flowLayout) {
	c.open("svg", "class", "pic "+layout.class, "role", "group", "aria-label", "Flow of entries through their states",
		"viewBox", "0 "+number(layout.top)+" "+number(layout.width)+" "+number(layout.height-layout.top))
	c.describe("Flow of entries through their states", f.sentence())
	c.empty("rect", "class", "pic-panel", "x", number(layout.panel.x), "y", number(layout.panel.y),
		"width", number(layout.panel.w), "height", number(layout.panel.h), "rx", "14")
	c.open("text", "class", "pic-name", "x", number(layout.panelLabel[0]), "y", number(layout.panelLabel[1]))
	c.b.WriteString("pending ")
	c.leaf("tspan", f.count(f.Pending()), "class", "pic-strong")
	c.close("text")
	if layout.bracket[2] > 0 {
		f.bracket(c, layout.bracket)
	}
	c.text("pic-name", number(layout.push[0]), number(layout.push[1]), "push")
	if f.In != nil {
		c.text("pic-rate pic-start", number(layout.push[0]), number(layout.push[1]+17), format.Rate(*f.In))
	}
	for _, e := range layout.edges {
		f.edge(c, e)
	}
	for _, n := range f.nodes() {
		f.node(c, n, layout.boxes[n.name])
	}
	c.close("svg")
}

// flowNode is a state as it is drawn.
type flowNode struct {
	name, note string
	state      State
}

func (f StateFlow) nodes() []flowNode {
	return []flowNode{
		{"initial", "not due yet", f.Initial},
		{"waiting", "may be claimed", f.Waiting},
		{"computing", "under a lock", f.Computing},
		{"disabled", "switched off", f.Disabled},
		{"done", f.DoneNote, f.Done},
		{"failed", "no attempt left", f.Failed},
	}
}

// countMax is the length from which a number is written smaller to fit its node.
const countMax = 8

func (f StateFlow) node(c *canvas, n flowNode, at box) {
	count := f.count(n.state.Count)
	closing := c.link(n.state.Href, n.name+": "+count)
	c.open("g", "class", "pic-node pic-s-"+n.name)
	c.empty("rect", "class", "pic-box", "x", number(at.x), "y", number(at.y), "width", number(at.w), "height",
		number(at.h), "rx", "9")
	c.empty("rect", "class", "pic-bar", "x", number(at.x), "y", number(at.y+12), "width", "4", "height",
		number(at.h-24), "rx", "2")
	c.text("pic-name", number(at.x+16), number(at.y+20), n.name)
	class := "pic-count"
	if len(count) > countMax {
		class += " pic-long"
	}
	c.text(class, number(at.x+16), number(at.y+44), count)
	c.text("pic-note", number(at.x+16), number(at.y+60), n.note)
	c.close("g")
	c.close(closing...)
}

func (f StateFlow) bracket(c *canvas, at [3]float64) {
	y, from, to := at[0], at[1], at[2]
	c.empty("path", "class", "pic-bracket", "d",
		"M"+number(from)+" "+number(y+10)+" V"+number(y)+" H"+number(to)+" V"+number(y+10))
	c.open("text", "class", "pic-name pic-middle pic-halo", "x", number((from+to)/2), "y", number(y+4))
	c.b.WriteString("awaiting compute ")
	c.leaf("tspan", f.count(f.Awaiting), "class", "pic-strong")
	c.close("text")
}

func (f StateFlow) edge(c *canvas, e edge) {
	c.empty("path", "class", "pic-edge "+e.class, "d", e.path)
	c.empty("path", "class", "pic-head", "d", arrowHead(e))
	rate := f.rate(e.rate)
	switch {
	case rate != nil && e.words != "":
		c.text("pic-rate pic-middle pic-halo", number(e.labelX), number(e.labelY), e.words+" "+format.Rate(*rate))
	case rate != nil:
		c.text("pic-rate pic-middle pic-halo", number(e.labelX), number(e.labelY), format.Rate(*rate))
	case e.words != "":
		c.text("pic-rate pic-middle pic-halo", number(e.labelX), number(e.labelY), e.words)
	}
}

func (f StateFlow) rate(name string) *float64 {
	switch name {
	case "promoted":
		return f.Promoted
	case "claimed":
		return f.Claimed
	case "retried":
		return f.Retried
	case "finished":
		return f.Finished
	case "failed":
		return f.FailedRate
	}
	return nil
}

func arrowHead(e edge) string {
	at := func(dx, dy float64) string { return number(e.headX+dx) + " " + number(e.headY+dy) }
	switch e.direction {
	case "down":
		return "M" + at(0, 0) + "L" + at(-4.5, -8) + "L" + at(4.5, -8) + "Z"
	case "up":
		return "M" + at(0, 0) + "L" + at(-4.5, 8) + "L" + at(4.5, 8) + "Z"
	case "left":
		return "M" + at(0, 0) + "L" + at(8, -4.5) + "L" + at(8, 4.5) + "Z"
	}
	return "M" + at(0, 0) + "L" + at(-8, -4.5) + "L" + at(-8, 4.5) + "Z"
}

// identity writes the sum that must hold between the states, and whether it does.
func (f StateFlow) identity(c *canvas) {
	class, verdict := "pic-identity", "✓ balanced"
	if !f.Balanced() {
		class, verdict = "pic-identity pic-wrong", "✗ differs by "+
			format.Count(f.Initial.Count+f.Pending()-f.Computing.Count-f.Awaiting)
	}
	c.open("p", "class", class)
	c.leaf("span", "initial "+f.count(f.Initial.Count)+" + pending "+f.count(f.Pending()))
	c.leaf("span", "= computing "+f.count(f.Computing.Count)+" + awaiting compute "+f.count(f.Awaiting))
	c.leaf("b", verdict)
	c.close("p")
}

func (f StateFlow) count(n int64) string {
	if f.Estimated {
		return "≈" + format.Count(n)
	}
	return format.Count(n)
}

func (f StateFlow) sentence() string {
	return "Initial " + f.count(f.Initial.Count) + ", waiting " + f.count(f.Waiting.Count) + ", computing " +
		f.count(f.Computing.Count) + ", disabled " + f.count(f.Disabled.Count) + ", done " + f.count(f.Done.Count) +
		", failed " + f.count(f.Failed.Count) + "."
}

// Table returns the numbers of the picture.
func (f StateFlow) Table() Table {
	t := Table{Caption: "Entries by state", Head: []string{"State", "Entries", "Rate of arrival"}}
	rates := map[string]*float64{
		"initial": f.Retried, "waiting": f.In, "computing": f.Claimed, "done": f.Finished, "failed": f.FailedRate,
	}
	for _, n := range f.nodes() {
		rate := "–"
		if r := rates[n.name]; r != nil {
			rate = format.Rate(*r)
		}
		t.Rows = append(t.Rows, []string{n.name, f.count(n.state.Count), rate})
	}
	return t
}
