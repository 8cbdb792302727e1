package simulate

import (
	"fmt"
	"html"
	"io"
	"math"
	"strings"
)

// The picture is a plot of 760 by 420 with room for the legend on the right.
const (
	plotWidth, plotHeight = 560.0, 340.0
	plotLeft, plotTop     = 60.0, 30.0
)

// colours of the frontiers, in the order in which names appear; the first is ours.
var colours = []string{"#0b6e4f", "#c0392b", "#8e6bbf", "#b8860b", "#2c7fb8", "#7f8c8d", "#444444", "#e67e22"}

// Picture writes the frontiers as SVG: GPU-hours to the right, late requests upwards on a root scale, so
// that small shares can be told apart.
func Picture(to io.Writer, title string, points []Point) error {
	var names []string
	seen := map[string]bool{}
	hours := 0.0
	for _, p := range points {
		if !seen[p.Name] {
			seen[p.Name] = true
			names = append(names, p.Name)
		}
		hours = max(hours, p.GPUHours)
	}
	var b strings.Builder
	b.WriteString(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 420" ` +
		`font-family="sans-serif" font-size="12">` + "\n")
	fmt.Fprintf(&b, `<rect width="860" height="420" fill="white"/><text x="%g" y="18" font-size="14">%s</text>`+"\n",
		plotLeft, html.EscapeString(title))
	axes(&b, hours)
	for i, name := range names {
		line(&b, Hull(points, name), name, colours[i%len(colours)], i, hours)
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(to, b.String())
	return err
}

func axes(b *strings.Builder, hours float64) {
	fmt.Fprintf(b, `<path d="M%g %gV%gH%g" fill="none" stroke="#888"/>`+"\n",
		plotLeft, plotTop, plotTop+plotHeight, plotLeft+plotWidth)
	for _, share := range []float64{0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 1} {
		fmt.Fprintf(b, `<text x="%g" y="%.1f" text-anchor="end">%g %%</text>`+"\n",
			plotLeft-6, down(share)+4, 100*share)
	}
	for i := range 6 {
		at := hours * float64(i) / 5
		fmt.Fprintf(b, `<text x="%.1f" y="%g" text-anchor="middle">%.0f</text>`+"\n",
			across(at, hours), plotTop+plotHeight+18, at)
	}
	fmt.Fprintf(b, `<text x="%g" y="%g" text-anchor="middle">GPU-hours; late requests upwards</text>`+"\n",
		plotLeft+plotWidth/2, plotTop+plotHeight+38)
}

func line(b *strings.Builder, hull []Point, name, colour string, index int, hours float64) {
	path := make([]string, len(hull))
	for i, p := range hull {
		path[i] = fmt.Sprintf("%.1f,%.1f", across(p.GPUHours, hours), down(p.Violations()))
		fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`,
			across(p.GPUHours, hours), down(p.Violations()), colour)
	}
	fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.5"/>`+"\n",
		strings.Join(path, " "), colour)
	y := plotTop + 16*float64(index+1)
	fmt.Fprintf(b, `<circle cx="%g" cy="%g" r="4" fill="%s"/><text x="%g" y="%g">%s</text>`+"\n",
		plotLeft+plotWidth+16, y-4, colour, plotLeft+plotWidth+26, y, html.EscapeString(name))
}

func across(hours, most float64) float64 { return plotLeft + plotWidth*hours/max(most, 1e-9) }

func down(share float64) float64 { return plotTop + plotHeight*(1-math.Sqrt(share)) }
