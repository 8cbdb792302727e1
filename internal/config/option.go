package config

import (
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// Option is one setting of a program.
type Option struct {
	Key     string // database.url
	Flag    string // database-url
	Env     string // PENSTOCK_DATABASE_URL
	Help    string
	Default string // in the form of a flag's value; empty if there is none

	value reflect.Value // the field of the program's struct
}

// Options lists the options of a program, in the order of its struct.
func Options(program string, cfg any) []Option {
	return options(program, "", reflect.ValueOf(cfg).Elem())
}

func options(program, prefix string, section reflect.Value) []Option {
	var all []Option
	for i := range section.NumField() {
		field := section.Type().Field(i)
		key := prefix + field.Tag.Get("koanf")
		if field.Type.Kind() == reflect.Struct {
			all = append(all, options(program, key+".", section.Field(i))...)
			continue
		}
		all = append(all, Option{
			Key:     key,
			Flag:    strings.NewReplacer(".", "-", "_", "-").Replace(strings.TrimPrefix(key, program+".")),
			Env:     envPrefix + strings.ToUpper(strings.ReplaceAll(key, ".", "_")),
			Help:    field.Tag.Get("help"),
			Default: write(section.Field(i)),
			value:   section.Field(i),
		})
	}
	return all
}

func write(v reflect.Value) string {
	switch {
	case v.IsZero() && v.Kind() != reflect.Bool:
		return ""
	case v.Kind() == reflect.Slice:
		return strings.Trim(strings.Join(strings.Fields(fmt.Sprint(v.Interface())), ","), "[]")
	default:
		return fmt.Sprint(v.Interface())
	}
}

// addTo declares the option as a flag. A type without a case here is a mistake in the program, found by its tests.
func (o Option) addTo(flags *pflag.FlagSet) error {
	switch v := o.value.Interface().(type) {
	case string:
		flags.String(o.Flag, v, o.Help)
	case bool:
		flags.Bool(o.Flag, v, o.Help)
	case int:
		flags.Int(o.Flag, v, o.Help)
	case int64:
		flags.Int64(o.Flag, v, o.Help)
	case float64:
		flags.Float64(o.Flag, v, o.Help)
	case time.Duration:
		flags.Duration(o.Flag, v, o.Help)
	case []string:
		flags.StringSlice(o.Flag, v, o.Help)
	default:
		return fmt.Errorf("option %s has type %T, which cannot be a flag", o.Key, v)
	}
	return nil
}

// Table writes the options as a Markdown table.
func Table(program string, cfg any) string {
	var b strings.Builder
	b.WriteString("| key in the file | flag | environment | default | |\n|---|---|---|---|---|\n")
	for _, o := range Options(program, cfg) {
		value := ""
		if o.Default != "" {
			value = "`" + o.Default + "`"
		}
		fmt.Fprintf(&b, "| `%s` | `--%s` | `%s` | %s | %s |\n", o.Key, o.Flag, o.Env, value,
			strings.ReplaceAll(o.Help, "|", "\\|"))
	}
	return b.String()
}

// Page replaces the table of one program in the text of docs/configuration.md, between the lines
// <!-- program --> and <!-- end -->.
func Page(text, program string, cfg any) (string, error) {
	begin, end := "<!-- "+program+" -->\n", "<!-- end -->"
	before, rest, found := strings.Cut(text, begin)
	_, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		return "", fmt.Errorf("the page has no place for %s: want the lines %s and %s", program,
			strings.TrimSpace(begin), end)
	}
	return before + begin + "\n" + Table(program, cfg) + "\n" + end + after, nil
}
