// Package model holds what the worker can compute: faces in a picture, the language of a text, and an echo.
package model

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Model turns a payload into work. One Model serves many calls at once.
type Model interface {
	// Name is the model's name on the wire.
	Name() string
	// Prepare checks a payload cheaply, outside any slot, and returns the work it asks for.
	// What is wrong with the payload is an *InputError.
	Prepare(payload json.RawMessage) (Work, error)
}

// Work is one inference. It ends early, with the cause of ctx, when ctx ends.
// The result marshals to JSON; an *InputError says that the input turned out unusable.
type Work func(ctx context.Context) (result any, err error)

// InputError names the field of a payload, or the header, that cannot be used, and why.
// An empty Field means the payload as a whole.
type InputError struct {
	Field  string
	Reason string
}

func (e *InputError) Error() string {
	if e.Field == "" {
		return e.Reason
	}
	return e.Field + ": " + e.Reason
}

// Names lists every model that Load knows.
func Names() []string { return []string{"echo", "faces", "language"} }

// Load makes the named models ready to run; it may take about a second.
func Load(names ...string) ([]Model, error) {
	models := make([]Model, 0, len(names))
	for _, name := range names {
		m, err := load(name)
		if err != nil {
			return nil, fmt.Errorf("load model %q: %w", name, err)
		}
		models = append(models, m)
	}
	return models, nil
}

func load(name string) (Model, error) {
	switch name {
	case "echo":
		return Echo{}, nil
	case "faces":
		return NewFaces()
	case "language":
		return NewLanguage(), nil
	}
	return nil, fmt.Errorf("unknown name; known are %q", Names())
}

// Decode reads an object strictly: a misspelt field is an error that names it, not a silent default.
// What is wrong with the object is an *InputError.
func Decode(payload json.RawMessage, into any) error {
	dec := json.NewDecoder(bytes.NewReader(payload))
	dec.DisallowUnknownFields()
	err := dec.Decode(into)
	var mismatch *json.UnmarshalTypeError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &mismatch) && mismatch.Field != "":
		return &InputError{Field: mismatch.Field, Reason: fmt.Sprintf("must be a %s, is a %s", mismatch.Type.Name(),
			mismatch.Value)}
	case errors.As(err, &mismatch):
		return &InputError{Reason: fmt.Sprintf("payload must be an object, is a %s", mismatch.Value)}
	case errors.Is(err, io.EOF):
		return &InputError{Reason: "payload is missing"}
	}
	return &InputError{Reason: "payload: " + err.Error()}
}
