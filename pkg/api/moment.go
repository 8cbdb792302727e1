package api

import (
	"github.com/danielgtaylor/huma/v2"

	"github.com/penstock/penstock/pkg/operator"
)

// Moment is an operator.Moment in a body or a query.
type Moment struct {
	operator.Moment
	unreadable bool // in a body, see Resolve
}

// given is the moment, or no time where it is absent.
func (m *Moment) given() operator.Moment {
	if m == nil {
		return operator.Moment{}
	}
	return m.Moment
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
	return []error{&huma.ErrorDetail{Location: path.String(), Message: operator.ErrMoment.Error()}}
}

// Schema describes it as a text: no format has both forms.
func (Moment) Schema(huma.Registry) *huma.Schema {
	return &huma.Schema{Type: huma.TypeString, Examples: []any{"2026-01-31T12:00:00Z", "30m"}}
}
