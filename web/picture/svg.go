package picture

import (
	"html"
	"html/template"
	"math"
	"strconv"
	"strings"

	"github.com/penstock/penstock/web/format"
)

const (
	textMax      = 280     // characters of a text
	attributeMax = 1 << 20 // of an attribute; the longest are paths
)

// canvas collects markup. Attributes are given as pairs of name and value; values and texts are escaped,
// and have no characters that do not print.
type canvas struct{ b strings.Builder }

// begin opens a picture of the full width and a height in pixels.
func (c *canvas) begin(class, title, description string, height float64) {
	c.open("svg", "class", "pic "+class, "role", "img", "width", "100%", "height", number(height))
	c.describe(title, description)
}

// describe names the element that was opened last, for screen readers and as a tooltip.
func (c *canvas) describe(title, description string) {
	c.leaf("title", title)
	if description != "" {
		c.leaf("desc", description)
	}
}

func (c *canvas) open(tag string, attributes ...string) {
	c.tag(tag, attributes)
	c.b.WriteString(">")
}

func (c *canvas) close(tags ...string) {
	for _, tag := range tags {
		c.b.WriteString("</" + tag + ">")
	}
}

func (c *canvas) empty(tag string, attributes ...string) {
	c.tag(tag, attributes)
	c.b.WriteString("/>")
}

// leaf writes an element that has a text and nothing else.
func (c *canvas) leaf(tag, text string, attributes ...string) {
	c.open(tag, attributes...)
	c.b.WriteString(html.EscapeString(label(text, textMax)))
	c.close(tag)
}

func (c *canvas) tag(tag string, attributes []string) {
	c.b.WriteString("<" + tag)
	for i := 0; i+1 < len(attributes); i += 2 {
		c.b.WriteString(" " + attributes[i] + `="` + html.EscapeString(label(attributes[i+1], attributeMax)) + `"`)
	}
}

// text writes a text at x and y; the class decides about its anchor.
func (c *canvas) text(class, x, y, text string) {
	c.leaf("text", text, "class", class, "x", x, "y", y)
}

// titled writes an element with a tooltip.
func (c *canvas) titled(tag, title string, attributes ...string) {
	c.open(tag, attributes...)
	c.leaf("title", title)
	c.close(tag)
}

// stretch opens a nested svg of 100 by 100 units over the whole width, from y on and height pixels high.
func (c *canvas) stretch(y, height float64) {
	c.open("svg", "x", "0", "y", number(y), "width", "100%", "height", number(height),
		"viewBox", "0 0 100 100", "preserveAspectRatio", "none", "class", "pic-stretch")
}

// line draws a polyline through the points of a stretched svg. A NaN interrupts it.
func (c *canvas) line(class string, points [][2]float64) {
	var d strings.Builder
	pen := "M"
	for _, p := range points {
		if math.IsNaN(p[1]) || math.IsInf(p[1], 0) {
			pen = "M"
			continue
		}
		d.WriteString(pen + number(p[0]) + " " + number(p[1]))
		pen = "L"
	}
	if d.Len() > 0 {
		c.empty("path", "class", class, "d", d.String())
	}
}

func (c *canvas) html() template.HTML {
	return template.HTML(c.b.String()) //nolint:gosec // every text and attribute went through html.EscapeString
}

// link opens a link to an address of the dashboard. An address that is not a path of this server is left out.
// It returns the tag to close, or nothing.
func (c *canvas) link(href, label string) []string {
	if !strings.HasPrefix(href, "/") || strings.HasPrefix(href, "//") || strings.HasPrefix(href, `/\`) {
		return nil
	}
	c.open("a", "href", href, "aria-label", label)
	return []string{"a"}
}

// number writes a coordinate with at most two decimals.
func number(v float64) string {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		v = 0
	}
	text := strconv.FormatFloat(v, 'f', 2, 64)
	text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	if text == "-0" {
		return "0"
	}
	return text
}

// percent writes a share of the width, 0 to 1.
func percent(share float64) string { return number(clamp(share)*100) + "%" }

func clamp(share float64) float64 {
	if math.IsNaN(share) {
		return 0
	}
	return min(max(share, 0), 1)
}

// label is a text of a user in a picture.
func label(text string, most int) string { return format.Label(text, most) }

// none is the picture of nothing: a sentence that says what is missing.
func none(sentence string) template.HTML {
	var c canvas
	c.leaf("p", sentence, "class", "pic-empty")
	return c.html()
}

// key is a row of a legend: the glyph of a class, and its meaning.
type key struct{ class, glyph, text string }

// legend lists what glyphs mean.
func (c *canvas) legend(keys []key) {
	c.open("ul", "class", "pic-legend")
	for _, k := range keys {
		c.open("li")
		c.open("svg", "class", "pic pic-key", "width", "16", "height", "16", "aria-hidden", "true")
		cell(c, k.class, k.glyph, 0, 0)
		c.close("svg")
		c.leaf("span", k.text)
		c.close("li")
	}
	c.close("ul")
}
