package api

import (
	"errors"
	"fmt"
	"mime"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"
)

// Bodies that may be large are read within the bytes that all bodies together may take, and decoded member by member:
// huma would hold them outside that bound, and once more as a tree of values.

// errMissing is the flaw of a required field that a body lacks.
var errMissing = errors.New("it is missing")

// readMembers reads a body that is one object. The caller calls give when it needs the body no more, error or not.
func (a *API) readMembers(w http.ResponseWriter, r *http.Request, members []member) (give func(), err error) {
	give = func() {}
	if r.URL.RawQuery != "" {
		return give, errNoParameters
	}
	if given := r.Header.Get("Content-Type"); given != "" {
		if mediaType, _, err := mime.ParseMediaType(given); err != nil || mediaType != "application/json" {
			return give, errMediaType
		}
	}
	body, give, err := a.readBody(w, r, callerOf(r.Context()).holder())
	if err != nil {
		return give, err
	}
	var unfit *memberError
	switch err := decodeWhole(body, members); {
	case errors.As(err, &unfit):
		return give, flaw(unfit.field, unfit.err)
	case err != nil:
		return give, fmt.Errorf("%w: %w", errMalformed, err)
	}
	return give, nil
}

// errNoParameters refuses a query at an address that takes none: what it asks for would be lost.
var errNoParameters = fmt.Errorf("%w: this address takes no query parameters", errInvalid)

// lengthOf refuses a text with fewer than least or more than most characters.
func lengthOf(field, text string, least, most int) error {
	switch n := utf8.RuneCountInString(text); {
	case n == 0 && least > 0:
		return flaw(field, errMissing)
	case n < least || n > most:
		return flaw(field, fmt.Errorf("it has %d characters, want %d to %d", n, least, most))
	}
	return nil
}

// addressable refuses a name that is a segment of addresses later, and that most clients cannot send as one: they
// resolve segments of one or two dots, escaped ones too (RFC 3986, 5.2.4; WHATWG URL, 4.4).
func addressable(field, name string) error {
	if name == "." || name == ".." {
		return flaw(field, fmt.Errorf("%q cannot be a part of an address: use another name", name))
	}
	return nil
}

// addressablePath refuses a PUT whose address has such a name, escaped: it makes the object that the address names.
func (r route) addressablePath(request *http.Request) error {
	if r.method != http.MethodPut {
		return nil
	}
	for _, part := range strings.Split(r.path, "/") {
		name := strings.Trim(part, "{}")
		if name == part {
			continue
		}
		var field *fieldError
		if err := addressable(name, request.PathValue(name)); errors.As(err, &field) {
			field.inPath = true
			return err
		}
	}
	return nil
}

// The parts of descriptions of such routes.

func jsonOf(schema *huma.Schema) map[string]*huma.MediaType {
	return map[string]*huma.MediaType{"application/json": {Schema: schema}}
}

func (a *API) bodyOf(body any) *huma.RequestBody {
	return &huma.RequestBody{Required: true, Content: jsonOf(a.schema(body))}
}

func queueParameter() *huma.Param {
	return &huma.Param{Name: "queue", In: "path", Required: true, Schema: &huma.Schema{Type: huma.TypeString}}
}

// entryParameter is the id of an entry in an address.
func entryParameter() *huma.Param {
	return &huma.Param{
		Name: "id", In: "path", Required: true,
		Schema: &huma.Schema{Type: huma.TypeInteger, Format: "int64"},
	}
}

// textHeader is a header of an answer.
func textHeader(description string) *huma.Header {
	return &huma.Header{Description: description, Schema: &huma.Schema{Type: huma.TypeString}}
}

func keyParameter(description string) *huma.Param {
	return &huma.Param{
		Name: "Idempotency-Key", In: "header", Description: description,
		Schema: &huma.Schema{Type: huma.TypeString},
	}
}
