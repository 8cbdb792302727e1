// Package sample makes real inputs for the worker: pictures with known numbers of faces and sentences in
// known languages.
package sample

import (
	"encoding/json"
	"fmt"
	"io"
)

// Call is one line of a sample file: a model, its payload and, where asked for, what the result must say.
type Call struct {
	Model    string         `json:"model"`
	Payload  map[string]any `json:"payload"`
	Expected map[string]any `json:"expected,omitempty"`
}

// Calls makes n calls, pictures and texts in turn.
func Calls(n int) ([]Call, error) {
	pictures, err := Pictures((n + 1) / 2)
	if err != nil {
		return nil, err
	}
	texts := Texts()
	calls := make([]Call, n)
	for i := range calls {
		if i%2 == 0 {
			calls[i] = faces(pictures[i/2])
		} else {
			calls[i] = language(texts[i/2%len(texts)])
		}
	}
	return calls, nil
}

func faces(p Picture) Call {
	return Call{
		Model:    "faces",
		Payload:  map[string]any{"image": p.JPEG}, // encoding/json writes bytes as base64
		Expected: map[string]any{"count": p.Faces},
	}
}

func language(t Text) Call {
	return Call{
		Model:    "language",
		Payload:  map[string]any{"text": t.Text},
		Expected: map[string]any{"language": t.Language},
	}
}

// Write writes n calls as JSON lines; with expected, each line also says what its result must contain.
func Write(w io.Writer, n int, expected bool) error {
	calls, err := Calls(n)
	if err != nil {
		return err
	}
	out := json.NewEncoder(w)
	out.SetEscapeHTML(false)
	for _, call := range calls {
		if !expected {
			call.Expected = nil
		}
		if err := out.Encode(call); err != nil {
			return fmt.Errorf("write sample: %w", err)
		}
	}
	return nil
}
