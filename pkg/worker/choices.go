package worker

import "encoding/json"

// Choices is how many sequences a server computes for a generation: the larger one of n and best_of of its payload, 1
// where it names neither, 1024 at most. Each takes a place in the server's batch for as long as the call.
func Choices(payload json.RawMessage) int {
	var asked struct {
		N      json.RawMessage `json:"n"`
		BestOf json.RawMessage `json:"best_of"`
	}
	if json.Unmarshal(payload, &asked) != nil {
		return 1
	}
	return min(max(1, wholeNumber(asked.N), wholeNumber(asked.BestOf)), choicesMost)
}

// wholeNumber reads a whole number, 0 for anything else: the server refuses that.
func wholeNumber(raw json.RawMessage) (n int) {
	if !isSet(raw) || json.Unmarshal(raw, &n) != nil {
		return 0
	}
	return n
}

// checkChoices refuses a generation of more sequences than the model takes for one call.
func (m Model) checkChoices(fields map[string]json.RawMessage) error {
	for _, name := range []string{"n", "best_of"} {
		n := 0
		if raw := fields[name]; isSet(raw) && json.Unmarshal(raw, &n) != nil {
			return fieldError(name,
				"is not a whole number: a server might take it for one, and compute as many sequences")
		}
		if m.ChoicesMax > 0 && n > m.ChoicesMax {
			return fieldError(name, "is %d: model %s takes at most %d sequences for one call (choices_max)", n, m.Name,
				m.ChoicesMax)
		}
	}
	return nil
}
