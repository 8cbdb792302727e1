package curves

import (
	"cmp"
	"encoding/csv"
	"fmt"
	"io"
	"slices"
	"strconv"
	"text/tabwriter"
)

// WriteTable prints the points of an axis; costs are per entry.
func WriteTable(w io.Writer, a Axis, points []Point) error {
	if len(points) == 0 {
		return nil
	}
	fmt.Fprintf(w, "\n%s: %s\n", a.Name, a.Title)
	titles := present(points)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(tw, "%s\t", cmp.Or(a.X, "load"))
	for _, t := range titles {
		fmt.Fprint(tw, t, "\t")
	}
	fmt.Fprintln(tw)
	for _, p := range points {
		name := p.X
		if p.Series != "" {
			name = p.Series + ", " + p.X
		}
		fmt.Fprint(tw, name, "\t")
		for _, t := range titles {
			fmt.Fprint(tw, p.Figures.text(t), "\t")
		}
		fmt.Fprintln(tw)
	}
	return tw.Flush()
}

// present lists the columns that any of the points has.
func present(points []Point) []string {
	return slices.DeleteFunc(slices.Clone(columns), func(title string) bool {
		return !slices.ContainsFunc(points, func(p Point) bool { _, ok := p.Figures[title]; return ok })
	})
}

// text writes a figure with three digits or more.
func (f Figures) text(title string) string {
	v, ok := f[title]
	switch {
	case !ok:
		return ""
	case v >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 1:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	return strconv.FormatFloat(v, 'f', 4, 64)
}

// WriteCSV writes one line a figure.
func WriteCSV(w io.Writer, points []Point) error {
	out := csv.NewWriter(w)
	lines := [][]string{{"axis", "series", "x", "figure", "value"}}
	for _, p := range points {
		for _, t := range present([]Point{p}) {
			lines = append(lines, []string{p.Axis, p.Series, p.X, t, strconv.FormatFloat(p.Figures[t], 'g', 6, 64)})
		}
	}
	return cmp.Or(out.WriteAll(lines), out.Error())
}
