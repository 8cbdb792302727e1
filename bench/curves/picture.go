package curves

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"
)

// A picture has a panel for each of these sets of figures that an axis has.
var panels = []struct {
	unit   string
	titles []string
}{
	{"entries/s", []string{rateTitle}},
	{"claim, ms", []string{claim50, claim99}},
	{"pick-up, ms", []string{pick50, pick99}},
	{"CPU an entry, us", []string{clientTitle, serverTitle}},
}

const panelWidth, panelHeight = 4 * vg.Inch, 3 * vg.Inch

// WritePictures draws an axis into folder as SVG and PNG.
func WritePictures(folder string, a Axis, points []Point) error {
	if len(points) == 0 {
		return nil
	}
	var row []*plot.Plot
	for _, panel := range panels {
		titles := slices.DeleteFunc(slices.Clone(panel.titles),
			func(t string) bool { return !slices.Contains(present(points), t) })
		if len(titles) == 0 {
			continue
		}
		p, err := drawPanel(a, points, panel.unit, titles)
		if err != nil {
			return fmt.Errorf("draw %s: %w", a.Name, err)
		}
		row = append(row, p)
	}
	if len(row) == 0 {
		return nil
	}
	width := panelWidth * vg.Length(len(row))
	svg, png := vgsvg.New(width, panelHeight), vgimg.PngCanvas{Canvas: vgimg.New(width, panelHeight)}
	tiles := draw.Tiles{
		Rows: 1, Cols: len(row), PadX: vg.Millimeter * 4, PadTop: vg.Millimeter,
		PadBottom: vg.Millimeter, PadLeft: vg.Millimeter, PadRight: vg.Millimeter * 4,
	}
	for _, canvas := range []vg.CanvasSizer{svg, png} {
		for i, at := range plot.Align([][]*plot.Plot{row}, tiles, draw.New(canvas))[0] {
			row[i].Draw(at)
		}
	}
	for name, picture := range map[string]io.WriterTo{a.Name + ".svg": svg, a.Name + ".png": png} {
		if err := save(filepath.Join(folder, name), picture); err != nil {
			return err
		}
	}
	return nil
}

func save(path string, picture io.WriterTo) error {
	file, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("save picture: %w", err)
	}
	defer file.Close()
	if _, err := picture.WriteTo(file); err != nil {
		return fmt.Errorf("save picture: %w", err)
	}
	return file.Close()
}

// drawPanel draws a line for each series and figure. Points stand at equal distances, whatever their numbers.
func drawPanel(a Axis, points []Point, unit string, titles []string) (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = a.Title, a.X, unit
	p.Y.Min = 0
	p.Y.Tick.Marker = plot.TickerFunc(shortTicks)
	p.Legend.Top = true
	p.Legend.ThumbnailWidth = vg.Points(12)
	var names, series []string // in order of appearance
	for _, point := range points {
		if !slices.Contains(names, point.X) {
			names = append(names, point.X)
		}
		if !slices.Contains(series, point.Series) {
			series = append(series, point.Series)
		}
	}
	lines := 0
	for _, s := range series {
		for _, title := range titles {
			var xys plotter.XYs
			for _, point := range points {
				if value, ok := point.Figures[title]; ok && point.Series == s {
					xys = append(xys, plotter.XY{X: float64(slices.Index(names, point.X)), Y: value})
				}
			}
			line, dots, err := plotter.NewLinePoints(xys)
			if err != nil {
				return nil, err
			}
			line.Color, dots.Color = plotutil.Color(lines), plotutil.Color(lines)
			line.Width, dots.Shape, dots.Radius = vg.Points(1.5), draw.CircleGlyph{}, vg.Points(2)
			p.Add(line, dots)
			if name := label(s, title, len(series), len(titles)); name != "" {
				p.Legend.Add(name, line, dots)
			}
			lines++
		}
	}
	p.Add(plotter.NewGrid())
	p.NominalX(thinned(names)...)
	p.Y.Max *= 1.25 // room for the legend
	return p, nil
}

// shortTicks are the usual ticks without zeros behind the point.
func shortTicks(least, most float64) []plot.Tick {
	ticks := plot.DefaultTicks{}.Ticks(least, most)
	for i := range ticks {
		if ticks[i].Label != "" {
			ticks[i].Label = strconv.FormatFloat(ticks[i].Value, 'f', -1, 64)
		}
	}
	return ticks
}

func label(series, title string, manySeries, manyTitles int) string {
	switch {
	case manySeries > 1 && manyTitles > 1:
		return series + ": " + title
	case manySeries > 1:
		return series
	case manyTitles > 1:
		return title
	}
	return ""
}

// thinned blanks names until there is room for the rest.
func thinned(names []string) []string {
	every := (len(names) + 6) / 7
	names = slices.Clone(names)
	for i := range names {
		if i%every != 0 {
			names[i] = ""
		}
	}
	return names
}
