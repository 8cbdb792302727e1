package web

import (
	"fmt"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// confirmField is the input by which a visitor confirms a change.
const confirmField = "confirm"

// form is the object and the inputs that a visitor gives a verb.
type form struct {
	values  url.Values
	objects []string // parameters that name the object: they come from an address, and nobody types them
}

// Get returns a parameter or a field: what names the object as it is, since a blank may be part of a name, and what
// people type without the blanks around it. Browsers send the line ends of hidden fields as CRLF.
func (f form) Get(name string) string {
	if slices.Contains(f.objects, name) {
		return strings.ReplaceAll(f.values.Get(name), "\r\n", "\n")
	}
	return strings.TrimSpace(f.values.Get(name))
}

// Number returns a field that is a whole number within bounds.
func (f form) Number(name string, least, most int64) (int64, error) {
	n, err := strconv.ParseInt(f.Get(name), 10, 64)
	switch {
	case (err != nil || n < least) && most == math.MaxInt64:
		return 0, f.refuse(name, fmt.Sprintf("a whole number from %d up", least))
	case err != nil || n < least || n > most:
		return 0, f.refuse(name, fmt.Sprintf("a whole number from %d to %d", least, most))
	}
	return n, nil
}

// ID returns a field that is the id of an object.
func (f form) ID(name string) (int64, error) { return f.Number(name, 1, math.MaxInt64) }

// Float returns a field that is a number.
func (f form) Float(name string) (float64, error) {
	n, err := strconv.ParseFloat(f.Get(name), 64)
	if err != nil || math.IsNaN(n) || math.IsInf(n, 0) {
		return 0, f.refuse(name, "a number")
	}
	return n, nil
}

// Duration returns a field that is a duration of at least so long.
func (f form) Duration(name string, least time.Duration) (time.Duration, error) {
	d, err := time.ParseDuration(f.Get(name))
	if err != nil || d < least {
		return 0, f.refuse(name, fmt.Sprintf("a duration from %v up, such as 30m or 24h", least))
	}
	return d, nil
}

// OptionalDuration returns a field that is a duration of a second or more, or empty, which is 0.
func (f form) OptionalDuration(name string) (time.Duration, error) {
	if f.Get(name) == "" {
		return 0, nil
	}
	return f.Duration(name, time.Second)
}

// Subject returns the object of a pause.
func (f form) Subject() operator.Subject {
	return operator.Subject{Scope: operator.Scope(f.Get("scope")), Value: f.Get("value"), Queue: f.Get("queue")}
}

// refuse is the error about the value of a field.
func (f form) refuse(name, want string) error {
	return fmt.Errorf("%s is %q: want %s: %w", strings.ReplaceAll(name, "_", " "), f.Get(name), want,
		invalidation.ErrInvalid)
}

// words splits a text at commas and white space.
func words(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' || r == '\n' || r == '\t' })
}
