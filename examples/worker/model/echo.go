package model

import (
	"context"
	"encoding/json"
)

// Echo answers with its payload, at once. It measures everything around a model.
type Echo struct{}

// Name is "echo".
func (Echo) Name() string { return "echo" }

// Prepare accepts any JSON value.
func (Echo) Prepare(payload json.RawMessage) (Work, error) {
	if len(payload) == 0 {
		return nil, &InputError{Reason: "payload is missing"}
	}
	return func(context.Context) (any, error) { return payload, nil }, nil
}
