package api

import (
	"errors"
	"time"

	"github.com/danielgtaylor/huma/v2"
)

// Moment is a time in a body, written as RFC 3339 has it or as a duration from now, as the CLI takes it.
type Moment struct {
	time.Time
	unreadable bool // in a body, see Resolve
}

var errMoment = errors.New("want a time such as 2026-01-31T12:00:00Z, or a duration from now such as 30m")

// UnmarshalText reads either form. A duration must be positive.
func (m *Moment) UnmarshalText(text []byte) error {
	if d, err := time.ParseDuration(string(text)); err == nil {
		if d <= 0 {
			return errMoment
		}
		m.Time = time.Now().Add(d)
		return nil
	}
	t, err := time.Parse(time.RFC3339, string(text))
	if err != nil {
		return errMoment
	}
	m.Time = t
	return nil
}

// UnmarshalJSON reads a JSON text; null is the zero time. It leaves the refusal to Resolve: an error of its own would
// not name the field.
func (m *Moment) UnmarshalJSON(text []byte) error {
	if string(text) == "null" {
		return nil
	}
	// Neither form has anything to escape.
	m.unreadable = len(text) < 2 || text[0] != '"' || m.UnmarshalText(text[1:len(text)-1]) != nil
	return nil
}

// Resolve refuses a text that is neither form.
func (m *Moment) Resolve(_ huma.Context, path *huma.PathBuffer) []error {
	if !m.unreadable {
		return nil
	}
	return []error{&huma.ErrorDetail{Location: path.String(), Message: errMoment.Error()}}
}

// Schema describes it as a text: no format has both forms.
func (Moment) Schema(huma.Registry) *huma.Schema {
	return &huma.Schema{Type: huma.TypeString, Examples: []any{"2026-01-31T12:00:00Z", "30m"}}
}
