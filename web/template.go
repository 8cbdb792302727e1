package web

import (
	"encoding/json"
	"fmt"
	"html/template"
	"net/url"
	"reflect"
	"strings"
	"time"

	"github.com/penstock/penstock/web/format"
)

// parse reads all templates. Each file defines those of one page.
func (d *Dashboard) parse() (*template.Template, error) {
	t, err := template.New("").Funcs(d.functions()).ParseFS(files, "templates/*.html")
	if err != nil {
		return nil, fmt.Errorf("read templates of the dashboard: %w", err)
	}
	return t, nil
}

// functions are those that templates call.
func (d *Dashboard) functions() template.FuncMap {
	return template.FuncMap{
		"count":    func(n any) string { return format.Count(whole(n)) },
		"bounded":  func(n, bound any) string { return format.Bounded(whole(n), whole(bound)) },
		"compact":  func(n any) string { return format.Compact(real(n)) },
		"rate":     func(v any) string { return orDash(v, format.Rate) },
		"dur":      func(v any) string { return orDash(v, format.Seconds) },
		"bytes":    func(n any) string { return format.Bytes(whole(n)) },
		"percent":  func(v any) string { return orDash(v, format.Percent) },
		"label":    format.Label,
		"ago":      ago,
		"until":    until,
		"since":    since,
		"json":     indented,
		"asset":    d.assets.Address,
		"link":     d.link,
		"verb":     d.offer,
		"words":    func(code string) string { return strings.ReplaceAll(code, "_", " ") },
		"contains": strings.Contains,
		"list":     func(values ...any) []any { return values },
		"with":     withFields,
	}
}

// whole returns any number as an integer, 0 for a nil pointer.
func whole(v any) int64 {
	r := reflect.Indirect(reflect.ValueOf(v))
	switch {
	case !r.IsValid():
		return 0
	case r.CanInt():
		return r.Int()
	case r.CanUint():
		return int64(r.Uint()) //nolint:gosec // counts
	case r.CanFloat():
		return int64(r.Float())
	}
	return 0
}

// real returns any number as a float.
func real(v any) float64 {
	r := reflect.Indirect(reflect.ValueOf(v))
	if r.IsValid() && r.CanFloat() {
		return r.Float()
	}
	return float64(whole(v))
}

// orDash writes a number, and a dash for a nil pointer.
func orDash(v any, write func(float64) string) string {
	if !reflect.Indirect(reflect.ValueOf(v)).IsValid() {
		return "–"
	}
	return write(real(v))
}

const exactTime = "2006-01-02 15:04:05 MST"

// moment returns the time of a time or a pointer to one; false: there is none.
func moment(v any) (time.Time, bool) {
	switch t := v.(type) {
	case time.Time:
		return t, !t.IsZero()
	case *time.Time:
		if t != nil {
			return *t, !t.IsZero()
		}
	}
	return time.Time{}, false
}

// ago writes a time in the past as a relative one, with the exact one on hover: 3 min ago. The
// browser keeps it current.
func ago(v any) template.HTML { return relative(v, "ago", time.Since, "", " ago") }

// until writes a time to come as a relative one: in 3 min.
func until(v any) template.HTML { return relative(v, "in", time.Until, "in ", "") }

// since writes the time that has passed since a moment: 3 min.
func since(v any) template.HTML { return relative(v, "for", time.Since, "", "") }

func relative(v any, kind string, distance func(time.Time) time.Duration, before, after string) template.HTML {
	t, known := moment(v)
	if !known {
		return `<span class="none">–</span>`
	}
	text := before + format.Duration(coarse(max(0, distance(t)))) + after
	return template.HTML(fmt.Sprintf( //nolint:gosec // digits and words of this function
		`<time datetime="%s" title="%s" data-rel="%s">%s</time>`,
		t.UTC().Format(time.RFC3339), t.UTC().Format(exactTime), kind, text))
}

// coarse rounds a duration as people read it.
func coarse(d time.Duration) time.Duration {
	switch {
	case d < time.Minute:
		return d.Truncate(time.Second)
	case d < time.Hour:
		return d.Truncate(time.Second)
	case d < 24*time.Hour:
		return d.Truncate(time.Minute)
	}
	return d.Truncate(time.Hour)
}

// indented writes a value as JSON for people. Integers keep all their digits.
func indented(v any) string {
	text, isText := v.(json.RawMessage)
	if !isText {
		text, _ = json.Marshal(v) // a model of this module
	}
	var b strings.Builder
	if err := indent(&b, text); err != nil {
		return string(text)
	}
	return b.String()
}

func indent(b *strings.Builder, text []byte) error {
	var raw json.RawMessage
	if err := json.Unmarshal(text, &raw); err != nil {
		return err
	}
	encoded, err := json.MarshalIndent(raw, "", "  ")
	b.Write(encoded)
	return err
}

// link returns the address of a page below the dashboard: path segments, then pairs of parameter
// and value. Empty values are left out. Segments and values are escaped.
func (d *Dashboard) link(path string, pairs ...any) (string, error) {
	if len(pairs)%2 != 0 {
		return "", fmt.Errorf("link %s: want pairs of parameter and value", path)
	}
	values := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		name, value := fmt.Sprint(pairs[i]), fmt.Sprint(pairs[i+1])
		placeholder := "{" + name + "}"
		switch {
		case strings.Contains(path, placeholder):
			path = strings.ReplaceAll(path, placeholder, url.PathEscape(value))
		case value != "":
			values.Set(name, value)
		}
	}
	address := d.cfg.Path + path
	if len(values) > 0 {
		address += "?" + values.Encode()
	}
	return address, nil
}

// offer writes the button of a verb for visitors with the role for it, and nothing for others: name of
// the verb, label, and pairs of parameter and value that name its object.
func (d *Dashboard) offer(v view, name, label string, pairs ...any) (template.HTML, error) {
	do, found := d.verbs[name]
	if !found {
		return "", fmt.Errorf("there is no verb %q", name)
	}
	if v.Role < do.role {
		return "", nil
	}
	back := v.Address
	if encoded := v.Query.Encode(); encoded != "" {
		back += "?" + encoded
	}
	pairs = append(pairs, "next", strings.TrimPrefix(back, v.Root))
	address, err := d.link("do/"+name, pairs...)
	if err != nil {
		return "", err
	}
	class := "button"
	if do.destroys {
		class += " danger"
	}
	return template.HTML(fmt.Sprintf( //nolint:gosec // escaped here
		`<a class="%s" href="%s" data-dialog>%s</a>`, class,
		template.HTMLEscapeString(address), template.HTMLEscapeString(label))), nil
}

// countOf writes a count of entries, marked where it is an estimate.
func countOf(n int64, estimated bool) string {
	if estimated {
		return "about " + format.Count(n)
	}
	return format.Count(n)
}

// capital writes a text with a capital letter.
func capital(text string) string {
	if text == "" {
		return ""
	}
	return strings.ToUpper(text[:1]) + text[1:]
}

// withFields returns a map of pairs of name and value, for a template that is called with several
// values.
func withFields(pairs ...any) (map[string]any, error) {
	if len(pairs)%2 != 0 {
		return nil, fmt.Errorf("want pairs of name and value")
	}
	fields := make(map[string]any, len(pairs)/2)
	for i := 0; i < len(pairs); i += 2 {
		fields[fmt.Sprint(pairs[i])] = pairs[i+1]
	}
	return fields, nil
}
