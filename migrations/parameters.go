package migrations

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// Where a definition of the catalog has parameters: the storage parameters of a table or index, the statistics target
// and the options of a column. They change how fast statements are and not what they do, and belong to the
// administrator of the database.
var parameterPatterns = map[string]*regexp.Regexp{
	"table":  regexp.MustCompile(`^kind \S+ persistence \S+ options (.*?) by `),
	"index":  regexp.MustCompile(` WITH \((.*?)\)`),
	"column": regexp.MustCompile(` (statistics \S* options .*?) collation `),
}

// splitParameters returns a definition without its parameters, and those by name.
func splitParameters(object, definition string) (rest string, parameters map[string]string) {
	kind, _, _ := strings.Cut(object, " ")
	parameters = map[string]string{}
	pattern := parameterPatterns[kind]
	if pattern == nil {
		return definition, parameters
	}
	found := pattern.FindStringSubmatchIndex(definition)
	if found == nil {
		return definition, parameters
	}
	text := definition[found[2]:found[3]]
	if target, options, column := strings.Cut(text, " options "); column {
		if target = strings.TrimPrefix(target, "statistics "); target != "" {
			parameters["statistics"] = target
		}
		text = options
	}
	for _, parameter := range strings.Split(strings.Trim(text, "{}"), ",") {
		if name, value, set := strings.Cut(strings.Trim(parameter, ` "`), "="); set {
			parameters[name] = strings.Trim(value, "'")
		}
	}
	cut := [2]int{found[2], found[3]}
	if kind == "index" {
		cut = [2]int{found[0], found[1]} // without parameters there is no WITH
	}
	return definition[:cut[0]] + definition[cut[1]:], parameters
}

// parameterChanges returns a line for each parameter of an object that was changed, and whether nothing else was. There
// is no line where they are only in another order, as after one was changed and set back.
func parameterChanges(object string, c change) (lines []string, only bool) {
	was, recorded := splitParameters(object, c.recorded)
	is, found := splitParameters(object, c.found)
	if was != is || switchedOff(found) && !switchedOff(recorded) {
		return nil, false
	}
	names := maps.Clone(recorded)
	maps.Copy(names, found)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if recorded[name] != found[name] {
			lines = append(lines, fmt.Sprintf("%s: %s is %s, Penstock's is %s", object, name, orUnset(found[name]),
				orUnset(recorded[name])))
		}
	}
	return lines, true
}

// switchedOff says that vacuum never cleans the table by itself, which no administrator may want.
func switchedOff(parameters map[string]string) bool {
	value, set := parameters["autovacuum_enabled"]
	return set && !slices.Contains([]string{"true", "on", "yes", "1"}, strings.ToLower(value))
}

func orUnset(value string) string {
	if value == "" {
		return "not set"
	}
	return value
}
