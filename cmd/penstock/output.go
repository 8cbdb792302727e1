package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/charmbracelet/x/ansi"
	"go.yaml.in/yaml/v3"

	"github.com/penstock/penstock/internal/oneline"
)

var formats = []string{"table", "wide", "json", "jsonl", "yaml"}

// column is one column of a table. Wide ones are left out of the narrow form.
type column[T any] struct {
	title string
	text  func(T) string
	wide  bool
	right bool // numbers
}

// printList writes rows in the format that was asked for.
func printList[T any](a *app, columns []column[T], rows []T) error {
	switch a.format {
	case "table", "wide":
		_, err := io.WriteString(a.out, a.table(columns2text(columns, rows, a.format == "wide")))
		return err
	case "jsonl":
		var text bytes.Buffer
		encoder := json.NewEncoder(&text)
		for _, row := range rows {
			if err := encoder.Encode(row); err != nil {
				return err
			}
		}
		_, err := a.out.Write(escapeControls(text.Bytes()))
		return err
	}
	if rows == nil {
		rows = []T{}
	}
	return a.encode(rows)
}

// tabular says whether the output is for people.
func (a *app) tabular() bool { return a.format == "table" || a.format == "wide" }

// printOne writes one thing; text is its form for people.
func printOne(a *app, v any, text func(io.Writer)) error {
	if a.tabular() {
		text(a.out)
		return nil
	}
	return a.encode(v)
}

// encode writes JSON or YAML. YAML is made of the JSON, so that both have the same names and numbers.
func (a *app) encode(v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("write %s: %w", a.format, err)
	}
	text = escapeControls(text)
	switch a.format {
	case "yaml":
		var tree yaml.Node
		if err := yaml.Unmarshal(text, &tree); err != nil {
			return fmt.Errorf("write yaml: %w", err)
		}
		block(&tree)
		var blocks bytes.Buffer
		encoder := yaml.NewEncoder(&blocks)
		encoder.SetIndent(2)
		if err := encoder.Encode(&tree); err != nil {
			return fmt.Errorf("write yaml: %w", err)
		}
		_, err := a.out.Write(escapeControls(blocks.Bytes()))
		return err
	case "json":
		var indented bytes.Buffer
		if err := json.Indent(&indented, text, "", "  "); err != nil {
			return fmt.Errorf("write json: %w", err)
		}
		text = indented.Bytes()
	}
	_, err = fmt.Fprintf(a.out, "%s\n", text)
	return err
}

// block takes the style of JSON from a YAML tree: nothing in braces, no quotes where none are needed. Escapes
// need quotes.
func block(n *yaml.Node) {
	n.Style = 0
	if strings.ContainsFunc(n.Value, isControl) {
		n.Style = yaml.DoubleQuotedStyle
	}
	if len(n.Content) == 0 && (n.Kind == yaml.SequenceNode || n.Kind == yaml.MappingNode) {
		n.Style = yaml.FlowStyle
	}
	for _, child := range n.Content {
		block(child)
	}
}

// grid is a table as texts; the first row holds the titles.
type grid struct {
	cells [][]string
	right []bool
}

func columns2text[T any](columns []column[T], rows []T, wide bool) grid {
	columns = slices.DeleteFunc(slices.Clone(columns), func(c column[T]) bool { return c.wide && !wide })
	g := grid{cells: [][]string{{}}}
	for _, c := range columns {
		g.cells[0] = append(g.cells[0], c.title)
		g.right = append(g.right, c.right)
	}
	for _, row := range rows {
		line := make([]string, len(columns))
		for i, c := range columns {
			line[i] = oneline.Of(c.text(row))
		}
		g.cells = append(g.cells, line)
	}
	return g
}

// table lays a grid out with two spaces between columns. Cells are coloured by their word, after they are measured.
func (a *app) table(g grid) string {
	widths := make([]int, len(g.right))
	for _, line := range g.cells {
		for i, cell := range line {
			widths[i] = max(widths[i], ansi.StringWidth(cell))
		}
	}
	var out strings.Builder
	for n, line := range g.cells {
		var text strings.Builder
		for i, cell := range line {
			pad := strings.Repeat(" ", widths[i]-ansi.StringWidth(cell))
			colour := cellColours[cell]
			if n == 0 {
				colour = bold
			}
			cell = a.paint(colour, cell)
			switch {
			case g.right[i]:
				text.WriteString(pad + cell)
			case i == len(line)-1:
				text.WriteString(cell)
			default:
				text.WriteString(cell + pad)
			}
			if i < len(line)-1 {
				text.WriteString("  ")
			}
		}
		out.WriteString(strings.TrimRight(text.String(), " ") + "\n")
	}
	return out.String()
}

// facts writes pairs of name and value under one another, without those that have no value.
func (a *app) facts(w io.Writer, pairs ...string) {
	width := 0
	for p := range slices.Chunk(pairs, 2) {
		if p[1] != "" {
			width = max(width, len(p[0]))
		}
	}
	for p := range slices.Chunk(pairs, 2) {
		if p[1] != "" {
			fmt.Fprintf(w, "%s%s  %s\n", a.paint(dim, p[0]), strings.Repeat(" ", width-len(p[0])),
				a.paint(cellColours[p[1]], oneline.Of(p[1])))
		}
	}
}

// indented writes JSON under a title; nothing for null.
func (a *app) indented(w io.Writer, title string, text json.RawMessage) {
	if len(text) == 0 || string(text) == "null" || string(text) == "{}" || string(text) == "[]" {
		return
	}
	var pretty bytes.Buffer
	if json.Indent(&pretty, text, "  ", "  ") != nil {
		pretty.Write(text)
	}
	fmt.Fprintf(w, "\n%s\n  %s\n", a.paint(bold, title), escapeControls(pretty.Bytes()))
}

// escapeControls writes characters that JSON leaves as they are as escapes: DEL and U+0080 to U+009F, which some
// terminals obey, and those that change the direction in which the rest of the line is read.
func escapeControls(text []byte) []byte {
	if !bytes.ContainsFunc(text, isControl) {
		return text
	}
	var safe bytes.Buffer
	for _, r := range string(text) {
		if isControl(r) {
			fmt.Fprintf(&safe, "\\u%04x", r)
		} else {
			safe.WriteRune(r)
		}
	}
	return safe.Bytes()
}

func isControl(r rune) bool { return r >= 0x7f && r < 0xa0 || unicode.Is(unicode.Bidi_Control, r) }

// behind is the hint that asks for what comes behind a key, whose text is a client's: quoted for a shell, or the hint
// otherwise if the key has characters that a terminal obeys.
func behind(key, otherwise string) string {
	if strings.ContainsFunc(key, func(r rune) bool { return isControl(r) || unicode.IsControl(r) }) {
		return otherwise
	}
	return "--after '" + strings.ReplaceAll(key, "'", `'\''`) + "'"
}

// Colours are those of ANSI, so that they fit the person's own scheme.
const (
	bold   = "1"
	dim    = "2"
	red    = "31"
	green  = "32"
	yellow = "33"
)

// cellColours are the words that stand out.
var cellColours = map[string]string{
	"dead": red, "failed": red, "critical": red, "unhealthy": red, "defunct": red,
	"draining": yellow, "paused": yellow, "disabled": yellow, "warning": yellow, "expired": yellow, "cancelled": yellow,
	"skipped": yellow,
	"live":    green, "computing": green, "done": green, "fine": green, "ready": green, "serving": green,
}

func (a *app) paint(colour, text string) string {
	if !a.colours || colour == "" || text == "" {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

// age writes seconds as people say them: 0.4s, 41s, 4m5s, 3h20m, 2d4h.
func age(seconds float64) string {
	switch s := int64(max(seconds, 0)); {
	case seconds < 9.95:
		return fmt.Sprintf("%.1fs", max(seconds, 0))
	case s < 60:
		return fmt.Sprintf("%ds", s)
	case s < 3600:
		return fmt.Sprintf("%dm%ds", s/60, s%60)
	case s < 86400:
		return fmt.Sprintf("%dh%dm", s/3600, s%3600/60)
	default:
		return fmt.Sprintf("%dd%dh", s/86400, s%86400/3600)
	}
}

func ageOrNone(seconds *float64) string {
	if seconds == nil {
		return ""
	}
	return age(*seconds)
}

// ago is the time so long ago, as the API takes one; empty for no time.
func (a *app) ago(since time.Duration) string {
	if since <= 0 {
		return ""
	}
	return a.now().Add(-since).UTC().Format(time.RFC3339Nano)
}

// since is the age of a time by this machine's clock.
func (a *app) since(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return age(a.now().Sub(t).Seconds())
}

// stamp writes a time in full.
func stamp(t *time.Time) string {
	if t == nil || t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}

func short(s string, width int) string { return ansi.Truncate(oneline.Of(s), width, "…") }

// number writes n, nothing for zero, so that other values are easy to find.
func number[N int | int16 | int32 | int64](n N) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

// many writes n of something.
func many[N int | int32 | int64](n N, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, more)
}

func optional[N int | int32 | ~int64 | float64](n *N) string {
	if n == nil {
		return ""
	}
	return fmt.Sprint(*n)
}
