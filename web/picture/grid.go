package picture

import (
	"fmt"
	"html/template"
	"math"
	"strconv"

	"github.com/penstock/penstock/web/format"
)

const (
	cellSize    = 16
	cellPitch   = 19
	cellColumns = 16
)

// glyphs are strokes in a cell of 16 by 16, so that a state is told without its colour.
var glyphs = map[string]string{
	"run":   "M6.2 4.8L11 8L6.2 11.2Z",
	"load":  "M4 12L12 4M4 8L8 4M8 12L12 8",
	"cross": "M5 5L11 11M11 5L5 11",
	"drain": "M8 4V11M5 8.2L8 11.2L11 8.2",
	"doubt": "M6 6.4C6 4.2 10 4.2 10 6.5C10 8 8 8 8 9.5M8 11.6V11.9",
	"late":  "M8 4V8.8M8 11.3V11.7",
	"wave":  "M4 9.2C5.2 6 6.8 6 8 8C9.2 10 10.8 10 12 6.8",
}

// cell draws one cell of a grid.
func cell(c *canvas, class, glyph string, x, y float64) {
	c.empty("rect", "class", class, "x", number(x+0.5), "y", number(y+0.5),
		"width", strconv.Itoa(cellSize-1), "height", strconv.Itoa(cellSize-1), "rx", "3")
	if d := glyphs[glyph]; d != "" {
		transform := "translate(" + number(x) + " " + number(y) + ")"
		c.empty("path", "class", "pic-glyph "+class+"-glyph", "d", d, "transform", transform)
	}
}

// SlotState is the state of a slot of an instance.
type SlotState string

// The states of a slot.
const (
	SlotIdle      SlotState = "idle"
	SlotBusy      SlotState = "busy"
	SlotLoading   SlotState = "loading"
	SlotUnhealthy SlotState = "unhealthy"
	SlotDraining  SlotState = "draining"
	SlotDoubt     SlotState = "in doubt"
	SlotOnline    SlotState = "online"  // held by a gateway
	SlotDurable   SlotState = "durable" // held by a task node
)

// slotKeys is the legend of a slot grid, in the order of the states.
var slotKeys = []struct {
	state SlotState
	key   key
}{
	{SlotIdle, key{"pic-c-idle", "", "idle"}},
	{SlotBusy, key{"pic-c-busy", "run", "busy"}},
	{SlotLoading, key{"pic-c-loading", "load", "loading"}},
	{SlotUnhealthy, key{"pic-c-unhealthy", "cross", "unhealthy"}},
	{SlotDraining, key{"pic-c-draining", "drain", "draining"}},
	{SlotDoubt, key{"pic-c-doubt", "doubt", "in doubt: a call of a lost node may still run"}},
	{SlotOnline, key{"pic-c-online", "wave", "online: held by a gateway"}},
	{SlotDurable, key{"pic-c-busy", "run", "durable: held by a task node"}},
}

// holderless are the states of slotKeys that do not tell the kind of the holder.
const holderless = 6

// SlotGrid is the state of each slot of an instance.
type SlotGrid struct {
	Title string
	Slots []Slot
}

// Slot is a cell of a slot grid.
type Slot struct {
	State  SlotState
	Detail string // the entry, the node
	Href   string
}

// HTML draws a cell for each slot, 16 to a row.
func (g SlotGrid) HTML() template.HTML {
	if len(g.Slots) == 0 {
		return none("This instance has no slots.")
	}
	return grid(label(g.Title, 80), g.sentence(), len(g.Slots), func(c *canvas, i int, x, y float64) {
		s := g.Slots[i]
		k := slotKey(s.State)
		title := fmt.Sprintf("slot %d: %s", i, k.text)
		if s.Detail != "" {
			title += ", " + label(s.Detail, 120)
		}
		closing := c.link(s.Href, title)
		c.open("g")
		c.leaf("title", title)
		cell(c, k.class, k.glyph, x, y)
		c.close("g")
		c.close(closing...)
	})
}

func slotKey(state SlotState) key {
	for _, k := range slotKeys {
		if k.state == state {
			return k.key
		}
	}
	return slotKeys[0].key
}

// SlotLegend lists the glyphs of a slot grid.
func SlotLegend() template.HTML {
	var c canvas
	keys := make([]key, 0, holderless)
	for _, k := range slotKeys[:holderless] {
		keys = append(keys, k.key)
	}
	c.legend(keys)
	return c.html()
}

// HolderLegend lists the glyphs of a slot grid that tells online from durable calls.
func HolderLegend() template.HTML {
	var c canvas
	var keys []key
	for _, k := range slotKeys {
		if k.state != SlotBusy {
			keys = append(keys, k.key)
		}
	}
	c.legend(keys)
	return c.html()
}

func (g SlotGrid) counts() map[SlotState]int64 {
	counts := map[SlotState]int64{}
	for _, s := range g.Slots {
		counts[s.State]++
	}
	return counts
}

func (g SlotGrid) sentence() string {
	text := ""
	counts := g.counts()
	for _, k := range slotKeys {
		if n := counts[k.state]; n > 0 {
			text += ", " + format.Count(n) + " " + string(k.state)
		}
	}
	return fmt.Sprintf("%d slots%s.", len(g.Slots), text)
}

// Table returns how many slots are in each state.
func (g SlotGrid) Table() Table {
	t := Table{Caption: label(g.Title, 80), Head: []string{"State", "Slots"}}
	counts := g.counts()
	for i, k := range slotKeys {
		if i < holderless || counts[k.state] > 0 {
			t.Rows = append(t.Rows, []string{string(k.state), format.Count(counts[k.state])})
		}
	}
	return t
}

// LockMatrix is the locks of one node, one cell each, coloured by age against the p99 of the run time.
type LockMatrix struct {
	Node  string
	Locks []LockCell
	Idle  int // threads without a lock
}

// LockCell is a lock of a node. Ages are in seconds; P99 is NaN or 0 if no run time is known.
type LockCell struct {
	Key     string
	Age     float64
	P99     float64
	Problem string // the verdict on a lock that is stuck or inconsistent
	Href    string
}

var lockKeys = []key{
	{"pic-c-idle", "", "free thread"},
	{"pic-a-1", "", "younger than half the p99 of the run time"},
	{"pic-a-2", "", "younger than the p99"},
	{"pic-a-3", "late", "older than the p99"},
	{"pic-a-4", "late", "older than twice the p99"},
	{"pic-a-bad", "cross", "stuck or inconsistent"},
	{"pic-a-new", "run", "no run time known yet"},
}

const idleCellsMax = 256

// HTML draws a cell for each lock, the oldest first, and one for each free thread.
func (m LockMatrix) HTML() template.HTML {
	idle := min(max(m.Idle, 0), idleCellsMax)
	if len(m.Locks)+idle == 0 {
		return none("This node holds no lock.")
	}
	title := "Locks of " + label(m.Node, 60)
	return grid(title, m.sentence(), len(m.Locks)+idle, func(c *canvas, i int, x, y float64) {
		if i >= len(m.Locks) {
			c.open("g")
			c.leaf("title", "free thread")
			cell(c, "pic-c-idle", "", x, y)
			c.close("g")
			return
		}
		l := m.Locks[i]
		k := lockKeys[l.rank()]
		text := label(l.Key, 80) + ", held for " + format.Seconds(l.Age) + ": " + k.text
		if l.Problem != "" {
			text += ", " + label(l.Problem, 120)
		}
		closing := c.link(l.Href, text)
		c.open("g")
		c.leaf("title", text)
		cell(c, k.class, k.glyph, x, y)
		c.close("g")
		c.close(closing...)
	})
}

// rank is the row of lockKeys of a lock.
func (l LockCell) rank() int {
	switch {
	case l.Problem != "":
		return 5
	case math.IsNaN(l.P99) || l.P99 <= 0:
		return 6
	case l.Age < l.P99/2:
		return 1
	case l.Age < l.P99:
		return 2
	case l.Age < 2*l.P99:
		return 3
	}
	return 4
}

func (m LockMatrix) sentence() string {
	late := 0
	for _, l := range m.Locks {
		if r := l.rank(); r >= 3 && r <= 5 {
			late++
		}
	}
	return fmt.Sprintf("%d locks, of which %d are older than the p99 of the run time or stuck, and %d free threads.",
		len(m.Locks), late, max(m.Idle, 0))
}

// LockLegend lists the colours and glyphs of a lock matrix.
func LockLegend() template.HTML {
	var c canvas
	c.legend(lockKeys)
	return c.html()
}

// Table returns the age of each lock.
func (m LockMatrix) Table() Table {
	t := Table{Caption: "Locks of " + label(m.Node, 60), Head: []string{"Key", "Age", "p99 of the run time", "Verdict"}}
	for _, l := range m.Locks {
		verdict := l.Problem
		if verdict == "" {
			verdict = lockKeys[l.rank()].text
		}
		p99 := "–"
		if l.P99 > 0 {
			p99 = format.Seconds(l.P99)
		}
		t.Rows = append(t.Rows, []string{label(l.Key, 80), format.Seconds(l.Age), p99, label(verdict, 120)})
	}
	return t
}

// grid draws n cells in rows. Its width is that of its cells: it does not stretch.
func grid(title, description string, n int, draw func(c *canvas, i int, x, y float64)) template.HTML {
	columns := min(n, cellColumns)
	rows := (n + cellColumns - 1) / cellColumns
	var c canvas
	c.open("svg", "class", "pic pic-cells", "role", "group", "aria-label", title,
		"width", strconv.Itoa(columns*cellPitch-cellPitch+cellSize), "height",
		strconv.Itoa(rows*cellPitch-cellPitch+cellSize))
	c.leaf("desc", description)
	for i := range n {
		draw(&c, i, float64(i%cellColumns*cellPitch), float64(i/cellColumns*cellPitch))
	}
	c.close("svg")
	return c.html()
}
