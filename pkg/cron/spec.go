package cron

import (
	"errors"
	"fmt"
	"strings"
	"time"

	robfig "github.com/robfig/cron/v3"
)

// spec is the parsed form: wall times, or a fixed interval.
type spec struct {
	walls     *robfig.SpecSchedule // in UTC; nil if interval is set
	interval  time.Duration        // of @every
	everyHour bool                 // the hour field starts with *: work that goes on, not an appointment
}

const maxSpecBytes = 200

func names() map[string]string {
	return map[string]string{
		"@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *", "@monthly": "0 0 1 * *", "@weekly": "0 0 * * 0",
		"@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@hourly": "0 * * * *",
	}
}

// field describes one field of a spec: its name, the parser's name for it, and its allowed values
// in words.
type field struct {
	name    string
	option  robfig.ParseOption
	allowed string
}

func fields() []field {
	return []field{
		{"second", robfig.Second, "0-59"},
		{"minute", robfig.Minute, "0-59"},
		{"hour", robfig.Hour, "0-23"},
		{"day of month", robfig.Dom, "1-31"},
		{"month", robfig.Month, "1-12 or jan-dec"},
		{"day of week", robfig.Dow, "0-6 or sun-sat, where 0 is Sunday"},
	}
}

func parseSpec(text string) (spec, error) {
	trimmed := strings.TrimSpace(text)
	switch {
	case trimmed == "":
		return spec{}, errors.New(`spec is empty; write for example "30 2 * * *" for every day at 02:30`)
	case len(trimmed) > maxSpecBytes:
		return spec{}, fmt.Errorf("spec has %d bytes, at most %d are read", len(trimmed), maxSpecBytes)
	case strings.HasPrefix(trimmed, "TZ=") || strings.HasPrefix(trimmed, "CRON_TZ="):
		return spec{}, fmt.Errorf("spec %q names a zone; take it out and set the zone field instead", text)
	case strings.HasPrefix(trimmed, "@every"):
		return parseEvery(trimmed)
	case strings.HasPrefix(trimmed, "@"):
		expanded, known := names()[strings.ToLower(trimmed)]
		if !known {
			return spec{}, fmt.Errorf(
				`spec %q is not known; use @hourly, @daily, @weekly, @monthly, @yearly, or "@every 90m"`, text)
		}
		trimmed = expanded
	}
	return parseFields(text, strings.Fields(trimmed))
}

func parseEvery(text string) (spec, error) {
	d, err := time.ParseDuration(strings.TrimSpace(strings.TrimPrefix(text, "@every")))
	if err != nil || d < time.Second || d%time.Second != 0 {
		return spec{}, fmt.Errorf(
			`spec %q: write a duration of whole seconds, such as "@every 90m" or "@every 1h30m"`,
			text)
	}
	return spec{interval: d}, nil
}

func parseFields(text string, parts []string) (spec, error) {
	order := fields()
	if len(parts) != len(order) && len(parts) != len(order)-1 {
		return spec{}, fmt.Errorf("spec %q has %d fields; write minute, hour, day of month, month, day of week, "+
			"with seconds in front if needed", text, len(parts))
	}
	order = order[len(order)-len(parts):]
	var errs []error
	var options robfig.ParseOption
	hour := ""
	for i, part := range parts {
		options |= order[i].option
		if order[i].option == robfig.Hour {
			hour = part
		}
		errs = append(errs, order[i].check(part))
	}
	if err := errors.Join(errs...); err != nil {
		return spec{}, fmt.Errorf("spec %q: %w", text, err)
	}
	parsed, err := robfig.NewParser(options).Parse(strings.Join(parts, " "))
	if err != nil {
		return spec{}, fmt.Errorf("spec %q: %w", text, err)
	}
	walls, ok := parsed.(*robfig.SpecSchedule)
	if !ok {
		return spec{}, fmt.Errorf("spec %q: want fields, not %T", text, parsed)
	}
	walls.Location = time.UTC
	return spec{walls: walls, everyHour: hour[0] == '*' || hour[0] == '?'}, nil
}

// check parses one field alone, so that an error can name it. It is stricter than the parser,
// which ignores empty elements and any text after a star.
func (f field) check(part string) error {
	for element := range strings.SplitSeq(part, ",") {
		star := strings.ContainsAny(element, "*?")
		switch {
		case element == "":
			return f.complain(part, "it has an empty element")
		case strings.IndexFunc(element, strange) >= 0:
			return f.complain(part, "L, W, # and other signs are not supported")
		case star && len(element) > 1 && element[1] != '/':
			return f.complain(part, "write a star alone or before a step")
		}
	}
	if _, err := robfig.NewParser(f.option).Parse(part); err != nil {
		return f.complain(part, err.Error())
	}
	return nil
}

func (f field) complain(part, problem string) error {
	return fmt.Errorf("%s field %q: %s; use %s, lists a,b, ranges a-b, or steps */n", f.name, part, problem, f.allowed)
}

func strange(r rune) bool {
	letter := 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z'
	return !letter && (r < '0' || r > '9') && !strings.ContainsRune("*?,/-", r)
}

// nextWall returns the first matching wall time at or after the given one, both as Unix
// seconds of a clock that shows UTC.
func (s spec) nextWall(wall int64) (int64, bool) {
	from := time.Unix(wall-1, 0).UTC()
	// The parser's own search gives up after five years; 29 February may need eight.
	for range 2 {
		if next := s.walls.Next(from); !next.IsZero() {
			return next.Unix(), true
		}
		from = time.Date(from.Year()+5, 1, 1, 0, 0, 0, 0, time.UTC).Add(-time.Second)
	}
	return 0, false
}
