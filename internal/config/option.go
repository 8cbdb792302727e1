package config

import (
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/knadh/koanf/providers/posflag"
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
			below := key + "."
			if field.Anonymous { // tagged ",squash": its options are of this section
				below = prefix
			}
			all = append(all, options(program, below, section.Field(i))...)
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

// parse reads a text as a value of the option, as its flag does. The items of a list have a comma or a line break
// between them, and no blanks around them.
func (o Option) parse(text string) (any, error) {
	if o.value.Kind() == reflect.Slice {
		return trimmed(strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == '\n' })), nil
	}
	flags := pflag.NewFlagSet(o.Flag, pflag.ContinueOnError)
	if err := o.addTo(flags); err != nil {
		return nil, err
	}
	flag := flags.Lookup(o.Flag)
	if err := flag.Value.Set(text); err != nil {
		return nil, err
	}
	return posflag.FlagVal(flags, flag), nil
}

// parseYAML reads a value of the file; given is false for one that is empty.
func (o Option) parseYAML(value any) (parsed any, given bool, err error) {
	list, isList := value.([]any)
	switch {
	case !isList:
		text, err := plain(value)
		if err != nil || strings.TrimSpace(text) == "" {
			return nil, false, err
		}
		if _, isText := value.(string); !isText && o.value.Type() == reflect.TypeFor[time.Duration]() {
			return nil, false, fmt.Errorf("%s is no duration: write it with a unit, such as 10s", text)
		}
		parsed, err = o.parse(text)
		return parsed, true, err
	case o.value.Kind() != reflect.Slice:
		return nil, false, errors.New("it is a list: want one value")
	}
	items := make([]string, len(list))
	for i, item := range list {
		if items[i], err = plain(item); err != nil {
			return nil, false, err
		}
	}
	return trimmed(items), true, nil
}

// plain writes a value of YAML as a flag would be given.
func plain(value any) (string, error) {
	switch v := value.(type) {
	case nil:
		return "", nil
	case string:
		return v, nil
	case bool, int, int64, uint64:
		return fmt.Sprint(v), nil
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64), nil
	}
	return "", fmt.Errorf("it is %v: want a text or a number", value)
}

func trimmed(items []string) []string {
	kept := []string{}
	for _, item := range items {
		if item = strings.TrimSpace(item); item != "" {
			kept = append(kept, item)
		}
	}
	return kept
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
