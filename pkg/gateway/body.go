package gateway

import (
	"bytes"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strings"
)

// readJSON reads the body of an operation of the OpenAI API.
func readJSON(r *http.Request, body []byte) (asked, error) {
	s, err := scan(body)
	switch {
	case errors.Is(err, errModelText), errors.Is(err, errModelTwice), errors.Is(err, errModelLong):
		return asked{}, badModel(err)
	case errors.Is(err, errChoicesTwice):
		return asked{}, bad(http.StatusBadRequest, "invalid_choices", "", "%s", err.Error())
	case err != nil:
		return asked{}, bad(http.StatusBadRequest, "invalid_json", "", "%s", err.Error())
	case s.name == "":
		return asked{}, bad(http.StatusBadRequest, "missing_model", "model", "you must provide a model parameter")
	}
	addUsage := operationOf(r.URL.Path).usage && s.stream && !s.streamOptions
	a := asked{model: s.name, scanned: s, json: true, addUsage: addUsage}
	a.parts = func(remote string, addUsage bool) [][]byte { return s.rewrite(body, remote, addUsage) }
	return a, nil
}

func badModel(err error) error {
	return bad(http.StatusBadRequest, "invalid_model", "model", "%s", err.Error())
}

// readGeneric takes a body in the worker's own protocol. The model is in the path.
func readGeneric(r *http.Request, body []byte) (asked, error) {
	name := r.PathValue("model")
	if len(name) > modelNameMax {
		return asked{}, badModel(errModelLong)
	}
	// The name outlives the request, and the line that it is a part of must not.
	return asked{
		model: strings.Clone(name), parts: func(string, bool) [][]byte { return [][]byte{body} },
	}, nil
}

// readForm finds the field model of a form, and where its value is.
func readForm(r *http.Request, body []byte) (asked, error) {
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "multipart/form-data" || params["boundary"] == "" {
		return asked{}, bad(http.StatusBadRequest, "invalid_form", "", "the body must be multipart/form-data")
	}
	name, at, err := formModel(body, params["boundary"])
	if errors.Is(err, errModelLong) || errors.Is(err, errModelTwice) {
		return asked{}, badModel(err)
	}
	if err != nil {
		return asked{}, bad(http.StatusBadRequest, "invalid_form", "", "the form cannot be read: %s", err.Error())
	}
	if name == "" {
		return asked{}, bad(http.StatusBadRequest, "missing_model", "model", "you must provide a model parameter")
	}
	return asked{model: name, parts: func(remote string, _ bool) [][]byte {
		if remote == name || at.empty() {
			return [][]byte{body}
		}
		return [][]byte{body[:at.from], []byte(remote), body[at.to:]}
	}}, nil
}

// WholeForm returns a reader of a form for multipart.Reader, which reports io.EOF then behind the last boundary alone:
// else it may take an end within a part, or within its header, for that of the form.
func WholeForm(form io.Reader) io.Reader {
	// The last boundary may lack the end of its line.
	return io.MultiReader(form, strings.NewReader("\r\n"), cutForm{})
}

// cutForm is what comes where a form has ended without its last boundary.
type cutForm struct{}

func (cutForm) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// formModel returns the value of the field model, and its place in the body.
func formModel(body []byte, boundary string) (name string, at span, err error) {
	form := multipart.NewReader(WholeForm(bytes.NewReader(body)), boundary)
	places := partPlaces{body: body, dash: []byte("--" + boundary)}
	for {
		part, err := form.NextRawPart()
		if errors.Is(err, io.EOF) {
			return name, at, nil
		}
		if err != nil {
			return "", span{}, err
		}
		value, err := io.ReadAll(io.LimitReader(part, modelNameMax+1))
		if err != nil {
			return "", span{}, err
		}
		more, err := io.Copy(io.Discard, part)
		if err != nil {
			return "", span{}, err
		}
		place, err := places.next(len(value) + int(more))
		switch {
		case err != nil:
			return "", span{}, err
		case part.FormName() != "model" || part.FileName() != "":
		case name != "":
			return "", span{}, errModelTwice
		case len(value) > modelNameMax:
			return "", span{}, errModelLong
		default:
			name, at = string(value), place
		}
	}
}

// partPlaces finds the values of the parts of a form, one behind the other. Other servers may divide a form otherwise
// if its lines do not end with CR and LF: such a form is refused.
type partPlaces struct {
	body []byte
	dash []byte // that a boundary begins with
	end  int    // of the last value
}

var errFormLines = errors.New("its lines do not end with CR and LF, or it does not begin with its boundary")

// next returns the place of the next value, of so many bytes.
func (p *partPlaces) next(length int) (at span, err error) {
	if p.end == 0 {
		before, behind, _ := bytes.Cut(p.body, p.dash)
		if p.end = len(before); p.end > 0 && before[p.end-1] != '\n' ||
			!bytes.HasPrefix(bytes.TrimLeft(behind, " \t"), []byte("\r\n")) {
			return at, errFormLines // what is there is no boundary yet
		}
	}
	const gap = "\r\n\r\n" // between header and value
	head, _, found := bytes.Cut(p.body[p.end:], []byte(gap))
	if !found || bytes.Count(head, []byte("\n")) != bytes.Count(head, []byte("\r\n")) {
		return at, errFormLines
	}
	at.from = p.end + len(head) + len(gap)
	at.to = at.from + length
	rest := p.body[min(at.to, len(p.body)):]
	if length > 0 || !bytes.HasPrefix(rest, p.dash) { // a part without a value may lack the line behind it
		rest, found = bytes.CutPrefix(rest, []byte("\r\n"))
	}
	if !found || !bytes.HasPrefix(rest, p.dash) {
		return at, errFormLines
	}
	p.end = at.to
	return at, nil
}
